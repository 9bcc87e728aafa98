"""What is checked before a kernel runs, and the wording. Never touches arithmetic or a device.

Ids and positions are compared on the host, where they come from, so that no check waits for a
device: a plan keeps the `Reach` of its step, and each operation compares that with what it gets.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels.work import Int32, Int64, StepWork

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def require(ok: bool, argument: str, what: str) -> None:
    """Raise ValueError naming the argument unless ok."""
    if not ok:
        raise ValueError(f"{argument}: {what}")


def check(
    tensor: Tensor,
    argument: str,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check one tensor before a launch.

    Args:
        tensor: what was given; argument: its name in messages.
        shape: expected sizes, None for any; the last dimension must be contiguous.
        dtypes: allowed ones; device: where it must be.

    Raises:
        ValueError: naming the argument.
    """
    sizes = tuple(tensor.shape)
    fits = len(sizes) == len(shape) and all(
        want in (None, size) for want, size in zip(shape, sizes, strict=True)
    )
    require(fits, argument, f"shape must be {_shape_text(shape)}, not {sizes}")
    names = " or ".join(str(dtype) for dtype in dtypes)
    require(tensor.dtype in dtypes, argument, f"dtype must be {names}, not {tensor.dtype}")
    require(tensor.device == device, argument, f"must be on {device}, not on {tensor.device}")
    if tensor.ndim and tensor.shape[-1] > 1:
        require(tensor.stride(-1) == 1, argument, "the last dimension must be contiguous")


def _shape_text(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if size is None else str(size) for size in shape) + ")"


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a step's numbers reach; -1 for none."""

    slot: int
    block: int
    position: int

    @classmethod
    def of(cls, work: StepWork) -> "Reach":
        """Of a step. Raises ValueError for a negative block id."""
        lowest = int(work.block_table.min(initial=0))
        require(lowest >= 0, "block_table", f"block id {lowest}")
        return cls(_greatest(work.slots), _greatest(work.block_table), _greatest(work.positions))

    def require_written(self, blocks: int, block_size: int) -> None:
        """Raise ValueError unless K and V of the step go to slots of the cache."""
        slots = blocks * block_size
        require(self.slot < slots, "slots", f"{self.slot} in a cache of {slots}")

    def require_read(self, blocks: int) -> None:
        """Raise ValueError unless the step reads blocks of the cache."""
        fits = self.block < blocks
        require(fits, "block_table", f"block id {self.block} of a pool of {blocks} blocks")

    def require_turned(self, rope_table: Tensor) -> None:
        """Raise ValueError unless the table has angles for the step's positions."""
        fits = self.position < len(rope_table)
        require(fits, "positions", f"{self.position} in a rope table of {len(rope_table)}")


def check_work(work: StepWork, span: int) -> Reach:
    """Check that a step's arrays hold together, and return how far they reach.

    Raises:
        ValueError: naming the field with a wrong shape, dtype or block id.
    """
    for name, array, dimensions, dtype in (
        ("positions", work.positions, 1, np.int32),
        ("slots", work.slots, 1, np.int64),
        ("block_table", work.block_table, 2, np.int32),
    ):
        fits = array.ndim == dimensions and array.dtype == dtype
        wanted = f"{np.dtype(dtype)} of {dimensions} dimensions"
        require(fits, name, f"must be {wanted}, not {array.dtype} {array.shape}")
    require(
        len(work.slots) == len(work.positions), "slots", f"one for each of {len(work.positions)}"
    )
    size = work.block_size
    require(size > 0 and span % size == 0, "block_size", f"{size} must divide the span of {span}")
    width = work.block_table.shape[-1]
    require(width % (span // size) == 0, "block_table", f"{width} blocks are not whole spans")
    return Reach.of(work)


def check_copies(sources: Int64, targets: Int64, blocks: int) -> None:
    """Check ids of blocks that are copied within a pool of so many.

    Raises:
        ValueError: "sources" or "targets" out of range, of other lengths, or a target twice.
    """
    require(sources.shape == targets.shape and sources.ndim == 1, "targets", "one for each source")
    require(len(np.unique(targets)) == len(targets), "targets", "one occurs twice")
    for ids, name in ((sources, "sources"), (targets, "targets")):
        inside = not len(ids) or bool(ids.min() >= 0 and ids.max() < blocks)
        require(inside, name, f"block ids must be in [0, {blocks})")


def _greatest(values: Int32 | Int64) -> int:
    return int(values.max(initial=-1))
