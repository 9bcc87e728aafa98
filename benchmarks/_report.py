"""What all benchmarks share: the command line, medians, ratios, and how figures are printed.

Owns no figure. Progress goes to stderr; stdout gets a table, and with `--json` one JSON object as
its last line.

    report = Report("cache", "What a lookup costs.")
    report.parser.add_argument("--blocks", type=int, default=4096)
    args = report.parse()
    pair = compare(slow, fast, rounds=20)
    report.add("lookup_us", pair.second * 1e6, unit="µs")
    report.add("lookup_speedup", pair.ratio, at_least=8)
    report.finish()
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Value = float | int | str | bool | None


def median_seconds(
    work: Callable[[], object], *, rounds: int = 11, warm_up: int = 1, inner: int = 1
) -> float:
    """Median wall time of one call, over `rounds` timings of `inner` calls each."""
    for _ in range(warm_up):
        work()
    return statistics.median(_seconds(work, inner) for _ in range(rounds))


@dataclass(frozen=True)
class Comparison:
    """Two median times in seconds, and the median of first / second within a round."""

    first: float
    second: float
    ratio: float


def compare(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    rounds: int = 11,
    warm_up: int = 1,
    inner: int = 1,
) -> Comparison:
    """Time two things in turn, so that a slow moment of a shared machine meets both.

    ratio > 1: `second` is that many times as fast.
    """
    for _ in range(warm_up):
        first()
        second()
    pairs = [(_seconds(first, inner), _seconds(second, inner)) for _ in range(rounds)]
    return Comparison(
        first=statistics.median(a for a, _ in pairs),
        second=statistics.median(b for _, b in pairs),
        ratio=statistics.median(a / b for a, b in pairs),
    )


def _seconds(work: Callable[[], object], inner: int) -> float:
    collecting = gc.isenabled()
    gc.disable()  # a collection in one timing and not in the next is noise
    try:
        start = time.perf_counter()
        for _ in range(inner):
            work()
        return (time.perf_counter() - start) / inner
    finally:
        if collecting:
            gc.enable()


@dataclass
class Report:
    """Figures of one benchmark, with the bounds that they are held to."""

    name: str
    description: str
    parser: argparse.ArgumentParser = field(init=False)
    figures: dict[str, Value] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    _json: bool = False
    _notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parser = argparse.ArgumentParser(f"benchmarks.{self.name}", None, self.description)
        self.parser.add_argument("--json", action="store_true", help="print one JSON object last")
        self.parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the command line; `--json` and `--quick` are always there."""
        options = self.parser.parse_args(arguments)
        self._json = options.json
        return options

    def progress(self, text: str) -> None:
        """Say on stderr what is going on."""
        print(f"[{self.name}] {text}", file=sys.stderr, flush=True)

    def add(
        self,
        key: str,
        value: Value,
        *,
        unit: str = "",
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Record a figure; one beyond its bound is listed under "missed", and does not raise."""
        self.figures[key] = round(value, 6) if isinstance(value, float) else value
        bound = f"≥ {at_least:g}" if at_least is not None else ""
        bound += f"≤ {at_most:g}" if at_most is not None else ""
        self._notes[key] = " ".join(part for part in (unit, bound and f"(wanted {bound})") if part)
        number = float(value) if isinstance(value, (int, float)) else None
        if number is not None and (
            (at_least is not None and not number >= at_least)
            or (at_most is not None and not number <= at_most)
        ):
            self.missed.append(key)
        self.progress(self._line(key))

    def finish(self) -> None:
        """Print the figures."""
        if not self._json:
            print("\n".join(self._line(key) for key in self.figures))
            return
        facts = {"benchmark": self.name, "machine": _machine()}
        print(json.dumps({**facts, **self.figures, "missed": self.missed}), flush=True)

    def _line(self, key: str) -> str:
        value = self.figures[key]
        text = f"{value:,.4g}" if isinstance(value, float) else str(value)
        mark = "  MISSED" if key in self.missed else ""
        return f"{key:<36} {text:>12} {self._notes[key]}{mark}"


def _machine() -> dict[str, Value]:
    torch = sys.modules.get("torch")  # told only where the benchmark uses it
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
    }
