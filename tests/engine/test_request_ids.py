"""RC-08: a name that is in use, given straight to the engine. The service numbers its requests."""

from collections.abc import Sequence

import pytest

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Finished,
    Fork,
    ForkBranch,
    Generate,
    Output,
    Score,
    Started,
)
from prefixcache.errors import AlreadyExists
from tests.engine.conftest import MakeEngine
from tests.engine.driving import run_one

FIRST = (5, 6, 7, 8, 9)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)


def kept(engine: Engine) -> str:
    engine.execute(Generate("parent", (5, 6), GREEDY, keep_seconds=60))
    events = finish(engine)
    return next(event.sequence_id for event in events if isinstance(event, Started))


def finish(engine: Engine) -> list[Event]:
    events = engine.step()
    while engine.has_work:
        events += engine.step()
    return events


def seconds(parent: str) -> Sequence[Command]:
    """Other requests under the name that the first has."""
    return (
        Generate("mine", (11, 12, 13), GREEDY),
        Generate("mine", FIRST, SamplingParams(n=3, max_tokens=2)),
        Generate("mine", FIRST, BeamSearchParams(num_beams=2, max_tokens=2)),
        Generate("mine", FIRST, GREEDY, cache_salt="another", tenant="another"),
        Score("mine", (5, 6), ((7, 8),)),
        Fork("mine", (ForkBranch(parent, GREEDY),)),
    )


@pytest.mark.parametrize("steps", [0, 1, 4])  # the first waits, has begun, is halfway
@pytest.mark.parametrize("which", range(6))
def test_rc_08_a_second_request_of_a_live_name_is_refused_and_the_first_goes_on(
    make_engine: MakeEngine, steps: int, which: int
) -> None:
    engine = make_engine()
    expected = run_one(engine, FIRST, GREEDY)
    second = seconds(kept(engine))[which]
    before = engine.metrics.counters
    finished, prompt = before.requests_finished, before.prompt_tokens
    engine.execute(Generate("mine", FIRST, GREEDY))
    events = [event for _ in range(steps) for event in engine.step()]
    engine.execute(second)
    events += finish(engine)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.request_id == "mine"
    assert isinstance(failed.error, AlreadyExists)
    mine = [event for event in events if isinstance(event, Started | Output | Finished)]
    tokens = [token for e in mine if isinstance(e, Output) for token in e.token_ids]
    logprobs = [entry for e in mine if isinstance(e, Output) for entry in e.logprobs]
    assert (tokens, logprobs) == (expected.token_ids, expected.logprobs)
    assert [type(event) for event in mine].count(Finished) == 1
    after = engine.metrics.counters
    assert (after.requests_finished, after.requests_failed) == (finished + 1, 1)
    assert after.prompt_tokens == prompt + len(FIRST)


def test_rc_08_the_name_is_free_again_once_its_request_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for ending in (None, Abort("mine")):
        engine.execute(Generate("mine", FIRST, GREEDY))
        engine.step()
        if ending is not None:
            engine.execute(ending)
        finish(engine)
    engine.execute(Generate("mine", (11, 12), GREEDY))
    events = finish(engine)
    assert not [event for event in events if isinstance(event, Failed)]
    assert [event.reason for event in events if isinstance(event, Finished)] == ["length"]


def test_rc_08_two_of_one_name_in_one_batch_are_told_apart(make_engine: MakeEngine) -> None:
    """As when both arrive between two steps; `Engine.run` raises for the second, and ends both."""
    engine = make_engine()
    two = [Generate("mine", FIRST, GREEDY), Generate("mine", (11, 12), GREEDY)]
    with pytest.raises(AlreadyExists, match="'mine' is in use"):
        engine.run(two)
    assert not engine.has_work
    assert run_one(engine, FIRST, GREEDY).token_ids
