"""The torch backend: `backend.Kernels` on the twins of `reference.py`.

Owns the choice between packed and tiled products, and what its probes found; keeps nothing else
from one step to the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefixcache_kernels import reference
from prefixcache_kernels.backend import (
    Cache,
    DecoderLayers,
    Heads,
    Layer,
    Linear,
    QuantizedCache,
    Weight,
)
from prefixcache_kernels.checks import FLOATS, Reach, check, check_copies, check_work, require
from prefixcache_kernels.layers import LayerByLayer
from prefixcache_kernels.work import SPAN, Int64, StepWork


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step, ready for the twins: rotations of each row, places to write, spans a window."""

    heads: Heads
    cos: Tensor  # [T, 1, D]
    sin: Tensor  # [T, 1, D], first half negated
    write_rows: Tensor | None  # int64 [W], rows that are written, or None for all
    blocks: Tensor  # int64 [W]
    offsets: Tensor  # int64 [W]
    spans: dict[int | None, reference.SpanPlan]
    tokens: int
    block_size: int
    reach: Reach


class TorchKernels:
    """Plain torch on any device; row-independent bits on the CPU in float32.

    Each product is probed on its real shape; where its rows turn out to depend on each other, it
    runs in tiles of a fixed number of rows instead. `fixed_tiles` forces that (for tests).
    """

    name = "torch"
    span = SPAN
    run_rows: int | None = None

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, fixed_tiles: bool = False
    ) -> None:
        self.same_bits = device.type == "cpu"
        self._device = device
        self._dtype = dtype
        self._fixed_tiles = fixed_tiles
        self._packs = device.type == "cpu" and dtype == torch.float32 and torch._C._has_mkldnn
        self._probed: dict[tuple[int, ...], bool] = {}

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        """See `Kernels.linear`."""
        parts = [w.dense() for w in weights]
        dense = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self._device.type != "cpu":
            return reference.PlainLinear(dense, bias)
        if self._packs and not self._fixed_tiles:
            packed = reference.PackedLinear(dense, bias)
            if self._probe(dense.shape, lambda: reference.row_independent(packed, self._dtype)):
                return packed
        return reference.TiledLinear(dense, bias)

    def embedding(self, weight: Weight, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """See `Kernels.embedding`."""
        rows = weight.dense()
        return lambda ids: rows[ids]

    def layers(self, layers: Sequence[Layer], final_norm: Tensor, eps: float) -> DecoderLayers:
        """See `Kernels.layers`."""
        return LayerByLayer(self, layers, final_norm, eps)

    def _probe(self, shape: tuple[int, ...], probe: Callable[[], bool]) -> bool:
        if shape not in self._probed:
            self._probed[shape] = probe()
        return self._probed[shape]

    def _attention_tile(self, heads: Heads) -> int | None:
        """Query rows of an attention product: None where any number gives the same bits."""
        group = heads.query // heads.kv
        if self._device.type != "cpu":
            return None
        free = not self._fixed_tiles and self._probe(
            (heads.dim, group, 0), lambda: reference.products_row_independent(heads.dim, group)
        )
        return None if free else reference.TILE_ROWS

    def prepare(self, work: StepWork, heads: Heads, rope_table: Tensor) -> TorchPlan:
        """See `Kernels.prepare`."""
        reach = check_work(work, self.span)
        check(rope_table, "rope_table", (None, heads.dim), (torch.float32,), rope_table.device)
        reach.require_turned(rope_table)
        positions = torch.from_numpy(work.positions).to(self._device, torch.int64).clamp_min_(0)
        cos, sin = rope_table[positions].to(self._dtype).unsqueeze(1).chunk(2, -1)  # [T, 1, D/2]
        slots = torch.from_numpy(work.slots).to(self._device)
        rows = None
        if (work.slots < 0).any():
            rows = torch.nonzero(slots >= 0).squeeze(1)
            slots = slots[rows]
        spans = {
            window: reference.plan_spans(
                work,
                groups,
                kv_heads=heads.kv,
                group=heads.query // heads.kv,
                head_dim=heads.dim,
                device=self._device,
                tile=self._attention_tile(heads),
            )
            for window, groups in work.groups.items()
        }
        return TorchPlan(
            heads,
            torch.cat((cos, cos), -1),
            torch.cat((-sin, sin), -1),
            rows,
            slots // work.block_size,
            slots % work.block_size,
            spans,
            len(work.positions),
            work.block_size,
            reach,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        check(weight, "weight", (x.shape[-1],), (x.dtype,), x.device)
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        check(residual, "residual", tuple(x.shape), (x.dtype,), x.device)
        check(weight, "weight", (x.shape[-1],), (x.dtype,), x.device)
        return reference.add_rms_norm(x, residual, weight, eps)

    def rope_write_kv(
        self,
        qkv: Tensor,
        plan: TorchPlan,
        k_cache: Cache,
        v_cache: Cache,
        qk_norm: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """See `Kernels.rope_write_kv`."""
        heads, tokens = plan.heads, plan.tokens
        width = (heads.query + 2 * heads.kv) * heads.dim
        check(qkv, "qkv", (tokens, width), FLOATS, qkv.device)
        require(qkv.is_contiguous(), "qkv", "must be contiguous")
        self._check_caches(plan, k_cache, v_cache, qkv)
        plan.reach.require_written(k_cache.shape[0], plan.block_size)
        for weight in qk_norm[:2] if qk_norm else ():
            check(weight, "qk_norm", (heads.dim,), (qkv.dtype,), qkv.device)
        states = qkv.view(tokens, heads.query + 2 * heads.kv, heads.dim)
        qk, v = torch.split(states, [heads.query + heads.kv, heads.kv], 1)  # [T, heads, D]
        if qk_norm is not None:
            q_weight, k_weight, eps = qk_norm
            q = reference.rms_norm(qk[:, : heads.query], q_weight, eps)
            qk = torch.cat((q, reference.rms_norm(qk[:, heads.query :], k_weight, eps)), 1)
        q, k = torch.split(reference.rope(qk, plan.cos, plan.sin), [heads.query, heads.kv], 1)
        if plan.write_rows is not None:
            k, v = k[plan.write_rows], v[plan.write_rows]
        reference.write_kv(k, v, k_cache, v_cache, plan.blocks, plan.offsets)
        return q.reshape(tokens, heads.query * heads.dim)

    def paged_attention(
        self, q: Tensor, k_cache: Cache, v_cache: Cache, plan: TorchPlan, window: int | None
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        check(q, "q", (plan.tokens, plan.heads.query * plan.heads.dim), FLOATS, q.device)
        self._check_caches(plan, k_cache, v_cache, q)
        plan.reach.require_read(k_cache.shape[0])
        require(window in plan.spans, "window", f"{window} was not planned for")
        scale = plan.heads.dim**-0.5
        return reference.paged_attention(q, k_cache, v_cache, plan.spans[window], scale)

    @staticmethod
    def _check_caches(plan: TorchPlan, k_cache: Cache, v_cache: Cache, rows: Tensor) -> None:
        """Check shapes and devices of both; their dtype may be any that torch widens."""
        blocks, kv, dim, size = k_cache.shape[0], plan.heads.kv, plan.heads.dim, plan.block_size
        for cache, name, shape in (
            (k_cache, "k_cache", (blocks, kv, dim, size)),
            (v_cache, "v_cache", (blocks, kv, size, dim)),
        ):
            data = cache.data if isinstance(cache, QuantizedCache) else cache
            require(data.shape == shape, name, f"shape must be {shape}, not {tuple(data.shape)}")
            where = rows.device
            require(data.device == where, name, f"must be on {where}, not on {data.device}")

    def copy_blocks(self, caches: Sequence[Tensor], sources: Int64, targets: Int64) -> None:
        """See `Kernels.copy_blocks`."""
        for cache in caches:
            check_copies(sources, targets, cache.shape[1])
        ids = (torch.from_numpy(ids).to(self._device) for ids in (sources, targets))
        reference.copy_blocks([layer for cache in caches for layer in cache], *ids)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        require(gate_up.shape[-1] % 2 == 0, "gate_up", "width must be even")
        return reference.silu_mul(gate_up)
