"""The layers of a decoder, operation by operation, on any backend.

Owns their order. A backend that runs all of them in one call (`cpu`) has its own in the same order.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from prefixcache_kernels.backend import Cache, Kernels, Layer


class LayerByLayer:
    """`backend.DecoderLayers` out of a backend's operations; waits for nothing on the host."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[Layer], final_norm: Tensor, eps: float
    ) -> None:
        """Take weights as they are; final_norm: [hidden]."""
        self._kernels = kernels
        self._layers = tuple(layers)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), final_norm)
        self._eps = eps

    def __call__(
        self,
        residual: Tensor,
        plan: Any,
        caches: Sequence[tuple[Cache, Cache]],
        rows: Tensor | None,
    ) -> Tensor:
        """See `DecoderLayers.__call__`."""
        run, eps = self._kernels, self._eps
        x = run.rms_norm(residual, self._layers[0].input_norm, eps)
        for layer, (keys, values), next_norm in zip(
            self._layers, caches, self._next_norms, strict=True
        ):
            q = run.rope_write_kv(layer.qkv(x), plan, keys, values, layer.qk_norm)
            attended = run.paged_attention(q, keys, values, plan, layer.window)
            if layer is self._layers[-1] and rows is not None:
                attended, residual = attended[rows], residual[rows]  # [R, …]
            x = run.add_rms_norm(layer.output(attended), residual, layer.post_norm, eps)
            mlp = layer.down(run.silu_mul(layer.gate_up(x)))
            x = run.add_rms_norm(mlp, residual, next_norm, eps)
        return x
