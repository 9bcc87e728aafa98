"""These cases run on a GPU, or in a process of Triton's interpreter (`test_triton_interpreted`)."""

import pytest
import torch
import triton

_RUNS = triton.knobs.runtime.interpret or torch.cuda.is_available()
collect_ignore_glob = [] if _RUNS else ["test_*.py"]
# Its pool is on the CPU, and its checkpoints need packages that a GPU machine may lack.
collect_ignore = [] if triton.knobs.runtime.interpret else ["test_decoder.py"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> None:
    """Not looked at here: a GPU's driver keeps files open, and the check needs the engine."""
