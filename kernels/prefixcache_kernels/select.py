"""Which backend to take. Owns the choice; computes nothing."""

import torch

from prefixcache_kernels.backend import Kernels
from prefixcache_kernels.torch_backend import TorchKernels


def select_kernels(name: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the backend called `name`: "auto" or "torch".

    Raises:
        ValueError: no such backend, or it does not serve this device and dtype.
    """
    if name not in ("auto", "torch"):
        raise ValueError(f"backend {name!r}: one of 'auto', 'torch'")
    return TorchKernels(device, dtype)
