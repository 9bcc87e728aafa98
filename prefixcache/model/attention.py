"""From the rows of a step to the work lists of the attention kernels, in numpy.

Owns the description of a forward pass (`StepInput`) and the plan: which query rows read which span
of which blocks. Spans whose blocks are the same for several sequences become one group, read once.
Never touches K, V or torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixcache_kernels.work import SPAN, SpanGroups, StepWork

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepInput:
    """One forward pass over T rows (tokens) of S sequences, each sequence's rows side by side.

    token_ids: int32 [T]
    positions: int32 [T], absolute; consecutive within a sequence
    slot_mapping: int64 [T], block_id · block_size + offset; -1 writes nothing (KV is there already)
    query_start_loc: int32 [S + 1], row ranges of the sequences
    seq_lens: int32 [S], tokens of KV that the sequence's last row sees (its position + 1); 0 marks
        padding rows, which see nothing
    block_table: int32 [S, max_blocks]; row s holds ceil(seq_lens[s]/block_size) ids, then zeros
    logits_rows: int32 [R], which rows need logits
    """

    token_ids: Int32
    positions: Int32
    slot_mapping: Int64
    query_start_loc: Int32
    seq_lens: Int32
    block_table: Int32
    logits_rows: Int32


def check_step(step: StepInput, block_size: int, num_blocks: int, vocab_size: int) -> None:
    """Check shapes and ranges before any kernel runs.

    Raises:
        ValueError: naming the field of `step`.
    """
    tokens, sequences = len(step.token_ids), len(step.seq_lens)
    _require(step.positions.shape == (tokens,), f"positions: shape must be ({tokens},)")
    _require(step.slot_mapping.shape == (tokens,), f"slot_mapping: shape must be ({tokens},)")
    starts = step.query_start_loc
    _require(starts.shape == (sequences + 1,), f"query_start_loc: shape must be ({sequences + 1},)")
    _require(
        starts[0] == 0 and starts[-1] == tokens and bool((np.diff(starts) >= 0).all()),
        f"query_start_loc: must rise from 0 to {tokens}",
    )
    table = step.block_table
    _require(table.ndim == 2 and len(table) == sequences, f"block_table: {sequences} rows needed")
    longest = int(step.seq_lens.max(initial=0))
    _require(longest <= table.shape[1] * block_size, "block_table: too narrow for seq_lens")
    _in_range(table, 0, num_blocks, "block_table")
    _in_range(step.slot_mapping, -1, num_blocks * block_size, "slot_mapping")
    _in_range(step.token_ids, 0, vocab_size, "token_ids")
    _in_range(step.logits_rows, 0, tokens, "logits_rows")
    last = np.repeat(step.seq_lens - starts[1:], np.diff(starts)) + np.arange(tokens)
    live = np.repeat(step.seq_lens > 0, np.diff(starts))
    _require(
        bool(((step.positions == last) | ~live).all()),
        "positions: must be consecutive and end at seq_lens - 1 in each sequence",
    )


def plan_step(
    step: StepInput,
    block_size: int,
    windows: Iterable[int | None],
    run_rows: int | None = None,
    span: int = SPAN,
) -> StepWork:
    """Plan the attention of a step: its groups for each window that the model's layers use.

    Args:
        step: checked rows, in any order of sequences.
        block_size: tokens in a block; divides the span.
        windows: sliding windows of the model's layers, None for full attention.
        run_rows: sequences with so many rows become runs and leave the groups; None: none do.
        span: tokens in a span, the kernels' (`Kernels.span`).
    """
    run = span // block_size
    sequences, width = step.block_table.shape
    table = np.zeros((sequences, max(1, -(-width // run)) * run), np.int32)
    table[:, :width] = step.block_table
    live = np.repeat(step.seq_lens > 0, np.diff(step.query_start_loc))
    positions = np.where(live, step.positions, -1).astype(np.int32)
    rows = _Rows(positions, table, _sharers_adjacent(table), span, run, run_rows)
    groups = {w: _span_groups(step, rows, w) for w in windows}
    return StepWork(positions, step.slot_mapping, table, block_size, groups)


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the plans of all windows share."""

    positions: Int32  # [T], -1 for padding
    table: Int32  # [S, width], width a multiple of run
    order: Int64  # [S], sequences with equal leading blocks side by side
    span: int  # tokens
    run: int  # blocks in a span
    run_rows: int | None


def _sharers_adjacent(table: Int32) -> Int64:
    """Order rows by their bytes, so that rows with equal leading blocks come side by side."""
    if len(table) < 2:
        return np.arange(len(table), dtype=np.int64)
    rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.shape[1] * 4))).ravel()
    return np.argsort(rows, kind="stable")


def _span_groups(step: StepInput, work: _Rows, window: int | None) -> SpanGroups:
    """Vectorised over a grid [spans, sequences in `order`], most of it in one pass of numpy."""
    positions, order, size = work.positions, work.order, work.span
    queries = np.diff(step.query_start_loc)[order]
    length = np.where(queries > 0, step.seq_lens[order], 0)
    runs = (
        (queries >= work.run_rows) & (length > 0) if work.run_rows else np.zeros(len(order), bool)
    )
    in_runs = order[runs]
    run_list = np.stack((in_runs, step.query_start_loc[in_runs], queries[runs]), 1)
    length = np.where(runs, 0, length)
    first = length - queries  # position of each sequence's first row
    first_span = np.zeros(len(positions), np.int32)
    if window is not None:
        first_span = (np.maximum(positions - window + 1, 0) // size).astype(np.int32)
    spans = -(-int(length.max(initial=0)) // size)
    low = np.arange(spans)[:, None] * size  # [J, 1] first position of each span
    begin = np.maximum(first, low)  # [J, S] first row that sees a key of the span
    end = np.broadcast_to(length, begin.shape)
    if window is not None:
        end = np.minimum(end, low + (size - 1 + window))
    active = (end > begin) & (length > 0)
    # A group goes on while the next active sequence has the same blocks in this span.
    blocks = work.table[order, : spans * work.run].reshape(len(order), spans, work.run)
    same = np.zeros((spans, len(order)), bool)
    same[:, 1:] = (blocks[1:] == blocks[:-1]).all(-1).T & active[:, :-1]
    span_of, member = np.nonzero(active)
    opens = ~same[span_of, member]
    begins, counts = begin[span_of, member], (end - begin)[span_of, member]
    origin = step.query_start_loc[:-1][order][member] + begins - first[member]
    offsets = np.cumsum(counts) - counts
    rows = np.repeat(origin - offsets, counts) + np.arange(int(counts.sum()))
    start = np.append(offsets[opens], len(rows))
    grouped = np.maximum(positions[rows], 0) // size - first_span[rows] + 1
    return SpanGroups(
        window,
        span_of[opens].astype(np.int32),
        order[member[opens]].astype(np.int32),
        start.astype(np.int32),
        rows.astype(np.int32),
        run_list.astype(np.int32),
        first_span,
        int(grouped.max(initial=0)),
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _in_range(values: Int32 | Int64, low: int, high: int, name: str) -> None:
    if values.size and not (low <= int(values.min()) and int(values.max()) < high):
        raise ValueError(f"{name}: values must be in [{low}, {high})")
