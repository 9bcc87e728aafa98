# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917, SIM102 (a kernel's parameters are its arrays, strides and sizes)
"""New keys and values into their slots, alone or fused with the rotation that comes before.

    write_kv:       K[slot // size, h, :, slot % size] ← k[t, h, :], V alike; slot = slots[t] ≥ 0
    rope_write_kv:  q, k, v = split(qkv[t]);  q, k ← rope(norm(q)), rope(norm(k));  write_kv(k, v)
    rope:           (x_i, x_{i + D/2}) turned by the angle of position t   (arXiv 2104.09864)

In a quantised cache (`QuantizedCache`) each head of a token is stored as e4m3 with a scale:

    scale = max_d |x[d]| / 448;  K[…] ← round(x / scale), scales[…] ← scale

Owns these two kernels. A slot of -1 writes nothing. Slots are int64 from the start, so a block's
address is a product of 64 bits. Rotation and norm (Qwen3) run in float32 and round once.
Twins: `reference.write_kv`, `reference.quantize`, `reference.rope`, `reference.rms_norm`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixcache_kernels.backend import Cache, Heads, QuantizedCache
from prefixcache_kernels.checks import FLOATS, check, require
from prefixcache_kernels.reference import GREATEST_E4M3, LEAST_ABSOLUTE
from prefixcache_kernels.triton_backend.launch import Launch, pad

_GREATEST = tl.constexpr(GREATEST_E4M3)
_LEAST = tl.constexpr(LEAST_ABSOLUTE)


@triton.jit
def _scale(greatest):
    """The scale of a head whose greatest absolute value this is."""
    return tl.maximum(greatest, _LEAST) * (1.0 / _GREATEST)


@triton.jit
def _e4m3(x):
    """The code of each float32 of at most 448, rounded to nearest, ties to even; uint8.

    Spelled in integers: conversions differ between targets, and the interpreter's are wrong.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # Eight exponent bits with bias 127 become four with bias 7; 20 bits of the mantissa go.
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - (127 - 7) * 8
    # Below 2^-6 codes count 2^-9, which is what the last bit of a float from 2^14 on is worth.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    code = tl.where(bits > 0x7F800000, 0x7F, code)  # NaN stays NaN
    return (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)


@triton.jit
def _stored(x, cache, fp8: tl.constexpr):
    """Numbers as a cache holds them; in e4m3, x is divided by its scale already."""
    if fp8:
        return _e4m3(x).to(cache.dtype.element_ty, bitcast=True)
    return x.to(cache.dtype.element_ty)


@triton.jit
def _write_kv(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    stride_k,
    stride_v,
    k_block,
    k_head,
    k_dim,
    k_slot,
    v_block,
    v_head,
    v_dim,
    v_slot,
    s_block,
    s_head,
    size: tl.constexpr,
    dim: tl.constexpr,
    fp8: tl.constexpr,
    block_d: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    d = tl.arange(0, block_d)
    live = d < tl.where(slot >= 0, dim, 0)
    block, offset = slot // size, slot % size
    key = tl.load(k + row * stride_k + head * dim + d, mask=live, other=0.0)
    value = tl.load(v + row * stride_v + head * dim + d, mask=live, other=0.0)
    if fp8:
        key, value = key.to(tl.float32), value.to(tl.float32)
        k_scale, v_scale = _scale(tl.max(tl.abs(key), 0)), _scale(tl.max(tl.abs(value), 0))
        key, value = key / k_scale, value / v_scale
        at = block * s_block + head * s_head + offset
        tl.store(k_scales + at, k_scale, mask=slot >= 0)
        tl.store(v_scales + at, v_scale, mask=slot >= 0)
    k_place = k_cache + block * k_block + head * k_head + d * k_dim + offset * k_slot
    v_place = v_cache + block * v_block + head * v_head + d * v_dim + offset * v_slot
    tl.store(k_place, _stored(key, k_cache, fp8), mask=live)
    tl.store(v_place, _stored(value, v_cache, fp8), mask=live)


@triton.jit
def _rope_write_kv(
    qkv,
    q_out,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    positions,
    slots,
    angles,
    q_weight,
    k_weight,
    eps,
    k_block,
    k_head,
    k_dim,
    k_slot,
    v_block,
    v_head,
    v_dim,
    v_slot,
    s_block,
    s_head,
    size: tl.constexpr,
    q_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    norm: tl.constexpr,
    fp8: tl.constexpr,
    block_h: tl.constexpr,
):
    """One program a (row, head of Q, K or V); block_h lanes hold each half of the head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    half: tl.constexpr = dim // 2
    i = tl.arange(0, block_h)
    live = i < half
    source = qkv + row * ((q_heads + 2 * kv_heads) * dim) + head * dim + i
    low = tl.load(source, mask=live, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=live, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    block, offset = slot // size, slot % size
    writes = i < tl.where(slot >= 0, half, 0)
    if head < q_heads + kv_heads:
        if norm:
            weight = k_weight
            if head < q_heads:
                weight = q_weight
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / dim + eps)
            low *= factor * tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
            high *= factor * tl.load(weight + half + i, mask=live, other=0.0).to(tl.float32)
        angle = angles + tl.maximum(tl.load(positions + row), 0).to(tl.int64) * dim + i
        cos = tl.load(angle, mask=live, other=0.0)
        sin = tl.load(angle + half, mask=live, other=0.0)
        turned = tl.fma(low, cos, -(high * sin))
        high = tl.fma(high, cos, low * sin)
        low = turned
    if fp8:  # known when it is compiled; where the head lies is not
        if head >= q_heads:
            scale = _scale(tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)))
            low, high = low / scale, high / scale
            scales, kv_head = k_scales, head - q_heads
            if head >= q_heads + kv_heads:
                scales, kv_head = v_scales, kv_head - kv_heads
            tl.store(scales + block * s_block + kv_head * s_head + offset, scale, mask=slot >= 0)
    if head < q_heads:
        q_place = q_out + row * (q_heads * dim) + head * dim + i
        tl.store(q_place, low.to(q_out.dtype.element_ty), mask=live)
        tl.store(q_place + half, high.to(q_out.dtype.element_ty), mask=live)
    elif head < q_heads + kv_heads:
        k_place = k_cache + block * k_block + (head - q_heads) * k_head + offset * k_slot
        tl.store(k_place + i * k_dim, _stored(low, k_cache, fp8), mask=writes)
        tl.store(k_place + (half + i) * k_dim, _stored(high, k_cache, fp8), mask=writes)
    else:
        v_base = v_cache + block * v_block + (head - q_heads - kv_heads) * v_head
        v_place = v_base + offset * v_slot
        tl.store(v_place + i * v_dim, _stored(low, v_cache, fp8), mask=writes)
        tl.store(v_place + (half + i) * v_dim, _stored(high, v_cache, fp8), mask=writes)


def check_caches(k_cache: Cache, v_cache: Cache, heads: Heads, device: torch.device) -> None:
    """Check K [blocks, kv_heads, D, size] and V [blocks, kv_heads, size, D], of any strides.

    Raises:
        ValueError: naming the cache.
    """
    blocks, size = k_cache.shape[0], k_cache.shape[-1]
    for cache, name, shape in (
        (k_cache, "k_cache", (blocks, heads.kv, heads.dim, size)),
        (v_cache, "v_cache", (blocks, heads.kv, size, heads.dim)),
    ):
        data = data_of(cache)
        require(tuple(data.shape) == shape, name, f"shape must be {shape}, not {data.shape}")
        if isinstance(cache, QuantizedCache):
            check(cache.scales, name, (blocks, heads.kv, size), (torch.float32,), device)
            require(data.dtype == torch.float8_e4m3fn, name, f"dtype {data.dtype} with scales")
        else:
            require(data.dtype in FLOATS, name, f"dtype {data.dtype} is not served")
        within = sum(
            (n - 1) * stride for n, stride in zip(shape[2:], data.stride()[2:], strict=True)
        )
        require(
            within < 2**31, name, "the slots of one head of a block lie over 2^31 elements apart"
        )
        require(data.device == device, name, f"must be on {device}, not on {data.device}")
    same = data_of(v_cache).dtype == data_of(k_cache).dtype
    require(same, "v_cache", "dtype must be k_cache's")
    if isinstance(k_cache, QuantizedCache) and isinstance(v_cache, QuantizedCache):
        strides = k_cache.scales.stride() == v_cache.scales.stride()
        require(strides, "v_cache", "scales must have the strides of k_cache's")
    require(size & (size - 1) == 0, "k_cache", f"block size must be a power of two, not {size}")


def data_of(cache: Cache) -> Tensor:
    """The tensor of the values, whether there are scales or not."""
    return cache.data if isinstance(cache, QuantizedCache) else cache


def is_fp8(cache: Cache) -> bool:
    """Whether there are scales."""
    return isinstance(cache, QuantizedCache)


def cache_arguments(k_cache: Cache, v_cache: Cache) -> dict[str, Any]:
    """Return tensors and strides of both, by the kernels' parameter names."""
    keys, values = data_of(k_cache), data_of(v_cache)
    k_block, k_head, k_dim, k_slot = keys.stride()
    v_block, v_head, v_slot, v_dim = values.stride()
    strides = {"k_block": k_block, "k_head": k_head, "k_dim": k_dim, "k_slot": k_slot}
    strides |= {"v_block": v_block, "v_head": v_head, "v_dim": v_dim, "v_slot": v_slot}
    # Without scales the kernels never look at these.
    k_scales, v_scales, s_block, s_head = keys, values, 0, 0
    if isinstance(k_cache, QuantizedCache) and isinstance(v_cache, QuantizedCache):
        k_scales, v_scales = k_cache.scales, v_cache.scales
        s_block, s_head, _ = k_scales.stride()
    tensors = {"k_cache": keys, "v_cache": values, "k_scales": k_scales, "v_scales": v_scales}
    return {**tensors, **strides, "s_block": s_block, "s_head": s_head}


def write_kv(k: Tensor, v: Tensor, k_cache: Cache, v_cache: Cache, slots: Tensor) -> None:
    """Scatter K and V, [T, kv_heads · D] each, to their slots.

    k_cache: [blocks, kv_heads, D, size]; v_cache: [blocks, kv_heads, size, D]; any strides.
    slots: int64 [T], block · size + offset; -1 writes nothing. They are on the device, so their
    range is the caller's promise (`TritonPlan` checks what it is made of).

    Raises:
        ValueError: naming the argument with a wrong shape, dtype, device or stride.
    """
    heads = Heads(k_cache.shape[1], k_cache.shape[1], v_cache.shape[-1])
    check_caches(k_cache, v_cache, heads, k.device)
    width = heads.kv * heads.dim
    check(k, "k", (None, width), FLOATS, k.device)
    check(v, "v", (k.shape[0], width), (k.dtype,), k.device)
    check(slots, "slots", (k.shape[0],), (torch.int64,), k.device)
    write_launch(k, v, k_cache, v_cache, slots).run()


def write_launch(k: Tensor, v: Tensor, k_cache: Cache, v_cache: Cache, slots: Tensor) -> Launch:
    """Return the launch of checked arguments."""
    dim = v_cache.shape[-1]
    rows = {"k": k, "v": v, "slots": slots, "stride_k": k.stride(0), "stride_v": v.stride(0)}
    return Launch(
        _write_kv,
        (k.shape[0], k_cache.shape[1]),
        {**rows, **cache_arguments(k_cache, v_cache)},
        {"size": k_cache.shape[-1], "dim": dim, "fp8": is_fp8(k_cache), "block_d": pad(dim)},
        num_warps=1,
    )


def rope_write_kv(
    qkv: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    positions: Tensor,
    slots: Tensor,
    angles: Tensor,
    heads: Heads,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Normalise (Qwen3) and rotate Q and K, write K and V to their slots, return Q.

    Args:
        qkv: [T, (query + 2 · kv) · D], contiguous.
        k_cache, v_cache, slots: see `write_kv`.
        positions: int32 [T]; negative ones (padding) turn by position 0.
        angles: float32 [longest, D], cosines then sines of D/2 angles; positions are below longest.
        heads: numbers of heads and their even size D.
        qk_norm: weights [D] of the norms of Q and K, and eps.

    Returns:
        [T, query · D], contiguous.

    Raises:
        ValueError: naming the argument with a wrong shape, dtype, device or stride.
    """
    tokens, device = qkv.shape[0], qkv.device
    check(qkv, "qkv", (None, (heads.query + 2 * heads.kv) * heads.dim), FLOATS, device)
    require(qkv.is_contiguous(), "qkv", "must be contiguous")
    require(heads.dim % 2 == 0, "heads", f"rotation needs an even head size, not {heads.dim}")
    check_caches(k_cache, v_cache, heads, device)
    check(positions, "positions", (tokens,), (torch.int32,), device)
    check(slots, "slots", (tokens,), (torch.int64,), device)
    check(angles, "angles", (None, heads.dim), (torch.float32,), device)
    require(angles.is_contiguous(), "angles", "must be contiguous")
    for weight in qk_norm[:2] if qk_norm else ():
        check(weight, "qk_norm", (heads.dim,), (qkv.dtype,), device)
    q = torch.empty((tokens, heads.query * heads.dim), dtype=qkv.dtype, device=device)
    rope_launch(qkv, q, k_cache, v_cache, positions, slots, angles, heads, qk_norm).run()
    return q


def rope_launch(
    qkv: Tensor,
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    positions: Tensor,
    slots: Tensor,
    angles: Tensor,
    heads: Heads,
    qk_norm: tuple[Tensor, Tensor, float] | None,
) -> Launch:
    """Return the launch of checked arguments."""
    q_weight, k_weight, eps = qk_norm or (qkv, qkv, 0.0)
    tensors = {"qkv": qkv, "q_out": q}
    rows = {"positions": positions, "slots": slots, "angles": angles}
    norms = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps}
    sizes = {"size": k_cache.shape[-1], "q_heads": heads.query, "kv_heads": heads.kv}
    kinds = {"norm": qk_norm is not None, "fp8": is_fp8(k_cache)}
    return Launch(
        _rope_write_kv,
        (qkv.shape[0], heads.query + 2 * heads.kv),
        {**tensors, **rows, **norms, **cache_arguments(k_cache, v_cache)},
        {**sizes, "dim": heads.dim, **kinds, "block_h": pad(heads.dim // 2)},
        num_warps=1,
    )
