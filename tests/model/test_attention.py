"""The attention plan, and the bits of attention over random trees of branches."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.model.attention import StepInput, plan_step
from prefixcache_kernels import Heads, SpanGroups
from tests.kernels.backends import every_backend, kernels_of, rows_step

HEADS = Heads(4, 2, 16)


def _pairs(groups: SpanGroups, positions: np.ndarray) -> list[tuple[int, int]]:
    """(row, span) of all groups, and of all runs as the kernels walk them."""
    pairs = [
        (int(row), int(groups.span[g]))
        for g in range(len(groups.span))
        for row in groups.rows[groups.start[g] : groups.start[g + 1]]
    ]
    for _, first, count in groups.runs.tolist():
        for row in range(first, first + count):
            pairs += [(row, s) for s in range(groups.first_span[row], positions[row] // 128 + 1)]
    return pairs


def test_sequences_with_the_same_blocks_share_a_group() -> None:
    tables = [[5, 6, 7, 8, 1], [5, 6, 7, 8, 2], [9, 6, 7, 8, 3]]
    step = rows_step([(40, 300), (1, 290), (3, 270)], tables, 64)
    groups = plan_step(step, 64, [None]).groups[None]
    # Span 0 is shared by two, span 1 by all three, span 2 by none.
    assert [int((groups.span == span).sum()) for span in range(3)] == [2, 1, 3]
    assert groups.max_spans == 3


def test_sharers_need_not_be_neighbours_in_the_batch() -> None:
    tables = [[1, 2], [3, 4], [1, 5], [3, 6], [1, 7]]
    groups = plan_step(rows_step([(1, 200)] * 5, tables, 128), 128, [None]).groups[None]
    assert [int((groups.span == span).sum()) for span in range(2)] == [2, 5]
    sizes = np.diff(groups.start)[groups.span == 0]
    assert sorted(sizes.tolist()) == [2, 3]


def test_a_window_leaves_out_the_spans_before_it() -> None:
    step = rows_step([(1, 1000)], [list(range(63))], 16)
    groups = plan_step(step, 16, [200]).groups[200]
    assert groups.span.tolist() == [6, 7]
    assert groups.first_span.tolist() == [6]
    assert groups.max_spans == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 700)), max_size=8),
    st.sampled_from([None, 1, 100, 128, 300]),
    st.sampled_from([None, 1, 5]),
    st.integers(0, 2**32 - 1),
)
def test_each_row_meets_each_span_that_it_sees_once(
    shapes: list[tuple[int, int]], window: int | None, run_rows: int | None, seed: int
) -> None:
    lengths = [(rows, rows + cached) for rows, cached in shapes]
    rng = np.random.default_rng(seed)
    tables = [rng.integers(0, 3, -(-end // 32)).tolist() for _, end in lengths]
    step = rows_step(lengths, tables, 32)
    groups = plan_step(step, 32, [window], run_rows).groups[window]
    pairs = _pairs(groups, step.positions)
    low = np.zeros_like(step.positions)
    if window is not None:
        low = np.maximum(step.positions - window + 1, 0)
    expected = {
        (row, span)
        for row, position in enumerate(step.positions)
        for span in range(low[row] // 128, position // 128 + 1)
    }
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected
    for g in range(len(groups.span)):  # all rows of a group read the same blocks
        owners = np.searchsorted(
            step.query_start_loc, groups.rows[groups.start[g] : groups.start[g + 1]], "right"
        )
        columns = slice(groups.span[g] * 4, groups.span[g] * 4 + 4)
        ids = {tuple(step.block_table[owner - 1][columns].tolist()) for owner in owners}
        assert len(ids) == 1


@dataclass
class _Branch:
    """A path in a tree: its tokens' states, and the blocks that hold them."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    blocks: list[int]


class _Tree:
    """A pool with a random tree of sequences over it, made by forks at random places."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.size = block_size
        self.order = self.rng.permutation(900).tolist()
        self.keys = torch.full((900, HEADS.kv, HEADS.dim, block_size), torch.nan)
        self.values = torch.full((900, HEADS.kv, block_size, HEADS.dim), torch.nan)
        self.branches = [self.extend(_Branch([], [], []), 1 + int(self.rng.integers(300)))]
        for _ in range(int(self.rng.integers(1, 7))):
            parent = self.branches[int(self.rng.integers(len(self.branches)))]
            kept = int(self.rng.integers(1, len(parent.keys) + 1))
            self.branches.append(
                self.extend(self.fork(parent, kept), int(self.rng.integers(1, 90)))
            )

    def fork(self, parent: _Branch, kept: int) -> _Branch:
        """Share the full blocks; the rest of the last one is copied."""
        full = kept // self.size
        child = _Branch(parent.keys[: full * self.size], parent.values[: full * self.size], [])
        child.blocks = parent.blocks[:full]
        rest = slice(full * self.size, kept)
        for key, value in zip(parent.keys[rest], parent.values[rest], strict=True):
            self.append(child, key, value)
        return child

    def extend(self, branch: _Branch, count: int) -> _Branch:
        for _ in range(count):
            noise = torch.from_numpy(self.rng.standard_normal((2, HEADS.kv, HEADS.dim))).float()
            self.append(branch, noise[0], noise[1])
        return branch

    def append(self, branch: _Branch, key: torch.Tensor, value: torch.Tensor) -> None:
        offset = len(branch.keys) % self.size
        if offset == 0:
            branch.blocks = [*branch.blocks, self.order.pop()]
        self.keys[branch.blocks[-1], :, :, offset] = key
        self.values[branch.blocks[-1], :, offset] = value
        branch.keys, branch.values = [*branch.keys, key], [*branch.values, value]

    def step(self, members: list[int], rows: list[int]) -> StepInput:
        branches = [self.branches[m] for m in members]
        lengths = [(min(n, len(b.keys)), len(b.keys)) for n, b in zip(rows, branches, strict=True)]
        return rows_step(lengths, [b.blocks for b in branches], self.size)


def _attend(
    backend: str, tree: _Tree, step: StepInput, window: int | None, q: torch.Tensor
) -> torch.Tensor:
    kernels = kernels_of(backend)
    work = plan_step(step, tree.size, [window], kernels.run_rows)
    plan = kernels.prepare(work, HEADS, torch.zeros(1024, HEADS.dim))
    return kernels.paged_attention(q, tree.keys, tree.values, plan, window)


def _check_tree(backend: str, seed: int, block_size: int, window: int | None) -> None:
    tree = _Tree(seed, block_size)
    rng = np.random.default_rng(seed + 1)
    count = len(tree.branches)
    members = rng.permutation(count).tolist()
    rows = [int(rng.choice([1, 2, 7, 40])) for _ in members]
    together = tree.step(members, rows)
    q = torch.randn(len(together.positions), HEADS.query * HEADS.dim)
    torch.set_num_threads(1 + seed % 3)
    try:
        out = _attend(backend, tree, together, window, q)
    finally:
        torch.set_num_threads(1)
    starts = together.query_start_loc
    for i, member in enumerate(members):
        mine = slice(starts[i], starts[i + 1])
        alone = _attend(backend, tree, tree.step([member], [rows[i]]), window, q[mine])
        assert torch.equal(out[mine], alone)
        branch = tree.branches[member]
        keys, values = torch.stack(branch.keys).double(), torch.stack(branch.values).double()
        last = q[mine][-1].double().view(HEADS.kv, -1, HEADS.dim)
        low = 0 if window is None else max(0, len(keys) - window)
        scores = torch.einsum("hgd,khd->hgk", last, keys[low:]) / HEADS.dim**0.5
        expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), values[low:]).flatten()
        torch.testing.assert_close(alone[-1].double(), expected, rtol=2e-5, atol=2e-5)


@every_backend
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([4, 16, 64]), st.sampled_from([None, None, 50]))
def test_in_any_tree_a_row_gets_its_bits_alone_or_beside_all_others(
    backend: str, seed: int, block_size: int, window: int | None
) -> None:
    _check_tree(backend, seed, block_size, window)


@pytest.mark.slow
@every_backend
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([1, 4, 16, 64]), st.sampled_from([None, None, 50, 130])
)
def test_two_hundred_trees(backend: str, seed: int, block_size: int, window: int | None) -> None:
    _check_tree(backend, seed, block_size, window)
