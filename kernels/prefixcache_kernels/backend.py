"""What a backend offers to the decoder.

Owns the protocol; computes nothing. A backend turns a step's work into a plan of its
own once a step (`prepare`); the other operations then take that plan for every layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefixcache_kernels.work import Int64, StepWork


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] of a linear layer, dense or in a quantised format.

    dense: reads it as a tensor [out, in] in the model's dtype, dequantised, on its device.
    format: how it is stored: "F32", "F16", "BF16", or a GGUF block format such as "Q4_1".
    shape: (out, in).
    raw: uint8 [out, bytes a row] in the quantised format, or None where it is not quantised.
    """

    dense: Callable[[], Tensor]
    format: str
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8] | None = None


class Linear(Protocol):
    """y = x Wᵀ + b: [M, in_features] → [M, out_features]; a row's bits do not depend on M."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the rows of x."""
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model: query heads, K/V heads (a divisor), and their size."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. `window` is None where the layer sees everything.

    qk_norm: weights of the norms of Q and K heads and their eps (Qwen3), or None.
    """

    input_norm: Tensor
    qkv: Linear
    qk_norm: tuple[Tensor, Tensor, float] | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """K or V of a layer in float8 (e4m3), each token and head with a scale of its own.

    A token's value is data · scale; the greatest one of a head is stored as 448, the greatest e4m3.
    So what is stored depends on the token alone, not on what is written beside it.

    data: float8_e4m3fn, shaped as the cache. scales: float32 [blocks, kv_heads, size].
    """

    data: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The cache's."""
        return self.data.shape


Cache = Tensor | QuantizedCache
"""K [blocks, kv_heads, D, size] or V [blocks, kv_heads, size, D] of a layer. Not every backend
serves quantised ones; one that does not takes a Tensor, so the protocol says Any."""


class DecoderLayers(Protocol):
    """All layers of a decoder, from embeddings to the final norm."""

    def __call__(
        self,
        residual: Tensor,
        plan: Any,
        caches: Sequence[tuple[Any, Any]],
        rows: Tensor | None,
    ) -> Tensor:
        """Run a step.

        residual: embeddings [T, hidden], which are overwritten. plan: of `Kernels.prepare`.
        caches: K and V of each layer, `Cache`s. rows: int64 [R], those whose hidden states are
        wanted, so that the last layer leaves out the others; None wants all. Returns
        [R or T, hidden].
        """
        ...


class Kernels(Protocol):
    """The operations of a decoder layer. Rows are [T, width], contiguous, in the model's dtype.

    A wrong shape, dtype, device or stride, and a block id, slot or position out of range, raise
    ValueError naming the argument, before anything is written.
    """

    name: str
    span: int
    """Tokens in a span, for the planner; a constant of a backend on a device."""
    same_bits: bool
    """Whether a row's bits are made not to depend on the rows beside it."""
    run_rows: int | None
    """Sequences with so many rows in a step are planned as runs, not as groups; None: none are."""

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> Linear:
        """One linear layer out of matrices with the same input, outputs side by side."""
        ...

    def embedding(self, weight: Weight, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """Look-up of rows: int64 [n] → [n, in]. tied: the output layer, if it has this weight."""
        ...

    def layers(self, layers: Sequence[Layer], final_norm: Tensor, eps: float) -> DecoderLayers:
        """A decoder's layers on linear layers of this backend. eps: of all norms but qk_norm."""
        ...

    def prepare(self, work: StepWork, heads: Heads, rope_table: Tensor) -> Any:
        """Plan a step. rope_table: float32 [positions, D], cosines then sines of D/2 angles."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm along the last dimension."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place and return the RMSNorm of the sum."""
        ...

    def rope_write_kv(
        self,
        qkv: Tensor,
        plan: Any,
        k_cache: Any,
        v_cache: Any,
        qk_norm: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """Normalise (Qwen3) and rotate Q and K, write K and V to the step's slots, return Q."""
        ...

    def paged_attention(
        self, q: Tensor, k_cache: Any, v_cache: Any, plan: Any, window: int | None
    ) -> Tensor:
        """Causal attention of each row over its sequence's blocks, softmax scale D^-1/2."""
        ...

    def copy_blocks(self, caches: Sequence[Tensor], sources: Int64, targets: Int64) -> None:
        """Copy blocks within each cache, [layers, blocks, a, b, c]: what was there before the call.

        sources, targets: int64 [n] block ids on the host, in range; a target occurs once.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU(gate) · up of [gate | up]."""
        ...
