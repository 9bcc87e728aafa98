"""A soak: one server with a tiny pool, clients that do everything to it, and a close watch.

The server is the real command in a process of its own (`tests.service.harness`): before each step
the engine's integrity is checked there, and by chance a forward pass fails.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prefixcache_service import Client
from tests.model.checkpoints import write_checkpoint
from tests.service.process import FAULTY, Process
from tests.soak.clients import Clients, Ledger

THREADS = 6
FAULTS_RATE = "0.006"  # of forward passes
SETTLE_SECONDS = 15.0
FLAGS = (
    *("--block-size", "4", "--num-gpu-blocks-override", "72", "--max-model-len", "128"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "24", "--max-queue", "8"),
    *("--max-leases", "64", "--log-level", "error", "--port", "0", "--no-http"),
)
VICTIM = """
import sys
from prefixcache_service import Client
client = Client(sys.argv[1])
streams = [client.stream([5, 6, 7], n=2, max_tokens=90, ignore_eos=True) for _ in range(3)]
print(streams[0].sequence_id, flush=True)
for stream in streams:
    stream.result()
"""


@dataclass
class Result:
    """What a soak saw.

    memory: seconds since the start, and resident bytes of the server. problems: must be none.
    """

    counts: dict[str, int]
    problems: list[str]
    server: dict[str, int]
    stats: dict[str, int]
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def later(self) -> list[tuple[float, int]]:
        """Memory over the last two thirds."""
        return self.memory[len(self.memory) // 3 :]

    @property
    def growth(self) -> tuple[float, float]:
        """Bytes by which a straight line through `later` grows, and the noise about that line."""
        times, sizes = zip(*self.later, strict=True)
        line = statistics.linear_regression(times, sizes)
        noise = [size - line.slope * at - line.intercept for at, size in self.later]
        return line.slope * (times[-1] - times[0]), statistics.pstdev(noise)


def run(seconds: float, seed: int, directory: Path) -> Result:
    """Soak for so many seconds; `directory` gets the server's log."""
    checkpoint = write_checkpoint(directory / "model", max_position_embeddings=512)
    environment = {"FAULTS_RATE": FAULTS_RATE, "FAULTS_SEED": str(seed)}
    with (
        (directory / "server.log").open("w") as log,
        Process("--model", str(checkpoint), *FLAGS, program=FAULTY, log=log, **environment) as it,
    ):
        target = f"127.0.0.1:{it.ready()}"
        before = report(it)
        ledger = Ledger()
        memory = besiege(it, target, seconds, seed, ledger)
        problems, stats = settle(it, target, before, ledger)
        server = report(it) if it.popen.poll() is None else before
        it.popen.send_signal(signal.SIGTERM)
        if (code := it.popen.wait(30)) != 0:
            problems.append(f"the server's exit code is {code}; see {directory / 'server.log'}")
    return Result(dict(ledger.counts), [*ledger.lost, *problems], server, stats, memory)


def report(process: Process) -> dict[str, int]:
    """What the harness says of itself."""
    process.popen.stdin.write("\n")
    process.popen.stdin.flush()
    figures: dict[str, int] = json.loads(process.popen.stdout.readline())
    return figures


def besiege(
    process: Process, target: str, seconds: float, seed: int, ledger: Ledger
) -> list[tuple[float, int]]:
    """Let the clients loose; the server's memory meanwhile, once a second."""
    began = time.monotonic()
    until = began + seconds
    threads = [
        threading.Thread(target=Clients(target, f"{seed}/{n}", ledger).run, args=(until,))
        for n in range(THREADS)
    ]
    threads.append(threading.Thread(target=kill_clients, args=(target, until, ledger)))
    for thread in threads:
        thread.start()
    memory = []
    while time.monotonic() < until and process.popen.poll() is None:
        memory.append((time.monotonic() - began, report(process)["resident_bytes"]))
        time.sleep(1)
    for thread in threads:
        thread.join()
    return memory


def kill_clients(target: str, until: float, ledger: Ledger) -> None:
    """Processes with streams open, each killed in the middle; one at a time."""
    while time.monotonic() < until:
        command = [sys.executable, "-c", VICTIM, target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as victim:
            assert victim.stdout is not None
            if victim.stdout.readline():
                ledger.count("clients killed")
            victim.kill()
        time.sleep(min(3.0, max(until - time.monotonic(), 0)))


def settle(
    process: Process, target: str, before: dict[str, int], ledger: Ledger
) -> tuple[list[str], dict[str, int]]:
    """Wait until all has ended or expired: nothing may be left. Problems, and the last figures."""
    if process.popen.poll() is not None:
        return ["the server has ended"], {}
    with Client(target, timeout=30) as client:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            stats = client.stats()
            left = stats.sequences_running + stats.sequences_waiting + stats.sequences_kept
            if not left and not stats.blocks_in_use:
                break
            if time.monotonic() > deadline:
                return [f"something is left: {stats}"], {}
            time.sleep(0.1)
        after = report(process)
        problems = [f"{key} left: {after[key]}" for key in ("tables", "leases") if after[key]]
        problems += list(leaks(process, before, time.monotonic() + SETTLE_SECONDS))
    failed, told = after["requests_failed_by_faults"], ledger.counts["failed by an injected fault"]
    if told > failed:
        problems.append(f"{told} calls ended INTERNAL, but only {failed} faults were injected")
    names = ("preemptions", "evicted_blocks", "forks", "requests_finished", "requests_aborted")
    return problems, {name: getattr(stats, name) for name in (*names, "requests_failed")}


def leaks(process: Process, before: dict[str, int], deadline: float) -> Iterator[str]:
    """Threads and files beyond those of the start: one connection is ours."""
    while True:
        after = report(process)
        more = {key: after[key] - before[key] for key in ("threads", "files")}
        if more["files"] <= 2 and more["threads"] <= 8:  # gRPC's own threads come with first use
            return
        if time.monotonic() > deadline:
            yield f"more than at the start: {more}"
            return
        time.sleep(0.2)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        yield Path(directory)
