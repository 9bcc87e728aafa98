"""What lengths alone say: memory that contiguous reservation leaves unused, against blocks.

Owns the schemes and their arithmetic; knows no hits and no time.

A server that stores a sequence's KV in one piece must reserve room for the longest that it may
become, before it knows. Blocks are taken as it grows, and only the last is filled in part.
W. Kwon et al., Efficient memory management for large language model serving with PagedAttention,
SOSP 2023, measured that 20 to 38 % of the memory held tokens, so 60 to 80 % were wasted, and 2 to 4
times the throughput through the larger batch. Its names for the schemes are used here.

Two ways to count, both as shares of what is reserved:

- at the end: each request once, at its full length;
- while it runs: each of its steps once, since it begins short and grows. This is what a moment's
  memory looks like, so the batch follows from it: memory / mean room of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache.errors import TraceError
from prefixcache.simulate.trace import SequenceRecord

BLOCK_SIZES = (8, 16, 32, 64, 128)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one way to give out memory does on a trace.

    unused_at_end, unused_running: shares of the reserved memory. tokens_held: mean room of a
    sequence while it runs, in tokens. batch: how many times as many sequences run in the same
    memory as where each reserves the longest length.
    """

    name: str
    block_size: int | None
    unused_at_end: float
    unused_running: float
    tokens_held: float
    batch: float


def compare_schemes(
    sequences: Sequence[SequenceRecord], block_sizes: Sequence[int] = BLOCK_SIZES
) -> list[Scheme]:
    """Contiguous reservation in three ways, then blocks of each size.

    Sharing of prefixes is left out. Raises TraceError where nothing is generated.
    """
    prompts = np.array([s.prompt_tokens for s in sequences], np.float64)
    outputs = np.array([s.output_tokens for s in sequences], np.float64)
    if not outputs.any():
        raise TraceError("the trace generates no token: nothing ever runs")
    ends = prompts + outputs
    powers = prompts + 2.0 ** np.ceil(np.log2(np.maximum(outputs, 1)))
    contiguous = {
        "longest of the trace": np.full_like(ends, ends.max()),
        "output rounded up to 2^n": powers,
        "exact, known beforehand": ends,
    }
    used = _running(prompts, outputs, 1)
    rooms: list[tuple[str, int | None, Floats, Floats]]
    rooms = [(name, None, room, room * outputs) for name, room in contiguous.items()]
    for size in block_sizes:
        room = np.ceil(ends / size) * size
        rooms.append((f"blocks of {size}", size, room, _running(prompts, outputs, size)))
    schemes = []
    for name, block_size, at_end, running in rooms:
        held = float(running.sum() / outputs.sum())
        unused = 1 - float(ends.sum() / at_end.sum()), 1 - float(used.sum() / running.sum())
        schemes.append(Scheme(name, block_size, *unused, held, float(ends.max()) / held))
    return schemes


def _running(prompts: Floats, outputs: Floats, block_size: int) -> Floats:
    """Tokens of room summed over the steps of each request: after step t it has prompt + t."""
    sums: Floats = _rounded_sum(prompts + outputs, block_size) - _rounded_sum(prompts, block_size)
    return sums


def _rounded_sum(lengths: Floats, size: int) -> Floats:
    """Sum over x from 1 to each length of x rounded up to whole blocks."""
    whole, rest = np.divmod(lengths, size)
    total: Floats = size * (size * whole * (whole + 1) / 2 + rest * (whole + 1))
    return total
