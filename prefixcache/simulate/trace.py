"""A trace in memory: which blocks each request asks for, and how long its sequences become.

Owns the vocabulary of the simulator. Blocks are known by name only: two of equal name hold equal
tokens behind equal prefixes, which is what a chained digest says as well.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]

NAME_WORDS = 2
"""A name has 64 bits: for the cache, which compares tokens of 32 bits, a block of two tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRecord:
    """One sequence of a request.

    prompt_tokens, output_tokens: its length. filled_tokens: those whose KV was written at its end,
        which the trace can tell; a last block that is named counts as full.
    blocks: names of whole blocks, uint64 [n]: the prompt's first, then generated ones where the
        trace knows them. prompt_blocks: how many of them the prompt asks for.
    inherited_tokens: what a fork takes over from its parent.
    usable_tokens: how many prompt tokens may come from the cache; the rest is run in any case.
    sample: another sample of the prompt that the request's first sequence has run; its prompt is
        asked for once. pruned: its own blocks are the first to go.
    keep_seconds: how long it is kept after its end, to be forked.
    """

    prompt_tokens: int
    output_tokens: int
    filled_tokens: int
    blocks: Names
    prompt_blocks: int
    inherited_tokens: int = 0
    usable_tokens: int | None = None
    sample: bool = False
    pruned: bool = False
    keep_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Sequences that arrive together.

    arrival: seconds since the first request of the trace. admitted: when it got its blocks, where
    the trace tells; else its arrival.
    """

    arrival: float
    admitted: float
    sequences: tuple[SequenceRecord, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their admission.

    block_size: tokens in one of its blocks; None where it has lengths only.
    skipped: malformed lines that were left out. pool_blocks: size of the recorded server's pool.
    """

    path: str
    format: str
    requests: tuple[Request, ...]
    block_size: int | None
    skipped: int = 0
    pool_blocks: int | None = None

    @property
    def has_blocks(self) -> bool:
        """True where it says which blocks are equal, so that hits can be told."""
        return self.block_size is not None

    @property
    def sequences(self) -> list[SequenceRecord]:
        """All sequences of all requests, in order."""
        return [sequence for request in self.requests for sequence in request.sequences]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return max((request.arrival for request in self.requests), default=0.0)


def distinct_blocks(requests: tuple[Request, ...]) -> int:
    """How many different blocks requests name: a pool of so many never evicts."""
    named = [s.blocks for request in requests for s in request.sequences]
    return len(np.unique(np.concatenate(named))) if named else 0


def with_block_size(trace: Trace, size: int) -> Trace:
    """The same requests in larger blocks, a multiple of the trace's own; lengths alone take any.

    A block's name stands for all tokens up to its end, so a larger block has the name of the last
    of those that it consists of. Smaller ones cannot be told: where in a block two prompts part is
    not in the trace. Raises ValueError for such a size.
    """
    own = trace.block_size
    if own is None or size == own:
        return trace
    if size % own:
        raise ValueError(f"the trace has blocks of {own} tokens; {size} is no multiple of that")
    ratio = size // own
    requests = tuple(
        replace(request, sequences=tuple(_coarser(s, ratio) for s in request.sequences))
        for request in trace.requests
    )
    pool = None if trace.pool_blocks is None else trace.pool_blocks // ratio
    return replace(trace, requests=requests, block_size=size, pool_blocks=pool)


def _coarser(sequence: SequenceRecord, ratio: int) -> SequenceRecord:
    names = sequence.blocks[ratio - 1 :: ratio].copy()
    return replace(sequence, blocks=names, prompt_blocks=sequence.prompt_blocks // ratio)
