"""`make gpu-check` at toy sizes, so that it runs first time where a GPU is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
