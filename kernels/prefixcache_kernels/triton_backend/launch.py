"""How a Triton kernel is launched.

Owns the shape of a launch (`Launch`: kernel, grid, arguments, options), which runs it or lets the
ahead-of-time compiler see exactly what would run. Never touches a kernel's arithmetic.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED_PROGRAMS = 3
"""Programs of a persistent grid in the interpreter: few, and no divisor of most amounts of work."""

PROGRAMS_A_PROCESSOR = 4
"""Programs of a persistent grid on each multiprocessor: enough to hide the loads of the others."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    arguments: tensors (their addresses are passed), integers and floats, by parameter name.
    constants: the compile-time parameters. num_warps, num_stages: the compiler's options.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def options(self) -> dict[str, Any]:
        """Compiler options. No fused multiply-add but the explicit ones: bits must not depend on
        which compiler finds which pair of operations (Triton fuses by default up to 3.9).
        """
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }

    def run(self) -> None:
        """Launch it; an empty grid is no work."""
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options())


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the import)."""
    return bool(triton.knobs.runtime.interpret)


WIDEN = tl.constexpr(interpreted())
"""Kernels widen the operands of a product: Triton 3.9's interpreter takes bfloat16 for integers."""


def persistent_programs(device: torch.device) -> int:
    """Size of a fixed grid whose programs share the work that the device finds in its buffers."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    index = torch.cuda.current_device() if device.index is None else device.index
    return _processors(index) * PROGRAMS_A_PROCESSOR


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def pad(width: int) -> int:
    """Return the next power of two, 16 at least: a dimension of a tile."""
    return max(16, 1 << (width - 1).bit_length())
