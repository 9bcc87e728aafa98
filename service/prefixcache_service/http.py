"""The HTTP side: liveness, metrics and the page, on a port of its own.

Knows the engine only as a snapshot of its figures; `metrics` names them, `api` serves the page and
what it shows and changes.
"""

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixcache.engine.messages import CacheStats
from prefixcache.errors import PrefixCacheError
from prefixcache_service.api import Dashboard, refusals
from prefixcache_service.guard import Guarded, require_operator
from prefixcache_service.tenants import Tenants


def make_app(
    is_serving: Callable[[], bool],
    stats: Callable[[], Awaitable[CacheStats]],
    render: Callable[[CacheStats], bytes],
    dashboard: Dashboard,
    tenants: Tenants | None,
) -> Starlette:
    """The application: /healthz answers 200 while the service is SERVING, else 503; /metrics; /.

    render: figures to the text of /metrics. tenants: where there are some, all but /healthz is for
    the operator.
    """

    async def healthz(request: Request) -> Response:
        ok = is_serving()
        return PlainTextResponse("ok\n" if ok else "not serving\n", 200 if ok else 503)

    async def metrics(request: Request) -> Response:
        require_operator(request, tenants)
        try:
            page = render(await stats())
        except PrefixCacheError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/healthz", healthz), Route("/metrics", metrics), dashboard.mount(tenants)]
    return Starlette(routes=routes, middleware=[Middleware(Guarded)], exception_handlers=refusals())
