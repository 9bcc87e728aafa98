"""The page and the data behind it: one look at the engine a second, however many browsers ask.

Owns the routes below `/`, and the JSON that they answer with; every refusal is JSON too, with a
sentence. `guard` decides who may ask, `page` makes the page, the engine's `inspect` the look.
"""

import asyncio
import base64
import dataclasses
import gzip
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixcache.engine import messages as engine
from prefixcache.engine import views
from prefixcache.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PrefixCacheError,
    ResourceExhausted,
    Unavailable,
)
from prefixcache_service import guard, log, page
from prefixcache_service.history import COLUMNS, History, Shared
from prefixcache_service.render import caller_request_id
from prefixcache_service.servicer import Served
from prefixcache_service.tenants import Tenants

LOOK_SECONDS = 0.9  # browsers ask once a second
PATIENCE_SECONDS = 15.0  # a step with long prompts can take some of them
LABEL_TOKENS = 24
DETAIL_TOKENS = 512
MAX_BODY_BYTES = 4096
DEFAULT_PIN_SECONDS = 300.0

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

_CODES: dict[type[PrefixCacheError], int] = {
    InvalidArgument: 400,
    NotFound: 404,
    FailedPrecondition: 409,
    ResourceExhausted: 409,
    Unavailable: 503,
}

_SENTENCES = {  # of what Starlette refuses by itself
    "Not Found": "nothing is at this address",
    "Method Not Allowed": "this address does not take this method",
}


class Calls(Protocol):
    """The way to the engine: `AsyncFront.call`."""

    async def __call__(self, make: Callable[[str], engine.Command], /) -> object:
        """Await the value of a command's Reply; raises its error."""


@dataclass(frozen=True, slots=True)
class Access:
    """What the page may show, and under which names it may be asked for.

    show_prompts: tell the text of cached prompts. hosts: names besides localhost and addresses.
    """

    show_prompts: bool = False
    hosts: tuple[str, ...] = ()


class Dashboard:
    """The page of one server; use it on the event loop that made it."""

    def __init__(self, call: Calls, threads: ThreadPoolExecutor, access: Access) -> None:
        self._call = call
        self._threads = threads
        self._access = access
        self._served: Served | None = None
        self._look = Shared(self._snapshot, LOOK_SECONDS)
        self._history = History(self.stats)

    def serve(self, model: Served) -> None:
        """Name the model that is served, and begin to keep the history."""
        self._served = model
        self._history.start()

    def stop(self) -> None:
        """Keep no history any more."""
        self._history.stop()

    def mount(self, tenants: Tenants | None) -> Mount:
        """All routes, behind the guard. tenants: of whom operators may see the page."""
        node = "/api/nodes/{digest}"
        gets: dict[str, Endpoint] = {
            "/": self._page,
            "/dashboard/{name}": self._asset,
            "/api/snapshot": self._send_snapshot,
            "/api/history": self._send_history,
            node: self._node,
        }
        posts: dict[str, Endpoint] = {
            f"{node}/pin": self._pin,
            f"{node}/flush": self._flush_node,
            "/api/flush": self._flush,
            "/api/pins/{pin_id}/unpin": self._unpin,
            "/api/sequences/{sequence_id}/release": self._release,
        }
        routes = [Route(path, what, methods=["GET"]) for path, what in gets.items()]
        routes += [Route(path, what, methods=["POST"]) for path, what in posts.items()]
        return Mount("/", app=_Authorised(Router(routes), self._access.hosts, tenants))

    # ------------------------------------------------------------ the page

    async def stats(self) -> engine.CacheStats:
        """The engine's figures."""
        return cast(engine.CacheStats, await self._ask(engine.GetStats))

    async def _page(self, request: Request) -> Response:
        try:
            return HTMLResponse(page.index(self._model.info.name, await self.stats()))
        except Unavailable as error:
            return HTMLResponse(page.index("", None, f"{str(error).capitalize()}."))

    async def _asset(self, request: Request) -> Response:
        asset = page.assets().get(request.path_params["name"])
        if asset is None:
            raise HTTPException(404, "the page has no file of this name")
        return Response(asset.content, media_type=asset.media_type)

    # ------------------------------------------------------------ data

    async def _send_snapshot(self, request: Request) -> Response:
        body = await self._look.get()
        headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("accept-encoding", ""):
            body, headers = gzip.decompress(body), {}
        return Response(body, media_type="application/json", headers=headers)

    async def _snapshot(self) -> bytes:
        tokens = LABEL_TOKENS if self._access.show_prompts else 0
        view = await self._ask(lambda call_id: engine.InspectCache(call_id, label_tokens=tokens))
        return await self._off_loop(lambda: self._encode(cast(views.CacheView, view)))

    def _encode(self, view: views.CacheView) -> bytes:
        info = self._model.info
        hypotheses = set(view.hypotheses)
        value = {
            "time": time.time(),
            "model": {"name": info.name, "version": info.version},
            "show_prompts": self._access.show_prompts,
            "stats": _stats(view.stats),
            "blocks": base64.b64encode(view.blocks).decode(),
            "nodes": [self._node_json(node) for node in view.nodes],
            "pins": [{**_pin(pin.pin), "node": pin.digest.hex()} for pin in view.pins],
            "sequences": [_sequence(info, hypotheses) for info in view.sequences],
            "num_sequences": view.num_sequences,
        }
        return gzip.compress(json.dumps(value).encode(), 1)

    async def _send_history(self, request: Request) -> Response:
        return JSONResponse({"columns": ["time", *COLUMNS], "rows": self._history.rows()})

    async def _node(self, request: Request) -> Response:
        digest, shown = _digest(request), self._access.show_prompts
        tokens, label = (DETAIL_TOKENS, LABEL_TOKENS) if shown else (0, 0)
        answer = await self._ask(lambda call_id: engine.InspectNode(call_id, digest, tokens, label))
        detail = cast(views.NodeDetail, answer)

        def encode() -> dict[str, Any]:
            return {
                "node": self._node_json(detail.node),
                "live": detail.live,
                "num_live": detail.num_live,
                "kept": detail.kept,
                "num_kept": detail.num_kept,
                "pins": [_pin(pin) for pin in detail.pins],
                "children": [self._node_json(child) for child in detail.children],
                "text": self._text(detail.token_ids),
            }

        return JSONResponse(await self._off_loop(encode))

    def _node_json(self, node: views.NodeView) -> dict[str, Any]:
        """A node; its text is None unless prompts are shown."""
        return {
            "id": node.digest.hex(),
            "parent": node.parent,
            "start": node.start,
            "blocks": node.num_blocks,
            "children": node.num_children,
            "uses": node.uses,
            "sharers": node.sharers,
            "leased": node.leased,
            "pinned": node.pinned,
            "age": round(node.age, 1),
            "idle": round(node.idle, 1),
            "text": self._text(node.token_ids),
        }

    def _text(self, token_ids: Sequence[int]) -> str | None:
        if not token_ids:
            return None
        return self._model.edge.tokenizer.decode(token_ids, skip_special_tokens=False)

    # ------------------------------------------------------------ changes

    async def _pin(self, request: Request) -> Response:
        digest, body = _digest(request), await _body(request)
        seconds = body.get("seconds", DEFAULT_PIN_SECONDS)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise InvalidArgument("seconds", "must be a number")
        try:
            seconds = float(seconds)
        except OverflowError:
            raise InvalidArgument("seconds", "is beyond all bounds") from None
        pin = await self._change(lambda call_id: engine.PinNode(call_id, digest, seconds))
        return JSONResponse(_pin(cast(engine.PinInfo, pin)))

    async def _unpin(self, request: Request) -> Response:
        pin_id = request.path_params["pin_id"]
        pin = await self._change(lambda call_id: engine.UnpinPrefix(call_id, pin_id, None))
        return JSONResponse(_pin(cast(engine.PinInfo, pin)))

    async def _flush_node(self, request: Request) -> Response:
        digest = _digest(request)
        freed = await self._change(lambda call_id: engine.FlushNode(call_id, digest))
        return JSONResponse({"blocks_freed": freed})

    async def _flush(self, request: Request) -> Response:
        return JSONResponse({"blocks_freed": await self._change(_flush_everything)})

    async def _release(self, request: Request) -> Response:
        sequence_id, body = request.path_params["sequence_id"], await _body(request)
        subtree = body.get("subtree", False)
        if not isinstance(subtree, bool):
            raise InvalidArgument("subtree", "must be true or false")
        answer = await self._change(
            lambda call_id: engine.Release(call_id, sequence_id, subtree, None)
        )
        receipt = cast(engine.ReleaseReceipt, answer)
        return JSONResponse(dataclasses.asdict(receipt))

    async def _change(self, make: Callable[[str], engine.Command]) -> object:
        try:
            return await self._ask(make)
        finally:
            self._look.forget()

    # ------------------------------------------------------------ ways

    @property
    def _model(self) -> Served:
        if self._served is None:
            raise Unavailable("the model is still loading")
        return self._served

    async def _ask(self, make: Callable[[str], engine.Command]) -> object:
        try:
            return await asyncio.wait_for(self._call(make), PATIENCE_SECONDS)
        except TimeoutError:
            raise Unavailable(
                f"the engine has not answered for {PATIENCE_SECONDS:.0f} s: it is busy"
            ) from None

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _flush_everything(call_id: str) -> engine.FlushCache:
    return engine.FlushCache(call_id, tenant=None)


class _Authorised:
    """Asks the guard before anything else, also for paths that are not there."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], tenants: Tenants | None) -> None:
        self._app = app
        self._hosts = hosts
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guard.authorise(Request(scope), self._hosts, self._tenants)
        await self._app(scope, receive, send)


def refusals() -> Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """What Starlette is to do with errors: JSON with a sentence."""

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            sentence = _SENTENCES.get(error.detail, error.detail)
            return _error(error.status_code, sentence, error.headers)
        if isinstance(error, PrefixCacheError):
            return _error(_code(error), str(error))
        log.error("fault", error, path=request.url.path)
        return _error(500, "a fault of the server; its log has the details")

    return {HTTPException: refuse, PrefixCacheError: refuse, Exception: refuse}


def _code(error: PrefixCacheError) -> int:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 500)


def _error(code: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": sentence}, code, headers)


def _digest(request: Request) -> bytes:
    try:
        return bytes.fromhex(request.path_params["digest"])
    except ValueError:
        raise HTTPException(
            404, "a node is named by the hexadecimal digits of its digest"
        ) from None


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request; an empty body is an empty object. Raises HTTPException."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body must be at most {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON, or nested too deeply") from None
    if not isinstance(value, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return value


def _stats(stats: engine.CacheStats) -> dict[str, Any]:
    derived = {"hit_rate": stats.hit_rate, "bytes_saved": stats.bytes_saved}
    return {**dataclasses.asdict(stats), **derived}


def _pin(pin: engine.PinInfo) -> dict[str, Any]:
    return dataclasses.asdict(pin)


def _sequence(info: engine.SequenceInfo, hypotheses: set[str]) -> dict[str, Any]:
    return {
        "id": info.sequence_id,
        "parent": info.parent_id,
        "request": info.request_id.partition("/")[2],
        "name": caller_request_id(info.request_id),
        "state": info.state,
        "tokens": info.num_tokens,
        "fork_position": info.fork_position,
        "own_blocks": info.own_blocks,
        "shared_blocks": info.shared_blocks,
        "kept_seconds": round(info.kept_seconds, 1),
        "hypothesis": info.sequence_id in hypotheses,
    }
