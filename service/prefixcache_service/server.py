"""The life of a server: ports, health, loading, serving, draining.

Owns the order in which these happen, and the two promises that hang on it: SERVING only once the
engine is warm, and out within the grace after SIGTERM. Knows nothing of single calls.

    open ──▶ NOT_SERVING, calls UNAVAILABLE ──▶ load ──▶ SERVING ──▶ drain ──▶ closed
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prefixcache.engine.messages import CacheStats, SetTenants
from prefixcache.errors import ConfigurationError, Unavailable
from prefixcache.limits import Limits
from prefixcache_service import gateway, http, log
from prefixcache_service.api import Access, Dashboard
from prefixcache_service.calls import SERVICE, Calls
from prefixcache_service.describe import describe
from prefixcache_service.front import AsyncFront
from prefixcache_service.limits import (
    DEFAULT_HOST,
    DEFAULT_HTTP_PORT,
    DEFAULT_PORT,
    server_options,
)
from prefixcache_service.metrics import Compat, render_metrics
from prefixcache_service.ports import address, advertised, listen
from prefixcache_service.servicer import Servicer
from prefixcache_service.tenants import Tenants
from prefixcache_service.tls import Certificates, TlsFiles, check_exposure
from prefixcache_service.web import WebServer

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine
    from prefixcache.engine.loop import EngineLoop

TOKENIZER_THREADS = 2
HEALTH_CHECK_SECONDS = 0.25
TOKENS_SECONDS = 1.0  # between looks at the tokens file
CLOSING_SECONDS = 0.3  # each for: statuses to go out, the engine to stop, the ports to close

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail, not share it
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a call may wait in the queue without a word
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen, and how long running calls may take once the server is to stop.

    port, http_port: 0 takes any free one; http_port None means no HTTP side.
    grace: seconds. access: what the page at / shows, and to whom.
    keepalive: seconds of silence after which a client is asked whether it is still there. It has
        half of that to answer, or its calls end: it may be frozen, or cut off without a goodbye.
    metrics_compat: whose names /metrics has besides ours.
    tokens: file of the tenants that may call; None lets everybody in. tls: for both ports.
    allow_insecure: let other machines connect without TLS, or without tokens.
    advertise_address: host:port under which clients reach this very server, also behind a load
        balancer; its port 0 stands for the one that is listened on. None tells them nothing.
    limits: of calls and messages; those of what is in a request are the engine's.
    """

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    http_host: str = DEFAULT_HOST
    http_port: int | None = DEFAULT_HTTP_PORT
    grace: float = 10.0
    access: Access = field(default_factory=Access)
    keepalive: float = 20.0
    metrics_compat: Compat = "none"
    tokens: Path | None = None
    tls: TlsFiles | None = None
    allow_insecure: bool = False
    advertise_address: str | None = None
    limits: Limits = field(default_factory=Limits)

    def keepalive_options(self) -> tuple[tuple[str, int], ...]:
        """As gRPC names them."""
        silence = int(self.keepalive * 1000)
        return (
            ("grpc.keepalive_time_ms", silence),
            ("grpc.keepalive_timeout_ms", silence // 2),
            # of gRPC's own pings, which else hold keepalive's back for a minute
            ("grpc.http2.ping_timeout_ms", silence // 2),
        )


class Server:
    """One server. Its methods belong to one event loop, and are called in the order below."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._front = AsyncFront(config.limits.waiting_events)
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize")
        self._servicer = Servicer(self._front, self._threads)
        self._tenants = None if config.tokens is None else Tenants(config.tokens)
        self._services = {SERVICE: self._servicer, **gateway.services(self._front, self._threads)}
        self._calls = Calls(self._tenants, config.limits)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._serving = False
        sizes = server_options(config.limits)
        options = (*sizes, *_SERVER_OPTIONS, *config.keepalive_options())
        self._grpc = grpc.aio.server(options=options)
        self._dashboard = Dashboard(self._front.call, self._threads, config.access)
        self._web = WebServer(
            http.make_app(
                lambda: self._serving,
                self._servicer.stats,
                self._render_metrics,
                self._dashboard,
                self._tenants,
            )
        )
        self._model_name = ""
        self._address = ""
        self._engine_loop: EngineLoop | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self.port = 0
        self.http_port: int | None = None

    async def open(self) -> None:
        """Listen on both ports; answer health checks with NOT_SERVING and calls with UNAVAILABLE.

        Raises ConfigurationError where a port cannot be had, or would be open to strangers, or the
        address to be advertised is none.
        """
        self._check_exposure()
        where = self._config
        known_as = None if where.advertise_address is None else advertised(where.advertise_address)
        if where.port and (where.host, where.port) == (where.http_host, where.http_port):
            raise ConfigurationError(
                f"gRPC and HTTP cannot both listen on {address(where.host, where.port)}; "
                "see --port and --http-port"
            )
        self._grpc.add_generic_rpc_handlers(
            [self._calls.handler(service, servicer) for service, servicer in self._services.items()]
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        await self._set_health(serving=False)
        own = [service.full_name for service in self._services]
        names = (*own, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        tls = None if where.tls is None else Certificates(where.tls)
        if where.http_port is not None:
            self.http_port = await self._web.open(where.http_host, where.http_port, tls)
        try:  # second, since a gRPC server that has not started cannot give its port back
            self.port = self._take_port(where.host, where.port, tls)
        except ConfigurationError:
            await self._web.close()
            raise
        if known_as is not None:
            host, port = known_as
            self._address = address(host, port or self.port)
        await self._grpc.start()

    def _check_exposure(self) -> None:
        where = self._config
        hosts = {where.host: "--host"}
        if where.http_port is not None:
            hosts.setdefault(where.http_host, "--http-host")
        for host, flag in hosts.items():
            check_exposure(
                host,
                flag,
                tls=where.tls,
                tokens=where.tokens is not None,
                allow_insecure=where.allow_insecure,
            )

    def _take_port(self, host: str, port: int, tls: Certificates | None) -> int:
        listen(host, port, "--host", "--port").close()  # gRPC itself would not say what is wrong
        try:
            if tls is not None:
                return self._grpc.add_secure_port(address(host, port), tls.credentials())
            return self._grpc.add_insecure_port(address(host, port))
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {address(host, port)}: {error}") from None

    async def load(self, make: Callable[[], "Engine"]) -> "Engine":
        """Make the engine on a thread of its own, warm-up included; then let calls in.

        Raises what `make` raises; the server then stays NOT_SERVING.
        """
        from prefixcache.engine.loop import EngineLoop  # noqa: PLC0415 (brings in torch)

        engine = await asyncio.to_thread(make)
        served = await asyncio.to_thread(describe, engine, self._address)
        for servicer in self._services.values():
            servicer.serve(served)
        self._model_name = served.info.name
        self._engine_loop = EngineLoop(engine, self._front.deliver)
        self._engine_loop.start()
        self._front.connect(self._engine_loop)
        self._dashboard.serve(served)
        if self._tenants is not None:
            self._front.tell(SetTenants(self._tenants.policies))
            self._follower = asyncio.create_task(self._follow_tokens(self._tenants))
        self._calls.open()
        await self._set_health(serving=True)
        self._watcher = asyncio.create_task(self._watch_engine(self._engine_loop))
        return engine

    async def engine_down(self) -> None:
        """Return once the engine has died of a fault; callers have been told by then.

        What is left of the process serves nobody: it should be drained, and end.
        """
        assert self._watcher is not None
        await asyncio.shield(self._watcher)

    async def _follow_tokens(self, tenants: Tenants) -> None:
        """Tell the engine whenever the tokens file has changed."""
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            if await asyncio.to_thread(tenants.refresh):
                with contextlib.suppress(Unavailable):  # nobody is left to be told
                    self._front.tell(SetTenants(tenants.policies))

    async def drain(self) -> None:
        """Stop: no new calls, running ones have the grace to end, the rest get UNAVAILABLE.

        Takes at most the grace and one second more.
        """
        self._calls.close("the server is stopping")
        await self._set_health(serving=False)
        log.info("drain", grace=self._config.grace)
        self._front.fail_watchers(Unavailable("the server is stopping"))
        finished = await self._calls.wait_idle(self._config.grace)
        if not finished:
            self._front.fail_all(Unavailable("the server has stopped"))
            await self._calls.wait_idle(CLOSING_SECONDS)
        for task in (self._watcher, self._follower):
            if task is not None:
                task.cancel()
        self._dashboard.stop()
        await asyncio.gather(
            self._grpc.stop(CLOSING_SECONDS), self._web.close(), self._stop_engine()
        )
        self._threads.shutdown(wait=False, cancel_futures=True)
        log.info("stopped", all_calls_finished=finished)

    async def _stop_engine(self) -> None:
        if self._engine_loop is not None:
            await asyncio.to_thread(self._engine_loop.stop, CLOSING_SECONDS)

    async def _watch_engine(self, loop: "EngineLoop") -> None:
        """Tell the world when the engine's thread has died."""
        while loop.healthy:
            await asyncio.sleep(HEALTH_CHECK_SECONDS)
        self._calls.close("the engine has stopped after a fault; the server must be restarted")
        await self._set_health(serving=False)
        self._front.fail_all(Unavailable("the engine has stopped after a fault"))
        log.error("engine_down")

    def _render_metrics(self, stats: CacheStats) -> bytes:
        compat = self._config.metrics_compat
        return render_metrics(stats, compat=compat, model_name=self._model_name)

    async def _set_health(self, *, serving: bool) -> None:
        self._serving = serving
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for name in ("", SERVICE.full_name):
            await self._health.set(name, state)
