"""The cases of `triton_cases`, in a process of their own.

Triton decides when it is imported whether kernels run in its interpreter, so a process does either
that or compile (`test_triton_aot`). The interpreter is numpy underneath: it proves indexing and
masking, never bits.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "triton_cases"


def _run(selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selection, CASES]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=CASES.parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]


def test_every_kernel_equals_its_twin_in_the_interpreter() -> None:
    _run("not slow")


@pytest.mark.slow
def test_the_long_cases_hold_in_the_interpreter() -> None:
    _run("slow")
