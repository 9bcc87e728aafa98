"""The public traces: where they lie, and how they get there.

    python -m benchmarks.traces        (what `make data` runs)

They go to the folder that PREFIXCACHE_DATA names, `data` by default, and are checked by their
SHA-256; what is there already is not fetched again. Apache-2.0 (Mooncake), CC-BY-4.0 (Azure).
"""

import hashlib
import os
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 60


@dataclass(frozen=True)
class PublicTrace:
    """A file, where it is published, and what it must hash to."""

    name: str
    url: str
    sha256: str


MOONCAKE = PublicTrace(
    "mooncake_conversation_trace.jsonl",
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/"
    "conversation_trace.jsonl",
    "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
)
AZURE = PublicTrace(
    "azure_llm_conv_2023.csv",
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/"
    "AzureLLMInferenceTrace_conv.csv",
    "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
)


def folder() -> Path:
    """Where traces lie."""
    return Path(os.environ.get("PREFIXCACHE_DATA", "data"))


def find(trace: PublicTrace) -> Path | None:
    """A trace's file, or None where it has not been fetched."""
    path = folder() / trace.name
    return path if path.is_file() else None


def fetch(trace: PublicTrace) -> Path:
    """Have a trace in the folder. Raises OSError, or ValueError where it is another file."""
    path = folder() / trace.name
    if path.is_file():
        _check(path.read_bytes(), trace)
        return path
    with urllib.request.urlopen(trace.url, timeout=TIMEOUT) as answer:
        data: bytes = answer.read()
    _check(data, trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(data)
    partial.replace(path)
    return path


def _check(data: bytes, trace: PublicTrace) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != trace.sha256:
        raise ValueError(f"its SHA-256 is {found}, not {trace.sha256}: it is another file")


def main() -> int:
    failed = 0
    for trace in (MOONCAKE, AZURE):
        try:
            print(f"{fetch(trace)}: here and checked")
        except (OSError, ValueError) as error:
            failed += 1
            print(
                f"{trace.name}: cannot be had from {trace.url}: {error}\n"
                f"  Fetch it elsewhere and put it into {folder()}/, or name a folder that has it "
                "in PREFIXCACHE_DATA.",
                file=sys.stderr,
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
