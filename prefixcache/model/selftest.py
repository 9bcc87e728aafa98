"""The start-up self-test: one decoder, the same tokens served in different ways, the same bits?

Owns the check only. What to do about a failure is the engine's decision (stats say so).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.attention import StepInput
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache

_BLOCK = 16
_TOKENS = 161  # two spans, the second one begun in the middle of a block


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """Whether all ways of serving the same tokens gave the same bits; `failures` names others."""

    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if nothing failed."""
        return not self.failures

    def __bool__(self) -> bool:
        return self.ok


def check_batch_invariance(
    decoder: Decoder, *, dtype: torch.dtype = torch.float32
) -> InvarianceReport:
    """Compare hidden states of one prompt bit by bit: whole, in chunks, token by token, in a batch.

    Every operation of every layer runs on its real shape, at few rows and at many, so on both sides
    of the places where libraries change their tiles or threads. Takes about 200 rows of prefill.
    """
    length = min(_TOKENS, decoder.max_model_len)
    tokens = np.random.default_rng(7).integers(0, decoder.config.vocab_size, length)
    whole = _Prompt(decoder, tokens, dtype)
    expected = whole.run([length])
    failures = []
    for name, chunks in _cuts(length):
        states = _Prompt(decoder, tokens, dtype).run(chunks)
        if not torch.equal(states, expected):
            failures.append(f"{name}: other bits than the prompt in one piece")
    last = length - 1
    for copies in (2, 3, 16, 33):
        states = whole.repeat_last(copies)
        if not torch.equal(states, expected[last:].expand(copies, -1)):
            failures.append(f"{copies} sequences at once: other bits than one alone")
    return InvarianceReport(tuple(failures))


def _cuts(length: int) -> Iterator[tuple[str, list[int]]]:
    for name, sizes in (
        ("chunks of 1, 2 and 3, then the rest", [1, 2, 3]),
        ("chunks of 64", [64] * 9),
    ):
        chunks: list[int] = []
        for size in [*sizes, length]:
            chunks.append(min(size, length - sum(chunks)))
        yield name, [chunk for chunk in chunks if chunk]


class _Prompt:
    """A prompt in a pool of its own, its blocks in reverse order."""

    def __init__(self, decoder: Decoder, tokens: np.ndarray, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._tokens = tokens.astype(np.int32)
        blocks = -(-len(tokens) // _BLOCK)
        self._cache = KVCache(
            decoder.config, blocks, _BLOCK, dtype, decoder.device, kernels=decoder.kernels
        )
        self._blocks = np.arange(blocks, dtype=np.int32)[::-1].copy()

    def run(self, chunks: list[int]) -> Tensor:
        """Prefill in chunks; returns the hidden states of all tokens, [length, hidden]."""
        ends = np.cumsum(chunks)
        steps = (self._step(end - size, end, 1) for size, end in zip(chunks, ends, strict=True))
        return torch.cat([self._decoder.hidden(step, self._cache) for step in steps])

    def repeat_last(self, copies: int) -> Tensor:
        """Run the last token again, as so many sequences side by side; writes nothing."""
        step = self._step(len(self._tokens) - 1, len(self._tokens), copies)
        return self._decoder.hidden(step, self._cache)

    def _step(self, begin: int, end: int, copies: int) -> StepInput:
        positions = np.tile(np.arange(begin, end, dtype=np.int32), copies)
        slots = self._blocks[positions // _BLOCK].astype(np.int64) * _BLOCK + positions % _BLOCK
        return StepInput(
            token_ids=self._tokens[positions],
            positions=positions,
            slot_mapping=slots if copies == 1 else np.full_like(slots, -1),
            query_start_loc=np.arange(copies + 1, dtype=np.int32) * (end - begin),
            seq_lens=np.full(copies, end, np.int32),
            block_table=np.tile(self._blocks, (copies, 1)),
            logits_rows=np.zeros(0, np.int32),
        )
