"""The keys of branches count on from one fork to the next."""

from prefixcache import SamplingParams
from prefixcache.engine.messages import ForkBranch
from prefixcache.errors import InvalidArgument
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver

DRAW = SamplingParams(max_tokens=4, ignore_eos=True)


def keys_of_a_fork(make_engine: MakeEngine, *, refused_before: bool) -> list[int]:
    engine = make_engine(seed=3)
    driver = Driver(engine, fails=["refused"])
    parent = driver.start("parent", (5, 6, 7, 8, 9), DRAW, keep_seconds=60)
    driver.finish()
    name = parent.outputs[0].sequence_id
    if refused_before:
        driver.fork("refused", ForkBranch(name, DRAW), ForkBranch(name, DRAW, position=99))
    fork = driver.fork("fork", ForkBranch(name, DRAW), ForkBranch(name, DRAW))
    driver.finish()
    assert ("refused" in driver.errors) == refused_before
    assert all(isinstance(error, InvalidArgument) for error in driver.errors.values())
    return [output.stream_key for output in fork.outputs]


def test_a_refused_fork_uses_no_branch_numbers_up(make_engine: MakeEngine) -> None:
    """So a client that mends its call gets what the right call would have given at once."""
    keys = keys_of_a_fork(make_engine, refused_before=False)
    assert len(set(keys)) == 2
    assert keys_of_a_fork(make_engine, refused_before=True) == keys
