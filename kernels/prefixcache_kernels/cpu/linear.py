"""Linear layers of the CPU backend: weights packed in their own format, and memory to work in.

Owns the packed weights. How they are laid out is `formats.h`'s.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels.backend import Weight
from prefixcache_kernels.checks import check, require
from prefixcache_kernels.cpu.library import Kind, Library, LinearLayer, Matrix

_CPU = torch.device("cpu")
_BLOCK = 32
"""Values of a quantised block."""
_BLOCK_BYTES = {
    Kind.Q8_0: 34,
    Kind.Q4_0: 18,
    Kind.Q4_1: 20,
    Kind.Q8_0_INT8: 34,
    Kind.Q4_0_INT8: 18,
    Kind.Q4_1_INT8: 20,
}


class Scratch:
    """Memory that products and partials reuse; it grows to what the largest step needs."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def pointer(self, floats: int) -> int:
        """Address of at least `floats` floats, valid until the next call."""
        if self._memory.numel() < floats:
            self._memory = torch.empty(floats)
        return self._memory.data_ptr()


class CpuLinear:
    """y = x Wᵀ + b, the weights in their own format; each output one chain over k."""

    def __init__(
        self,
        library: Library,
        scratch: Scratch,
        weights: Sequence[Weight],
        bias: Tensor | None,
        *,
        int8: bool = False,
    ) -> None:
        """weights: matrices with the same input, outputs side by side; bias: float32 [out].

        int8: quantise x, in groups of 32, for weights of Q8_0, Q4_0 and Q4_1 (`int8.cpp`); those of
        other formats are multiplied in float32.

        Raises:
            ValueError: weights of other inputs than the first, blocks that do not fill their rows,
                or a bias of another shape or dtype.
        """
        self._library = library
        self._scratch = scratch
        self.in_features = weights[0].shape[1]
        self.out_features = sum(weight.shape[0] for weight in weights)
        for weight in weights:
            wide = weight.shape[1] == self.in_features
            require(wide, "weights", f"{self.in_features} inputs each, not {weight.shape[1]}")
        if bias is not None:
            require_vector(bias, "bias", self.out_features)
        matrices, tiles = [], []
        for kind, members in groupby(weights, lambda weight: _kind(weight, int8)):
            same = list(members)
            outputs = sum(weight.shape[0] for weight in same)
            tiles.append(_pack(library, kind, same, outputs, self.in_features))
            matrices.append(Matrix(kind, outputs, tiles[-1].data_ptr()))
        self.tiles = tuple(tiles)
        self._bias = bias
        self.structure = LinearLayer(
            self.in_features,
            self.out_features,
            None if bias is None else bias.data_ptr(),
            len(matrices),
            (Matrix * len(matrices))(*matrices),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [M, in], contiguous → [M, out]."""
        require_rows(x, "x", self.in_features)
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features)
        self._library.linear(
            self.structure,
            x.data_ptr(),
            rows,
            y.data_ptr(),
            self._scratch.pointer(self._library.linear_scratch(self.structure, rows)),
            torch.get_num_threads(),
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W as float32, [n, in], for int64 ids [n]: an embedding look-up.

        Only for a layer of one format.

        Raises:
            ValueError: ids of another shape or dtype, or out of range.
        """
        (tiles,) = self.tiles
        check(ids, "ids", (None,), (torch.int64,), _CPU)
        inside = not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < self.out_features)
        require(inside, "ids", f"must be in [0, {self.out_features})")
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.in_features)
        self._library.linear_rows(
            self.structure.matrices[0].kind,
            tiles.data_ptr(),
            self.in_features,
            ids.data_ptr(),
            len(ids),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _kind(weight: Weight, int8: bool) -> Kind:
    """Formats that the kernels read stay; any other is expanded to float32 once."""
    if weight.raw is None:
        return Kind[weight.format] if weight.format in ("BF16", "F16") else Kind.F32
    if weight.format in ("Q8_0", "Q4_0", "Q4_1"):
        return Kind[f"{weight.format}_INT8" if int8 else weight.format]
    return Kind.F32


def _pack(
    library: Library, kind: Kind, weights: Sequence[Weight], outputs: int, inputs: int
) -> Tensor:
    dense = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}
    if kind in dense:  # a 16-bit checkpoint went to float32 and back: the same numbers
        rows = torch.cat([weight.dense().to(dense[kind]) for weight in weights]).contiguous()
        row_bytes = inputs * rows.element_size()
    else:
        raw = [weight.raw for weight in weights if weight.raw is not None]
        rows = torch.from_numpy(np.concatenate(raw))
        row_bytes = rows.shape[1]
        whole = inputs % _BLOCK == 0 and row_bytes == inputs // _BLOCK * _BLOCK_BYTES[kind]
        require(whole, "weights", f"{row_bytes} bytes are no {kind.name} rows of {inputs} inputs")
    tiles = torch.empty(library.linear_bytes(kind, outputs, inputs), dtype=torch.uint8)
    threads = torch.get_num_threads()
    library.linear_pack(
        kind, rows.data_ptr(), row_bytes, outputs, inputs, tiles.data_ptr(), threads
    )
    return tiles


def require_rows(x: Tensor, name: str, width: int | None = None) -> None:
    """Raise ValueError unless x is a matrix of contiguous float32 rows, of this width if given."""
    check(x, name, (None, width), (torch.float32,), _CPU)
    require(x.is_contiguous(), name, "must be contiguous")


def require_vector(x: Tensor, name: str, length: int) -> None:
    """Raise ValueError unless x is a contiguous float32 vector of this length."""
    check(x, name, (length,), (torch.float32,), _CPU)
