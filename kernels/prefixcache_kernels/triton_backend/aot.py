"""Launches compiled ahead of time for a target that need not be there, and what they take of it.

Owns the step from a `Launch` (its tensors may be on torch's "meta" device) to a compiled kernel,
specialised as Triton would specialise it at that launch, and the reading of registers, spills and
shared memory out of the binary. Runs nothing.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefixcache_kernels.triton_backend.launch import Launch


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for; shared_kib: shared memory that one program may have, in KiB."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_kib: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163),
        Target("sm_90", "cuda", 90, 32, 227),
        Target("sm_100", "cuda", 100, 32, 227),
        Target("gfx942", "hip", "gfx942", 64, 64),
    )
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel takes. registers: a thread's; spills: bytes a thread; shared: bytes.

    assembly: PTX or GCN text; ttir: Triton's intermediate code.
    """

    registers: int
    spills: int
    shared: int
    assembly: str
    ttir: str


_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def compile_launch(launch: Launch, target: Target) -> Compiled:
    """Compile what `launch.run` would run on the target, with the launch's own options.

    Raises:
        RuntimeError: the target's assembler is missing, or refuses the kernel.
    """
    source = _source(launch)
    device = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled = triton.compile(source, target=device, options=launch.options())
    shared, ttir = int(compiled.metadata.shared), str(compiled.asm["ttir"])
    if target.backend == "hip":
        text = str(compiled.asm["amdgcn"])
        registers, spills = _amd_usage(text)
        return Compiled(registers, spills, shared, text, ttir)
    registers, spills = _nvidia_usage(compiled.asm["cubin"])
    return Compiled(registers, spills, shared, str(compiled.asm["ptx"]), ttir)


def _source(launch: Launch) -> Any:
    """The kernel with its types, constants and what is known of its integers' divisibility."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    known: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.constants.get(name, launch.arguments.get(name))
        free = parameter.do_not_specialize
        if parameter.is_constexpr or (_is_one(value) and not free):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not free):
            known[index,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, known)


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack, which these kernels use for spills only."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of scratch memory; scalar spills stay in vector registers."""

    def read(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found[1]) if found else 0

    return read("vgpr_count"), max(4 * read("vgpr_spill_count"), read("private_segment_fixed_size"))
