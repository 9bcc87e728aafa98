"""Compiles the C++ kernels once and caches the library under the user's cache directory.

Owns the compiler's flags and the cache's key (sources, compiler, flags, processor). Never loads the
library: that is `library.py`. A cached file ends with a digest of all before it, because loading a
file that was cut short (a full disk, a lost power supply) can end the process.
"""

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

SOURCES = ("linear.cpp", "int8.cpp", "attention.cpp", "rows.cpp", "layers.cpp")
HEADERS = ("formats.h", "int8.h", "kernels.h", "output.h", "simd.h")
# No contraction and no reassociation: the sources say where products are fused, and in what order
# sums run. The order is what makes a row's bits independent of its batch.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-w",
)
_TIMEOUT = 300.0


class BuildError(ValueError):
    """The backend that was asked for cannot be compiled here; the message says why."""


def build(directory: Path | None = None, extra_flags: Sequence[str] = ()) -> Path:
    """Return the library's path, compiling it if the cache has none for this machine.

    Args:
        directory: where libraries are cached; `kernels` in `$PREFIXCACHE_HOME`, or in
            `~/.cache/prefixcache`, by default.
        extra_flags: further compiler flags, such as "-mno-avx512f".

    Raises:
        BuildError: no compiler, no OpenMP runtime of torch's, or the compiler fails.
    """
    folder = directory or _cache_directory()
    compiler = _compiler()
    flags, runtime = [*FLAGS, *extra_flags], openmp_runtime()
    target = folder / f"cpu-{_key(compiler, [*flags, str(runtime)])}.so"
    if _is_whole(target):
        return target
    _log.info("compiling the CPU kernels, once for this machine (about 10 s)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename and no reader sees half a file.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            library = _compile(compiler, flags, runtime, Path(scratch))
            library.write_bytes(_sealed(library.read_bytes()))
            os.replace(library, target)
    except OSError as error:
        raise BuildError(
            f"cannot write the compiled kernels to {folder}: {error}; set PREFIXCACHE_HOME to a "
            "directory that can be written"
        ) from error
    return target


def _compiler() -> list[str]:
    """The compiler's command, which $CXX may give with arguments."""
    command = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which("g++") or shutil.which("c++")
    if not command and not found:
        raise BuildError("no C++ compiler found: install g++, or name one in $CXX")
    return command or [str(found)]


def _sealed(library: bytes) -> bytes:
    return library + hashlib.sha256(library).digest()


def _is_whole(path: Path) -> bool:
    """Whether the file is there, and as it was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content == _sealed(content[:-size])


def openmp_runtime() -> Path:
    """The OpenMP library that torch has loaded: a second runtime would spin against it."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    found = re.findall(r"(/\S*/lib(?:gomp|iomp5)\S*)", maps)
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    for path in (*map(Path, found), *bundled):
        if path.is_file():
            return path
    raise BuildError("torch has no OpenMP runtime that the kernels could share")


def _cache_directory() -> Path:
    home = os.environ.get("PREFIXCACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache" / "prefixcache") / "kernels"
    except RuntimeError as error:  # a user without a home
        raise BuildError(f"{error}; set PREFIXCACHE_HOME to a directory") from None


def _key(compiler: list[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((Path(__file__).parent / name).read_bytes())
    version = _run([*compiler, "--version"]).partition("\n")[0]
    for part in (*compiler, version, *flags, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: list[str], flags: list[str], runtime: Path, scratch: Path) -> Path:
    here = Path(__file__).parent
    objects = [scratch / f"{name}.o" for name in SOURCES]
    commands = [
        [*compiler, *flags, "-c", str(here / name), "-o", str(target)]
        for name, target in zip(SOURCES, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    library = scratch / "kernels.so"
    # Linked to torch's own runtime by path, without -fopenmp, which would add the compiler's. A
    # compiler with another OpenMP interface leaves symbols undefined: better refused now.
    strict = ["-Wl,-z,defs"] if sys.platform == "linux" else []
    _run([*compiler, "-shared", *map(str, objects), str(runtime), *strict, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if result.returncode:
        raise BuildError(
            f"{command[0]} failed with {result.returncode}: {result.stderr.strip()[-2000:]}"
        )
    return result.stdout
