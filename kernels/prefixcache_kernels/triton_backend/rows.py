# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (a kernel's parameters are its arrays, strides and sizes)
"""Row-wise fusions of a decoder layer: RMSNorm with the residual's addition, and SiLU · up.

    rms_norm:      y = x / sqrt(mean(x²) + eps) · weight             (arXiv 1910.07467)
    add_rms_norm:  residual ← x + residual;  y = rms_norm(residual)
    silu_mul:      y = gate / (1 + exp(-gate)) · up

Owns these two kernels. One program computes one row (or a piece of one) from that row alone, so its
bits depend on nothing else. Twins: the functions of the same names in `reference`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixcache_kernels.checks import FLOATS, check, require
from prefixcache_kernels.triton_backend.launch import Launch, pad

_SILU_COLUMNS = 1024


@triton.jit
def _rms_norm(
    x, residual, weight, y, stride_x, stride_r, width, eps, add: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    live = column < width
    value = tl.load(x + row * stride_x + column, mask=live, other=0.0).to(tl.float32)
    if add:
        place = residual + row * stride_r + column
        value += tl.load(place, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(y.dtype.element_ty)  # the norm sees what the next layer will see
        tl.store(place, rounded, mask=live)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normal = (value * scale).to(y.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (normal * factor).to(y.dtype.element_ty), mask=live)


@triton.jit
def _silu_mul(gate_up, y, stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    live = column < width
    gate = tl.load(gate_up + row * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=live, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (active * up).to(y.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row (arXiv 1910.07467), computed in float32.

    x: [T, width], rows of any stride; weight: [width], same dtype. Returns [T, width].

    Raises:
        ValueError: a wrong shape, dtype, device or stride.
    """
    y = _checked_output(x, weight)
    norm_launch(x, None, weight, y, eps).run()
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place, and return the RMSNorm of the sum. Both [T, width].

    Raises:
        ValueError: a wrong shape, dtype, device or stride.
    """
    y = _checked_output(x, weight)
    check(residual, "residual", tuple(x.shape), (x.dtype,), x.device)
    norm_launch(x, residual, weight, y, eps).run()
    return y


def _checked_output(x: Tensor, weight: Tensor) -> Tensor:
    check(x, "x", (None, None), FLOATS, x.device)
    check(weight, "weight", (x.shape[1],), (x.dtype,), x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def norm_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, eps: float
) -> Launch:
    """Return the launch of checked arguments; without a residual nothing is added."""
    tokens, width = x.shape
    other = x if residual is None else residual
    arguments = {"x": x, "residual": other, "weight": weight, "y": y}
    strides = {"stride_x": x.stride(0), "stride_r": other.stride(0)}
    return Launch(
        _rms_norm,
        (tokens,),
        {**arguments, **strides, "width": width, "eps": eps},
        {"add": residual is not None, "block": pad(width)},
        num_warps=8 if width > 2048 else 4,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up for gate_up = [gate | up], [T, 2 · width] → [T, width], in float32 inside.

    Raises:
        ValueError: an odd width, or a wrong dtype or stride.
    """
    check(gate_up, "gate_up", (None, None), FLOATS, gate_up.device)
    require(gate_up.shape[1] % 2 == 0, "gate_up", f"width must be even, not {gate_up.shape[1]}")
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    y = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    silu_launch(gate_up, y).run()
    return y


def silu_launch(gate_up: Tensor, y: Tensor) -> Launch:
    """Return the launch of checked arguments."""
    tokens, width = y.shape
    return Launch(
        _silu_mul,
        (tokens, triton.cdiv(width, _SILU_COLUMNS)),
        {"gate_up": gate_up, "y": y, "stride": gate_up.stride(0), "width": width},
        {"block": _SILU_COLUMNS},
    )
