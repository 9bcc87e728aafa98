"""Paged attention against dense float64, on every backend; and the bits of a row."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixcache.model.attention import StepInput, plan_step
from prefixcache_kernels import Heads
from prefixcache_kernels.reference import copy_blocks
from tests.kernels.backends import every_backend, kernels_of, rows_step

HIDDEN = float("nan")


def _tokens(count: int, heads: Heads, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Q [n, query, D], K and V [n, kv, D] of the positions of one sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((count, heads.query, heads.dim), (count, heads.kv, heads.dim))
    q, k, v = (torch.randn(shapes[i], generator=generator) for i in (0, 1, 1))
    return q * 2, k, v


def _pool(blocks: int, heads: Heads, block_size: int) -> tuple[Tensor, Tensor]:
    """K and V caches full of NaN: a slot that is read but was not written shows at once."""
    return (
        torch.full((blocks, heads.kv, heads.dim, block_size), HIDDEN),
        torch.full((blocks, heads.kv, block_size, heads.dim), HIDDEN),
    )


def _store(pool: tuple[Tensor, Tensor], k: Tensor, v: Tensor, ids: list[int]) -> None:
    size = pool[0].shape[-1]
    for position in range(len(k)):
        pool[0][ids[position // size], :, :, position % size] = k[position]
        pool[1][ids[position // size], :, position % size] = v[position]


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Softmax attention of all positions in float64, [n, query, D]."""
    n, heads, dim = q.shape
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / dim**0.5
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _attend(  # noqa: PLR0917
    backend: str,
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    step: StepInput,
    heads: Heads,
    window: int | None = None,
) -> Tensor:
    kernels = kernels_of(backend)
    work = plan_step(step, pool[0].shape[-1], [window], kernels.run_rows)
    plan = kernels.prepare(work, heads, torch.zeros(4096, heads.dim))
    out = kernels.paged_attention(q.flatten(1), *pool, plan, window)
    return out.view(len(q), heads.query, heads.dim)


@every_backend
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [
        (Heads(9, 3, 64), 16, None),
        (Heads(4, 4, 80), 8, None),
        (Heads(2, 1, 96), 32, 40),
        (Heads(16, 1, 112), 64, None),
        (Heads(4, 2, 128), 128, 100),
        (Heads(2, 2, 192), 1, 8),
        (Heads(5, 1, 256), 2, None),
        (Heads(6, 2, 20), 16, 129),
    ],
)
def test_prefill_equals_dense_attention(
    backend: str, heads: Heads, block_size: int, window: int | None
) -> None:
    """KN-06: head sizes that are no power of two; a whole prompt, the end of one, decode."""
    count = 300
    q, k, v = _tokens(count, heads)
    blocks = -(-count // block_size)
    ids = np.random.default_rng(1).permutation(blocks + 3)[:blocks].tolist()
    pool = _pool(blocks + 3, heads, block_size)
    _store(pool, k, v, ids)
    expected = _dense(q, k, v, window)
    for rows in (count, 21, 1):
        step = rows_step([(rows, count)], [ids], block_size)
        out = _attend(backend, q[count - rows :], pool, step, heads, window)
        torch.testing.assert_close(out.double(), expected[-rows:], rtol=2e-5, atol=2e-5)


@every_backend
@pytest.mark.parametrize("window", [None, 8, 130])
def test_a_rows_bits_do_not_depend_on_the_batch_the_chunks_or_the_block_order(
    backend: str, window: int | None
) -> None:
    heads, size, count = Heads(9, 3, 64), 16, 290
    q, k, v = _tokens(count, heads)
    blocks = -(-count // size)
    ids = list(range(blocks))
    pool = _pool(4 * blocks, heads, size)
    _store(pool, k, v, ids)
    whole = _attend(backend, q, pool, rows_step([(count, count)], [ids], size), heads, window)
    moved = np.random.default_rng(3).permutation(3 * blocks)[:blocks] + blocks
    _store(pool, k, v, moved.tolist())
    other_q, other_k, other_v = _tokens(40, heads, seed=9)
    other = [i for i in range(blocks, 4 * blocks) if i not in moved][:3]
    _store(pool, other_k, other_v, other)
    try:
        for first, end, workers in (
            (0, 1, 1),
            (3, 20, 2),
            (120, 137, 3),
            (255, 290, 2),
            (289, 290, 3),
        ):
            torch.set_num_threads(workers)
            rows = end - first
            step = rows_step(
                [(1, 40), (rows, end), (rows, end), (2, 9), (rows, end)],
                [other, moved.tolist(), ids, other, moved.tolist()],
                size,
            )
            mine = q[first:end]
            batch = torch.cat((other_q[39:], mine, mine, other_q[7:9], mine))
            out = _attend(backend, batch, pool, step, heads, window)
            for at in (1, 1 + rows, 3 + 2 * rows):
                assert torch.equal(out[at : at + rows], whole[first:end]), (first, end, at)
    finally:
        torch.set_num_threads(1)


@every_backend
def test_one_row_of_one_head_has_the_same_bits_on_any_number_of_threads(backend: str) -> None:
    """A single product of torch's is cut among 3 threads or more along its columns."""
    heads, size = Heads(7, 1, 20), 16
    q, k, v = _tokens(128, heads)
    pool = _pool(8, heads, size)
    _store(pool, k, v, list(range(8)))
    outs = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for rows in (1, 61):
            step = rows_step([(rows, 128)], [list(range(8))], size)
            outs.append(_attend(backend, q[128 - rows :], pool, step, heads)[-1])
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


@pytest.mark.parametrize("window", [None, 100])
def test_runs_and_groups_give_the_same_bits(window: int | None) -> None:
    heads, size = Heads(9, 3, 64), 16
    q, k, v = _tokens(300, heads)
    ids = list(range(19))
    pool = _pool(19, heads, size)
    _store(pool, k, v, ids)
    kernels, outs = kernels_of("cpu"), []
    for run_rows in (None, 1, 200):
        step = rows_step([(300, 300), (1, 300), (7, 260)], [ids] * 3, size)
        work = plan_step(step, size, [window], run_rows)
        assert len(work.groups[window].runs) == {None: 0, 1: 3, 200: 1}[run_rows]
        plan = kernels.prepare(work, heads, torch.zeros(512, 64))
        rows = torch.cat((q, q[299:], q[253:260])).flatten(1)
        outs.append(kernels.paged_attention(rows, *pool, plan, window))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0][300], outs[0][299])


@every_backend
def test_sharers_read_a_span_together_and_get_the_bits_of_one_alone(backend: str) -> None:
    heads, size, shared, branches = Heads(9, 3, 64), 16, 256, 21
    q, k, v = _tokens(shared, heads)
    pool = _pool(16 + branches, heads, size)
    prefix = list(range(16))
    _store(pool, k, v, prefix)
    tails = [_tokens(3, heads, seed=100 + i) for i in range(branches)]
    for i, (_, tail_k, tail_v) in enumerate(tails):
        _store(pool, tail_k, tail_v, [16 + i])
    rows = torch.cat([tail_q[2:] for tail_q, _, _ in tails])
    tables = [[*prefix, 16 + i] for i in range(branches)]
    together = _attend(backend, rows, pool, rows_step([(1, 259)] * branches, tables, size), heads)
    for i in (0, 7, 20):
        alone = _attend(
            backend, rows[i : i + 1], pool, rows_step([(1, 259)], [tables[i]], size), heads
        )
        assert torch.equal(together[i : i + 1], alone)
        states = [torch.cat(pair) for pair in zip((q, k, v), tails[i], strict=True)]
        expected = _dense(*states, None)[-1:]
        torch.testing.assert_close(alone.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """What torch hands out uninitialised holds NaN, as a buffer that was used before may."""
    torch.use_deterministic_algorithms(True)  # with it goes fill_uninitialized_memory
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)


@every_backend
@pytest.mark.parametrize("blocks", [16, 64])
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_rows_that_see_nothing_are_zero_and_spoil_nobody(backend: str, blocks: int) -> None:
    """KN-10: a batch of 3 padded to 8 with length 0; block 0, which padding points at, is NaN.

    KN-12: of 16 blocks or of many, which changes no bit.
    """
    heads, size = Heads(4, 2, 32), 16
    q, k, v = _tokens(20, heads)
    pool = _pool(blocks, heads, size)
    _store(pool, k, v, [2, 1])
    live, padding = [(1, 20), (2, 9), (1, 16)], [(1, 0)] * 5
    step = rows_step([*live, *padding], [[2, 1], [2], [2], *[[]] * 5], size)
    rows = torch.cat((q[19:], q[7:9], q[15:16]))
    out = _attend(backend, torch.cat((rows, torch.full((5, 4, 32), HIDDEN))), pool, step, heads)
    assert torch.equal(out[4:], torch.zeros(5, 4, 32))
    expected = _dense(q, k, v, None)[[19, 7, 8, 15]]
    torch.testing.assert_close(out[:4].double(), expected, rtol=2e-5, atol=2e-5)
    alone = rows_step(live, [[2, 1], [2], [2]], size)
    other = _pool(16, heads, size)
    _store(other, k, v, [2, 1])
    assert torch.equal(_attend(backend, rows, other, alone, heads), out[:4])


@every_backend
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_samples_of_a_small_pool_are_those_of_a_big_one(backend: str) -> None:
    """KN-12: n = 4 behind 24 shared tokens, 16 blocks of which the first is full of NaN."""
    heads, size, outs = Heads(4, 2, 32), 8, []
    q, k, v = _tokens(24, heads)
    tails = [_tokens(3, heads, seed=10 + i) for i in range(4)]
    for blocks in (16, 300):
        pool = _pool(blocks, heads, size)
        _store(pool, k, v, [1, 2, 3])
        for i, (_, tail_k, tail_v) in enumerate(tails):
            _store(pool, tail_k, tail_v, [4 + i])
        tables = [[1, 2, 3, 4 + i] for i in range(4)]
        step = rows_step([(1, 27)] * 4 + [(1, 0)] * 4, [*tables, *[[]] * 4], size)
        rows = torch.cat([tail_q[2:] for tail_q, _, _ in tails])
        out = _attend(backend, torch.cat((rows, q[:4])), pool, step, heads)
        for i, (_, tail_k, tail_v) in enumerate(tails):
            whole = (torch.cat(pair) for pair in ((q, tails[i][0]), (k, tail_k), (v, tail_v)))
            expected = _dense(*whole, None)[-1]
            torch.testing.assert_close(out[i].double(), expected, rtol=2e-5, atol=2e-5)
        outs.append(out)
    assert torch.equal(*outs)


@every_backend
def test_an_empty_batch_is_no_work(backend: str) -> None:
    """KN-10: zero requests."""
    heads = Heads(4, 2, 32)
    step = rows_step([], [], 16)
    assert _attend(backend, torch.zeros(0, 4, 32), _pool(2, heads, 16), step, heads).shape[0] == 0


@every_backend
@pytest.mark.parametrize("length", [30, 36, 61])
def test_values_before_the_window_are_never_used(backend: str, length: int) -> None:
    """KN-04: window 8, length 30; blocks before the window hold NaN, and then another's values.

    With 36 and 61 such a block is in the same tile of keys as the window.
    """
    heads, size = Heads(4, 2, 32), 8
    q, k, v = _tokens(length, heads)
    blocks = -(-length // size)
    ids = list(range(1, blocks + 1))
    pool = _pool(blocks + 1, heads, size)
    _store(pool, k, v, ids)
    freed = ids[: (length - 8) // size]
    assert freed
    outs = []
    for before in (HIDDEN, 1e4):
        pool[0][freed], pool[1][freed] = before, before
        step = rows_step([(1, length)], [ids], size)
        outs.append(_attend(backend, q[-1:], pool, step, heads, 8))
    assert torch.equal(*outs)
    expected = _dense(q, k, v, 8)[-1:]
    torch.testing.assert_close(outs[0].double(), expected, rtol=2e-5, atol=2e-5)


@every_backend
def test_caches_may_be_strided_views(backend: str) -> None:
    """KN-08: one pool [blocks, 2, …], K = view 0 and V = view 1, read and written through strides.

    A block's own layout is [heads, dim, size] for K and [heads, size, dim] for V.
    """
    heads, size = Heads(4, 2, 64), 16
    q, k, v = _tokens(150, heads)
    ids = [9, 3, 4, 8, 1, 0, 7, 5, 2, 6]
    plain = _pool(10, heads, size)
    _store(plain, k, v, ids)
    both = torch.full((10, 2, 2, 64 * size), HIDDEN)
    views = (both[:, 0].unflatten(-1, (64, size)), both[:, 1].unflatten(-1, (size, 64)))
    assert not views[0].is_contiguous()
    step = rows_step([(150, 150)], [ids], size)
    kernels = kernels_of(backend)
    plan = kernels.prepare(
        plan_step(step, size, [None], kernels.run_rows),
        heads,
        torch.cat((torch.ones(150, 32), torch.zeros(150, 32)), 1),
    )
    kernels.rope_write_kv(torch.cat((q, k, v), 1).flatten(1), plan, *views, None)
    for view, written in zip(views, plain, strict=True):
        torch.testing.assert_close(view, written, rtol=0, atol=0, equal_nan=True)
    expected = _attend(backend, q, plain, step, heads)
    assert torch.equal(_attend(backend, q, views, step, heads), expected)


def test_fixed_tiles_agree_with_free_ones() -> None:
    from prefixcache_kernels.torch_backend import TorchKernels  # noqa: PLC0415

    heads, size = Heads(9, 3, 64), 16
    q, k, v = _tokens(200, heads)
    ids = list(range(13))
    pool = _pool(13, heads, size)
    _store(pool, k, v, ids)
    work = plan_step(rows_step([(200, 200)], [ids], size), size, [None])
    fixed = TorchKernels(torch.device("cpu"), torch.float32, fixed_tiles=True)
    plan = fixed.prepare(work, heads, torch.zeros(256, 64))
    out = fixed.paged_attention(q.flatten(1), *pool, plan, None).view(200, 9, 64)
    torch.testing.assert_close(out.double(), _dense(q, k, v, None), rtol=2e-5, atol=2e-5)
    late = plan_step(rows_step([(5, 200)], [ids], size), size, [None])
    some = fixed.paged_attention(
        q[195:].flatten(1), *pool, fixed.prepare(late, heads, torch.zeros(256, 64)), None
    )
    assert torch.equal(some.view(5, 9, 64), out[195:])


@every_backend
def test_offsets_beyond_32_bits_reach_the_last_blocks(backend: str) -> None:
    """KN-01: ids from 131,072 on overflow int32 once multiplied by a block's 2^14 elements.

    Written, copied and read: one request on the last 3 of 131,100 blocks.
    """
    heads, size, blocks = Heads(8, 8, 128), 16, 131_100
    # Pages are touched when they are written: of 17 GB, three blocks.
    pool = (torch.empty(blocks, 8, 128, size), torch.empty(blocks, 8, size, 128))
    ids = [blocks - 1, blocks - 3, blocks - 2]
    step = rows_step([(40, 40)], [ids], size)
    kernels = kernels_of(backend)
    plan = kernels.prepare(
        plan_step(step, size, [None], kernels.run_rows),
        heads,
        torch.cat((torch.ones(40, 64), torch.zeros(40, 64)), 1),
    )
    q, k, v = _tokens(40, heads)
    qkv = torch.cat((q, k, v), 1).flatten(1)
    out = kernels.paged_attention(
        kernels.rope_write_kv(qkv, plan, *pool, None), *pool, plan, None
    ).view(40, 8, 128)
    torch.testing.assert_close(out.double(), _dense(q, k, v, None), rtol=2e-5, atol=2e-5)
    copy_blocks(pool, torch.tensor([blocks - 1]), torch.tensor([0]))
    assert torch.equal(pool[0][0], pool[0][-1])


@every_backend
def test_keys_that_no_sharer_sees_are_not_read(backend: str) -> None:
    """Two rows far apart in the same blocks: what lies between their windows may be anything."""
    heads, size = Heads(4, 2, 32), 16
    q, k, v = _tokens(110, heads)
    ids = list(range(7))
    pool = _pool(7, heads, size)
    for kept in (range(4, 12), range(102, 110)):
        for position in kept:
            pool[0][position // size, :, :, position % size] = k[position]
            pool[1][position // size, :, position % size] = v[position]
    step = rows_step([(1, 12), (1, 110)], [ids[:1], ids], size)
    out = _attend(backend, torch.stack((q[11], q[109])), pool, step, heads, 8)
    expected = _dense(q, k, v, 8)[[11, 109]]
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    together = rows_step([(1, 12), (1, 110)], [ids, ids], size)  # padded alike: one group
    out = _attend(backend, torch.stack((q[11], q[109])), pool, together, heads, 8)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
