"""The Triton backend: `backend.Kernels` on the kernels of this folder.

Owns the choice of tiles for a device; keeps nothing from one step to the next.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from prefixcache_kernels import reference
from prefixcache_kernels.backend import Cache, DecoderLayers, Heads, Layer, Linear, Weight
from prefixcache_kernels.checks import FLOATS, require
from prefixcache_kernels.layers import LayerByLayer
from prefixcache_kernels.triton_backend import rows, write_kv
from prefixcache_kernels.triton_backend.attention_work import Policy
from prefixcache_kernels.triton_backend.copy_blocks import copy_blocks
from prefixcache_kernels.triton_backend.launch import interpreted, persistent_programs
from prefixcache_kernels.triton_backend.linear import InvariantLinear
from prefixcache_kernels.triton_backend.paged_attention import paged_attention, tile_of
from prefixcache_kernels.triton_backend.plan import Capacity, PlanBuffers, TritonPlan
from prefixcache_kernels.work import SPAN, Int64, StepWork

GPU_SPAN = 512
"""Tokens in a span on a GPU: longer ones write fewer partials, shorter ones keep a small batch of
short sequences on more multiprocessors. Chosen by arithmetic, not by measurement."""


class TritonKernels:
    """Triton on CUDA and ROCm devices; on the CPU in Triton's interpreter, for tests.

    With `batch_invariant` linear layers run in one tile for each shape, as attention always does;
    without it they are the device library's, whose bits change with the number of rows.
    """

    name = "triton"
    run_rows: int | None = 16

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_invariant: bool = True,
        span: int | None = None,
    ) -> None:
        """span: tokens in a span; `GPU_SPAN` on a GPU by default.

        Raises:
            ValueError: a device or dtype that the kernels do not serve.
        """
        if device.type != "cuda" and not interpreted():
            raise ValueError(
                f"Triton's kernels need a GPU, not {device.type}: choose another "
                "attention_backend, or set TRITON_INTERPRET=1 before the start to test them "
                "slowly in its interpreter"
            )
        require(dtype in FLOATS, "dtype", f"{dtype} is not served")
        self.batch_invariant = batch_invariant
        self.span = span or (GPU_SPAN if device.type == "cuda" else SPAN)
        self.same_bits = batch_invariant and not interpreted()  # the interpreter's are numpy's
        self._device = device
        self._dtype = dtype
        self._shared_kib = shared_kib(device)

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        """See `Kernels.linear`."""
        parts = [w.dense() for w in weights]
        dense = torch.cat(parts) if len(parts) > 1 else parts[0]
        if self.batch_invariant:
            return InvariantLinear(dense, bias, self._shared_kib)
        return reference.PlainLinear(dense, bias)

    def embedding(self, weight: Weight, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """See `Kernels.embedding`."""
        dense = (InvariantLinear, reference.PlainLinear)
        table = tied.weight if isinstance(tied, dense) else weight.dense()
        return lambda ids: table[ids]

    def layers(self, layers: Sequence[Layer], final_norm: Tensor, eps: float) -> DecoderLayers:
        """See `Kernels.layers`."""
        return LayerByLayer(self, layers, final_norm, eps)

    def policy(self, heads: Heads) -> Policy:
        """Return how a step is cut into items; no result depends on it."""
        tile = tile_of(heads, self._dtype, self._shared_kib)
        busy = -(-persistent_programs(self._device) // heads.kv)
        slots = (256 << 20) // (4 * heads.query * heads.dim)  # 256 MiB of partials
        return Policy(tile.rows(heads.query // heads.kv), min_runs=busy, max_slots=slots)

    def prepare(self, work: StepWork, heads: Heads, rope_table: Tensor) -> TritonPlan:
        """See `Kernels.prepare`.

        Raises:
            ValueError: naming the field of `work` that does not hold together.
        """
        policy = self.policy(heads)
        return TritonPlan.of(work, heads=heads, angles=rope_table, span=self.span, policy=policy)

    def decode_capacity(self, rows: int, blocks: int, block_size: int) -> Capacity:
        """Room for any step of one row for each of `rows` sequences of at most `blocks` blocks."""
        return Capacity.decode(rows, blocks, block_size, self.span)

    def reserve(
        self,
        capacity: Capacity,
        *,
        heads: Heads,
        rope_table: Tensor,
        windows: Iterable[int | None],
        block_size: int,
        buffers: PlanBuffers | None = None,
    ) -> TritonPlan:
        """Return an empty plan whose buffers stay where they are, for a graph to be captured over.

        `TritonPlan.load` puts a step into it; kernels launched with it then do that step's work.
        Plans that take turns may share `buffers`, as large as the largest of them needs.
        """
        return TritonPlan(
            capacity,
            heads=heads,
            angles=rope_table,
            windows=windows,
            block_size=block_size,
            span=self.span,
            policy=self.policy(heads),
            buffers=buffers,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        return rows.add_rms_norm(x, residual, weight, eps)

    def rope_write_kv(
        self,
        qkv: Tensor,
        plan: TritonPlan,
        k_cache: Cache,
        v_cache: Cache,
        qk_norm: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """See `Kernels.rope_write_kv`.

        Raises:
            ValueError: naming the argument; among others, a slot beyond the cache, or a position
                beyond the rope table.
        """
        blocks, size = k_cache.shape[0], k_cache.shape[-1]
        require(size == plan.block_size, "k_cache", f"blocks must have {plan.block_size} slots")
        plan.reach.require_written(blocks, size)
        plan.reach.require_turned(plan.angles)
        return write_kv.rope_write_kv(
            qkv, k_cache, v_cache, plan.positions, plan.slots, plan.angles, plan.heads, qk_norm
        )

    def paged_attention(
        self, q: Tensor, k_cache: Cache, v_cache: Cache, plan: TritonPlan, window: int | None
    ) -> Tensor:
        """See `Kernels.paged_attention`."""
        tile = tile_of(plan.heads, q.dtype, self._shared_kib, write_kv.is_fp8(k_cache))
        return paged_attention(q, k_cache, v_cache, plan.attention(window), tile)

    def copy_blocks(self, caches: Sequence[Tensor], sources: Int64, targets: Int64) -> None:
        """See `Kernels.copy_blocks`."""
        copy_blocks(caches, sources, targets)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        return rows.silu_mul(gate_up)


def shared_kib(device: torch.device) -> int:
    """Shared memory that one program may have on a device, in KiB."""
    if device.type != "cuda":
        return 227
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", 64 << 10)  # not told on ROCm
    return int(limit) >> 10
