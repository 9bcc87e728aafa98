"""A histogram that counts: cheap enough to be fed once a token."""

from bisect import bisect_left
from collections.abc import Mapping

from prefixcache.engine import messages

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Bounds for waits and prefills."""

STEP_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)
"""Bounds for a step, and so for the time between tokens."""

LONG_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Bounds for whole requests."""

CACHE_SECONDS = (0.0, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Bounds for how long blocks lie."""


class Histogram:
    """Counts of values by upper bound, the last for what is above all; and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def snapshot(self, name: str, labels: Mapping[str, str] | None = None) -> messages.Histogram:
        """What it holds now."""
        return messages.Histogram(name, labels or {}, self.bounds, tuple(self.counts), self.sum)
