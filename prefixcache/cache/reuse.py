"""Hit rate against the size of the pool, from a sample of the blocks that prompts ask for.

Owns an order of last use over sampled digests, and counts of the distances at which they came back.
Knows neither trie nor blocks: whoever sees prompts and ends of sequences feeds it.

Method: stack distances. A least-recently-used pool of C blocks holds just the C blocks used last,
so a block is hit there exactly if fewer than C others were used since its own last use, and one
pass gives the whole curve. As in SHARDS (Waldspurger et al., FAST '15) only blocks whose digest
falls below a threshold are followed, a share `rate` of all; a distance among them stands for
1 / rate as many. Two things differ, for a server that runs for months: blocks farther than the
largest size asked for are dropped, which bounds the memory at a fixed rate; and counts are halved
from time to time, so that the curve is that of the last million blocks or two.

Prefixes. The pool evicts leaves first, and what falls idle does so deepest first; so a sequence's
blocks are put in order from the deepest to the root, and no block is ever farther than those behind
it, in the sample as in the pool. Hits at any size are then a prefix of the prompt. Where another
sequence holds the front of a prompt, it may be older than what is behind it; it is there all the
same, hence the running minimum in `access`.

Anchor. What the real pool hit is known exactly. The estimate is moved so that it says the same at
the real size; its errors at other sizes, which are mostly the same error, shrink with it. Where the
real pool hit less than that (kept sequences and those that run stood in the way), a larger one
makes up for it: the move shrinks as the misses do that size can mend, to nothing at `max_size`.
What was hit in part of a block is in no distance, and is added at every size.

Left out: levels of priority, pins and leases (all blocks count as equal), flushes, that blocks in
use cannot go, and what a pool of another size would have scheduled differently.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from prefixcache.cache.digest import DIGEST_BYTES

MAX_SAMPLES = 16_384
"""Blocks that are followed at most: some 3 MB."""

WINDOW = 2**20
"""Blocks asked for after which all counts are halved."""


class ReuseCurve:
    """Estimates what pools of other sizes would have hit.

    size: blocks of the real pool. max_size: of the largest one that will be asked about.
    max_samples: memory bound.

    >>> curve = ReuseCurve(size=8, max_size=64)
    >>> prompt = bytes(range(48))  # digests of three blocks
    >>> curve.access(prompt, num_blocks=3, num_hits=0)
    >>> curve.access(prompt, num_blocks=3, num_hits=3)
    >>> curve.hit_rates([2, 8])
    (0.3333333333333333, 0.5)
    """

    def __init__(self, size: int, max_size: int, *, max_samples: int = MAX_SAMPLES) -> None:
        self.rate = min(1.0, max_samples / max_size)
        self._size = size
        self._max_size = max_size
        self._limit = min(max_size, max_samples)
        self._threshold = min(int(self.rate * 2**64), 2**64 - 1)
        self._last: OrderedDict[bytes, int] = OrderedDict()
        """Time of last use by digest, oldest first; a time is a number that only grows."""
        self._times: list[int] = []
        """The same times, in order: a block's distance is how many stand behind its own."""
        self._now = 0
        self._near = np.zeros(self._limit + 1, np.int64)
        """Sampled blocks that came back, by one more than the distance at which they did."""
        self._sampled = 0
        self._whole_blocks = 0
        self._blocks = 0.0
        self._hits = 0.0
        self._beside = 0.0

    def __len__(self) -> int:
        return len(self._last)

    def access(
        self, digests: bytes, num_blocks: float, num_hits: float, num_beside: float = 0.0
    ) -> None:
        """A prompt was looked up. digests: of its whole blocks from the root on, 16 bytes each.

        num_blocks: its length in blocks, what hits are a share of, not always whole; num_hits: how
        many of the digests the real pool had. num_beside: what it had of other blocks, in part.
        """
        self._whole_blocks += len(digests) // DIGEST_BYTES
        self._blocks += num_blocks
        self._hits += num_hits
        self._beside += num_beside
        if self._blocks > WINDOW:
            self._halve()
        keys = self._sample(digests)
        self._sampled += len(keys)
        distance = self._limit
        for key in reversed(keys):
            time = self._last.get(key)
            if time is not None:
                behind = len(self._times) - bisect_left(self._times, time) - 1
                distance = min(distance, behind)
            if distance < self._limit:
                self._near[distance + 1] += 1
        self._move_to_front(reversed(keys))

    def touch(self, digests: bytes) -> None:
        """Blocks (from the root on) were used, or made, and are idle from now on."""
        self._move_to_front(reversed(self._sample(digests)))

    def hit_rates(self, sizes: Iterable[int]) -> tuple[float | None, ...]:
        """Share of the blocks asked for that pools of these sizes would have held.

        None before any was asked for.
        """
        if not self._blocks:
            return tuple(None for _ in sizes)
        sizes = list(sizes)
        anchor, most, *estimates = self._estimates([self._size, self._max_size, *sizes])
        moved = self._hits / self._blocks - anchor
        beside = self._beside / self._blocks  # the same in any pool, about
        rates = []
        for size, estimate in zip(sizes, estimates, strict=True):
            left = 1.0
            if moved < 0 and size > self._size:
                left = (most - estimate) / (most - anchor) if most > anchor else 0.0
            rates.append(min(max(estimate + moved * left + beside, 0.0), 1.0))
        return tuple(rates)

    def _estimates(self, sizes: Iterable[int]) -> list[float]:
        """The same from the sample alone.

        A popular block that is in the sample by chance, or is not, would weigh too much or too
        little. Such blocks are near, so the difference between the blocks sampled and those that
        should have been is counted at distance zero (SHARDS-adj).
        """
        missing = self._whole_blocks * self.rate - self._sampled
        nearer = np.cumsum(self._near) + missing
        buckets = [min(round(size * self.rate), self._limit) for size in sizes]
        return [float(nearer[bucket]) / (self._blocks * self.rate) for bucket in buckets]

    def _sample(self, digests: bytes) -> list[bytes]:
        """Those digests that are followed, in order."""
        heads = np.frombuffer(digests, np.uint64)[::2]
        return [
            digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
            for at in np.flatnonzero(heads <= self._threshold).tolist()
        ]

    def _move_to_front(self, keys: Iterable[bytes]) -> None:
        """Make these the ones used last, the last of them most."""
        last, times = self._last, self._times
        for key in keys:
            time = last.get(key)
            if time is not None:
                del times[bisect_left(times, time)]
                last.move_to_end(key)
            last[key] = self._now
            times.append(self._now)
            self._now += 1
        while len(last) > self._limit:
            last.popitem(last=False)
            del times[0]

    def _halve(self) -> None:
        self._near //= 2
        self._sampled //= 2
        self._whole_blocks //= 2
        self._blocks /= 2
        self._hits /= 2
        self._beside /= 2
