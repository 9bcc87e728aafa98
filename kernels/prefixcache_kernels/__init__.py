"""Paged kernels: arrays in, arrays out. Nothing here knows of tries, sequences or requests.

`select_kernels` picks a backend; every backend offers the operations of `backend.Kernels`:

    torch   `reference.py`: the twins, in plain torch. They define what the others compute.
    cpu     `cpu/`: C++ compiled on first use, on weights in their own format.
    triton  `triton_backend/`: for GPUs, or in Triton's interpreter.
"""

from prefixcache_kernels.backend import Cache, Heads, Kernels, Layer, Linear, QuantizedCache, Weight
from prefixcache_kernels.select import select_kernels
from prefixcache_kernels.work import SPAN, SpanGroups, StepWork

__all__ = [
    "SPAN",
    "Cache",
    "Heads",
    "Kernels",
    "Layer",
    "Linear",
    "QuantizedCache",
    "SpanGroups",
    "StepWork",
    "Weight",
    "select_kernels",
]
