"""What the page shows of the past, and one look at the engine for all who ask at the same time."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

from prefixcache.engine.messages import CacheStats
from prefixcache.errors import PrefixCacheError

T = TypeVar("T")

SAMPLE_SECONDS = 2.0
KEPT_SAMPLES = 450  # a quarter of an hour

COLUMNS = (
    "cached_tokens",
    "computed_tokens",
    "forked_tokens",
    "completion_tokens",
    "blocks_in_use",
    "sequences_running",
    "sequences_waiting",
)


class Shared(Generic[T]):
    """A value that is fetched anew only when it is older than `seconds`, once for all callers."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._fetch = fetch
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._value: tuple[float, T] | None = None

    async def get(self) -> T:
        """The value; raises what the fetch raises."""
        async with self._lock:
            if self._value is None or time.monotonic() - self._value[0] >= self._seconds:
                self._value = time.monotonic(), await self._fetch()
            return self._value[1]

    def forget(self) -> None:
        """Something was changed: the next one who asks is to see it."""
        self._value = None


class History:
    """Counters of the last minutes, sampled whether or not anybody looks."""

    def __init__(self, stats: Callable[[], Awaitable[CacheStats]]) -> None:
        self._stats = stats
        self._samples: deque[tuple[float, ...]] = deque(maxlen=KEPT_SAMPLES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Sample no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            with suppress(PrefixCacheError):  # the engine is busy: a gap
                self._samples.append(row(time.time(), await self._stats()))
            await asyncio.sleep(SAMPLE_SECONDS)

    def rows(self) -> list[tuple[float, ...]]:
        """The samples, oldest first: seconds since 1970, and then COLUMNS."""
        return list(self._samples)


def row(moment: float, stats: CacheStats) -> tuple[float, ...]:
    """One sample."""
    return (round(moment, 3), *(float(getattr(stats, name)) for name in COLUMNS))
