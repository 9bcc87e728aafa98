"""The work items of the Triton attention kernel: every (row, span) once, in order."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton

from prefixcache.model.attention import plan_step
from prefixcache_kernels import SPAN, Heads, StepWork, select_kernels
from prefixcache_kernels.triton_backend.attention_work import (
    AttentionWork,
    Policy,
    attention_work,
)
from prefixcache_kernels.triton_backend.paged_attention import AttentionInput
from prefixcache_kernels.triton_backend.plan import Capacity, PlanBuffers, TritonPlan
from tests.kernels.backends import CPU, rows_step

SIZE = 64


def _work(window: int | None, run_rows: int | None) -> StepWork:
    """Three sequences that share, one prompt of 300 rows, one of 2, and padding."""
    lengths = [(1, 300), (1, 290), (1, 0), (300, 700), (2, 129), (1, 5)]
    tables = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [], list(range(7, 18)), [1, 2, 18], [19]]
    return plan_step(rows_step(lengths, tables, SIZE), SIZE, [window], run_rows)


def _visits(work: AttentionWork) -> dict[int, list[tuple[int, int, int]]]:
    """For each row, the (slot, span, row of the block table) that programs compute for it."""
    visits: dict[int, list[tuple[int, int, int]]] = {}
    for entry, entry_end, group, group_end in work.items.tolist():
        for e in range(entry, entry_end):
            for g in range(group, group_end):
                visit = (
                    int(work.entry_slots[e]),
                    int(work.group_spans[g]),
                    int(work.group_tables[g]),
                )
                visits.setdefault(int(work.entry_rows[e]), []).append(visit)
    return visits


@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize("run_rows", [None, 2, 16])
@pytest.mark.parametrize("min_runs", [0, 1000])
def test_each_row_goes_through_its_spans_once_and_in_order(
    window: int | None, run_rows: int | None, min_runs: int
) -> None:
    step = _work(window, run_rows)
    work = attention_work(step.groups[window], step.positions, SPAN, Policy(5, min_runs))
    visits = _visits(work)
    merged = {row: (low, high) for row, low, high in work.merges.tolist()}
    assert all(0 < high - low <= 5 for low, high in work.items[:, :2].tolist())
    for row, position in enumerate(step.positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1) // SPAN
        spans = [*range(first, position // SPAN + 1)] if position >= 0 else []
        seen = [visit for visit in visits.get(row, []) if visit[1] in spans]
        if row in merged:  # spans apart: one partial each, side by side in order
            assert len(seen) == len(visits.get(row, []))
            assert sorted(slot for slot, _, _ in seen) == [*range(*merged[row])]
            seen.sort()
        else:  # one item for all, which may look at spans of its other rows too
            assert {slot for slot, _, _ in seen} == {-1}
        assert [span for _, span, _ in seen] == spans
    slots = [slot for row in visits.values() for slot, _, _ in row if slot >= 0]
    assert sorted(slots) == list(range(work.slots))


def test_the_blocks_of_a_span_are_read_through_a_row_that_has_them() -> None:
    step = _work(None, 16)
    work = attention_work(step.groups[None], step.positions, SPAN, Policy(16))
    own = [0, 1, 2, *[3] * 300, 4, 4, 5]
    run = SPAN // SIZE
    for row, visits in _visits(work).items():
        for _, span, table in visits:
            blocks = slice(span * run, span * run + run)
            mine, read = step.block_table[own[row], blocks], step.block_table[table, blocks]
            assert np.array_equal(mine, read)


def test_sharers_are_in_one_item() -> None:
    step = _work(None, None)
    work = attention_work(step.groups[None], step.positions, SPAN, Policy(16))
    first_spans = [
        set(work.entry_rows[low:high].tolist())
        for low, high, group, _ in work.items.tolist()
        if work.group_spans[group] == 0
    ]
    assert {0, 1, 303, 304} in first_spans


def test_long_prompts_store_no_partials_unless_programs_would_idle() -> None:
    step = _work(None, 16)
    groups, positions = step.groups[None], step.positions
    whole = attention_work(groups, positions, SPAN, Policy(16))
    split = attention_work(groups, positions, SPAN, Policy(16, min_runs=1000))
    bounded = attention_work(groups, positions, SPAN, Policy(16, min_runs=1000, max_slots=100))
    assert (whole.slots, bounded.slots) == (8, 8)  # two decode rows of 3 spans, one of 2
    assert split.slots > 1000
    assert len(split.items) > len(whole.items)


def test_a_step_without_rows_has_no_items() -> None:
    step = plan_step(rows_step([], [], SIZE), SIZE, [None])
    work = attention_work(step.groups[None], step.positions, SPAN, Policy(16))
    assert (len(work.items), len(work.merges), work.slots) == (0, 0, 0)


def test_groups_for_other_spans_are_refused() -> None:
    step = _work(None, None)
    groups = step.groups[None]
    with pytest.raises(ValueError, match="groups: each row needs one group for each of its spans"):
        attention_work(groups, step.positions, 64, Policy(16))
    fewer = replace(groups, start=groups.start[:-1], span=groups.span[:-1])
    fewer = replace(fewer, table_row=groups.table_row[:-1], rows=groups.rows[: fewer.start[-1]])
    with pytest.raises(ValueError, match="groups: each row needs one group"):
        attention_work(fewer, step.positions, SPAN, Policy(16))


def test_a_decode_step_of_any_tree_fits_the_capacity_of_its_size() -> None:
    capacity = Capacity.decode(rows=6, blocks=11, block_size=SIZE, span=SPAN)
    tables = [list(range(1 + 11 * s, 12 + 11 * s)) for s in range(6)]
    for lengths in ([704] * 6, [1, 64, 65, 128, 129, 0]):
        step = plan_step(rows_step([(1, n) for n in lengths], tables, SIZE), SIZE, [None])
        work = attention_work(step.groups[None], step.positions, SPAN, Policy(16))
        needed = Capacity.of(step, [work])
        for name in ("entries", "groups", "items", "slots"):
            assert getattr(needed, name) <= getattr(capacity, name)


@pytest.mark.parametrize("windows", [[None], [None, 40]])
def test_plans_updated_by_difference_hold_each_step_as_it_is(windows: list[int | None]) -> None:
    """Random decode steps on plans of two sizes that take turns over one memory."""
    rng, size, span, heads = random.Random(7), 16, 64, Heads(2, 1, 16)
    shared = Capacity.decode(rows=6, blocks=20, block_size=size, span=span)
    made = {"heads": heads, "angles": torch.zeros(1, 16), "windows": windows}
    made |= {"block_size": size, "span": span, "policy": Policy(16)}
    memory = PlanBuffers(shared, heads=heads, windows=len(windows), device=CPU)
    plans = {
        rows: TritonPlan(Capacity.decode(rows, 20, size, span), **made, buffers=memory)
        for rows in (6, 3)
    }
    tables = [rng.sample(range(400), 20) for _ in range(6)]
    lengths = [rng.randint(1, 200) for _ in range(6)]
    for _ in range(80):
        rows = rng.choice((6, 6, 3))
        for number in range(rows):
            lengths[number] = rng.choice((lengths[number] % 319 + 1, lengths[number], 0))
            if rng.random() < 0.1:  # another sequence comes, or the blocks of one are shared
                tables[number] = rng.choice((rng.sample(range(400), 20), [*tables[0]]))
                lengths[number] = rng.randint(0, 320)
        step = plan_step(
            rows_step([(1, n) for n in lengths[:rows]], tables[:rows], size),
            size,
            windows,
            None,
            span,
        )
        plans[rows].load(step)
        assert np.array_equal(memory.host, memory.device.numpy())
        assert np.array_equal(plans[rows].slots, step.slots)
        for window in windows:
            _assert_holds(plans[rows].attention(window), step, window)


def _assert_holds(ours: AttentionInput, step: StepWork, window: int | None) -> None:
    """The step's own lists, from their beginnings on; what lies behind them no kernel looks at."""
    work = attention_work(step.groups[window], step.positions, ours.span, Policy(16))
    assert np.array_equal(ours.positions, step.positions)
    assert ours.buffers.counts.tolist() == [len(work.items), len(work.merges)]
    for name in ("items", "merges", "entry_rows", "entry_slots", "group_spans", "group_tables"):
        expected = getattr(work, name)
        assert np.array_equal(getattr(ours.buffers, name)[: len(expected)], expected), name
    sequences, blocks = step.block_table.shape
    assert np.array_equal(ours.table[:sequences, :blocks], step.block_table)


def test_captured_tables_are_whole_spans_wide() -> None:
    capacity = Capacity.decode(rows=3, blocks=9, block_size=SIZE, span=4 * SIZE)
    step = plan_step(rows_step([(1, 520)], [list(range(9))], SIZE), SIZE, [None], None, 4 * SIZE)
    assert capacity.table == (3, step.block_table.shape[1]) == (3, 12)


def test_spans_are_as_long_as_the_kernels_say() -> None:
    """One plan of 700 keys: six spans of 128, or two of 512."""
    tables = [list(range(11))]
    for span, expected in ((SPAN, [0, 1, 2, 3, 4, 5]), (512, [0, 1])):
        step = plan_step(rows_step([(1, 700)], tables, SIZE), SIZE, [None, 100], None, span)
        work = attention_work(step.groups[None], step.positions, span, Policy(16))
        assert work.group_spans.tolist() == expected
        assert step.groups[100].first_span.tolist() == [600 // span]


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter serves the CPU")
def test_the_backend_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="Triton's kernels need a GPU, not cpu: choose another"):
        select_kernels("triton", torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"dtype: torch\.float64 is not served"):
        select_kernels("triton", torch.device("cuda"), torch.float64)
