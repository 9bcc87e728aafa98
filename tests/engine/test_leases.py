"""At most max_leases sequences are kept, and those still to come count."""

import pytest

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import Abort, Generate
from prefixcache.errors import ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver

PROMPT = (5, 6, 7, 8, 9)
SAMPLES = SamplingParams(n=3, max_tokens=8, temperature=0.0, ignore_eos=True)
SEARCH = BeamSearchParams(4, 3, max_tokens=8, ignore_eos=True)


def ask(engine: Engine, name: str, params: SamplingParams | BeamSearchParams) -> None:
    engine.execute(Generate(name, PROMPT, params, keep_seconds=60))


@pytest.mark.parametrize("params", [SAMPLES, SEARCH], ids=["samples", "search"])
@pytest.mark.parametrize("steps", [0, 1, 3, 30])
def test_what_a_request_will_keep_counts_from_its_start(
    make_engine: MakeEngine, params: SamplingParams | BeamSearchParams, steps: int
) -> None:
    """Queued, running or ended: three of four leases are taken."""
    engine = make_engine(max_leases=4)
    ask(engine, "first", params)
    driver = Driver(engine, fails=["second"])
    driver.step(steps)
    ask(engine, "second", SAMPLES)
    ask(engine, "one", SamplingParams(max_tokens=2))
    driver.finish()
    assert isinstance(driver.errors["second"], ResourceExhausted)
    assert "3 sequences of this request cannot be kept now" in str(driver.errors["second"])
    assert engine.registry.num_kept == 4


def test_an_aborted_search_gives_its_leases_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_leases=3)
    ask(engine, "first", SEARCH)
    engine.step()
    engine.execute(Abort("first"))
    ask(engine, "second", SAMPLES)
    Driver(engine).finish()
    assert engine.registry.num_kept == 3
