"""A real gateway (SMG) in front of servers: for benchmarks, the demo and tests.

It stays on the loopback. No tokenizer is looked for on a hub: it takes that of the servers.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

READY_SECONDS = 60.0
POLL_SECONDS = 0.05
STRICT = ("--worker-warmup-divert-every", "0", "--worker-warmup-secs", "0")
"""Always to where most is cached: by default a replica that has little cached gets some all the
same, so that it fills."""
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Gateway:
    """A running gateway. url: where OpenAI's clients find it, without `/v1`."""

    url: str
    metrics_url: str
    process: "subprocess.Popen[bytes]"

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def join(self, replica: str) -> None:
        """Tell it of another replica (host:port)."""
        post = urllib.request.Request(
            f"{self.url}/workers",
            json.dumps({"url": f"grpc://{replica}"}).encode(),
            {"content-type": "application/json"},
        )
        urllib.request.urlopen(post, timeout=10).close()

    def workers(self) -> Mapping[str, str]:
        """host:port of each replica it knows, to its status: "ready" where it is used."""
        workers = cast(list[dict[str, Any]], self.get("/workers")["workers"])
        return {worker["url"].partition("//")[2]: worker["status"] for worker in workers}

    def indexed(self) -> Mapping[str, int]:
        """How many cached blocks it knows of each replica (host:port)."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            lines = response.read().decode()
        found = re.findall(r'^smg_kv_index_blocks\{worker="grpc://(.+?)"\} (\d+)$', lines, re.M)
        return {where: int(blocks) for where, blocks in found}

    def wait(self, replicas: Sequence[str], seconds: float = READY_SECONDS) -> None:
        """Until it uses these replicas and no others, and has their tokenizer.

        Raises RuntimeError where it does not.
        """
        deadline = time.monotonic() + seconds
        while not self._uses(set(replicas)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not use {sorted(replicas)}")
            time.sleep(POLL_SECONDS)

    def _uses(self, replicas: set[str]) -> bool:
        try:
            ready = {where for where, status in self.workers().items() if status == "ready"}
            return ready == replicas and bool(self.get("/v1/tokenizers")["tokenizers"])
        except OSError:  # it does not listen yet
            return False


@contextmanager
def gateway(
    replicas: Sequence[str], *flags: str, policy: str = "cache_aware", log: Path | None = None
) -> Iterator[Gateway]:
    """Start a gateway in front of these replicas (host:port each); yields it once it uses them all.

    log: where it writes; nowhere by default. Raises RuntimeError where it does not come up.
    """
    port, metrics = free_port(), free_port()
    command = [
        str(Path(sys.executable).with_name("smg")),
        "launch",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
        *("--worker-urls", *(f"grpc://{replica}" for replica in replicas)),
        *("--policy", policy, "--worker-startup-check-interval", "1"),
        *flags,
    ]
    with open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **NO_HUB}
        )
        try:
            metrics_url = f"http://127.0.0.1:{metrics}/metrics"
            running = Gateway(f"http://127.0.0.1:{port}", metrics_url, process)
            running.wait(replicas)
            yield running
        finally:
            process.kill()  # SIGTERM would keep it listening for five seconds more
            process.wait()


def free_port() -> int:
    """A port of the loopback that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
