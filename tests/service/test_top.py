"""`prefixcache top` against a real server: its picture, its keys, and a server that goes away."""

import io
import os
import pty
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixcache.engine.messages import Histogram
from prefixcache_service import Branch
from prefixcache_service.cli import app
from prefixcache_service.cli.frame import compact, duration, percent, quantile
from prefixcache_service.cli.top import _Look
from prefixcache_service.server import Server
from tests.service.conftest import RunningServer

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def run(*arguments):
    return CliRunner().invoke(app, ["top", *arguments])


def test_one_picture_has_the_figures(server, client):
    kept = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    stats = client.stats()
    result = run("--once", "--server", server.target)
    assert result.exit_code == 0, result.output
    picture = result.stdout
    for figure in (
        percent(stats.hit_rate),
        f"{stats.blocks_evictable:,} cached",
        f"of {stats.blocks_total:,} blocks",
        f"{stats.blocks_leased:,} leased",
        "Misses by cause",
        "Hit rate by pool size",
        kept.sequence_id[:8],
        f"{stats.sequences_kept} kept",
    ):
        assert figure in picture, f"{figure}\n{picture}"
    assert re.search(rf"computed +{compact(stats.computed_tokens)} ", picture)
    assert re.search(rf"never seen +{compact(stats.misses['never_seen'])} ", picture)


def test_forks_stand_below_their_parents(server, client):
    parent = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    (fork,) = client.fork([Branch(parent.sequence_id)], max_tokens=1, keep_seconds=60, **GREEDY)
    lines = run("--once", "--server", server.target).stdout.splitlines()
    (above,) = [at for at, line in enumerate(lines) if line.startswith(parent.sequence_id[:8])]
    assert lines[above + 1].startswith(f"  └ {fork.sequence_id[:8]}")


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_it_fits_any_terminal(server, client, columns):
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    stats = client.stats()
    console = Console(width=columns, height=40, file=io.StringIO(), highlight=False)
    console.print(_Look(client, server.target, console).now())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert any("Hit rate" in line for line in lines)
    assert any(percent(stats.hit_rate) in line for line in lines), "\n".join(lines)
    if columns >= 40:  # narrower, long numbers are cut
        assert any(compact(stats.computed_tokens) in line for line in lines), "\n".join(lines)


def test_without_a_server_it_says_so(free_port):
    result = run("--once", "--server", f"127.0.0.1:{free_port}")
    assert result.exit_code == 1
    assert "is `prefixcache serve` running there?" in str(result.exception)


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Terminal:
    """`prefixcache top` on a terminal of its own."""

    def __init__(self, *flags):
        self.screen, side = pty.openpty()
        command = [sys.executable, "-c", "from prefixcache_service.cli import main; main()"]
        self.popen = subprocess.Popen(
            [*command, "top", "--interval", "0.2", *flags],
            stdin=side, stdout=side, stderr=side, close_fds=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )  # fmt: skip
        os.close(side)
        os.set_blocking(self.screen, False)
        self.text = ""

    def wait_for(self, text, seconds=20.0):
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, self.text[-2000:]
            time.sleep(0.02)
            self.read()

    def read(self):
        try:
            self.text += os.read(self.screen, 65_536).decode(errors="replace")
        except BlockingIOError:
            return

    def press(self, keys):
        os.write(self.screen, keys)

    def close(self):
        self.popen.kill()
        self.popen.wait()
        os.close(self.screen)


class ServerAt(RunningServer):
    """A server at a given port."""

    def __init__(self, port, config):
        self.port = port
        super().__init__(config, 0.1)

    async def _make(self, config):
        server = Server(replace(config, port=self.port))
        await server.open()
        return server


@pytest.mark.slow
def test_it_outlives_the_server_and_q_ends_it(tiny_config):
    running = RunningServer(tiny_config, grace=0.1).load()
    port = running.server.port
    terminal = Terminal("--server", running.target)
    try:
        terminal.wait_for("Hit rate")
        running.close()
        terminal.text = ""
        terminal.wait_for("trying again")
        terminal.text = ""
        running = ServerAt(port, tiny_config).load()
        terminal.wait_for("Hit rate")
        terminal.press(b"\x1b[Aq")
        assert terminal.popen.wait(10) == 0
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()
        running.close()


def test_help_has_examples():
    help_text = run("--help").stdout
    assert "prefixcache top --once" in help_text
    assert "--interval" in help_text


def test_figures_as_text():
    assert [compact(n) for n in (0, 9999, 12_345, 1_234_567, 2e12)] == [
        "0", "9,999", "12.3K", "1.2M", "2.0T",
    ]  # fmt: skip
    assert [duration(s) for s in (0.0402, 2.5, 240)] == ["40.2 ms", "2.5 s", "4 min"]
    assert (percent(None), percent(0.734)) == ("-", "73.4 %")
    histogram = Histogram("x", {}, (1.0, 2.0, 4.0), (0, 4, 4, 0), 20.0)
    assert [quantile(histogram, share) for share in (0.25, 0.5, 0.75, 1.0)] == [1.5, 2.0, 3.0, 4.0]
    beyond = Histogram("x", {}, (1.0,), (0, 3), 9.0)
    assert quantile(beyond, 0.5) == 1.0
