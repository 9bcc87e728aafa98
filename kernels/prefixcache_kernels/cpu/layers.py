"""All layers of a decoder in one call of the compiled kernels: what Python costs no longer grows
with the number of layers.

Owns the structures that describe the layers, and the scratch memory of a step. The same kernels in
the same order as `prefixcache_kernels.layers`, so the same bits.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from prefixcache_kernels.backend import Layer, Linear
from prefixcache_kernels.cpu.library import (
    AttentionWork,
    CacheShape,
    DecoderWeights,
    HeadNorms,
    LayerWeights,
    Library,
    LinearLayer,
    Step,
)
from prefixcache_kernels.cpu.linear import CpuLinear, Scratch, require_rows
from prefixcache_kernels.cpu.plan import CpuPlan

Caches = Sequence[tuple[Tensor, Tensor]]


class CpuLayers:
    """`backend.DecoderLayers` on the compiled kernels. One thread at a time may use it."""

    def __init__(
        self, library: Library, layers: Sequence[Layer], final_norm: Tensor, eps: float
    ) -> None:
        """layers: of `CpuLinear`s; norms float32 [hidden]."""
        self._library = library
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._hidden = len(final_norm)
        weights = (LayerWeights * len(layers))(*map(_weights, layers))
        self._decoder = DecoderWeights(
            len(layers), self._hidden, weights, final_norm.data_ptr(), eps
        )
        self._scratch, self._partials = Scratch(), Scratch()
        self._caches: _Caches | None = None

    def __call__(
        self, residual: Tensor, plan: CpuPlan, caches: Caches, rows: Tensor | None
    ) -> Tensor:
        """See `DecoderLayers.__call__`; rows must be in range.

        Raises:
            ValueError: an argument has another shape, dtype or layout than the kernels read.
        """
        if residual.shape != (plan.tokens, self._hidden):
            raise ValueError(f"residual: shape must be ({plan.tokens}, {self._hidden})")
        require_rows(residual, "residual")
        if rows is not None and (rows.dtype != torch.int64 or not rows.is_contiguous()):
            raise ValueError(f"rows: must be contiguous int64, not {rows.dtype} {rows.stride()}")
        if self._caches is None or self._caches.of is not caches:
            self._caches = _Caches(caches, plan, len(self._layers))
        out = torch.empty(plan.tokens if rows is None else len(rows), self._hidden)
        partials = self._partials.pointer(max(spans.partials for spans in plan.spans.values()))
        for spans in plan.spans.values():
            spans.work.partials = partials
        step = Step(
            plan.tokens,
            len(out),
            None if rows is None else rows.data_ptr(),
            plan.rope,
            self._caches.shape,
            self._works(plan),
            self._caches.keys,
            self._caches.values,
        )
        self._library.layers(
            self._decoder,
            step,
            residual.data_ptr(),
            out.data_ptr(),
            self._scratch.pointer(self._library.layers_scratch(self._decoder, plan.tokens)),
            torch.get_num_threads(),
        )
        return out

    def _works(self, plan: CpuPlan) -> "ctypes.Array[ctypes._Pointer[AttentionWork]]":
        """The work of each layer's window."""
        works = {w: ctypes.pointer(spans.work) for w, spans in plan.spans.items()}
        pointers = ctypes.POINTER(AttentionWork) * len(self._layers)
        return pointers(*(works[layer.window] for layer in self._layers))


class _Caches:
    """Addresses of the K and V caches of all layers, checked once for a pool."""

    def __init__(self, caches: Caches, plan: CpuPlan, layers: int) -> None:
        """Raises ValueError where a cache has a wrong shape or dtype, or other strides."""
        if len(caches) != layers:
            raise ValueError(f"caches: {layers} layers needed, not {len(caches)}")
        shapes = [plan.cache_shape(keys, values) for keys, values in caches]
        if any(bytes(shape) != bytes(shapes[0]) for shape in shapes):
            raise ValueError("caches: strides must be the same in all layers")
        self.of = caches
        self.shape: CacheShape = shapes[0]
        pointers = ctypes.c_void_p * layers
        self.keys = pointers(*(keys.data_ptr() for keys, _ in caches))
        self.values = pointers(*(values.data_ptr() for _, values in caches))


def head_norms(qk_norm: tuple[Tensor, Tensor, float] | None) -> HeadNorms:
    """The structure of a layer's norms of Q and K."""
    if qk_norm is None:
        return HeadNorms()
    q, k, eps = qk_norm
    return HeadNorms(q.data_ptr(), k.data_ptr(), eps)


def _weights(layer: Layer) -> LayerWeights:
    return LayerWeights(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        _structure(layer.qkv),
        _structure(layer.output),
        _structure(layer.gate_up),
        _structure(layer.down),
        head_norms(layer.qk_norm),
    )


def _structure(linear: Linear) -> LinearLayer:
    if not isinstance(linear, CpuLinear):
        raise ValueError(f"layers: linear layers must be of this backend, not {type(linear)}")
    return linear.structure
