# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (a kernel's parameters are its arrays, strides and sizes)
"""The linear layer of `--batch-invariant`: a row's bits do not depend on the number of rows.

    y[m, n] = Σ_k x[m, k] · weight[n, k] + bias[n]

Owns the kernel and the choice of its tile, made from (N, K) alone: the same tile and the same order
in k for every M, and no split of k (the recipe of "Defeating nondeterminism in LLM inference",
Thinking Machines, 2025). Products accumulate in float32. Twin: `reference.PlainLinear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixcache_kernels.checks import FLOATS, check
from prefixcache_kernels.triton_backend.launch import WIDEN, Launch

_GROUP = 8
"""Row tiles that pass over the same weights together, so that these are read from L2."""


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    inputs,
    stride_x,
    stride_w,
    has_bias: tl.constexpr,
    group: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(rows, block_m), tl.cdiv(outputs, block_n)
    tile = tl.program_id(0)
    first = tile // (group * tiles_n) * group
    height = tl.minimum(tiles_m - first, group)
    inside = tile % (group * tiles_n)
    m = (first + inside % height) * block_m + tl.arange(0, block_m)
    n = inside // height * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    live_m, live_n = m < rows, n < outputs
    # Rows are widened before the product: M · K passes 2^31 in a long prefill, N · K in a big head.
    x_tile = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_tile = weight + n.to(tl.int64)[None, :] * stride_w + k[:, None]
    sums = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, inputs, block_k):
        live_k = k < inputs - start
        a = tl.load(x_tile + start, mask=live_m[:, None] & live_k[None, :], other=0.0)
        b = tl.load(w_tile + start, mask=live_k[:, None] & live_n[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    place = y + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Tile of one (N, K): rows, outputs and inputs a step, and the compiler's options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_of(outputs: int, dtype: torch.dtype, shared_kib: int) -> LinearTile:
    """Return the tile of a layer; nothing of the batch goes into the choice.

    outputs: N; narrow layers get narrow tiles, so that one row tile fills a GPU. shared_kib: shared
    memory of a program in KiB, which bounds the stages in flight.
    """
    if dtype == torch.float32:
        return LinearTile(32, 32, 32, 4, 2)
    block_n = 128 if outputs >= 16384 else 64 if outputs >= 8192 else 32
    stages = 4 if shared_kib > 100 else 2
    return LinearTile(64, block_n, 64, 4, stages)


class InvariantLinear:
    """y = x Wᵀ + b with one tile for every number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shared_kib: int = 227) -> None:
        """weight: [out, in]; bias: [out] or None, same dtype.

        Raises:
            ValueError: a wrong shape, dtype, device or stride.
        """
        check(weight, "weight", (None, None), FLOATS, weight.device)
        self.out_features, self.in_features = weight.shape
        if bias is not None:
            check(bias, "bias", (self.out_features,), (weight.dtype,), weight.device)
        self.weight = weight
        self._bias = bias
        self._tile = tile_of(self.out_features, weight.dtype, shared_kib)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] → [M, out].

        Raises:
            ValueError: a wrong shape, dtype, device or stride of x.
        """
        check(x, "x", (None, self.in_features), (self.weight.dtype,), self.weight.device)
        y = torch.empty((x.shape[0], self.out_features), dtype=x.dtype, device=x.device)
        linear_launch(x, self.weight, self._bias, y, self._tile).run()
        return y


def linear_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tile: LinearTile
) -> Launch:
    """Return the launch of checked arguments."""
    rows, outputs = y.shape
    arguments = {"x": x, "weight": weight, "bias": weight if bias is None else bias, "y": y}
    sizes = {"rows": rows, "outputs": outputs, "inputs": x.shape[1]}
    strides = {"stride_x": x.stride(0), "stride_w": weight.stride(0)}
    blocks = {"block_m": tile.block_m, "block_n": tile.block_n, "block_k": tile.block_k}
    return Launch(
        _linear,
        (triton.cdiv(rows, tile.block_m) * triton.cdiv(outputs, tile.block_n),),
        {**arguments, **sizes, **strides},
        {"has_bias": bias is not None, "group": _GROUP, **blocks},
        tile.num_warps,
        tile.num_stages,
    )
