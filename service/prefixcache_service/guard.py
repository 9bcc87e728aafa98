"""Who may use the HTTP side: the one function that authorises, and the headers of every answer.

Owns the rules against other sites. A page of another origin can make a browser send requests here;
it must neither read an answer nor change anything:

- a name that is not ours in `Host` is refused, so that a name of theirs that points here (DNS
  rebinding) does not make their page of the same origin;
- what changes something is a POST of JSON with a header of our own, which a form cannot send and a
  script of another origin may not; what the browser says of the origin is checked besides.
"""

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def authorise(request: Request, names: Iterable[str]) -> None:
    """Let a request to the page or its data pass. Raises HTTPException 403 or 415 with a sentence.

    names: hosts, besides localhost and addresses, under which the server may be asked for. This is
    also the place where a token of the operator is to be asked for, once there are tokens.
    """
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
