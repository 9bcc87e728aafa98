"""What long work shows where there is no terminal."""

import io

from rich.console import Console

from prefixcache_service.cli import progress


def test_plain_lines_are_few(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=False))
    with progress.progress() as report:
        report("download", 0, 0)
        for done in range(0, 1001):
            report("extract", done, 1000)
    assert out.getvalue().splitlines() == [
        *("download ...", "extract ..."),
        *("extract: 25 %", "extract: 50 %", "extract: 75 %", "extract: 100 %"),
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=out, force_terminal=True))
    with progress.progress() as report:
        report("extract", 500, 1000)
    assert "extract" in out.getvalue()
