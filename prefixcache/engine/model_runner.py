"""From scheduled rows to logits: builds the arrays of a step and runs the decoder on them.

Owns the KV tensors. Never decides what runs; never keeps anything of a step. Steps that only decode
are replayed from graphs where there are some; those with a prompt in them are launched.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from prefixcache.engine.scheduler import ScheduledRow, ScheduledStep
from prefixcache.model.attention import StepInput
from prefixcache.model.decode_graph import DecodeGraphs
from prefixcache.model.decoder import Decoder
from prefixcache.model.host_cache import HostCache
from prefixcache.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class RowLogits:
    """Where a row's logits are: first is the logits row of the first position that has some.

    positions: positions whose logits were kept, ascending; logits row first + i for the i-th.
    """

    first: int
    positions: range

    @property
    def last(self) -> int:
        """The logits row of the last position."""
        return self.first + len(self.positions) - 1


class ModelRunner:
    """Runs forward passes over one KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        block_size: int,
        graphs: DecodeGraphs | None = None,
        host_cache: HostCache | None = None,
    ) -> None:
        """graphs: captured over this decoder and cache; None launches every step.

        host_cache: where blocks may be moved to; None where none ever are.
        """
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._graphs = graphs
        self._host_cache = host_cache

    def move_blocks(self, step: ScheduledStep) -> None:
        """Make the moves and copies of a step; must come before its forward pass.

        What goes to the host is read before anything is written, and what comes from there is
        written last: its blocks may be sources of copies until then.
        """
        if self._host_cache is not None:
            self._host_cache.move_out(step.move_out)
        self._kv_cache.copy_blocks(step.copies)
        if self._host_cache is not None:
            self._host_cache.move_in(step.move_in)

    def run(self, rows: Seq[ScheduledRow]) -> tuple[torch.Tensor, list[RowLogits]]:
        """One forward pass. Returns logits float32 [R, vocab_size], and each row's place in them.

        Logits are valid until the next pass. Running the same rows again gives the same: it writes
        the same KV to the same slots.
        """
        wanted = [_positions_with_logits(row) for row in rows]
        step = self._step_input(rows, wanted)
        logits = None if self._graphs is None else self._graphs.run(step)
        if logits is None:
            logits = self._decoder.forward(step, self._kv_cache)
        firsts = np.cumsum([0, *map(len, wanted)])
        places = [RowLogits(int(first), w) for first, w in zip(firsts, wanted, strict=False)]
        return logits, places

    def _step_input(self, rows: Seq[ScheduledRow], wanted: Seq[range]) -> StepInput:
        starts = np.cumsum([0, *(row.count for row in rows)], dtype=np.int32)
        return StepInput(
            token_ids=np.concatenate(
                [row.sequence.tokens.view()[row.start : row.stop] for row in rows]
            ).astype(np.int32),
            positions=np.concatenate(
                [np.arange(row.start, row.stop, dtype=np.int32) for row in rows]
            ),
            slot_mapping=np.concatenate([self._slots(row) for row in rows]),
            query_start_loc=starts,
            seq_lens=np.array([row.stop for row in rows], np.int32),
            block_table=self._block_table(rows),
            logits_rows=np.array(
                [
                    start + position - row.start
                    for start, row, positions in zip(starts, rows, wanted, strict=False)
                    for position in positions
                ],
                np.int32,
            ),
        )

    def _slots(self, row: ScheduledRow) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        assert row.sequence.table is not None
        return row.sequence.table.slots(row.start, row.stop, self._block_size)

    def _block_table(
        self, rows: Seq[ScheduledRow]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """int32 [S, max_blocks], padded with 0."""
        counts = [-(-row.stop // self._block_size) for row in rows]
        table = np.zeros((len(rows), max(counts)), np.int32)
        for line, row, count in zip(table, rows, counts, strict=True):
            assert row.sequence.table is not None
            line[:count] = row.sequence.table.row[:count]
        return table


def _positions_with_logits(row: ScheduledRow) -> range:
    """Positions of a row whose logits are needed: for its next token and its prompt's logprobs."""
    first = row.stop - 1 if row.samples else row.stop
    wanted = row.sequence.next_logprob_position
    if wanted is not None:
        first = min(first, wanted - 1)
    return range(first, row.stop)
