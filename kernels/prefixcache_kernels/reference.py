"""The torch twin of every kernel: small, plain, and the definition of what the others compute.

Owns no state and no layout of its own. Each function works on any device and dtype that torch has;
on the CPU in float32 the results of one row do not depend on the other rows (`selftest` checks the
operations that this rests on: products at few rows, `exp`, sums along a fixed width).

Layouts: K cache [blocks, kv_heads, head_dim, block_size], V cache [blocks, kv_heads, block_size,
head_dim], any strides, either may be quantised; rows of several heads are [T, heads · head_dim],
contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels.backend import Cache
from prefixcache_kernels.work import SPAN, Int64, SpanGroups, StepWork

TILE_ROWS = 16
"""Rows of the fixed tile in which a product runs whose bits are not known to be row-independent."""

ROW_STEP = 4
"""Query rows of a group are padded to a multiple of this, so that few shapes occur."""

_PROBE_ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130)
"""Numbers of rows that the probes compare, around the tile sizes of known libraries."""

GREATEST_E4M3 = 448.0
LEAST_ABSOLUTE = 1e-20
"""A quantised row's greatest value is taken for this at least, so that no scale is 0."""

LOWEST = -3.0e38
"""Stands for the maximum of a row that sees nothing, where -inf - -inf would be NaN."""


# --- linear ---------------------------------------------------------------------------------------


class PackedLinear:
    """y = x Wᵀ + b on a oneDNN-packed float32 weight, at least 2 rows at a time.

    oneDNN takes another route for a single row; from 2 rows on a row's bits were the same for every
    number of rows and threads tried. The start-up self-test repeats the check on the real shapes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: float32 [out, in]; bias: float32 [out] or None."""
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [M, in] → [M, out]."""
        rows = x.shape[0]
        if rows == 1:
            x = x.expand(2, -1)
        run = torch.ops.mkldnn._linear_pointwise
        y: Tensor = run(x, self._packed, self._bias, "none", [], "")  # [M, out]
        return y[:rows]


class TiledLinear:
    """y = x Wᵀ + b in tiles of exactly TILE_ROWS rows: one shape, so one order of arithmetic.

    The fallback where packed weights are not offered or not row-independent; slow for prefill.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out] or None."""
        self.out_features, self.in_features = weight.shape
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] → [M, out]."""
        rows = x.shape[0]
        padded = -(-rows // TILE_ROWS) * TILE_ROWS
        if padded != rows:
            x = torch.cat((x, x.new_zeros(padded - rows, x.shape[1])))
        tiles = [torch.nn.functional.linear(t, self._weight) for t in torch.split(x, TILE_ROWS)]
        y = torch.cat(tiles)[:rows] if tiles else x.new_zeros(0, self.out_features)
        return y if self._bias is None else y.add_(self._bias)


class PlainLinear:
    """y = x Wᵀ + b as the device's library does it, with no promise about bits (CUDA)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out] or None."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] → [M, out]."""
        return torch.nn.functional.linear(x, self.weight, self._bias)


def row_independent(linear: PackedLinear | TiledLinear, dtype: torch.dtype) -> bool:
    """Whether a row's bits are the same for numbers of rows on both sides of tile boundaries."""
    x = _noise(_PROBE_ROWS[-1], linear.in_features).to(dtype)
    whole = linear(x)
    return all(
        torch.equal(linear(x[first : first + rows]), whole[first : first + rows])
        for rows in _PROBE_ROWS[:-1]
        for first in {0, _PROBE_ROWS[-1] - rows}
    )


def products_row_independent(head_dim: int, group: int) -> bool:
    """Whether the attention's batched products give the same bits for any number of rows."""
    x, y = _noise(2 * _PROBE_ROWS[-1] * ROW_STEP * group, head_dim), _noise(2 * SPAN, head_dim)
    x, y = x.view(2, -1, head_dim), y.view(2, SPAN, head_dim)
    scores = _bmm(x, y.mT.contiguous())  # [2, rows, SPAN]
    values = _bmm(scores, y)
    for units in (1, 2, 3, 5, 8, 21, 33):
        rows = units * ROW_STEP * group
        for batch in (x[:1, :rows], x[:, -rows:]):
            some = _bmm(batch.contiguous(), y[: len(batch)].mT.contiguous())
            some_values = _bmm(some, y[: len(batch)])
            first = 0 if len(batch) == 1 else x.shape[1] - rows
            cut = (slice(len(batch)), slice(first, first + rows))
            if not (torch.equal(some, scores[cut]) and torch.equal(some_values, values[cut])):
                return False
    return True


def _bmm(x: Tensor, y: Tensor) -> Tensor:
    """Batched products, [n, a, b] by [n, b, c], at least two at a time.

    A single one is cut among threads inside, and has other bits with 3 threads than with 1.
    """
    if len(x) != 1:
        return torch.bmm(x, y)
    return torch.bmm(x.expand(2, -1, -1), y.expand(2, -1, -1))[:1]


def _noise(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width))


# --- row-wise operations --------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight along the last dimension (arXiv 1910.07467).

    x: [..., width]; weight: [width]. Computed in float32, returned in x's dtype.
    """
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.mul(wide).mean(-1, keepdim=True).add_(eps))
    return wide.mul_(scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place, and return the RMSNorm of the sum. All [T, width]."""
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)) · up for gate_up = [gate | up], [T, 2 · width] → [T, width].

    Spelled with `exp`: torch's own `silu` gives other bits in the tail of a tensor.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    y = wide.div(wide.neg().exp_().add_(1.0)).to(gate.dtype)
    return y.mul_(up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by the row's angle (RoFormer, arXiv 2104.09864).

    x: [T, heads, D]; cos: [T, 1, D]; sin: [T, 1, D] with the first half negated.
    """
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1)
    return x.mul(cos).add_(swapped.mul_(sin))


# --- KV cache -------------------------------------------------------------------------------------


def write_kv(  # noqa: PLR0917 (arrays of one scatter)
    k: Tensor, v: Tensor, k_cache: Cache, v_cache: Cache, blocks: Tensor, offsets: Tensor
) -> None:
    """Scatter K and V, [T, kv_heads, D] each, to (block, offset), int64 [T] each."""
    for x, cache, by_token in ((k, k_cache, (0, 3, 1, 2)), (v, v_cache, (0, 2, 1, 3))):
        if isinstance(cache, Tensor):
            cache.permute(by_token).index_put_((blocks, offsets), x.to(cache.dtype))
            continue
        codes, scales = quantize(x)
        place = cache.data.view(torch.uint8).permute(by_token)  # torch moves no float8
        place.index_put_((blocks, offsets), codes.view(torch.uint8))
        cache.scales.permute(0, 2, 1).index_put_((blocks, offsets), scales)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / scale in float8 (e4m3) and the scales: the greatest |x| of a row becomes 448.

    x: [..., D]. Returns float8_e4m3fn [..., D] and float32 [...].
    """
    wide = x.float()
    scales = wide.abs().amax(-1).clamp_min(LEAST_ABSOLUTE).mul(1 / GREATEST_E4M3)
    return wide.div(scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def _gather(cache: Cache, blocks: Tensor, token_dim: int) -> Tensor:
    """Blocks of a cache, [n, kv_heads, ...] in its own dtype, or float32 where it is quantised.

    token_dim: of the cache's dimensions, the one of the tokens in a block.
    """
    if isinstance(cache, Tensor):
        return cache.index_select(0, blocks)
    codes = cache.data.view(torch.uint8).index_select(0, blocks).view(torch.float8_e4m3fn)
    scales = cache.scales.index_select(0, blocks)  # [n, kv_heads, size]
    return codes.float().mul_(scales.unsqueeze(2 if token_dim == 3 else 3))


def copy_blocks(caches: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy blocks within each cache, [blocks, ...]; sources are read before any target is written.

    sources, targets: int64 [n]; a target occurs once.
    """
    for cache in caches:
        cache.index_copy_(0, targets, cache.index_select(0, sources))


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpanClass:
    """Groups with the same padded number of rows: one batch of products.

    blocks: int64 [n · SPAN / block_size]; rows: int64 [n, Q] (padding repeats row 0);
    target: int64 [n · Q], row of the partials (padding goes to the spare last one);
    hidden: bool [n, Q, SPAN], key not visible, or None where every key is; dead: bool [n, SPAN],
    key visible to no row of the group: its V may never have been written.
    """

    blocks: Tensor
    rows: Tensor
    target: Tensor
    hidden: Tensor | None
    dead: Tensor | None


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Attention work of one step for one window, and the buffers of its partials."""

    classes: tuple[SpanClass, ...]
    max_spans: int
    maxima: Tensor  # [max_spans · T + 1, kv_heads, group]
    sums: Tensor  # [max_spans · T + 1, kv_heads, group]
    values: Tensor  # [max_spans · T + 1, kv_heads, group, D]


def plan_spans(
    work: StepWork,
    groups: SpanGroups,
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    device: torch.device,
    tile: int | None = None,
) -> SpanPlan:
    """Turn groups into batches of equal shape; once a step, for all layers with this window.

    Args:
        work: the step; groups: its work for one window.
        kv_heads, group, head_dim: heads of K, query heads a head of K, their size.
        device: where the caches are.
        tile: query rows of every product, where products of other numbers of rows have other bits;
            None takes as many rows as a group has.
    """
    counts = np.diff(groups.start)
    owner = np.repeat(np.arange(len(counts)), counts)  # group of each entry
    position = work.positions[groups.rows]  # [entries]
    low = groups.span[owner] * SPAN
    whole = position >= low + (SPAN - 1)
    if groups.window is not None:
        whole &= position - groups.window < low
    # Split each group in the rows that see the whole span, which need no mask, and the others.
    part, part_of, part_rows = np.unique(owner * 2 + whole, return_inverse=True, return_counts=True)
    pieces = np.split(np.argsort(part_of, kind="stable"), np.cumsum(part_rows)[:-1])
    if tile is not None:
        cuts = [np.arange(tile, len(piece), tile) for piece in pieces]
        part = np.repeat(part, [len(cut) + 1 for cut in cuts])
        pieces = [p for piece, cut in zip(pieces, cuts, strict=True) for p in np.split(piece, cut)]
    step = tile or ROW_STEP
    padded = np.array([-(-len(piece) // step) * step for piece in pieces], np.int64)
    classes = []
    for key in np.unique(padded * 2 + part % 2) if len(part) else ():
        members = np.flatnonzero(padded * 2 + part % 2 == key)
        of, entries = part[members] // 2, [pieces[m] for m in members]
        arrays = _class_arrays(work, groups, of, entries, (len(members), int(key) // 2))
        classes.append(_span_class(groups, of, arrays, bool(key % 2), device))
    length = groups.max_spans * len(work.positions) + 1
    return SpanPlan(
        tuple(classes),
        groups.max_spans,
        torch.full((length, kv_heads, group), -torch.inf, device=device),
        torch.zeros((length, kv_heads, group), device=device),
        torch.zeros((length, kv_heads, group, head_dim), device=device),
    )


@dataclass(frozen=True, slots=True)
class _ClassArrays:
    """The padded rows of a class: their targets, positions (-1 for padding) and block ids."""

    rows: Int64  # [n, Q]
    target: Int64  # [n, Q]
    position: Int64  # [n, Q]
    blocks: Int64  # [n, SPAN / block_size]


def _class_arrays(
    work: StepWork,
    groups: SpanGroups,
    members: Int64,
    entries: list[Int64],
    shape: tuple[int, int],
) -> _ClassArrays:
    tokens = len(work.positions)
    rows = np.zeros(shape, np.int64)
    target = np.full(shape, groups.max_spans * tokens, np.int64)
    position = np.full(shape, -1, np.int64)
    for i, entry in enumerate(entries):
        row = groups.rows[entry]
        rows[i, : len(row)] = row
        span = groups.span[members[i]] - groups.first_span[row]
        target[i, : len(row)] = span.astype(np.int64) * tokens + row
        position[i, : len(row)] = work.positions[row]
    run = SPAN // work.block_size
    columns = groups.span[members][:, None] * run + np.arange(run)
    blocks = work.block_table[groups.table_row[members][:, None], columns].astype(np.int64)
    return _ClassArrays(rows, target, position, blocks)


def _span_class(
    groups: SpanGroups, members: Int64, arrays: _ClassArrays, whole: bool, device: torch.device
) -> SpanClass:
    hidden = dead = None
    if not whole:
        key = groups.span[members][:, None] * SPAN + np.arange(SPAN)  # [n, SPAN]
        position = arrays.position[:, :, None]
        seen = key[:, None] <= position  # [n, Q, SPAN]
        if groups.window is not None:
            seen &= key[:, None] > position - groups.window
        hidden = torch.from_numpy(~seen).to(device)
        dead = torch.from_numpy(~seen.any(1)).to(device)
    return SpanClass(
        torch.from_numpy(arrays.blocks.reshape(-1)).to(device),
        torch.from_numpy(arrays.rows).to(device),
        torch.from_numpy(arrays.target.reshape(-1)).to(device),
        hidden,
        dead,
    )


def paged_attention(
    q: Tensor, k_cache: Cache, v_cache: Cache, plan: SpanPlan, scale: float
) -> Tensor:
    """Softmax(scale · Q Kᵀ) V over the blocks of each row's sequence; causal, windowed.

    q: [T, heads · D]; caches as in the module's docstring; plan: of `plan_spans`. Returns
    [T, heads · D]; rows that see nothing give zeros. Partial maxima, sums and values of each span
    are merged in span order (FlashDecoding, arXiv 2311.01282, with fixed cuts).
    """
    tokens = q.shape[0]
    kv_heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // (kv_heads * head_dim)
    scaled = q.float().mul(scale).view(tokens, kv_heads, group, head_dim)
    for batch in plan.classes:
        _span_partials(scaled, k_cache, v_cache, batch, plan)
    return _merge_spans(plan, tokens).to(q.dtype)


def _span_partials(
    q: Tensor, k_cache: Cache, v_cache: Cache, batch: SpanClass, plan: SpanPlan
) -> None:
    n, padded = batch.rows.shape
    kv_heads, group, dim = q.shape[1:]
    k = _gather(k_cache, batch.blocks, 3).view(n, -1, kv_heads, dim, k_cache.shape[-1])
    k = k.permute(0, 2, 3, 1, 4).contiguous().view(n * kv_heads, dim, SPAN).float()
    v = _gather(v_cache, batch.blocks, 2).view(n, -1, kv_heads, v_cache.shape[-2], dim)
    v = v.permute(0, 2, 1, 3, 4).contiguous().view(n, kv_heads, SPAN, dim).float()
    rows = q[batch.rows].permute(0, 2, 1, 3, 4).reshape(n * kv_heads, padded * group, dim)
    scores = _bmm(rows, k)  # [n · kv, Q · G, SPAN]
    if batch.hidden is not None and batch.dead is not None:
        grid = scores.view(n, kv_heads, padded, group, SPAN)
        grid.masked_fill_(batch.hidden[:, None, :, None, :], -torch.inf)
        v.masked_fill_(batch.dead[:, None, :, None], 0.0)
    maxima = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maxima.clamp_min(LOWEST)).exp_()
    sums = weights.sum(-1)
    values = _bmm(weights, v.view(n * kv_heads, SPAN, dim))  # [n · kv, Q · G, D]

    def by_row(x: Tensor) -> Tensor:
        return x.view(n, kv_heads, padded, group, -1).transpose(1, 2).flatten(0, 1)

    plan.maxima.index_copy_(0, batch.target, by_row(maxima).squeeze(-1))
    plan.sums.index_copy_(0, batch.target, by_row(sums).squeeze(-1))
    plan.values.index_copy_(0, batch.target, by_row(values))


def _merge_spans(plan: SpanPlan, tokens: int) -> Tensor:
    spans = plan.max_spans
    kv_heads, group, dim = plan.values.shape[1:]
    if not spans or not tokens:
        return plan.values.new_zeros(tokens, kv_heads * group * dim)
    maxima = plan.maxima[:-1].view(spans, tokens, kv_heads, group)
    factor = (maxima - maxima.amax(0).clamp_min_(LOWEST)).exp_()
    sums = plan.sums[:-1].view(spans, tokens, kv_heads, group).mul(factor)
    values = plan.values[:-1].view(spans, tokens, kv_heads, group, dim)
    values = values.mul_(factor.unsqueeze(-1))
    # One addition a span, in order: a reduction of torch would regroup them with their number.
    total, out = sums[0], values[0].clone()
    for j in range(1, spans):
        total = total + sums[j]
        out.add_(values[j])
    out.div_(total.clamp_min_(1e-30).unsqueeze(-1))  # a row that sees a key has total ≥ 1
    return out.view(tokens, kv_heads * group * dim)
