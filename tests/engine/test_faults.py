"""Faults that were found by attacking the engine, each with the smallest thing that shows it."""

import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache.engine.loop import EngineLoop
from prefixcache.engine.messages import (
    Command,
    Event,
    Failed,
    Finished,
    Fork,
    ForkBranch,
    Generate,
    GetStats,
    Output,
    PinPrefix,
    Release,
    Reply,
    Score,
    UnpinPrefix,
)
from prefixcache.errors import ConfigurationError, InvalidArgument, ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


def ask(engine: Engine, call: Command) -> Any:
    """The value of a call that is answered at once."""
    engine.execute(call)
    (reply,) = [event for event in engine.take_events() if isinstance(event, Reply)]
    assert reply.error is None
    return reply.value


def until_idle(engine: Engine) -> list[Event]:
    """Run until nothing is left to do; all events."""
    events = engine.step()
    while engine.has_work:
        events += engine.step()
    return events


@pytest.mark.parametrize("seed", range(8))
def test_a_kept_beam_result_forks_as_if_its_tokens_were_a_prompt(
    seed: int, make_engine: MakeEngine
) -> None:
    """Results are kept on block copies that run with the next step, and the fork copies those.

    Both copies are of one batch, which reads what was there before it: the fork must not read the
    block that the first one is only about to fill.
    """
    engine, cold = make_engine(), make_engine()
    choose = random.Random(seed)
    prompt = choose.sample(range(5, 300), 5 + seed)
    stop = tuple(choose.sample(range(5, 300), 40))  # so that results end inside a block
    search = BeamSearchParams(
        num_beams=5, num_return_sequences=5, max_tokens=14, stop_token_ids=stop
    )
    results = engine.generate([prompt], search, keep_seconds=60)[0].outputs
    for result in results:  # the first fork is the first step after the search
        branch = ForkBranch(result.sequence_id, GREEDY)
        child = engine.run([Fork("child", (branch,))])[0].outputs[0]
        fresh = cold.generate([prompt + result.token_ids], GREEDY)[0].outputs[0]
        assert bits(child) == bits(fresh)


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_no_priority_is_taken_for_a_lease(priority: int, make_engine: MakeEngine) -> None:
    """Two kept sequences share a run of blocks; one is released, and the pool is filled."""
    engine = make_engine(num_gpu_blocks_override=16, max_model_len=64)
    driver = Driver(engine)
    shared = list(range(10, 18))
    for name in ("first", "second"):
        own = list(range(30, 36) if name == "first" else range(40, 46))
        driver.start(name, shared + own, GREEDY, priority=priority, keep_seconds=60)
        driver.finish()
    engine.execute(Release("release", driver.outputs["first"].outputs[0].sequence_id))
    engine.check_integrity()
    driver.start("filler", range(100, 156), GREEDY)
    driver.finish()


def test_a_search_that_fills_the_pool_fails_before_its_other_beams_run(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The rows that its other beams have in that step have lost their blocks."""
    engine = make_engine(block_size=1, num_gpu_blocks_override=150, max_model_len=66)
    driver = Driver(engine, fails=["search"])
    held = [engine.manager.pool.take() for _ in range(120)]
    search = BeamSearchParams(num_beams=8, max_tokens=16, ignore_eos=True)
    driver.start("search", range(100, 110), search)
    driver.finish()
    assert isinstance(driver.errors["search"], ResourceExhausted)
    assert not caplog.records  # the forward pass was not even tried with them
    for block in held:
        engine.manager.pool.give(block)


def test_a_full_pool_never_cuts_a_scoring_short(make_engine: MakeEngine) -> None:
    """Pins leave too little: the scoring fails and says so; it does not end without its scores."""
    engine = make_engine(num_gpu_blocks_override=32, max_model_len=64)
    tokens = tuple(range(5, 68))
    engine.generate([tokens], SamplingParams(max_tokens=1))
    pin = ask(engine, PinPrefix("pin", tokens[:60], 60.0))
    continuations = tuple(tuple(range(200 + i, 212 + i)) for i in range(6))
    engine.execute(Score("score", tuple(range(100, 140)), continuations))
    events = [event for event in until_idle(engine) if not isinstance(event, Reply)]
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert isinstance(failed.error, ResourceExhausted)
    scored = {e.index for e in events if isinstance(e, Output) and len(e.prompt_logprobs) == 12}
    assert {e.index for e in events if isinstance(e, Finished)} == scored
    ask(engine, UnpinPrefix("unpin", pin.pin_id))


def test_forks_of_beam_results_draw_from_streams_of_their_own(make_engine: MakeEngine) -> None:
    """Results have a key each; so have their forks, and they differ from search to search."""
    engine = make_engine(seed=None)
    search = BeamSearchParams(num_beams=4, num_return_sequences=3, max_tokens=6)
    keys: list[int] = []
    for _ in range(2):
        results = engine.generate([[5, 9, 33, 7]], search, keep_seconds=60)[0].outputs
        branches = [ForkBranch(result.sequence_id, GREEDY) for result in results for _ in "ab"]
        children = engine.run([Fork("children", tuple(branches))])[0].outputs
        keys += [output.stream_key for output in [*results, *children]]
    assert len(keys) == len(set(keys)) == 2 * (3 + 6)


@pytest.mark.parametrize("order", ["abbbbbbb", "bbbbbbba", "bbbabbbb"])
def test_what_branches_of_two_parents_need_does_not_depend_on_their_order(
    order: str, make_engine: MakeEngine
) -> None:
    """Two prompts of 50 blocks, and a block a branch: that fits a pool of 128."""
    engine = make_engine(num_gpu_blocks_override=128, max_model_len=300)
    prompts = {"a": list(range(5, 205)), "b": list(range(50, 250))}
    parents = {
        name: engine.generate([prompt], GREEDY, keep_seconds=60)[0].outputs[0].sequence_id
        for name, prompt in prompts.items()
    }
    branches = tuple(ForkBranch(parents[name], GREEDY) for name in order)
    assert len(engine.run([Fork("fork", branches)])[0].outputs) == 8


def test_run_waits_for_indexes_that_start_after_others_have_ended(make_engine: MakeEngine) -> None:
    """The second continuation waits for the last block of the prefix, which the first computes."""
    engine = make_engine(max_num_batched_tokens=16)
    output = engine.run([Score("score", tuple(range(10, 62)), ((1,), (3,)))])[0]
    assert [out.finish_reason for out in output.outputs] == ["length", "length"]
    assert not engine.has_work


def test_the_loop_can_wait_for_a_lease_of_any_length(make_engine: MakeEngine) -> None:
    engine = make_engine(max_keep_seconds=1e12)
    events: list[Event] = []
    finished = threading.Event()

    def deliver(batch: Sequence[Event]) -> None:
        events.extend(batch)
        if any(isinstance(event, Finished | Reply) for event in batch):
            finished.set()

    loop = EngineLoop(engine, deliver)
    loop.start()
    loop.submit(Generate("long", (5, 6, 7), GREEDY, keep_seconds=1e12))
    assert finished.wait(20)
    finished.clear()
    loop.submit(GetStats("stats"))  # taken by a loop that has been waiting
    assert finished.wait(20)
    loop.stop(5)
    assert loop.fault is None


@pytest.mark.parametrize("tokens", [[1.7, 2.0], ["a"], [2**70], [[1, 2], [3, 4]], [[1], [2, 3]]])
def test_what_are_no_token_ids_is_refused_by_name(tokens: Any, make_engine: MakeEngine) -> None:
    engine = make_engine()
    for command in (
        Generate("generate", tokens, GREEDY),
        Score("score", (5,), (tokens,)),
        PinPrefix("pin", tokens, 60.0),
    ):
        engine.execute(command)
        (event,) = engine.take_events()
        assert isinstance(event, Failed | Reply)
        assert isinstance(event.error, InvalidArgument)


def test_one_string_is_not_a_list_of_prompts(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidArgument, match="list of prompts"):
        make_engine().generate("The sky is", GREEDY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_threads", 0),
        ("num_threads", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_leases", -1),
        ("max_keep_seconds", -1.0),
        ("max_keep_seconds", math.nan),
        ("max_num_seqs", 2**31),
        ("num_gpu_blocks_override", 2**31),
    ],
)
def test_a_setting_out_of_range_is_refused_before_anything_is_loaded(
    field: str, value: Any
) -> None:
    """These came up as tracebacks, or as a server that refuses every call."""
    with pytest.raises(ConfigurationError, match=field):
        EngineConfig(max_num_batched_tokens=2**31, **{field: value})
