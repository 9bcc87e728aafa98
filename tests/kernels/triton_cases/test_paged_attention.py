"""Paged attention against the dense twin: shapes, sharing, windows, and slots never written."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefixcache.model.attention import StepInput
from prefixcache_kernels import Heads
from prefixcache_kernels.triton_backend import TritonKernels
from prefixcache_kernels.triton_backend.attention_work import Policy
from tests.kernels.backends import rows_step
from tests.kernels.triton_cases.inputs import (
    DEVICE,
    Pool,
    assert_close,
    attend,
    every_dtype,
    noise,
    planned,
    quantized,
)

SMALL = Heads(4, 2, 16)


def _one(
    count: int, rows: int, heads: Heads, size: int, **pool: torch.dtype
) -> tuple[Pool, StepInput]:
    """One sequence of `count` tokens in shuffled blocks, of which the last `rows` are asked for."""
    blocks = -(-count // size)
    ids = random.Random(count).sample(range(blocks + 2), blocks)
    filled = Pool.empty(blocks + 2, heads, size, **pool)
    filled.write(ids, 0, count)
    return filled, rows_step([(rows, count)], [ids], size)


@pytest.mark.parametrize(
    ("heads", "size", "window"),
    [
        (Heads(9, 3, 64), 16, None),
        (Heads(2, 2, 64), 32, 40),
        (Heads(4, 2, 80), 8, None),
        (Heads(8, 1, 96), 32, 24),
        (Heads(16, 1, 112), 64, None),
        (Heads(4, 1, 128), 128, 100),
        (Heads(6, 2, 192), 16, None),
        (Heads(5, 1, 256), 8, 9),
        (Heads(2, 1, 20), 1, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 21])
def test_decode_and_prefill_equal_the_twin(
    heads: Heads, size: int, window: int | None, rows: int
) -> None:
    """KN-06: head sizes that are no power of two; lanes beyond them are masked."""
    pool, step = _one(150, rows, heads, size, dtype=torch.float16)
    out, expected = attend(pool, step, window=window, span=128)
    assert_close(out, expected)


@every_dtype
@pytest.mark.parametrize("run_rows", [16, None])
def test_every_dtype_equals_the_twin(dtype: torch.dtype, run_rows: int | None) -> None:
    pool, step = _one(75, 20, Heads(6, 2, 80), 16, dtype=dtype)
    out, expected = attend(pool, step, span=64, run_rows=run_rows)
    assert out.dtype == dtype
    assert_close(out, expected)


@pytest.mark.parametrize("span", [16, 32, 512])
@pytest.mark.parametrize("window", [None, 20])
def test_spans_of_any_length_equal_the_twin(span: int, window: int | None) -> None:
    pool, step = _one(100, 18, SMALL, 16)
    out, expected = attend(pool, step, span=span, window=window)
    assert_close(out, expected)


@every_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_a_quantised_cache_gives_what_its_dequantised_values_give(
    dtype: torch.dtype, window: int | None
) -> None:
    """Slots never written hold NaN and NaN scales; heads that are no power of two."""
    pool, step = _one(75, 20, Heads(6, 2, 80), 16, dtype=dtype)
    (keys, k), (values, v) = quantized(pool.keys, 3), quantized(pool.values, 2)
    pool.keys, pool.values = k.to(dtype), v.to(dtype)
    out, expected = attend(pool, step, window=window, caches=(keys, values))
    assert out.dtype == dtype
    assert_close(out, expected)


def _tree(seed: int, size: int) -> tuple[Pool, StepInput]:
    """Sequences forked at random places of random parents; each asks for some of its last rows."""
    rng = random.Random(seed)
    pool, free = Pool.empty(160, SMALL, size), rng.sample(range(160), 160)
    sequences: list[tuple[list[int], int]] = [([], 0)]
    for number in range(rng.randint(1, 9)):
        ids, length = rng.choice(sequences)
        kept = rng.randint(0, length)
        end = kept + rng.randint(1, 70)
        mine = ids[: -(-kept // size)]
        if kept % size:  # copy on write of the block that both would write to
            mine[-1] = free.pop()
            pool.keys[mine[-1]], pool.values[mine[-1]] = (
                cache[ids[kept // size]].clone() for cache in (pool.keys, pool.values)
            )
            pool.keys[mine[-1], :, :, kept % size :] = torch.nan
            pool.values[mine[-1], :, kept % size :] = torch.nan
        mine += [free.pop() for _ in range(-(-end // size) - len(mine))]
        pool.write(mine, kept, end, seed=number)
        sequences.append((mine, end))
    chosen = [rng.choice(sequences) for _ in range(rng.randint(1, 8))]
    most = [min(max(end, 1), rng.choice((1, 3, 40))) for _, end in chosen]
    rows = [(rng.randint(1, n), end) for n, (_, end) in zip(most, chosen, strict=True)]
    return pool, rows_step(rows, [ids for ids, _ in chosen], size)


def _trees(examples: int) -> Callable[..., Any]:
    relaxed = {"deadline": None, "suppress_health_check": list(HealthCheck)}
    drawn = given(
        seed=st.integers(0, 2**32),
        size=st.sampled_from([8, 16, 32]),
        window=st.sampled_from([None, None, 5, 33]),
        span=st.sampled_from([32, 64]),
        run_rows=st.sampled_from([None, 2, 16]),
    )
    fixed = settings(max_examples=examples, derandomize=True, database=None, **relaxed)
    return lambda test: fixed(drawn(test))


@_trees(10)
def test_any_tree_of_forks_equals_the_twin(
    seed: int, size: int, window: int | None, span: int, run_rows: int | None
) -> None:
    """Several roots, decode and prefill rows mixed, padding rows, all unwritten slots NaN."""
    pool, step = _tree(seed, size)
    out, expected = attend(pool, step, window=window, span=span, run_rows=run_rows)
    assert_close(out, expected)


@pytest.mark.slow
@_trees(200)
def test_two_hundred_trees_of_forks_equal_the_twin(**drawn: Any) -> None:
    pool, step = _tree(drawn.pop("seed"), drawn.pop("size"))
    assert_close(*attend(pool, step, **drawn))


def test_block_ids_are_widened_before_they_meet_the_stride() -> None:
    """KN-01: one sequence in the last three blocks of a cache of more than 2^31 elements."""
    heads, size = Heads(2, 1, 16), 16
    blocks = 2**31 // 256 + 3
    ids = [blocks - 1, blocks - 3, blocks - 2]
    keys = torch.empty(blocks, 1, 16, size, dtype=torch.float16, device=DEVICE)
    values = torch.empty(blocks, 1, size, 16, dtype=torch.float16, device=DEVICE)
    pool = Pool(keys, values, heads)
    pool.write(ids, 0, 40)
    out, expected = attend(pool, rows_step([(2, 40)], [ids], size))
    assert_close(out, expected)


@pytest.mark.parametrize("length", [30, 36, 61])
def test_values_before_the_window_are_never_used(length: int) -> None:
    """KN-04: window 8, length 30; blocks before the window are freed and hold NaN.

    With 36 and 61 a freed block is in the same tile of keys as the window.
    """
    pool, step = _one(length, 1, SMALL, 8)
    out, expected = attend(pool, step, window=8)
    freed = step.block_table[0, : (length - 8) // 8].tolist()
    pool.keys[freed], pool.values[freed] = torch.nan, torch.nan
    again, _ = attend(pool, step, window=8)
    assert torch.equal(again, out)
    assert_close(out, expected)


def test_caches_may_be_views_with_any_strides() -> None:
    """KN-08: one pool [blocks, 2, size, heads, dim], K = view 0 and V = view 1."""
    pool, step = _one(75, 20, Heads(4, 2, 24), 16)
    both = torch.stack((pool.keys.permute(0, 3, 1, 2), pool.values.permute(0, 2, 1, 3)), 1)
    views = both[:, 0].permute(0, 2, 3, 1), both[:, 1].permute(0, 2, 1, 3)
    assert not views[0].is_contiguous()
    out, expected = attend(pool, step, caches=views)
    assert_close(out, expected)
    # Heads outside the blocks: consecutive blocks of a head are next to each other.
    apart = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (pool.keys, pool.values))
    out, _ = attend(pool, step, caches=(apart[0], apart[1]))
    assert_close(out, expected)


def test_rows_of_length_zero_are_zeros_and_spoil_nobody() -> None:
    """KN-10: a batch of 3 padded to 8 with length 0; padding points at a block of NaN."""
    pool = Pool.empty(9, SMALL, 16)
    tables = [[3, 4], [3, 5], [6, 7, 8]]
    for ids, end in zip(tables, (20, 32, 40), strict=True):
        pool.write(ids, 0, end, seed=ids[-1])
    pool.write([3], 0, 16)
    step = rows_step([(1, 20), (1, 32), (2, 40), *[(1, 0)] * 5], [*tables, *[[]] * 5], 16)
    out, expected = attend(pool, step, span=32)
    assert_close(out, expected)
    assert torch.equal(out[4:], torch.zeros_like(out[4:]))


def test_an_empty_batch_is_no_work() -> None:
    """KN-10: zero requests."""
    pool = Pool.empty(2, SMALL, 16)
    out, _ = attend(pool, rows_step([], [], 16))
    assert out.shape == (0, 64)


def test_the_size_of_the_pool_changes_nothing() -> None:
    """KN-12: a pool of 16 blocks, the reserved one full of NaN, a padded batch, n = 4."""
    outs = []
    for blocks in (16, 64):
        pool = Pool.empty(blocks, SMALL, 8)
        shared, tails = [1, 2, 3], [4, 5, 6, 7]
        pool.write(shared, 0, 24)
        for tail in tails:
            pool.write([*shared, tail], 24, 27, seed=tail)
        step = rows_step([(1, 27)] * 4 + [(1, 0)] * 4, [[*shared, t] for t in tails] + [[]] * 4, 8)
        out, expected = attend(pool, step, span=16)
        assert_close(out, expected)
        outs.append(out)
    assert torch.equal(*outs)


def test_a_value_seen_by_a_neighbour_only_changes_nothing_but_the_neighbour() -> None:
    pool, step = _one(64, 20, SMALL, 16)
    out, _ = attend(pool, step)
    pool.write(step.block_table[0].tolist(), 60, 64, seed=77)
    again, _ = attend(pool, step)
    assert torch.equal(out[:16], again[:16])
    assert not torch.equal(out[16:], again[16:])


class _SplitRuns(TritonKernels):
    """Every run of rows is split by span, as where too few of them keep a device busy."""

    def policy(self, heads: Heads) -> Policy:
        return replace(super().policy(heads), min_runs=1 << 30)


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.bfloat16, None), (torch.float16, 50)], ids=str
)
def test_a_rows_result_does_not_depend_on_the_batch_or_on_how_the_work_is_cut(
    dtype: torch.dtype, window: int | None
) -> None:
    """On a GPU to the bit; the interpreter's products are numpy's, whose bits prove nothing."""
    heads, size, count = Heads(3, 1, 64), 16, 150
    pool, whole = _one(count, count, heads, size, dtype=dtype)
    ids = whole.block_table[0].tolist()
    q = noise(count, heads.query * heads.dim, dtype=dtype)
    angles = torch.zeros(1, heads.dim, device=DEVICE)

    def run(step: StepInput, rows: Tensor, run_rows: int | None, **kind: Any) -> Tensor:
        kernels = kind.get("of", TritonKernels)(DEVICE, dtype, span=64)
        plan = kernels.prepare(planned(step, size, [window], 64, run_rows), heads, angles)
        return kernels.paged_attention(rows, pool.keys, pool.values, plan, window)

    def same(actual: Tensor, expected: Tensor) -> None:
        if DEVICE.type == "cpu":
            assert_close(actual, expected)
        else:
            assert torch.equal(actual, expected)

    expected = run(whole, q, 16)
    same(run(whole, q, None), expected)
    same(run(whole, q, 16, of=_SplitRuns), expected)
    for first, end in ((149, 150), (60, 85)):
        mine = rows_step([(end - first, end)], [ids], size)
        same(run(mine, q[first:end], 16), expected[first:end])
        beside = rows_step([(1, 150), (end - first, end), (3, 90)], [ids] * 3, size)
        batch = torch.cat((q[149:], q[first:end], q[87:90]))
        same(run(beside, batch, 16)[1 : 1 + end - first], expected[first:end])


def test_a_captured_plan_serves_other_steps_in_place() -> None:
    """What a graph needs: the same addresses for every step, the amount of work on the device."""
    pool, size = Pool.empty(40, SMALL, 8), 8
    tables = [[s, *range(10 + 5 * s, 15 + 5 * s)] for s in range(4)]
    for ids in tables:
        pool.write(ids, 0, 48, seed=ids[0])
    kernels = TritonKernels(DEVICE, torch.float32, span=16)
    plan = kernels.reserve(
        kernels.decode_capacity(rows=4, blocks=6, block_size=size),
        heads=SMALL,
        rope_table=torch.zeros(1, 16, device=DEVICE),
        windows=[None, 20],
        block_size=size,
    )
    addresses = plan.positions.data_ptr(), plan.attention(None).buffers.items.data_ptr()
    q = noise(4, 64)
    for lengths in ([48, 48, 1, 47], [1, 0, 17, 33], [0, 0, 0, 0]):
        chosen = [ids if n else [] for ids, n in zip(tables, lengths, strict=True)]
        step = rows_step([(1, n) for n in lengths], chosen, size)
        work = planned(step, size, [None, 20], 16, None)
        plan.load(work)
        exact = kernels.prepare(work, SMALL, torch.zeros(1, 16, device=DEVICE))
        for window in (None, 20):
            ours, theirs = (
                kernels.paged_attention(q, pool.keys, pool.values, p, window) for p in (plan, exact)
            )
            assert torch.equal(ours, theirs)
            assert torch.isfinite(ours).all()
    assert addresses == (plan.positions.data_ptr(), plan.attention(None).buffers.items.data_ptr())
    with pytest.raises(ValueError, match="positions: another number of rows"):
        plan.load(planned(rows_step([(1, 5)], [[1]], size), size, [None, 20], 16, None))
    full = rows_step([(2, 48)] * 2, [[*tables[0]], [*tables[1]]], size)
    with pytest.raises(ValueError, match="groups: other windows"):
        plan.load(planned(full, size, [None], 16, None))


def test_bad_arguments_are_refused_by_name() -> None:
    pool, step = _one(20, 1, SMALL, 16)
    kernels = TritonKernels(DEVICE, torch.float32, span=64)
    work = planned(step, 16, [None], 64, None)
    plan = kernels.prepare(work, SMALL, torch.zeros(1, 16, device=DEVICE))
    q, keys, values = noise(1, 64), pool.keys, pool.values
    for arguments, message in (
        ((noise(1, 63), keys, values), r"q: shape must be \(1, 64\)"),
        ((noise(2, 64), keys, values), r"q: shape must be \(1, 64\)"),
        ((q.double(), keys, values), "q: dtype"),
        ((noise(64, 2).T[:1], keys, values), "q: the last dimension must be contiguous"),
        ((q.half(), keys, values), r"k_cache: dtype must be q's torch\.float16"),
        ((q, keys[:, :1], values), "k_cache: shape"),
        ((q, keys, values[:, :, :8]), "v_cache: shape"),
        ((q, keys.to("meta"), values), "k_cache: must be on"),
        ((q, keys[:1], values[:1]), r"block_table: block id \d of a pool of 1 blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.paged_attention(*arguments, plan, None)
    work.block_table[0, 0] = -1
    with pytest.raises(ValueError, match="block_table: block id -1"):
        kernels.prepare(work, SMALL, torch.zeros(1, 16, device=DEVICE))
    qkv = noise(1, 128)
    far = planned(step, 16, [None], 64, None)
    far.slots[0] = 10**6
    late = kernels.prepare(far, SMALL, torch.zeros(32, 16, device=DEVICE))
    with pytest.raises(ValueError, match="slots: 1000000 in a cache of"):
        kernels.rope_write_kv(qkv, late, keys, values, None)
    assert np.array_equal(work.positions, [19])
