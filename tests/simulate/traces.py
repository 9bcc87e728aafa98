"""Small traces for tests, whose answers are known without a cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prefixcache.simulate.trace import Request, SequenceRecord

BLOCK = 16


def sequence(blocks: Sequence[int], *, output: int = 0, made: Sequence[int] = ()) -> SequenceRecord:
    """A prompt of whole blocks by name, and `made` whole blocks that it generates."""
    names = np.array([*blocks, *made], np.uint64)
    prompt = len(blocks) * BLOCK
    output = output or len(made) * BLOCK
    return SequenceRecord(prompt, output, len(names) * BLOCK, names, len(blocks))


def requests(*prompts: Sequence[int]) -> list[Request]:
    """One request a second, each a prompt of whole blocks."""
    return [Request(t, t, (sequence(blocks),)) for t, blocks in enumerate(prompts)]


def group(at: float, *sequences: SequenceRecord, priority: int = 0) -> Request:
    return Request(at, at, sequences, priority)


def shared_prompt(count: int, shared: int, own: int) -> list[Request]:
    """`count` requests that begin with the same blocks and go on with blocks of their own.

    With room for one request, or more, (count - 1) * shared of their blocks are hits.
    """
    front = list(range(shared))
    return requests(
        *(front + [1000 * (index + 1) + at for at in range(own)] for index in range(count))
    )


def forked(record: SequenceRecord, tokens: int) -> SequenceRecord:
    return replace(record, inherited_tokens=tokens)
