"""From groups and runs of rows to the work items of the attention kernel, in numpy, once a step.

Owns the choice of what one program does at a time, which is free: whatever is chosen here, a row's
spans are computed by the same arithmetic and merged in the same order. Knows no device.

An item is a tile of query rows and the spans that it goes through, in order:

    rows behind the same blocks   one span for each item; partials are merged by a second kernel
    a run of rows (prefill)       all spans of the tile in one item, merged as they come: nothing is
                                  stored but the result

    entries   row  slot           groups   span  table row        items
       0        4    0               0       0       2            [entry 0..2) x [group 0..1)
       1        7    2               1       1       2            [entry 2..3) x [group 1..2)
       2        4    1               …                            …
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefixcache_kernels.work import Int32, Int64, SpanGroups


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Flat int32 work lists of one step and one window.

    items: [I, 4], first and last entry, first and last group (half-open).
    entry_rows, entry_slots: [E], the query row, and where its partial goes; -1: the item has seen
        all that the row sees, so the result is written straight.
    group_spans, group_tables: [G], the span, and the row of the block table to read it through.
    merges: [R, 3], row, first and last partial (half-open); a row that sees nothing has none.
    slots: partials in all.
    """

    items: Int32
    entry_rows: Int32
    entry_slots: Int32
    group_spans: Int32
    group_tables: Int32
    merges: Int32
    slots: int


@dataclass(frozen=True, slots=True)
class Policy:
    """Sizes that decide what an item is; never seen in the results.

    tile_rows: query rows in a tile.
    min_runs: fewest tiles of runs that keep the device busy; with fewer, runs are split by span.
    max_slots: most partials that splitting them may need; above it they are taken whole.
    """

    tile_rows: int
    min_runs: int = 0
    max_slots: int = 1 << 20


def attention_work(
    groups: SpanGroups, positions: Int32, span: int, policy: Policy
) -> AttentionWork:
    """Cut a step's groups and runs into items.

    Args:
        groups: of the planner, with spans of `span` tokens.
        positions: int32 [T], -1 for rows that see nothing.
        span: tokens in a span.
        policy: sizes.

    Raises:
        ValueError: a (row, span) with a visible key is in no group or run, or in two.
    """
    pieces = np.where(positions >= 0, positions // span - groups.first_span + 1, 0)
    lengths = groups.runs[:, 2].astype(np.int64)
    run_rows = np.repeat(groups.runs[:, 1], lengths) + _ramp(lengths)
    tiles = int((-(-lengths // policy.tile_rows)).sum())
    if tiles < policy.min_runs and int(pieces[run_rows].sum()) <= policy.max_slots:
        groups, run_rows = _split_runs(groups, positions, span), run_rows[:0]
    found = np.bincount(groups.rows, minlength=len(positions))
    np.add.at(found, run_rows, pieces[run_rows])
    if not np.array_equal(found, pieces):
        raise ValueError(f"groups: each row needs one group for each of its spans of {span} tokens")
    runs = _run_items(groups, positions, span, policy.tile_rows)
    whole = pieces <= 1
    whole[run_rows] = True
    return _with_span_items(groups, pieces, whole, runs, policy.tile_rows)


def _split_runs(groups: SpanGroups, positions: Int32, span: int) -> SpanGroups:
    """Turn each run into groups, one for each span, of the rows that see a key of it."""
    table, row, length = groups.runs.astype(np.int64).T
    first = positions[row].astype(np.int64)
    low = groups.first_span[row]
    spans = (first + length - 1) // span - low + 1
    of = np.repeat(np.arange(len(row)), spans)
    span_of = low[of] + _ramp(spans)
    begin = np.maximum(first[of], span_of * span)
    end = (first + length)[of]
    if groups.window is not None:
        end = np.minimum(end, span_of * span + span - 1 + groups.window)
    counts = end - begin
    rows = np.repeat(row[of] + begin - first[of], counts) + _ramp(counts)
    return replace(
        groups,
        span=_int32(np.concatenate((groups.span, span_of))),
        table_row=_int32(np.concatenate((groups.table_row, table[of]))),
        start=_int32(np.concatenate((groups.start, groups.start[-1] + np.cumsum(counts)))),
        rows=_int32(np.concatenate((groups.rows, rows))),
        runs=groups.runs[:0],
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Items of whole runs, with the entries and groups that they refer to."""

    items: Int64  # [I, 4]
    rows: Int64
    spans: Int64
    tables: Int64


def _run_items(groups: SpanGroups, positions: Int32, span: int, tile: int) -> _Runs:
    table, row, length = groups.runs.astype(np.int64).T
    tiles = -(-length // tile)
    low = np.repeat(row, tiles) + _ramp(tiles) * tile
    high = np.minimum(low + tile, np.repeat(row + length, tiles))
    first = groups.first_span[low].astype(np.int64)
    spans = positions[high - 1] // span - first + 1
    entry_end, group_end = np.cumsum(high - low), np.cumsum(spans)
    items = np.stack((entry_end - (high - low), entry_end, group_end - spans, group_end), 1)
    rows = np.repeat(low, high - low) + _ramp(high - low)
    tables = np.repeat(np.repeat(table, tiles), spans)
    return _Runs(items, rows, np.repeat(first, spans) + _ramp(spans), tables)


def _with_span_items(
    groups: SpanGroups, pieces: Int64, whole: npt.NDArray[np.bool_], runs: _Runs, tile: int
) -> AttentionWork:
    """Add the items of one span each; whole: rows that need no merging, or see nothing."""
    counts = np.diff(groups.start).astype(np.int64)
    rows, owner = groups.rows, np.repeat(np.arange(len(counts)), counts)
    tiles = -(-counts // tile)
    group = np.repeat(np.arange(len(counts)), tiles)
    low = groups.start[:-1][group] + _ramp(tiles) * tile
    high = np.minimum(low + tile, groups.start[1:][group])
    shift, at = len(runs.rows), group + len(runs.spans)
    stored = np.where(whole, 0, pieces)
    slot = np.cumsum(stored) - stored
    slots = np.where(whole[rows], -1, slot[rows] + groups.span[owner] - groups.first_span[rows])
    merged = np.flatnonzero((stored > 0) | (pieces == 0))
    merges = np.stack((merged, slot[merged], slot[merged] + stored[merged]), 1)
    span_items = np.stack((low + shift, high + shift, at, at + 1), 1)
    return AttentionWork(
        _int32(np.concatenate((runs.items, span_items))),
        _int32(np.concatenate((runs.rows, rows))),
        _int32(np.concatenate((np.full(shift, -1), slots))),
        _int32(np.concatenate((runs.spans, groups.span))),
        _int32(np.concatenate((runs.tables, groups.table_row))),
        _int32(merges),
        int(stored.sum()),
    )


def _ramp(counts: Int64) -> Int64:
    """0, 1, … of each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def _int32(values: npt.NDArray[np.integer]) -> Int32:
    return values.astype(np.int32)
