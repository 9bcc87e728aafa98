# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (a kernel's parameters are its arrays, strides and sizes)
"""Attention over the paged cache: decode and prefill in one scheme, spans at fixed positions.

    out[t, h] = Σ_s softmax_s(D^-1/2 · q[t, h] · K[s, h / G]) · V[s, h / G]
    over the keys s of t's sequence with p_t - window < s ≤ p_t

Owns two kernels. `_attend` computes, for a tile of (row, head) pairs that share a K/V head, one
span after another: within a span, tiles of keys are merged in registers in order (FlashAttention-2,
arXiv 2307.08691); finished spans are merged in order, in registers or, where other programs compute
them, by `_merge_spans` (FlashDecoding, with cuts at fixed places). Both merge by `_merge`, so a
row's arithmetic depends on its position alone: not on the rows beside it in a tile, which are other
rows of the products, nor on which program computed which span.

Grids are fixed. Programs read the amount of work from `counts` and share it out among themselves,
so one captured graph serves every step. Twin: `dense_attention` in `twins`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixcache_kernels.backend import Cache, Heads
from prefixcache_kernels.checks import FLOATS, check, require
from prefixcache_kernels.triton_backend.launch import (
    WIDEN,
    Launch,
    pad,
    persistent_programs,
)
from prefixcache_kernels.triton_backend.write_kv import (
    cache_arguments,
    check_caches,
    data_of,
    is_fp8,
)

_LOG2_E = 1.4426950408889634
_FAR = tl.constexpr(1 << 30)


@triton.jit
def _merge(maximum, sums, values, next_maximum, next_sums, next_values):
    """Merge the next span of each row; a row that sees nothing of it keeps every bit."""
    seen = next_maximum > -float("inf")
    top = tl.maximum(maximum, next_maximum)
    safe = tl.where(top > -float("inf"), top, 0.0)  # -inf - -inf would be NaN
    factor, next_factor = tl.exp2(maximum - safe), tl.exp2(next_maximum - safe)
    new_sums = tl.fma(next_sums, next_factor, sums * factor)
    new_values = tl.fma(next_values, next_factor[:, None], values * factor[:, None])
    return top, tl.where(seen, new_sums, sums), tl.where(seen[:, None], new_values, values)


@triton.jit
def _attend_span(
    query,
    position,
    low,
    high,
    k_base,
    v_base,
    k_scales,
    v_scales,
    table_row,
    first,
    scale,
    k_block,
    v_block,
    s_block,
    k_dim: tl.constexpr,
    k_slot: tl.constexpr,
    v_dim: tl.constexpr,
    v_slot: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
    span: tl.constexpr,
    window: tl.constexpr,
    fp8: tl.constexpr,
    run: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    """Maximum, sum and values of the span that begins at position `first`, for each row.

    low, high: lowest and highest position in the tile: keys outside (low - window, high] are seen
    by no row, may never have been written, and are neither used nor trusted.
    """
    d = tl.arange(0, block_d)
    maximum = tl.full((block_m,), -float("inf"), tl.float32)
    sums = tl.zeros((block_m,), tl.float32)
    values = tl.zeros((block_m, block_d), tl.float32)
    begin = first
    if window > 0:
        begin = tl.maximum(first, (low - window + 1) // block_n * block_n)
    for start in range(begin, tl.minimum(first + span, high + 1), block_n):
        n = start + tl.arange(0, block_n)
        written = n <= high
        if window > 0:
            written = written & (n > low - window)
        block = tl.load(table_row + n // size, mask=written, other=0).to(tl.int64)
        offset = n % size
        k_at = block * k_block + offset * k_slot
        if run > 1:  # slots of a block lie side by side: loads take several at once
            k_at = tl.max_contiguous(tl.multiple_of(k_at, run), run)
        # A key that was never written spoils its own column of scores only, and that is replaced.
        key = tl.load(k_base + d[:, None] * k_dim + k_at[None, :], mask=d[:, None] < dim, other=0.0)
        if fp8:  # exact: e4m3 is a part of every wider type
            key = key.to(query.dtype)
        if WIDEN:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        if fp8:
            scale_at = block * s_block + offset
            scores *= tl.load(k_scales + scale_at, mask=written, other=0.0)[None, :]
        seen = n[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        top = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(top > -float("inf"), top, 0.0)
        factor = tl.exp2(maximum - safe)
        weights = tl.exp2(scores - safe[:, None])
        sums = tl.fma(sums, factor, tl.sum(weights, 1))
        # A value that was never written would spoil every row: 0 · NaN is NaN.
        v_at = block * v_block + offset * v_slot
        v_live = written[:, None] & (d[None, :] < dim)
        value = tl.load(v_base + v_at[:, None] + d[None, :] * v_dim, mask=v_live, other=0.0)
        if fp8:
            v_scale = tl.load(v_scales + scale_at, mask=written, other=0.0)
            value = (value.to(tl.float32) * v_scale[:, None]).to(query.dtype)
        values = values * factor[:, None]
        weights = weights.to(value.dtype)
        if WIDEN:
            weights, value = weights.to(tl.float32), value.to(tl.float32)
        values = tl.dot(weights, value, values, input_precision="ieee")
        maximum = top
    return maximum, sums, values


@triton.jit
def _attend(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    out,
    positions,
    table,
    counts,
    items,
    entry_rows,
    entry_slots,
    group_spans,
    group_tables,
    part_values,
    part_maxima,
    part_sums,
    scale,
    table_stride,
    k_block,
    k_head,
    v_block,
    v_head,
    s_block,
    s_head,
    k_dim: tl.constexpr,
    k_slot: tl.constexpr,
    v_dim: tl.constexpr,
    v_slot: tl.constexpr,
    q_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    size: tl.constexpr,
    span: tl.constexpr,
    window: tl.constexpr,
    fp8: tl.constexpr,
    run: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_d: tl.constexpr,
):
    group: tl.constexpr = q_heads // kv_heads
    amount = tl.load(counts)
    m, d = tl.arange(0, block_m), tl.arange(0, block_d)
    # Neighbouring programs take items of the same head, so that tiles of one span meet in L2.
    for work in range(tl.program_id(0), amount * kv_heads, tl.num_programs(0)):
        head, item = (work // amount).to(tl.int64), work % amount
        entry = tl.load(items + 4 * item) + m // group
        live = entry < tl.load(items + 4 * item + 1)
        row = tl.load(entry_rows + entry, mask=live, other=0).to(tl.int64)
        position = tl.load(positions + row, mask=live, other=-1)
        q_head = head * group + m % group
        inside = live[:, None] & (d[None, :] < dim)
        at = (row * q_heads + q_head)[:, None] * dim + d[None, :]
        query = tl.load(q + at, mask=inside, other=0.0)
        if WIDEN:
            query = query.to(tl.float32)
        low, high = tl.min(tl.where(live, position, _FAR), 0), tl.max(position, 0)
        maximum = tl.full((block_m,), -float("inf"), tl.float32)
        sums = tl.zeros((block_m,), tl.float32)
        values = tl.zeros((block_m, block_d), tl.float32)
        for index in range(tl.load(items + 4 * item + 2), tl.load(items + 4 * item + 3)):
            table_row = table + tl.load(group_tables + index).to(tl.int64) * table_stride
            span_maximum, span_sums, span_values = _attend_span(
                query,
                position,
                low,
                high,
                k_cache + head * k_head,
                v_cache + head * v_head,
                k_scales + head * s_head,
                v_scales + head * s_head,
                table_row,
                tl.load(group_spans + index) * span,
                scale,
                k_block,
                v_block,
                s_block,
                k_dim,
                k_slot,
                v_dim,
                v_slot,
                dim,
                size,
                span,
                window,
                fp8,
                run,
                block_m,
                block_n,
                block_d,
            )
            maximum, sums, values = _merge(
                maximum, sums, values, span_maximum, span_sums, span_values
            )
        slot = tl.load(entry_slots + entry, mask=live, other=-1).to(tl.int64)
        result = values / tl.where(sums > 0.0, sums, 1.0)[:, None]
        whole = inside & (slot[:, None] < 0)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=whole)
        part = slot * q_heads + q_head
        stored = live & (slot >= 0)
        place = part_values + part[:, None] * dim + d[None, :]
        tl.store(place, values, mask=inside & (slot[:, None] >= 0))
        tl.store(part_maxima + part, maximum, mask=stored)
        tl.store(part_sums + part, sums, mask=stored)


@triton.jit
def _merge_spans(
    out,
    counts,
    merges,
    part_values,
    part_maxima,
    part_sums,
    q_heads: tl.constexpr,
    dim: tl.constexpr,
    block_h: tl.constexpr,
    block_d: tl.constexpr,
):
    """Merge the partials of each row in span order; a row without any gets zeros."""
    pieces: tl.constexpr = (q_heads + block_h - 1) // block_h
    d = tl.arange(0, block_d)
    for work in range(tl.program_id(0), tl.load(counts + 1) * pieces, tl.num_programs(0)):
        merge = merges + 3 * (work // pieces)
        head = work % pieces * block_h + tl.arange(0, block_h).to(tl.int64)
        live = head < q_heads
        inside = live[:, None] & (d[None, :] < dim)
        maximum = tl.full((block_h,), -float("inf"), tl.float32)
        sums = tl.zeros((block_h,), tl.float32)
        values = tl.zeros((block_h, block_d), tl.float32)
        for slot in range(tl.load(merge + 1), tl.load(merge + 2)):
            part = head + slot * q_heads
            span_maximum = tl.load(part_maxima + part, mask=live, other=-float("inf"))
            span_sums = tl.load(part_sums + part, mask=live, other=0.0)
            place = part_values + part[:, None] * dim + d[None, :]
            span_values = tl.load(place, mask=inside, other=0.0)
            maximum, sums, values = _merge(
                maximum, sums, values, span_maximum, span_sums, span_values
            )
        result = values / tl.where(sums > 0.0, sums, 1.0)[:, None]
        at = (tl.load(merge).to(tl.int64) * q_heads + head)[:, None] * dim + d[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows (row, head) and keys of a tile, and the compiler's options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def rows(self, group: int) -> int:
        """Query rows in a tile, with `group` query heads for each K/V head."""
        return self.block_m // group


def tile_of(heads: Heads, dtype: torch.dtype, shared_kib: int, fp8: bool = False) -> AttentionTile:
    """Return the tile of a model on a device: one for decode and prefill, whatever the batch.

    Another tile may be another instruction (16 rows: mma.sync, 64 rows: wgmma on sm_90) and another
    order of additions, so nothing of the batch goes into the choice. shared_kib: shared memory of a
    program in KiB. fp8: keys and values are quantised.
    """
    width, small = pad(heads.dim), shared_kib < 100
    if dtype == torch.float32:  # no tensor cores: small tiles, for correctness
        rows, warps = pad(heads.query // heads.kv), 4 if width <= 64 else 8
        return AttentionTile(rows, 16, warps, 1 if small else 2)
    # Two accumulators of block_m rows must fit in registers (see benchmarks.kernels_aot), and what
    # converting e4m3 takes where the device does it in software.
    keys = 64 if not small else 16 if fp8 else 32
    if width > 128:
        return AttentionTile(32, min(keys, 32), 8, 1 if small else 2)
    if width > 64:
        return AttentionTile(64, keys, 8, 1 if small else 2)
    return AttentionTile(64, keys, 4, 2)


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """The work lists of `AttentionWork` on the device, and room for its partials.

    counts: int32 [2], numbers of items and merges; the lists may be longer than what is used.
    """

    counts: Tensor
    items: Tensor  # int32 [I, 4]
    entry_rows: Tensor  # int32 [E]
    entry_slots: Tensor  # int32 [E]
    group_spans: Tensor  # int32 [G]
    group_tables: Tensor  # int32 [G]
    merges: Tensor  # int32 [R, 3]
    part_values: Tensor  # float32 [slots, query heads, D]
    part_maxima: Tensor  # float32 [slots, query heads]
    part_sums: Tensor  # float32 [slots, query heads]


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What a step's attention reads, the same in all layers of a window.

    positions: int32 [T], -1 for padding. table: int32 [S, blocks]. span: tokens in a span.
    window: tokens that a row sees, itself included, or None.
    highest_block: largest id in the table, known on the host; compared with the cache's size.
    """

    heads: Heads
    positions: Tensor
    table: Tensor
    span: int
    window: int | None
    highest_block: int
    buffers: AttentionBuffers


def paged_attention(
    q: Tensor, k_cache: Cache, v_cache: Cache, step: AttentionInput, tile: AttentionTile
) -> Tensor:
    """Causal attention of each row over its sequence's blocks, softmax scale D^-1/2.

    q: [T, query heads · D], contiguous; k_cache: [blocks, kv_heads, D, size]; v_cache: [blocks,
    kv_heads, size, D], any strides, q's dtype or quantised. Returns [T, query heads · D]; rows that
    see nothing give zeros.

    Raises:
        ValueError: naming the argument with a wrong shape, dtype, device, stride or block id.
    """
    heads, size = step.heads, k_cache.shape[-1]
    check(q, "q", (len(step.positions), heads.query * heads.dim), FLOATS, q.device)
    require(q.is_contiguous(), "q", "must be contiguous")
    check_caches(k_cache, v_cache, heads, q.device)
    same = is_fp8(k_cache) or data_of(k_cache).dtype == q.dtype
    require(same, "k_cache", f"dtype must be q's {q.dtype}")
    require(step.span % tile.block_n == 0, "step", f"span must be a multiple of {tile.block_n}")
    require(step.span % size == 0, "k_cache", f"block size {size} must divide span {step.span}")
    require(tile.rows(heads.query // heads.kv) > 0, "tile", "fewer rows than heads in a group")
    blocks, highest = k_cache.shape[0], step.highest_block
    require(highest < blocks, "block_table", f"block id {highest} of a pool of {blocks} blocks")
    out = torch.empty_like(q)
    for launch in attention_launches(q, k_cache, v_cache, out, step, tile):
        launch.run()
    return out


def attention_launches(
    q: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    out: Tensor,
    step: AttentionInput,
    tile: AttentionTile,
) -> tuple[Launch, Launch]:
    """Return the launches of checked arguments: the spans, then their merging."""
    heads, lists, programs = step.heads, step.buffers, persistent_programs(q.device)
    size, width = k_cache.shape[-1], pad(heads.dim)
    tensors = {"q": q, "out": out}
    rows = {"positions": step.positions, "table": step.table, "counts": lists.counts}
    work = {"items": lists.items, "entry_rows": lists.entry_rows}
    work |= {"entry_slots": lists.entry_slots, "group_spans": lists.group_spans}
    parts = {"part_values": lists.part_values, "part_maxima": lists.part_maxima}
    parts["part_sums"] = lists.part_sums
    scalars = {"scale": heads.dim**-0.5 * _LOG2_E, "table_stride": step.table.stride(0)}
    model = {"q_heads": heads.query, "dim": heads.dim, "block_d": width}
    blocks = {"size": size, "span": step.span, "window": step.window or 0}
    run = _run(data_of(k_cache), tile.block_n)
    tiles = {"block_m": tile.block_m, "block_n": tile.block_n, "run": run, "fp8": is_fp8(k_cache)}
    spans = Launch(
        _attend,
        (programs,),
        {**tensors, **rows, **work, "group_tables": lists.group_tables, **parts, **scalars}
        | cache_arguments(k_cache, v_cache),
        {**model, "kv_heads": heads.kv, **blocks, **tiles},
        tile.num_warps,
        tile.num_stages,
    )
    merge = Launch(
        _merge_spans,
        (programs,),
        {"out": out, "counts": lists.counts, "merges": lists.merges, **parts},
        {**model, "block_h": min(16, pad(heads.query))},
    )
    return spans, merge


def _run(k_cache: Tensor, block_n: int) -> int:
    """Slots of a block that the compiler may take as lying side by side and aligned; 1 for none."""
    run = min(k_cache.shape[-1], block_n)
    side_by_side = k_cache.stride(-1) == 1 and k_cache.stride(0) % run == 0
    return run if side_by_side else 1
