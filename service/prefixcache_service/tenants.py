"""Who calls: tokens and certificates to tenants, and what a tenant's name does to its commands.

Owns the tokens file. It holds no token, only the SHA-256 of each, so that whoever reads it can be
nobody; tokens are 256 random bits, for which a fast hash is as good as a slow one. Neither tokens
nor what was sent in their place are ever logged or put into an error.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from prefixcache.engine import messages as engine
from prefixcache.engine.messages import TenantPolicy
from prefixcache.errors import ConfigurationError, PermissionDenied, Unauthenticated
from prefixcache_service import log

MOST_URGENT = -(2**31)
MAX_NAME_CHARS = 64

_DIGEST = re.compile(r"[0-9a-f]{64}")
_QUOTAS = ("max_sequences", "max_leases", "tokens_per_minute")
_MOST = 10**12

Owned = (
    engine.Generate
    | engine.Fork
    | engine.Score
    | engine.Release
    | engine.ListSequences
    | engine.FlushCache
    | engine.PinPrefix
    | engine.UnpinPrefix
    | engine.GetStats
)
C = TypeVar("C", bound=Owned)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls. The default is everybody, where the server knows no tenants.

    admin: may see and do what concerns all. priority: none of its requests is more urgent.
    trace_parent: W3C context of the span in which it calls; empty without one.
    """

    name: str = ""
    admin: bool = True
    priority: int = MOST_URGENT
    policy: TenantPolicy = field(default_factory=lambda: TenantPolicy(""))
    trace_parent: str = ""

    def own(self, command: C) -> C:
        """The command as this tenant's: it reaches nothing of others, and is in no greater hurry.

        What an operator asks of the whole pool (figures, a flush of all salts) is the pool's.
        """
        if isinstance(command, engine.GetStats):
            return replace(command, tenant=None if self.admin else self.name)
        if isinstance(command, engine.FlushCache):
            everything = self.admin and command.cache_salt is None
            return replace(command, tenant=None if everything else self.name)
        if isinstance(command, engine.Generate | engine.Fork | engine.Score):
            urgency = max(command.priority, self.priority)
            request_id = self.request_id(command.request_id)
            command = replace(
                command,
                priority=urgency,
                request_id=request_id,
                trace_parent=self.trace_parent,
            )
        return replace(command, tenant=self.name)

    def request_id(self, request_id: str) -> str:
        """An id of a request as this tenant's: they are unique by tenant and salt."""
        if not self.name:
            return request_id
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest() + request_id

    def require_admin(self, what: str) -> None:
        """Raise PermissionDenied unless this is the operator."""
        if not self.admin:
            raise PermissionDenied(f"{what} is for the operator: it shows what all tenants do")


EVERYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class _Entry:
    tenant: Tenant
    digests: tuple[bytes, ...]
    certificates: frozenset[str]


class Tenants:
    """The tenants of a tokens file, as it was when it was last in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        self._entries: tuple[_Entry, ...] = ()
        self._seen = self._stamp()
        self._entries = _read(path)

    @property
    def policies(self) -> tuple[TenantPolicy, ...]:
        """What each may use."""
        return tuple(entry.tenant.policy for entry in self._entries)

    def refresh(self) -> bool:
        """Read the file again where it has changed; whether tenants may have changed.

        A file that is wrong, or gone, changes nothing: the log has one line for each such change.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._entries = _read(self._path)
        except ConfigurationError as error:
            log.error("tokens_file", reason=str(error), kept="the tenants read before")
            return False
        log.info("tokens_file", tenants=len(self._entries))
        return True

    def _stamp(self) -> object:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    # ------------------------------------------------------------ who is it

    def of_token(self, token: str) -> Tenant:
        """The tenant of a token. Raises Unauthenticated. Takes the same time for all tokens."""
        given = hashlib.sha256(token.encode()).digest()
        found = None
        for entry in self._entries:
            for digest in entry.digests:
                if hmac.compare_digest(given, digest):
                    found = entry.tenant
        if found is None:
            raise Unauthenticated("this token is not known")
        return found

    def of_caller(self, metadata: Iterable[tuple[str, Any]], names: Iterable[str]) -> Tenant:
        """The tenant of a call: by its bearer token, else by a name in its certificate.

        names: of a certificate that was verified; none without mutual TLS. Raises Unauthenticated.
        """
        for key, value in metadata:
            if key == "authorization":
                kind, _, token = str(value).partition(" ")
                if kind.lower() != "bearer":
                    raise Unauthenticated("authorization must be `Bearer TOKEN`")
                return self.of_token(token.strip())
        shown = set(names)
        for entry in self._entries:
            if not shown.isdisjoint(entry.certificates):
                return entry.tenant
        raise Unauthenticated("send `authorization: Bearer TOKEN` in the metadata of each call")


# ---------------------------------------------------------------- the file


def fresh_token() -> str:
    """A token of 256 random bits."""
    return f"pc-{secrets.token_urlsafe(32)}"


def entry_for(name: str, token: str) -> str:
    """What to put into the tokens file for a tenant of this token. Raises ConfigurationError."""
    _check_name(name)
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[{name}]\nsha256 = "{digest}"\n'


def _read(path: Path) -> tuple[_Entry, ...]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = tuple(_entry(name, table) for name, table in tables.items())
    except (OSError, ValueError, RecursionError) as error:  # the last: of lists in lists in lists
        raise ConfigurationError(f"tokens file {path}: {error}") from None
    digests = [digest for entry in entries for digest in entry.digests]
    if len(set(digests)) < len(digests):
        raise ConfigurationError(f"tokens file {path}: two tenants have the same token")
    certificates = [name for entry in entries for name in entry.certificates]
    if len(set(certificates)) < len(certificates):
        raise ConfigurationError(f"tokens file {path}: two tenants have the same certificate")
    return entries


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or len(name) > MAX_NAME_CHARS:
        raise ConfigurationError(
            f"{name!r} cannot be a tenant's name: use 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ -"
        )


def _entry(name: str, table: Any) -> _Entry:
    """One tenant. Raises ValueError that says what is wrong, never the value of a digest."""
    try:
        _check_name(name)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table: [{name}]")
    given = dict(table)
    digests = tuple(_digest(name, one) for one in _strings(name, given, "sha256"))
    certificates = frozenset(_strings(name, given, "certificate"))
    if not digests and not certificates:
        raise ValueError(f"{name} needs sha256, of its token, or certificate")
    admin = given.pop("admin", False)
    if not isinstance(admin, bool):
        raise ValueError(f"{name}.admin must be true or false")
    priority = given.pop("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
        raise ValueError(f"{name}.priority must be a whole number of 32 bits")
    tenant = Tenant(name, admin, priority, _policy(name, given))
    if given:
        raise ValueError(f"{name}.{next(iter(given))} is not known")
    return _Entry(tenant, digests, certificates)


def _policy(name: str, given: dict[str, Any]) -> TenantPolicy:
    weight = given.pop("weight", 1.0)
    share = given.pop("pool_share", None)
    quotas: Mapping[str, int | None] = {key: given.pop(key, None) for key in _QUOTAS}
    if not (_is_number(weight) and 1e-6 <= weight <= 1e6):
        raise ValueError(f"{name}.weight must be from 1e-6 to 1e6")
    if share is not None and not (_is_number(share) and 0 < share <= 1):
        raise ValueError(f"{name}.pool_share must be above 0 and at most 1")
    for key, value in quotas.items():
        least = 1 if key == "tokens_per_minute" else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}.{key} must be a whole number")
        if value is not None and not least <= value <= _MOST:
            raise ValueError(f"{name}.{key} must be at least {least} and at most {_MOST}")
    return TenantPolicy(name, float(weight), pool_share=share, **quotas)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _strings(name: str, given: dict[str, Any], key: str) -> list[str]:
    """One string or a list of them."""
    value = given.pop(key, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise ValueError(f"{name}.{key} must be a string or a list of strings")
    return values


def _digest(name: str, text: str) -> bytes:
    if not _DIGEST.fullmatch(text):
        raise ValueError(
            f"{name}.sha256 must be 64 hexadecimal digits; `prefixcache token` makes it"
        )
    return bytes.fromhex(text)
