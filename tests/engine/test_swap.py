"""Preempted blocks moved to host memory and back: the same answers, less computed again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixcache import Engine, SamplingParams
from prefixcache.engine.messages import CacheStats, GetStats, Reply
from prefixcache.engine.swap_cost import SwapCost
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits, run_one

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, temperature=0.8, stream_key=5)
PROMPT = [5 + 7 * i % 200 for i in range(30)]
OTHER = [8 + 13 * i % 200 for i in range(20)]
SMALL = {"num_gpu_blocks_override": 24, "max_model_len": "auto"}


def _always(engine: Engine) -> Engine:
    engine.scheduler.swap.worth = lambda num_blocks: True
    return engine


def _stats(engine: Engine) -> CacheStats:
    engine.execute(GetStats("stats"))
    (reply,) = [event for event in engine.step() if isinstance(event, Reply)]
    assert isinstance(reply.value, CacheStats)
    return reply.value


def _preempted_behind(engine: Engine, prompts: Sequence[Sequence[int]], n: int = 1) -> Driver:
    """Requests that have run a while, all preempted, and then pushed out of the pool's cache."""
    driver = Driver(engine)
    for number, prompt in enumerate(prompts):
        driver.start(f"r{number}", prompt, replace(PARAMS, n=n))
    driver.step(6)
    # More urgent, and as large as the pool: what was preempted finds nothing of its own any more.
    for number in range(len(prompts)):
        driver.preempt(f"r{number}")
    big = [9 + 11 * i % 200 for i in range(engine.max_model_len - 3)]
    driver.start("big", big, replace(PARAMS, max_tokens=3), priority=-1)
    return driver


@pytest.mark.parametrize(
    "fields", [{}, {"attention_backend": "torch", "kv_cache_dtype": "fp8"}], ids=["float32", "fp8"]
)
def test_a_preempted_request_goes_on_with_blocks_from_the_host(
    make_engine: MakeEngine, fields: dict[str, str]
) -> None:
    quiet = make_engine(enable_prefix_caching=False, **fields)
    expected = bits(run_one(quiet, PROMPT, PARAMS))
    recomputed = {}
    for gib in (0.0, 0.001):
        engine = _always(make_engine(**SMALL, swap_space=gib, **fields))
        driver = _preempted_behind(engine, [PROMPT])
        assert bits(driver.finish()["r0"].outputs[0]) == expected
        recomputed[gib] = engine.metrics.counters.recomputed_tokens
        stats = _stats(engine)
        moved = (stats.swapped_out_blocks, stats.swapped_in_blocks)
        assert moved == ((9, 9) if gib else (0, 0))  # 30 prompt tokens and 5 more of blocks of 4
    assert recomputed == {0.0: 36, 0.001: 1}


def test_blocks_may_go_to_the_host_and_back_in_one_step(make_engine: MakeEngine) -> None:
    """Preempted, and admitted again before anything was moved; the cache is gone meanwhile."""
    params = replace(PARAMS, n=2)
    quiet = make_engine(enable_prefix_caching=False)
    expected = [bits(output) for output in quiet.generate([PROMPT], params)[0].outputs]
    engine = _always(make_engine(swap_space=0.001))
    driver = Driver(engine)
    driver.start("r0", PROMPT, params)
    driver.step(4)
    driver.preempt("r0")
    engine.manager.flush()
    driver.step()
    assert engine.scheduler.swap.num_in > 0
    assert [bits(output) for output in driver.finish()["r0"].outputs] == expected


def test_samples_move_what_they_share_once(make_engine: MakeEngine) -> None:
    quiet = make_engine(enable_prefix_caching=False)
    params = replace(PARAMS, n=3)
    expected = [bits(output) for output in quiet.generate([PROMPT], params)[0].outputs]
    engine = _always(make_engine(**SMALL, swap_space=0.001))
    driver = _preempted_behind(engine, [PROMPT], n=3)
    engine.check_integrity()
    assert engine.scheduler.swap.num_out == 7 + 3 * 2  # the prompt's whole blocks, and three tails
    assert [bits(output) for output in driver.finish()["r0"].outputs] == expected


def test_host_blocks_of_an_aborted_request_are_free_at_once(make_engine: MakeEngine) -> None:
    engine = _always(make_engine(**SMALL, swap_space=0.001))
    driver = _preempted_behind(engine, [PROMPT, OTHER])
    swap = engine.scheduler.swap
    assert swap.num_out == 9 + 7
    driver.abort("r0")
    driver.abort("r1")
    engine.check_integrity()
    assert swap.take_moves() == ([], [])  # nor are they moved any more
    driver.finish()
    assert swap.num_in == 0


def test_what_others_use_is_not_moved(make_engine: MakeEngine) -> None:
    """Its blocks will be found in the trie again."""
    engine = _always(make_engine(swap_space=0.001))
    driver = Driver(engine)
    driver.start("first", PROMPT, PARAMS)
    driver.step(3)
    driver.start("second", [*PROMPT[:24], 7, 8, 9], PARAMS)
    driver.step(3)
    driver.preempt("second")
    assert engine.scheduler.swap.num_out == 2  # 24 of its 29 tokens are the first one's
    driver.finish()


def test_too_little_host_memory_moves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    per_block = engine.bytes_per_block
    small = _always(make_engine(**SMALL, swap_space=4.5 * per_block / 2**30))
    _preempted_behind(small, [PROMPT]).finish()
    assert small.scheduler.swap.num_out == 0


def test_the_quicker_way_is_taken() -> None:
    """A step that only decodes tells nothing of prefill; a slow first one is soon forgotten."""
    cost = SwapCost(block_size=16, move_seconds=0.016)
    assert not cost.worth_moving(4)
    cost.stepped(num_rows=4, num_tokens=4, seconds=100.0)
    assert not cost.worth_moving(4)
    cost.stepped(num_rows=1, num_tokens=100, seconds=50.0)  # 500 ms a token
    assert cost.worth_moving(4)
    for _ in range(40):
        cost.stepped(num_rows=1, num_tokens=100, seconds=0.05)  # 0.5 ms: 8 ms a block
    assert not cost.worth_moving(4)
    for _ in range(40):
        cost.stepped(num_rows=1, num_tokens=100, seconds=0.2)  # 32 ms a block
    assert cost.worth_moving(4)
