"""What to compare a replay with: a plain LRU, and the best that any policy could do.

Neither is a cache: they follow names of blocks, on the same requests, one after the other, with the
same pool and the same refusals as `replay.py`.

**Plain LRU**: each block stands for itself and is touched in the order of the prompt, so the front
of a prompt goes first; a hit needs all blocks before it. (Touched from the back it would be the
order of our cache where no request has a priority, none is pruned and none kept.)

**Offline bound**: Belady's MIN on a prefix tree. When room is needed, of the blocks that the
request at hand does not use, the one goes that is asked for again last; of several, the deepest.
A parent is asked for whenever its child is, so a child never outlives it: MIN evicts leaves by
itself, and its hits are whole prefixes. No order of eviction has more hits (L. A. Belady, A study
of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966; R. L. Mattson et
al., Evaluation techniques for storage hierarchies, ibid. 1970). That a request needs its blocks at
the same time changes nothing: see it as asking for all of them again at once; then MIN takes none.
Where a trace names generated blocks they are made again without having been asked for; to keep one
for that is worth nothing, so until then MIN counts it as never asked for. It may then have more
hits than a tree could have: still a bound.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.simulate.replay import Hits, computed_blocks, private_blocks, room_of
from prefixcache.simulate.trace import Request, SequenceRecord

NEVER = 2**31 - 1
_DEPTH_BITS = 24
_ID_BITS = 32

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Lookup:
    """A sequence, and the numbers of its blocks, [n]: the prompt's first.

    next: the request that asks for each of them next, or NEVER.
    """

    sequence: SequenceRecord
    ids: Ids
    next: Ids | None = None


class BlockNumbers:
    """The requests of a trace, their blocks numbered from 0: once for all sizes and policies."""

    def __init__(self, requests: Sequence[Request], block_size: int) -> None:
        self.block_size = block_size
        sequences = [s for request in requests for s in request.sequences]
        names, ids = np.unique(np.concatenate([s.blocks for s in sequences]), return_inverse=True)
        ends = np.cumsum([len(s.blocks) for s in sequences])[:-1]
        numbers = iter(np.split(ids.astype(np.int64), ends))
        self.num_blocks = len(names)
        self._requests = [[_Lookup(s, next(numbers)) for s in r.sequences] for r in requests]
        self._room = [room_of(request, block_size) for request in requests]

    def split(self, num_blocks: int, hits: Hits) -> list[list[_Lookup]]:
        """The requests that fit a pool; the others are counted as refused."""
        fitting = []
        for lookups, room in zip(self._requests, self._room, strict=True):
            if room <= num_blocks:
                fitting.append(lookups)
                continue
            hits.refused += 1
            for lookup in lookups:
                if not lookup.sequence.sample:
                    hits.add(lookup.sequence, 0, self.block_size)
        return fitting

    def computed(self, lookup: _Lookup) -> int:
        """How many of a sequence's blocks are full at its end."""
        return computed_blocks(lookup.sequence, self.block_size)

    def private(self, lookup: _Lookup) -> int:
        """How many blocks it needs besides."""
        return private_blocks(lookup.sequence, self.block_size)


def plain_lru(numbers: BlockNumbers, num_blocks: int) -> Hits:
    """What a pool hits that evicts the block last touched longest ago, whatever hangs on it."""
    hits = Hits()
    cached: OrderedDict[int, None] = OrderedDict()
    for lookups in numbers.split(num_blocks, hits):
        room = num_blocks
        for lookup in lookups:
            ids = lookup.ids.tolist()
            if not lookup.sequence.sample:
                hits.add(lookup.sequence, _leading(ids, cached), numbers.block_size)
            room -= numbers.private(lookup)
            for block in ids[: numbers.computed(lookup)]:
                cached[block] = None
                cached.move_to_end(block)
                if len(cached) > room:
                    cached.popitem(last=False)
            while len(cached) > room:
                cached.popitem(last=False)
    return hits


def _leading(ids: list[int], cached: OrderedDict[int, None]) -> int:
    """How many blocks at the front are all there."""
    for count, block in enumerate(ids):
        if block not in cached:
            return count
    return len(ids)


def belady(numbers: BlockNumbers, num_blocks: int) -> Hits:
    """What a pool hits at most, were the future known: Belady's MIN on a prefix tree."""
    hits = Hits()
    pool = _FarthestFirst(num_blocks)
    for now, lookups in enumerate(_with_next(numbers, numbers.split(num_blocks, hits))):
        private = 0
        for lookup in lookups:
            ids = lookup.ids.tolist()
            if not lookup.sequence.sample:
                asked = ids[: lookup.sequence.prompt_blocks]
                hits.add(lookup.sequence, pool.present(asked), numbers.block_size)
            assert lookup.next is not None
            pool.use(now, ids[: numbers.computed(lookup)], lookup.next.tolist())
            private += numbers.private(lookup)
        pool.make_room(private)
    return hits


def _with_next(numbers: BlockNumbers, requests: list[list[_Lookup]]) -> list[list[_Lookup]]:
    """The same, knowing when each block is asked for next: one pass from the end."""
    next_asked = np.full(numbers.num_blocks, NEVER, np.int64)
    known: list[list[_Lookup]] = []
    for now in range(len(requests) - 1, -1, -1):
        lookups = requests[now]
        known.append([_Lookup(u.sequence, u.ids, next_asked[u.ids]) for u in lookups])
        for lookup in lookups:  # what is made again without having been asked for
            next_asked[lookup.ids[: numbers.computed(lookup)]] = NEVER
        for lookup in lookups:
            if not lookup.sequence.sample:
                next_asked[lookup.ids[: lookup.sequence.prompt_blocks]] = now
    known.reverse()
    return known


class _FarthestFirst:
    """A pool that evicts what is asked for again last, but nothing of the request at hand.

    The heap may hold what is no longer true of a block; `_next` has what is. Keys are one integer:
    a later use is smaller, of equal ones the deeper block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._next: dict[int, int] = {}
        self._heap: list[int] = []
        self._never: list[int] = []
        self._at_hand: list[tuple[int, int]] = []
        self._now = -1

    def present(self, ids: list[int]) -> int:
        """How many of these blocks are there."""
        cached = self._next
        return sum(block in cached for block in ids)

    def use(self, now: int, ids: list[int], next_use: list[int]) -> None:
        """The request at hand, number `now`, holds these blocks, in the order of their depth."""
        if now != self._now:
            self._queue()
            self._now = now
        for depth, block in enumerate(ids):
            self._next[block] = then = next_use[depth]
            self._at_hand.append((then << _DEPTH_BITS | depth, block))

    def make_room(self, private: int) -> None:
        """Evict until this many blocks are free beside those that are there."""
        while len(self._next) + private > self._num_blocks:
            if self._never:
                block = self._never.pop()
                if self._next.get(block) == NEVER:
                    del self._next[block]
                continue
            key = -heapq.heappop(self._heap)
            block = key & (1 << _ID_BITS) - 1
            if self._next.get(block) == key >> _DEPTH_BITS + _ID_BITS:
                del self._next[block]

    def _queue(self) -> None:
        """The request at hand has ended: what it used can be evicted."""
        for rank, block in self._at_hand:
            if rank >> _DEPTH_BITS == NEVER:
                self._never.append(block)
            else:
                heapq.heappush(self._heap, -(rank << _ID_BITS | block))
        self._at_hand.clear()
