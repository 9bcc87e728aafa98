"""Arrays from the host to a device and back. Owns nothing that lasts.

A copy from pageable memory makes the host wait for all that the device still has to do, so what
goes to CUDA is put into pinned memory first, which torch keeps and hands out again once the copy
is done. A read waits once, for an event behind its copy. On the CPU both are plain copies.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def upload(array: Array, device: torch.device) -> Tensor:
    """Return a host array on a device; the array may be changed as soon as this returns."""
    target = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=device)
    fill(target, array)
    return target


def fill(target: Tensor, array: Array) -> None:
    """Replace a tensor's content by a host array of its shape and dtype; does not wait for it."""
    source = torch.from_numpy(array)
    if target.device.type == "cuda":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def read_back(tensors: Sequence[Tensor]) -> list[Array]:
    """Tensors of one device as host arrays: one copy for all of them, and one wait."""
    if not tensors:
        return []
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    packed = torch.cat(parts)
    on_gpu = packed.device.type == "cuda"
    host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=on_gpu)
    host.copy_(packed, non_blocking=True)
    if on_gpu:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()
    pieces = torch.split(host, [len(part) for part in parts])
    return [
        piece.clone().view(tensor.dtype).view(tensor.shape).numpy()
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
