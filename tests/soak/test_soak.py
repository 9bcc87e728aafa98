"""The soak, for as long as a test run can wait: `make soak` is half an hour of it."""

from pathlib import Path

import pytest

from tests.soak.run import Result, run


def soak(tmp_path: Path, seconds: float, seed: int) -> Result:
    result = run(seconds, seed, tmp_path)
    assert not result.problems, result.problems[:5]
    assert result.server["steps_checked"] > 10 * seconds  # far fewer than on a quiet machine
    served, bad = result.counts["served"], result.counts["bad inputs"]
    assert min(served, bad, result.counts["answers compared"]) > seconds / 2
    assert result.stats["preemptions"] > 0
    assert result.stats["evicted_blocks"] > 0
    return result


def test_fifteen_seconds_of_everything(tmp_path: Path) -> None:
    soak(tmp_path, 15, seed=1)


@pytest.mark.slow
def test_two_minutes_of_everything_and_memory_is_flat(tmp_path: Path) -> None:
    result = soak(tmp_path, 120, seed=2)
    growth, noise = result.growth
    assert growth < max(4 * noise, 0.02 * result.later[0][1])
    assert result.counts["clients killed"] > 10
    assert result.server["faults"] > 10
