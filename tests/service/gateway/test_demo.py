"""`make cluster-demo`, which fails by itself where it does not show what it is to show."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_demo_ends_well_and_shows_where_each_request_went():
    command = [sys.executable, "-m", "examples.cluster"]
    demo = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert demo.returncode == 0, demo.stderr
    assert demo.stdout.count("museum: ") == 6
