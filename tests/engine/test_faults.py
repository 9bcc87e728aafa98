"""Faults that were found by attacking the engine, each with the smallest thing that shows it."""

import random

import pytest

from prefixcache import BeamSearchParams, SamplingParams
from prefixcache.engine.messages import Fork, ForkBranch, Release
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)


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
