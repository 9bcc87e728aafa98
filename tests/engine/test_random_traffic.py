"""Random traffic on a pool that is far too small, and every answer equal to a quiet engine's.

The seed decides arrivals, forks, aborts, releases, flushes, priorities, pool and budget, so that a
failure replays from its seed. After each step no block is lost; at the end each sequence has the
tokens and logprobs of a fresh request with the same tokens and stream key, alone and uncached.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixcache import Engine, EngineConfig
from prefixcache.engine.messages import TenantPolicy
from tests.engine.traffic import Traffic, compare

POLICIES = (
    TenantPolicy("open"),
    TenantPolicy("small", weight=0.5, max_sequences=4, max_leases=2),
    TenantPolicy("slow", weight=3.0, pool_share=0.6, tokens_per_minute=600),
)


class Ticks:
    """A clock that depends on nothing but how often it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now


def run_seed(
    traffic_model: Path, seed: int, swap: bool = False, policies: Sequence[TenantPolicy] = ()
) -> Traffic:
    choose = random.Random(seed)
    engine = Engine(
        EngineConfig(
            model=str(traffic_model),
            block_size=4,
            num_gpu_blocks_override=choose.choice((12, 16, 24, 40)),
            max_model_len=40,
            max_num_seqs=choose.choice((3, 6)),
            max_num_batched_tokens=choose.choice((6, 9, 64)),
            enable_prefix_caching=choose.random() < 0.85,
            wait_for_inflight=choose.random() < 0.7,
            seed=seed,
            swap_space=0.001 if swap else 0.0,
        ),
        clock=Ticks(),
    )
    engine.scheduler.swap.worth = lambda num_blocks: True
    traffic = Traffic(engine, seed, policies)
    for _ in range(120):
        if choose.random() < 0.5:
            traffic.act()
        traffic.step()
    traffic.drain()
    return traffic


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_traffic(traffic_model: Path, quiet: Engine, seed: int) -> None:
    check_seed(traffic_model, quiet, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_answers_do_not_depend_on_more_traffic(
    traffic_model: Path, quiet: Engine, seed: int
) -> None:
    check_seed(traffic_model, quiet, seed)


@pytest.mark.parametrize("seed", [53, 55, 60, 66])  # those in which much is moved
def test_answers_do_not_depend_on_blocks_moved_to_the_host_and_back(
    traffic_model: Path, quiet: Engine, seed: int
) -> None:
    engine = check_seed(traffic_model, quiet, seed, swap=True)
    assert engine.scheduler.swap.num_in > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 230))
def test_answers_do_not_depend_on_more_moves(traffic_model: Path, quiet: Engine, seed: int) -> None:
    check_seed(traffic_model, quiet, seed, swap=True)


@pytest.mark.parametrize("seed", range(300, 304))
def test_tenants_share_nothing_and_keep_to_their_quotas(
    traffic_model: Path, quiet: Engine, seed: int
) -> None:
    """Each step shows it: no block of one is another's, and none has more than it may."""
    check_tenants(traffic_model, quiet, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 440))
def test_tenants_share_nothing_in_more_traffic(
    traffic_model: Path, quiet: Engine, seed: int
) -> None:
    check_tenants(traffic_model, quiet, seed)


def test_traffic_of_tenants_replays_from_its_seed(traffic_model: Path) -> None:
    first, second = (run_seed(traffic_model, 300, policies=POLICIES) for _ in range(2))
    assert [str(f.error) for f in first.failed.values()] == [
        str(f.error) for f in second.failed.values()
    ]
    assert [(k, a.token_ids, a.stream_key) for k, a in first.answers.items()] == [
        (k, a.token_ids, a.stream_key) for k, a in second.answers.items()
    ]


def check_tenants(traffic_model: Path, quiet: Engine, seed: int) -> None:
    traffic = run_seed(traffic_model, seed, policies=POLICIES)
    assert compare(traffic, quiet) > 50
    refused = Counter(traffic.owner_of[name].tenant for name in traffic.failed)
    assert refused["small"] + refused["slow"] > 0
    assert traffic.engine.manager.num_in_use == traffic.engine.manager.num_pinned()


def check_seed(traffic_model: Path, quiet: Engine, seed: int, swap: bool = False) -> Engine:
    traffic = run_seed(traffic_model, seed, swap)
    engine = traffic.engine
    assert compare(traffic, quiet) > 50
    assert engine.manager.num_in_use == engine.manager.num_pinned()
    counters = engine.metrics.counters
    sources = counters.cached_tokens + counters.forked_tokens + counters.computed_tokens
    assert sources == counters.prompt_tokens
    return engine
