"""Figures under random traffic: sums that hold after every step, and nothing counted twice.

At the end they are what the events said, request by request.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from prefixcache import Engine, EngineConfig
from prefixcache.engine.calls import answer
from prefixcache.engine.histogram import Histogram
from prefixcache.engine.messages import (
    CacheStats,
    Event,
    Failed,
    Finished,
    GetStats,
    Output,
    Reply,
    Started,
    Usage,
)
from tests.engine.traffic import Traffic
from tests.model.checkpoints import write_checkpoint

GROWING = (
    "prompt_tokens", "cached_tokens", "forked_tokens", "computed_tokens", "recomputed_tokens",
    "completion_tokens", "preemptions", "forks", "block_copies", "evicted_blocks",
    "requests_finished", "requests_aborted", "requests_failed",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("metered") / "llama", "llama", seed=3)


def stats_of(engine: Engine) -> CacheStats:
    (reply,) = answer(engine, GetStats("stats"))
    assert isinstance(reply, Reply)
    assert isinstance(reply.value, CacheStats)
    return reply.value


def counts(stats: CacheStats) -> Counter[str]:
    """How many values each histogram has, by name."""
    found: Counter[str] = Counter()
    for one in stats.histograms:
        found[one.name.removesuffix("_seconds")] += sum(one.counts)
    return found


class Counted(Traffic):
    """Adds up what the events say, and looks at the figures after every step."""

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(engine, seed)
        self.sum = Usage()
        self.started: set[tuple[str, int]] = set()
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.last = stats_of(engine)

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started.add((event.request_id, event.index))
        elif isinstance(event, Output):
            self.tokens[event.request_id, event.index] += len(event.token_ids)
        elif isinstance(event, Finished):
            self.add(event)
        elif isinstance(event, Failed):
            started = {name for name, _ in self.started}
            assert event.request_id not in started  # what such a one had is in no usage
        super().take(event)

    def add(self, event: Finished) -> None:
        names = Usage.__dataclass_fields__
        new = {name: getattr(self.sum, name) + getattr(event.usage, name) for name in names}
        self.sum = replace(self.sum, **new)
        key = (event.request_id, event.index)
        unborn = key in self.answers and self.answers[key].params.n > 1 and key not in self.started
        if event.index == 0 or not unborn:
            self.reasons[event.reason] += 1

    def step(self) -> None:
        super().step()
        stats = stats_of(self.engine)
        check(stats, self.engine.config.enable_prefix_caching)
        for name in GROWING:
            assert getattr(stats, name) >= getattr(self.last, name), name
        assert all(stats.misses[cause] >= n for cause, n in self.last.misses.items())
        self.last = stats


def check(stats: CacheStats, caching: bool) -> None:
    """What holds at every scrape."""
    sources = stats.cached_tokens + stats.forked_tokens + stats.computed_tokens
    assert sources == stats.prompt_tokens
    assert sum(stats.misses.values()) == stats.computed_tokens
    assert stats.blocks_free + stats.blocks_evictable + stats.blocks_in_use == stats.blocks_total
    assert stats.blocks_shared <= stats.blocks_saved
    assert stats.blocks_shared <= stats.blocks_in_use
    assert stats.sequences_preempted <= stats.sequences_waiting
    found = counts(stats)
    assert found["eviction_age"] == found["eviction_idle"] <= stats.evicted_blocks
    assert found["queue_time"] >= found["prefill_time"] == found["time_to_first_token"]
    if caching:
        assert stats.size_curve[2].hit_rate == pytest.approx(stats.hit_rate)
        rates = [point.hit_rate for point in stats.size_curve if point.hit_rate is not None]
        assert rates == sorted(rates)
    else:
        assert stats.misses["bypassed"] == stats.computed_tokens


def run_seed(checkpoint: Path, seed: int) -> Counted:
    choose = random.Random(seed)
    config = EngineConfig(
        model=str(checkpoint),
        block_size=4,
        num_gpu_blocks_override=choose.choice((16, 24, 40)),
        max_model_len=40,
        max_num_seqs=choose.choice((3, 6)),
        max_num_batched_tokens=choose.choice((6, 9, 64)),
        enable_prefix_caching=seed % 4 != 3,
        wait_for_inflight=choose.random() < 0.7,
        seed=seed,
    )
    traffic = Counted(Engine(config), seed)
    for _ in range(80):
        if choose.random() < 0.5:
            traffic.act()
        traffic.step()
    traffic.drain()
    return traffic


def check_seed(checkpoint: Path, seed: int) -> Counted:
    traffic = run_seed(checkpoint, seed)
    stats, said = traffic.last, traffic.sum
    for name in Usage.__dataclass_fields__:
        assert getattr(stats, name) == getattr(said, name), name
    assert {reason: n for reason, n in stats.finish_reasons.items() if n} == traffic.reasons
    assert stats.requests_failed == len(traffic.failed)
    found = counts(stats)
    assert found["request_duration"] == found["queue_time"]
    sampled = {key: n for key, n in traffic.tokens.items() if n and key in traffic.answers}
    assert found["time_between_tokens"] == sum(sampled.values()) - len(sampled)
    assert found["time_to_first_token"] == len({name for name, _ in sampled})
    return traffic


@pytest.mark.parametrize("seed", range(4))
def test_sums_hold_after_every_step(checkpoint: Path, seed: int) -> None:
    check_seed(checkpoint, seed)


@pytest.mark.slow
def test_sums_hold_under_more_traffic(checkpoint: Path) -> None:
    causes: Counter[str] = Counter()
    preemptions = 0
    for seed in range(4, 44):
        stats = check_seed(checkpoint, seed).last
        causes.update(stats.misses)
        preemptions += stats.preemptions
    assert all(causes.values())
    assert preemptions > 20


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(1.5, times=3)
    snapshot = histogram.snapshot("name_seconds", {"label": "value"})
    assert (snapshot.counts, snapshot.sum) == ((2, 5, 1), 12.5)
