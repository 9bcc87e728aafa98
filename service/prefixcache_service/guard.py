"""Who may use the HTTP side: the one function that authorises, and the headers of every answer.

Owns the rules against other sites. A page of another origin can make a browser send requests here;
it must neither read an answer nor change anything:

- a name that is not ours in `Host` is refused, so that a name of theirs that points here (DNS
  rebinding) does not make their page of the same origin;
- what changes something is a POST of JSON with a header of our own, which a form cannot send and a
  script of another origin may not; what the browser says of the origin is checked besides.
"""

import base64
import ipaddress
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixcache.errors import Unauthenticated
from prefixcache_service.tenants import Tenants

HEADER = "x-prefixcache"
"""Must be on every request that changes something, with any value."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def require_operator(request: Request, tenants: Tenants | None) -> None:
    """Where there are tenants, ask for the token of an operator. Raises HTTPException 401 or 403.

    Either as bearer token, or as the password of Basic, for which a browser asks by itself.
    """
    if tenants is None:
        return
    try:
        tenant = tenants.of_token(_token(request.headers.get("authorization", "")))
    except Unauthenticated:
        challenge = {"WWW-Authenticate": 'Basic realm="prefixcache: token as password"'}
        raise HTTPException(401, "the token of an operator is needed", challenge) from None
    if not tenant.admin:
        raise HTTPException(403, "this is for the operator: it shows what all tenants do")


def _token(authorization: str) -> str:
    kind, _, value = authorization.partition(" ")
    if kind.lower() != "basic":
        return value.strip()
    try:
        return base64.b64decode(value).decode().partition(":")[2]
    except ValueError:
        return ""


def authorise(request: Request, names: Iterable[str], tenants: Tenants | None) -> None:
    """Let a request to the page or its data pass. Raises HTTPException 401, 403 or 415.

    names: hosts, besides localhost and addresses, under which the server may be asked for.
    tenants: of whom only operators may see the page.
    """
    require_operator(request, tenants)
    host = request.headers.get("host", "")
    if not _is_ours(_without_port(host), names):
        raise HTTPException(
            403,
            f"this server is not known as {host[:80]!r}: use its address, or start it with "
            "--http-allowed-host NAME",
        )
    if request.method not in {"GET", "HEAD"}:
        _check_same_site(request, host)


def _check_same_site(request: Request, host: str) -> None:
    headers = request.headers
    origin = headers.get("origin")
    if headers.get("sec-fetch-site", "same-origin") != "same-origin" or (
        origin is not None and origin.partition("://")[2] != host
    ):
        raise HTTPException(403, "only the page of this server may change something here")
    if HEADER not in headers:
        raise HTTPException(403, f"a request that changes something needs the header {HEADER}")
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be JSON, with content-type application/json")


def _is_ours(host: str, names: Iterable[str]) -> bool:
    """An address cannot be rebound; of names, only our own are good."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in names
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


class Guarded:
    """Puts the headers on every answer, those of the metrics included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)
