"""A uvicorn server inside our event loop. Owns its socket; leaves signals to the main server."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from prefixcache_service.ports import listen
from prefixcache_service.tls import Certificates


class WebServer:
    """Serves one application. `close` is fine without `open`."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    async def open(self, host: str, port: int, tls: Certificates | None = None) -> int:
        """Listen; returns the port. Raises ConfigurationError where it cannot be had."""
        self._listener = listener = listen(host, port, "--http-host", "--http-port")
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = None if tls is None else tls.context()
        self._server = _Quiet(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=0.3)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        if self._listener is not None:
            self._listener.close()  # uvicorn forgets it where it is told to stop while it starts


class _Quiet(uvicorn.Server):
    """Uvicorn takes SIGTERM for itself; ours goes to the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
