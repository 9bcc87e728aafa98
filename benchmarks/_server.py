"""A `prefixcache serve` process of its own for benchmarks that measure through a real channel."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serve(*flags: str) -> Iterator[str]:
    """Start a server with these flags on a free port; its host:port, once it is ready.

    Raises RuntimeError where it does not come up. It is stopped by SIGTERM at the end.
    """
    command = [sys.executable, "-c", "from prefixcache_service.cli import main; main()", "serve"]
    settings = ["--port", "0", "--no-http", "--log-level", "warning", "--grace", "1", *flags]
    process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start; its message is above")
        yield line.split("gRPC ")[1].split(",")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
