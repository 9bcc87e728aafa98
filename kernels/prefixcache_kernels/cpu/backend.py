"""The CPU backend: `backend.Kernels` on the compiled kernels, in float32 unless asked otherwise.

Owns the packed weights and scratch memory that grows to the largest step; so one thread at a time
may use it (the kernels themselves take torch's number of threads). Rows are independent by
construction: see the C++ files.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from prefixcache_kernels import reference
from prefixcache_kernels.backend import DecoderLayers, Heads, Layer, Linear, Weight
from prefixcache_kernels.checks import check, check_copies, require
from prefixcache_kernels.cpu.layers import CpuLayers, head_norms
from prefixcache_kernels.cpu.library import Library
from prefixcache_kernels.cpu.linear import CpuLinear, Scratch, require_rows, require_vector
from prefixcache_kernels.cpu.plan import CpuPlan, make_plan
from prefixcache_kernels.work import SPAN, Int64, StepWork

RUN_ROWS = 5
"""A sequence with so many rows is attended row tile by row tile; with fewer, it may share spans."""


class CpuKernels:
    """Compiled kernels for float32 on the CPU."""

    name = "cpu"
    span = SPAN
    same_bits = True
    run_rows: int | None = RUN_ROWS

    def __init__(self, library: Library, *, int8: bool = False) -> None:
        """int8: linear layers quantise their input where the weights' format allows it."""
        self._library = library
        self._int8 = int8
        self._scratch = Scratch()

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> CpuLinear:
        """See `Kernels.linear`."""
        return CpuLinear(self._library, self._scratch, weights, bias, int8=self._int8)

    def embedding(self, weight: Weight, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """See `Kernels.embedding`; a tied output layer's packed rows serve both."""
        layer = tied if isinstance(tied, CpuLinear) else self.linear([weight], None)
        return layer.rows

    def layers(self, layers: Sequence[Layer], final_norm: Tensor, eps: float) -> DecoderLayers:
        """See `Kernels.layers`: all of them in one call."""
        return CpuLayers(self._library, layers, final_norm, eps)

    def prepare(self, work: StepWork, heads: Heads, rope_table: Tensor) -> CpuPlan:
        """See `Kernels.prepare`."""
        return make_plan(self._library, work, heads, rope_table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        check(residual, "residual", tuple(x.shape), (torch.float32,), x.device)
        require_rows(residual, "residual")
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        require_rows(x, "x")
        require_vector(weight, "weight", x.shape[-1])
        out = torch.empty_like(x)
        self._library.rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            torch.get_num_threads(),
        )
        return out

    def copy_blocks(self, caches: Sequence[Tensor], sources: Int64, targets: Int64) -> None:
        """See `Kernels.copy_blocks`."""
        for cache in caches:
            check_copies(sources, targets, cache.shape[1])
        ids = torch.from_numpy(sources), torch.from_numpy(targets)
        reference.copy_blocks([layer for cache in caches for layer in cache], *ids)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        require_rows(gate_up, "gate_up")
        require(gate_up.shape[1] % 2 == 0, "gate_up", "width must be even")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._library.silu_mul(
            gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()
        )
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        plan: CpuPlan,
        k_cache: Tensor,
        v_cache: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """See `Kernels.rope_write_kv`; rotates in place and returns a view of qkv."""
        heads = plan.heads
        width = (heads.query + 2 * heads.kv) * heads.dim
        check(qkv, "qkv", (plan.tokens, width), (torch.float32,), torch.device("cpu"))
        require_rows(qkv, "qkv")
        shape = plan.cache_shape(k_cache, v_cache)
        plan.reach.require_written(len(k_cache), plan.block_size)
        plan.reach.require_turned(plan.angles)
        self._library.rope_write_kv(
            qkv.data_ptr(),
            plan.tokens,
            plan.rope,
            shape,
            head_norms(qk_norm, heads.dim),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            torch.get_num_threads(),
        )
        return qkv[:, : heads.query * heads.dim]

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuPlan, window: int | None
    ) -> Tensor:
        """See `Kernels.paged_attention`; rows of q may be apart, as in a view of qkv."""
        width = plan.heads.query * plan.heads.dim
        check(q, "q", (plan.tokens, width), (torch.float32,), torch.device("cpu"))
        shape = plan.cache_shape(k_cache, v_cache)
        plan.reach.require_read(len(k_cache))
        require(window in plan.spans, "window", f"{window} was not planned for")
        spans = plan.spans[window]
        spans.work.partials = self._scratch.pointer(spans.partials)
        out = torch.empty(plan.tokens, width)
        self._library.attention(
            shape,
            spans.work,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
