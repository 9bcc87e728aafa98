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
from prefixcache_kernels.checks import check, require
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
from prefixcache_kernels.cpu.linear import CpuLinear, Scratch, require_rows, require_vector
from prefixcache_kernels.cpu.plan import CpuPlan

_CPU = torch.device("cpu")

Caches = Sequence[tuple[Tensor, Tensor]]


class CpuLayers:
    """`backend.DecoderLayers` on the compiled kernels. One thread at a time may use it."""

    def __init__(
        self, library: Library, layers: Sequence[Layer], final_norm: Tensor, eps: float
    ) -> None:
        """layers: of `CpuLinear`s; norms float32 [hidden].

        Raises:
            ValueError: norms of another shape or dtype, or linear layers of another backend.
        """
        for norm in (final_norm, *(n for x in layers for n in (x.input_norm, x.post_norm))):
            require_vector(norm, "norms", len(final_norm))
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
        """See `DecoderLayers.__call__`.

        Raises:
            ValueError: an argument has another shape, dtype or layout than the kernels read, or the
                step reaches beyond the caches or the rope table.
        """
        check(residual, "residual", (plan.tokens, self._hidden), (torch.float32,), _CPU)
        require_rows(residual, "residual")
        if rows is not None:
            check(rows, "rows", (None,), (torch.int64,), _CPU)
            inside = not len(rows) or (int(rows.min()) >= 0 and int(rows.max()) < plan.tokens)
            require(inside, "rows", f"must be in [0, {plan.tokens})")
        if self._caches is None or self._caches.of is not caches:
            self._caches = _Caches(caches, plan, len(self._layers))
        blocks = len(caches[0][0])
        plan.reach.require_written(blocks, plan.block_size)
        plan.reach.require_read(blocks)
        plan.reach.require_turned(plan.angles)
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
        missing = {layer.window for layer in self._layers} - set(plan.spans)
        require(not missing, "plan", f"made without the windows {missing}")
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


def head_norms(qk_norm: tuple[Tensor, Tensor, float] | None, dim: int) -> HeadNorms:
    """The structure of a layer's norms of Q and K, for heads of this size."""
    if qk_norm is None:
        return HeadNorms()
    q, k, eps = qk_norm
    for weight in (q, k):
        require_vector(weight, "qk_norm", dim)
    return HeadNorms(q.data_ptr(), k.data_ptr(), eps)


def _weights(layer: Layer) -> LayerWeights:
    return LayerWeights(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        _structure(layer.qkv),
        _structure(layer.output),
        _structure(layer.gate_up),
        _structure(layer.down),
        head_norms(layer.qk_norm, len(layer.qk_norm[0]) if layer.qk_norm else 0),
    )


def _structure(linear: Linear) -> LinearLayer:
    if not isinstance(linear, CpuLinear):
        raise ValueError(f"layers: linear layers must be of this backend, not {type(linear)}")
    return linear.structure
