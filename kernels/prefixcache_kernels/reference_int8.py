"""The torch twin of products in int8 (`cpu/int8.cpp`), bit for bit; slow, for tests.

Owns the definition of the quantised arithmetic: rows in groups of 32, whole-number products, one
fused multiply-add a group in order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Values with a scale of their own, in rows and in the blocks of weights alike."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """W[n, 32 g + k] = scale[n, g] · q[n, g, k] (+ minimum[n, g]).

    q: float32 [N, G, 32], whole numbers from -128 to 127; scale, minimum: float32 [N, G].
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor | None


def unpack_blocks(kind: str, raw: Tensor) -> Int8Weight:
    """The parts of GGUF blocks "Q8_0", "Q4_0" or "Q4_1", uint8 [N, bytes a row]."""
    halves = 2 if kind == "Q4_1" else 1
    size = 2 * halves + (32 if kind == "Q8_0" else 16)
    blocks = raw.view(len(raw), -1, size)  # [N, G, bytes]
    scales = blocks[..., : 2 * halves].contiguous().view(torch.float16).float()  # [N, G, halves]
    data = blocks[..., 2 * halves :].contiguous()
    if kind == "Q8_0":
        return Int8Weight(data.view(torch.int8).float(), scales[..., 0], None)
    q = torch.cat((data & 15, data >> 4), -1).float()
    if kind == "Q4_0":
        return Int8Weight(q - 8, scales[..., 0], None)
    return Int8Weight(q, scales[..., 0], scales[..., 1])


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers q, float32 [M, G, 32], and scales s = max |x| / 127, float32 [M, G]: x ≈ s q.

    x: float32 [M, 32 G]. A group of zeros has scale 0; one with a NaN has scale NaN.
    """
    groups = x.view(len(x), x.shape[1] // GROUP, GROUP)
    scale = groups.abs().amax(-1) / 127.0
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    return (groups / divisor).round().clamp(-127, 127), scale


def linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """y = x Wᵀ + b, float32 [M, N], of x, float32 [M, 32 G], quantised."""
    q, scale = quantise_rows(x)
    sums = scale * q.sum(-1)  # [M, G]
    y = x.new_zeros(len(x), len(weight.q))
    for g in range(scale.shape[1]):
        dot = q[:, g] @ weight.q[:, g].T  # whole numbers below 2²⁴: exact in any order
        y = _fma(scale[:, g, None] * weight.scale[:, g], dot, y)
        if weight.minimum is not None:
            y = _fma(sums[:, g, None], weight.minimum[:, g].expand_as(y), y)
    return y + (0.0 if bias is None else bias)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c of float32, rounded once.

    The product is exact in float64. Their sum is rounded to odd there (to the neighbour whose last
    bit is 1, where it is not exact), so that rounding again to float32 rounds as if once
    (Boldo and Melquiond, IEEE Transactions on Computers 57-4, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product  # TwoSum: total + error is the exact sum
    error = (product - (total - part)) + (addend - part)
    even = total.view(torch.int64) % 2 == 0
    towards = torch.where(error > 0, torch.inf, -torch.inf).to(total.dtype)
    odd = torch.where((error != 0) & even, torch.nextafter(total, towards), total)
    return odd.float()
