"""Faults that were found by attacking the engine, each with the smallest thing that shows it."""

import random

import pytest

from prefixcache import BeamSearchParams, SamplingParams
from prefixcache.engine.messages import Fork, ForkBranch
from tests.engine.conftest import MakeEngine
from tests.engine.driving import bits

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
