"""Which backend to take. Owns the choice and says why; computes nothing."""

import logging

import torch

from prefixcache_kernels.backend import Kernels
from prefixcache_kernels.cpu.backend import CpuKernels
from prefixcache_kernels.cpu.build import BuildError, build
from prefixcache_kernels.cpu.library import Library
from prefixcache_kernels.torch_backend import TorchKernels

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "cpu", "torch")


def select_kernels(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    activation_quantization: str | None = None,
) -> Kernels:
    """Return the backend called `name`.

    Args:
        name: "triton" (a GPU, or the CPU in Triton's interpreter where TRITON_INTERPRET=1 is set),
            "cpu" (compiled, float32 on the CPU), "torch" (any device and dtype), or "auto": Triton
            on a GPU, the compiled one where it serves, else torch; the log says why.
        device, dtype: where and in what the kernels compute.
        batch_invariant: rows must not depend on each other. On the CPU they never do.
        activation_quantization: None, or "int8": linear layers quantise their input in groups of 32
            where the weights are Q8_0, Q4_0 or Q4_1. Only the compiled kernels do.

    Raises:
        ValueError: no such backend, or it does not serve this device and dtype, or cannot promise
            what `batch_invariant` asks for.
        BuildError: "cpu" or "int8" was asked for and cannot be compiled here.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention_backend {name!r}: one of {', '.join(map(repr, BACKENDS))}")
    if activation_quantization is not None:
        return _int8_kernels(name, device, dtype, activation_quantization)
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        triton = _triton(name, device, dtype, batch_invariant)
        if triton is not None:
            return triton
    if batch_invariant and device.type != "cpu":
        raise ValueError(
            f"batch_invariant: attention_backend {name!r} gives no such results on {device.type}, "
            "only triton does"
        )
    serves = device.type == "cpu" and dtype == torch.float32
    if name == "cpu" and not serves:
        raise ValueError(
            f"attention_backend 'cpu': serves float32 on the CPU, not {_name(dtype)} on "
            f"{device.type}; choose dtype float32, or attention_backend auto"
        )
    if name == "torch" or not serves:
        return TorchKernels(device, dtype)
    try:
        return CpuKernels(_library())
    except BuildError as error:
        if name == "cpu":
            raise BuildError(f"attention_backend 'cpu': {error}") from None
        _log.warning("CPU kernels are not available, using torch's, which are slower: %s", error)
        return TorchKernels(device, dtype)


def _int8_kernels(
    name: str, device: torch.device, dtype: torch.dtype, activation_quantization: str
) -> Kernels:
    if activation_quantization != "int8":
        raise ValueError(f"activation_quantization {activation_quantization!r}: None or 'int8'")
    if name not in ("auto", "cpu") or device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            "activation_quantization 'int8': served by attention_backend 'cpu' in float32, not by "
            f"{name!r} in {_name(dtype)} on {device.type}; choose attention_backend auto and dtype "
            "float32, or leave it out"
        )
    try:
        return CpuKernels(_library(), int8=True)
    except BuildError as error:
        raise BuildError(
            f"activation_quantization 'int8' needs compiled kernels: {error}"
        ) from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _triton(
    name: str, device: torch.device, dtype: torch.dtype, batch_invariant: bool
) -> Kernels | None:
    """Triton's kernels; None where "auto" must do without."""
    try:
        # Imported here: Triton takes a second to import, and is not there on every platform.
        from prefixcache_kernels.triton_backend import TritonKernels  # noqa: PLC0415
    except ImportError as error:
        if name == "triton":
            raise ValueError(f"attention_backend 'triton': {error}") from error
        _log.warning("Triton is not available, using torch's kernels: %s", error)
        return None
    return TritonKernels(device, dtype, batch_invariant=batch_invariant)


def _library() -> Library:
    path = build()
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
