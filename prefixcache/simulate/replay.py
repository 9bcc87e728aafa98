"""Replaying requests through the cache itself: `BlockManager`, the code that the server runs.

Owns how requests follow one another: in the order of their admission, each ending before the next
one begins. So all that a request does not use can be evicted, and the figures depend on the size of
the pool alone and not on the speed of a machine; `serving.py` adds time. Memory is that of the
cache, whatever the length of the trace.
"""

import heapq
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from prefixcache.cache import (
    BlockDigest,
    BlockManager,
    BlockTable,
    Lease,
    NoFreeBlocks,
    namespace_key,
)
from prefixcache.simulate.trace import NAME_WORDS, Request, SequenceRecord

NAMESPACE = namespace_key(model=b"simulated")
"""One for all: what separates tenants is in the blocks' names already."""


@dataclass(slots=True)
class Hits:
    """What prompts asked for and what was there. Forks do not ask for what they inherit.

    refused: requests too large for the empty pool; all that they ask for is missed.
    """

    asked_blocks: int = 0
    hit_blocks: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    inherited_tokens: int = 0
    refused: int = 0

    @property
    def block_rate(self) -> float:
        """Share of the blocks asked for that were there."""
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Share of the prompt tokens that need not be run."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def add(self, sequence: SequenceRecord, found: int, block_size: int) -> None:
        """Count a prompt of which the cache had the first `found` whole blocks.

        The last token of a prompt is always run; a remainder inside a block counts as run, because
        a trace of digests cannot tell what it has in common with others.
        """
        usable = sequence.prompt_tokens - 1
        most = sequence.prompt_blocks
        if sequence.usable_tokens is not None:
            usable = min(usable, sequence.usable_tokens)
            most = min(most, -(-sequence.usable_tokens // block_size))
        inherited = min(sequence.inherited_tokens // block_size, most)
        found = min(found, most)
        self.asked_blocks += sequence.prompt_blocks - inherited
        self.hit_blocks += max(found - inherited, 0)
        start = min(found * block_size, usable)
        taken_over = min(start, inherited * block_size)
        self.inherited_tokens += taken_over
        self.hit_tokens += start - taken_over
        self.asked_tokens += sequence.prompt_tokens - taken_over


def computed_blocks(sequence: SequenceRecord, block_size: int) -> int:
    """Named blocks that were full at its end, so that others can be served from them."""
    return min(len(sequence.blocks), sequence.filled_tokens // block_size)


def room_of(request: Request, block_size: int) -> int:
    """Blocks that a request needs at its end: equal ones once, and those without name."""
    named = [s.blocks[: computed_blocks(s, block_size)] for s in request.sequences]
    distinct = len(named[0]) if len(named) == 1 else len(np.unique(np.concatenate(named)))
    return distinct + sum(private_blocks(sequence, block_size) for sequence in request.sequences)


def private_blocks(sequence: SequenceRecord, block_size: int) -> int:
    """Blocks that it needs at its end besides those that others can be served from."""
    all_blocks = -(-sequence.filled_tokens // block_size)
    return max(all_blocks - computed_blocks(sequence, block_size), 0)


def enough(requests: Iterable[Request], block_size: int) -> int:
    """Blocks of which so many requests can never run short, whatever is shared.

    A larger pool gives the same figures, and need not be built to tell them.
    """
    blocks = 0
    for request in requests:
        for s in request.sequences:
            tokens = max(s.filled_tokens, s.prompt_tokens + s.output_tokens)
            blocks += max(-(-tokens // block_size), len(s.blocks)) + 1
    return blocks


class Replay:
    """One pool, fed with requests one by one.

    num_blocks: size of the pool. block_size: tokens in a block of the trace.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, NAME_WORDS, BlockDigest(seed=0))
        self.hits = Hits()
        self._block_size = block_size
        self._kept: list[tuple[float, int, Lease]] = []

    def run(self, requests: Iterable[Request]) -> Hits:
        """Replay requests; what they have hit so far, in all calls."""
        for request in requests:
            self._end_leases(request.admitted)
            self._serve(request)
        return self.hits

    def _serve(self, request: Request) -> None:
        if room_of(request, self._block_size) > self.manager.pool.num_blocks:
            self.hits.refused += 1
            for sequence in request.sequences:
                if not sequence.sample:
                    self.hits.add(sequence, 0, self._block_size)
            return
        tables = [self._compute(sequence) for sequence in request.sequences]
        for sequence, table in zip(request.sequences, tables, strict=True):
            if sequence.keep_seconds > 0:
                self._keep(table, request.admitted + sequence.keep_seconds)
            self.manager.release(table, request.priority, pruned=sequence.pruned)

    def _compute(self, sequence: SequenceRecord) -> BlockTable:
        """Look a prompt up, take what room the sequence needs, and fill it."""
        manager, size = self.manager, self._block_size
        words = sequence.blocks.view("u4")
        prompt = words[: sequence.prompt_blocks * NAME_WORDS].tobytes()
        match = manager.match(NAMESPACE, prompt)
        if not sequence.sample:
            self.hits.add(sequence, match.num_blocks, size)
        table = manager.admit(NAMESPACE, prompt, match)
        full = computed_blocks(sequence, size)
        with suppress(NoFreeBlocks):  # a sibling has generated the same, and holds it already
            manager.grow(table, (full + private_blocks(sequence, size)) * NAME_WORDS)
            manager.publish(table, words, full * NAME_WORDS)
        return table

    def _keep(self, table: BlockTable, until: float) -> None:
        lease = self.manager.lease(table, table.num_filled)
        heapq.heappush(self._kept, (until, id(lease), lease))

    def _end_leases(self, now: float) -> None:
        while self._kept and self._kept[0][0] <= now:
            self.manager.end_lease(heapq.heappop(self._kept)[2])
