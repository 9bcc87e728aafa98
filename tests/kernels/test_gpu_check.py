"""`make gpu-check` at toy sizes, so that it runs first time where a GPU is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ImportError("there is no " + name)

sys.meta_path.insert(0, Missing())
import pytest
import benchmarks.gpu_check.attention, benchmarks.gpu_check.bits, benchmarks.gpu_check.steps
from benchmarks.gpu_check.__main__ import _PYTEST
cases = "tests/kernels/triton_cases"
arguments = [*_PYTEST[3:], "-p", "no:anyio", cases, f"--ignore={{cases}}/test_decoder.py"]
sys.exit(pytest.main([*arguments, "-k", "silu_mul"]))  # all are collected, a few run
"""
"""Python on a machine that lacks the engine's packages."""

_ENGINES = ("xxhash", "tokenizers", "transformers", "safetensors", "gguf", "huggingface_hub")
_ENGINES += (
    "grpc",
    "google",
    "typer",
    "rich",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "anyio",
)


def test_a_gpu_machine_needs_only_torch_triton_numpy_pytest_and_hypothesis() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BARE.format(packages=_ENGINES)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_every_part_of_gpu_check_runs_in_the_interpreter() -> None:
    command = ["benchmarks.gpu_check", "--device", "cpu", "--skip-tests", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["failed"], figures["missed"]) == ("none", [])
    assert figures["bits_captured_vs_launched"]
    assert figures["engine_batched_differing_outputs"] == 0
    assert figures["shared_prefix_bytes_vs_ideal"] < 1.2
