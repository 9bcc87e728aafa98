# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The product of two tiles, as every kernel here takes it: float32 sums, IEEE inputs.

Owns this one function.
"""

import triton
import triton.language as tl

from prefixcache_kernels.triton_backend.launch import interpreted

_WIDEN = tl.constexpr(interpreted())  # Triton 3.9's interpreter multiplies bfloat16 as integers


@triton.jit
def dot(a, b, sums):
    """Return sums + a · b; float32 is multiplied as such, never as TF32."""
    if _WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
