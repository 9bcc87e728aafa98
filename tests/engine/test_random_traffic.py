"""Random traffic on a pool that is far too small, and every answer equal to a quiet engine's.

The seed decides arrivals, forks, aborts, releases, flushes, priorities, pool and budget, so that a
failure replays from its seed. After each step no block is lost; at the end each sequence has the
tokens and logprobs of a fresh request with the same tokens and stream key, alone and uncached.
"""

import random
from pathlib import Path

import pytest

from prefixcache import Engine, EngineConfig
from tests.engine.traffic import Traffic, compare
from tests.model.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("random") / "llama", "llama", seed=3)


@pytest.fixture(scope="module")
def quiet(checkpoint: Path) -> Engine:
    """The reference: nothing cached, nothing shared, nothing else running."""
    return Engine(
        EngineConfig(
            model=str(checkpoint),
            enable_prefix_caching=False,
            num_gpu_blocks_override=64,
            max_model_len=128,
        )
    )


def run_seed(checkpoint: Path, quiet: Engine, seed: int, swap: bool) -> Traffic:
    choose = random.Random(seed)
    engine = Engine(
        EngineConfig(
            model=str(checkpoint),
            block_size=4,
            num_gpu_blocks_override=choose.choice((12, 16, 24, 40)),
            max_model_len=40,
            max_num_seqs=choose.choice((3, 6)),
            max_num_batched_tokens=choose.choice((6, 9, 64)),
            enable_prefix_caching=choose.random() < 0.85,
            wait_for_inflight=choose.random() < 0.7,
            seed=seed,
            swap_space=0.001 if swap else 0.0,
        )
    )
    engine.scheduler.swap.worth = lambda num_blocks: True
    traffic = Traffic(engine, seed)
    for _ in range(120):
        if choose.random() < 0.5:
            traffic.act()
        traffic.step()
    traffic.drain()
    return traffic


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_traffic(checkpoint: Path, quiet: Engine, seed: int) -> None:
    check_seed(checkpoint, quiet, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_answers_do_not_depend_on_more_traffic(checkpoint: Path, quiet: Engine, seed: int) -> None:
    check_seed(checkpoint, quiet, seed)


@pytest.mark.parametrize("seed", [53, 55, 60, 66])  # those in which much is moved
def test_answers_do_not_depend_on_blocks_moved_to_the_host_and_back(
    checkpoint: Path, quiet: Engine, seed: int
) -> None:
    engine = check_seed(checkpoint, quiet, seed, swap=True)
    assert engine.scheduler.swap.num_in > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 230))
def test_answers_do_not_depend_on_more_moves(checkpoint: Path, quiet: Engine, seed: int) -> None:
    check_seed(checkpoint, quiet, seed, swap=True)


def check_seed(checkpoint: Path, quiet: Engine, seed: int, swap: bool = False) -> Engine:
    traffic = run_seed(checkpoint, quiet, seed, swap)
    engine = traffic.engine
    assert compare(traffic, quiet) > 50
    assert engine.manager.num_in_use == engine.manager.num_pinned()
    counters = engine.metrics.counters
    sources = counters.cached_tokens + counters.forked_tokens + counters.computed_tokens
    assert sources == counters.prompt_tokens
    return engine
