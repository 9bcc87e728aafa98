"""New K and V into their slots, alone and behind norm and rotation."""

import pytest
import torch
from torch import Tensor

from prefixcache_kernels import Heads, QuantizedCache, reference
from prefixcache_kernels.triton_backend import write_kv
from tests.kernels.triton_cases.inputs import DEVICE, Pool, assert_close, every_dtype, noise

SIZES = [(Heads(9, 3, 64), 16), (Heads(2, 2, 80), 8), (Heads(4, 1, 20), 128), (Heads(1, 1, 96), 1)]
SLOTS = [37, -1, 0, 5, 63, -1, 38]


def _equal(ours: Pool, keys: Tensor, values: Tensor) -> None:
    torch.testing.assert_close(ours.keys, keys, equal_nan=True, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours.values, values, equal_nan=True, rtol=0, atol=0)


def _twin(pool: Pool, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = pool.keys.clone(), pool.values.clone()
    live = slots >= 0
    places = slots[live] // pool.size, slots[live] % pool.size
    reference.write_kv(k[live], v[live], keys, values, *places)
    return keys, values


@every_dtype
@pytest.mark.parametrize(("heads", "size"), SIZES, ids=str)
def test_write_kv_equals_its_twin_and_minus_one_writes_nothing(
    dtype: torch.dtype, heads: Heads, size: int
) -> None:
    pool = Pool.empty(-(-64 // size), heads, size, dtype)
    slots = torch.tensor(SLOTS, device=DEVICE)
    k, v = (noise(len(slots), heads.kv, heads.dim, dtype=dtype, seed=i) for i in (0, 1))
    keys, values = _twin(pool, k, v, slots)
    write_kv.write_kv(k.flatten(1), v.flatten(1), pool.keys, pool.values, slots)
    _equal(pool, keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "size"), SIZES[:3], ids=str)
def test_rope_write_kv_equals_its_twins(
    dtype: torch.dtype, norm: bool, heads: Heads, size: int
) -> None:
    pool = Pool.empty(-(-64 // size), heads, size, dtype)
    slots = torch.tensor(SLOTS, device=DEVICE)
    positions = torch.tensor([7, -1, 0, 3, 30, 31, 2], dtype=torch.int32, device=DEVICE)
    angle = noise(32, heads.dim // 2)
    angles = torch.cat((angle.cos(), angle.sin()), -1)
    qkv = noise(len(slots), heads.query + 2 * heads.kv, heads.dim, dtype=dtype)
    weights = (noise(heads.dim, dtype=dtype), noise(heads.dim, dtype=dtype, seed=1), 1e-6)
    qk, v = torch.split(qkv, [heads.query + heads.kv, heads.kv], 1)
    if norm:
        q, k = torch.split(qk, [heads.query, heads.kv], 1)
        normal = [
            reference.rms_norm(x.float(), w.float(), 1e-6)
            for x, w in zip((q, k), weights, strict=False)
        ]
        qk = torch.cat(normal, 1)
    cos, sin = angles[positions.clamp_min(0).long()].unsqueeze(1).chunk(2, -1)
    turned = reference.rope(qk.float(), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    q, k = torch.split(turned.to(dtype), [heads.query, heads.kv], 1)
    keys, values = _twin(pool, k, v, slots)
    out = write_kv.rope_write_kv(
        qkv.flatten(1),
        pool.keys,
        pool.values,
        positions,
        slots,
        angles,
        heads,
        weights if norm else None,
    )
    assert_close(out, q.flatten(1))
    _equal(pool, keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("heads", "size"), SIZES[:3], ids=str)
def test_quantised_rows_are_the_twins(
    dtype: torch.dtype, rotated: bool, heads: Heads, size: int
) -> None:
    """To the bit, but for codes that a rounding of the division decides."""
    blocks = -(-64 // size)
    slots = torch.tensor(SLOTS, device=DEVICE)
    qkv = noise(len(slots), heads.query + 2 * heads.kv, heads.dim, dtype=dtype)
    _, k, v = torch.split(qkv, [heads.query, heads.kv, heads.kv], 1)
    ours, theirs = (_quantised_pool(blocks, heads, size) for _ in range(2))
    if rotated:  # by nothing: position 0
        angles = torch.cat((torch.ones(1, heads.dim // 2), torch.zeros(1, heads.dim // 2)), -1)
        at = torch.zeros(len(slots), dtype=torch.int32, device=DEVICE)
        write_kv.rope_write_kv(qkv.flatten(1), *ours, at, slots, angles.to(DEVICE), heads)
    else:
        write_kv.write_kv(k.flatten(1), v.flatten(1), *ours, slots)
    live = slots >= 0
    places = slots[live] // size, slots[live] % size
    reference.write_kv(k[live], v[live], *theirs, *places)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.scales, other.scales, rtol=1e-6, atol=0, equal_nan=True)
        assert int(mine.scales.isnan().logical_not().sum()) == int(live.sum()) * heads.kv
        codes = [cache.data.view(torch.uint8).int() for cache in (mine, other)]
        assert int((codes[0] - codes[1]).abs().max()) <= 1


def test_e4m3_rounds_to_nearest_and_ties_to_even() -> None:
    """All positive codes, the middles between them, and the floats beside those; either sign."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middle, torch.tensor(x)) for x in (0.0, 1e3)]
    values = torch.cat((codes, middle, *beside, torch.full((3,), 448.0)))  # 508
    heads, size = Heads(4, 4, 128), 1
    x = torch.cat((values, torch.full((4,), 448.0))).view(128, 4).T.contiguous()  # 448 in each head
    x[:, -1] = 448.0
    ours, _ = pools = _quantised_pool(2, heads, size)
    slots = torch.tensor([0, 1], device=DEVICE)
    rows = torch.stack((x, -x)).to(DEVICE)  # [2, 4, 128]
    write_kv.write_kv(rows.flatten(1), rows.flatten(1), *pools, slots)
    assert ours.scales.eq(1.0).all()
    expected = rows.to(torch.float8_e4m3fn).float()
    assert torch.equal(ours.data.squeeze(-1).float(), expected)


def _quantised_pool(blocks: int, heads: Heads, size: int) -> tuple[QuantizedCache, QuantizedCache]:
    where = {"device": DEVICE, "dtype": torch.float8_e4m3fn}
    scales = [torch.full((blocks, heads.kv, size), torch.nan, device=DEVICE) for _ in range(2)]
    keys = torch.zeros(blocks, heads.kv, heads.dim, size, **where)
    values = torch.zeros(blocks, heads.kv, size, heads.dim, **where)
    return QuantizedCache(keys, scales[0]), QuantizedCache(values, scales[1])


def test_block_ids_are_widened_before_they_meet_the_stride() -> None:
    """KN-01: a block over 2^31 elements into a cache; pages that nobody touches cost nothing."""
    heads, size = Heads(1, 1, 16), 16
    block, blocks = heads.dim * size, 2**31 // 256 + 3
    store = torch.empty(blocks * block, dtype=torch.float16, device=DEVICE)
    keys, values = store.view(blocks, 1, 16, size), store.view(blocks, 1, size, 16)
    slots = torch.tensor([(blocks - 1) * size + 3, (blocks - 3) * size], device=DEVICE)
    k, v = (noise(2, 16, dtype=torch.float16, seed=i) for i in (0, 1))
    write_kv.write_kv(k, v, keys, torch.empty_like(values), slots)
    assert torch.equal(keys[-1, 0, :, 3], k[0])
    assert torch.equal(keys[-3, 0, :, 0], k[1])
    write_kv.write_kv(k, v, torch.empty_like(keys), values, slots)
    assert torch.equal(values[-1, 0, 3], v[0])
    qkv = noise(2, 48, dtype=torch.float16)
    angles = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1).to(DEVICE)
    rows = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    write_kv.rope_write_kv(qkv, keys, torch.empty_like(values), rows, slots, angles, heads)
    assert torch.equal(keys[-3, 0, :, 0], qkv[1, 16:32])


def test_caches_may_be_views_with_any_strides() -> None:
    """KN-08: one pool [blocks, 2, size, heads, dim], K = view 0 and V = view 1."""
    size, k, v = 8, noise(3, 48), noise(3, 48, seed=1)
    both = torch.full((4, 2, size, 2, 24), torch.nan, device=DEVICE)
    keys, values = both[:, 0].permute(0, 2, 3, 1), both[:, 1].permute(0, 2, 1, 3)
    slots = torch.tensor([31, 0, 9], device=DEVICE)
    write_kv.write_kv(k, v, keys, values, slots)
    assert torch.equal(both[3, 0, 7].flatten(), k[0])
    assert torch.equal(both[1, 1, 1].flatten(), v[2])
    assert int(both.isnan().logical_not().sum()) == 2 * 3 * 48


def test_no_rows_are_no_work() -> None:
    pool, none = Pool.empty(1, Heads(1, 1, 16), 8), torch.zeros(0, 16, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    write_kv.write_kv(none, none, pool.keys, pool.values, slots)
    assert pool.keys.isnan().all()


def test_bad_arguments_are_refused_by_name() -> None:
    pool, k = Pool.empty(2, Heads(2, 2, 16), 8), noise(3, 32)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"k: shape must be \(any, 32\)"):
        write_kv.write_kv(noise(3, 31), k, pool.keys, pool.values, slots)
    with pytest.raises(ValueError, match="v: dtype"):
        write_kv.write_kv(k, k.half(), pool.keys, pool.values, slots)
    with pytest.raises(ValueError, match=r"slots: dtype must be torch\.int64"):
        write_kv.write_kv(k, k, pool.keys, pool.values, slots.int())
    with pytest.raises(ValueError, match="v_cache: shape"):
        write_kv.write_kv(k, k, pool.keys, pool.values[:1], slots)
    with pytest.raises(ValueError, match="v_cache: dtype must be k_cache's"):
        write_kv.write_kv(k, k, pool.keys, pool.values.half(), slots)
    with pytest.raises(ValueError, match="v_cache: must be on"):
        write_kv.write_kv(k, k, pool.keys, pool.values.to("meta"), slots)
