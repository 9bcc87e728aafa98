"""The work of one forward pass as flat arrays: what a plan hands to the kernels.

Owns the array layout only. Which sequences share what is decided by the planner
(`prefixcache.model.attention`); a kernel sees groups of query rows and a run of block ids.

A *span* is a run of tokens at a fixed absolute position, as long as `Kernels.span` says: span j of
a sequence holds its positions [j·span, (j+1)·span). Attention is computed span by span and merged
in span order, so that a row's arithmetic depends on its position alone: not on the batch, on how
prefill was cut into chunks, nor on who shares the span (the split of FlashDecoding, arXiv
2311.01282, at fixed places).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SPAN = 128
"""Tokens in a span on the CPU. A block never crosses a span: block_size divides it."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SpanGroups:
    """Groups of query rows that read the same blocks for the same span.

    Group g reads span `span[g]` through row `table_row[g]` of the block table, for the query rows
    `rows[start[g]:start[g + 1]]`. Each (row, span) with a visible key is in exactly one group, but
    for the rows of runs: sequences with many rows, whose spans are read row tile by row tile.

    window: tokens that a query sees, itself included; None sees all.
    runs: int32 [n, 3], (row of the block table, first query row, number of rows) each.
    first_span: int32 [T], the first span in which each row sees a key.
    max_spans: most spans that any grouped row reads (0 with none).
    """

    window: int | None
    span: Int32  # [N]
    table_row: Int32  # [N]
    start: Int32  # [N + 1]
    rows: Int32  # [start[N]]
    runs: Int32  # [n, 3]
    first_span: Int32  # [T]
    max_spans: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """One forward pass over T query rows of S sequences.

    positions: int32 [T], absolute position of each row; -1 marks a padding row, which sees nothing.
    slots: int64 [T], block_id · block_size + offset; -1 writes nothing.
    block_table: int32 [S, blocks], the width a multiple of span / block_size.
    groups: for each window that the model's layers use, the attention work.
    """

    positions: Int32
    slots: Int64
    block_table: Int32
    block_size: int
    groups: dict[int | None, SpanGroups]
