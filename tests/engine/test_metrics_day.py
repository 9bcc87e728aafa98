"""A scripted day on a pool of 16 blocks of 4 tokens, each figure computed by hand beside it.

The clock moves only where the script says so: a step takes no time, and a second lies between two.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache.engine.messages import (
    CacheStats,
    ForkBranch,
    GetStats,
    Histogram,
    PinInfo,
    PinPrefix,
    Release,
    Reply,
    Score,
    TenantStats,
    UnpinPrefix,
)
from prefixcache.errors import AlreadyExists, ResourceExhausted
from tests.engine.driving import Driver

P = list(range(1, 19))
"""The day's prompt: four whole blocks and two tokens."""


def greedy(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


class Day:
    """An engine, a clock, and requests by name."""

    def __init__(self, checkpoint: Path, engines: list[Engine]) -> None:
        self.time = 0.0
        config = EngineConfig(
            model=str(checkpoint),
            block_size=4,
            num_gpu_blocks_override=16,
            max_model_len=56,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            metrics_tenants=1,
            seed=1,
        )
        self.engine = Engine(config, clock=lambda: self.time)
        engines.append(self.engine)
        self.driver = Driver(self.engine, fails=("too large",))

    def at(self, time: float) -> Driver:
        self.time = time
        return self.driver

    def run(self, steps: int) -> None:
        """Steps, a second between two; then all has ended."""
        self.driver.step()
        for _ in range(steps - 1):
            self.time += 1
            self.driver.step()

    def ask(self, command: object) -> object:
        self.engine.execute(command)  # type: ignore[arg-type]
        (reply,) = [event for event in self.engine.take_events() if isinstance(event, Reply)]
        return reply.value

    def stats(self) -> CacheStats:
        stats = self.ask(GetStats("stats"))
        assert isinstance(stats, CacheStats)
        return stats


@pytest.fixture
def day(checkpoint_of: Callable[..., Path], engines: list[Engine]) -> Day:
    return Day(checkpoint_of(), engines)


def morning(day: Day) -> None:
    """Shared prompts, a second tenant, prompts that bypass the cache, a fork."""
    # 18 tokens: 16 never seen, 2 remainder. Waits 2 s. Leaves 18 + 2 tokens with KV: five blocks,
    # the fifth of them at t = 4.
    day.at(0).start("cold", P, greedy(3))
    day.at(2)
    day.run(3)
    # Four blocks idle for 6 s, two tokens of the fifth (copied), the last token is run: 17 cached,
    # 1 remainder. The second sample shares the last block; the first to write copies it.
    day.at(10).start("warm", P, greedy(2, n=2))
    day.run(2)
    # Of 16 tokens 12 are known of the other tenant, 3 never seen, 1 remainder.
    day.at(20).start("tenant", [*P[:12], 101, 102, 103, 104], greedy(1), cache_salt="b")
    day.run(1)
    # All 18 are run, for their logprobs: bypassed. Their blocks are held, the fifth is copied.
    day.at(21).start("logprobs", P, greedy(1, prompt_logprobs=1))
    day.run(1)
    # 7 of the prefix's 8 tokens are cached (two blocks, idle for 1 s, then in use), 3 and 2 scored.
    day.at(22)
    day.engine.execute(Score("score", tuple(P[:8]), ((131, 132), (133,))))
    day.run(1)
    # 4 never seen, 2 remainder. Kept: two blocks, and a tail with one token.
    kept = day.at(30).start("kept", range(31, 37), greedy(4), keep_seconds=100)
    day.run(4)
    # Of 10 and 13 tokens 9 each are taken over. The rest: 1 remainder; 3 never seen, 1 remainder.
    parent = kept.outputs[0].sequence_id
    branches = (ForkBranch(parent, greedy(2)), ForkBranch(parent, greedy(2), None, (41, 42, 43)))
    day.at(40).fork("fork", *branches)
    day.driver.step()
    stats = day.stats()
    assert (stats.blocks_shared, stats.blocks_saved, stats.blocks_leased) == (2, 2, 3)
    assert stats.bytes_saved == 2 * stats.bytes_per_block > 0
    # Both have the two blocks of the parent, one has one more, the other two.
    assert (stats.blocks_in_use, stats.sequences_running, stats.sequences_kept) == (5, 2, 1)
    day.at(41)
    day.run(1)


def noon(day: Day) -> None:
    """What ends early, what is refused, what is tried again."""
    day.at(50).start("gone", range(51, 56), greedy(10))  # 4 never seen, 1 remainder
    day.driver.step()
    day.at(51).abort("gone")
    day.driver.start("never admitted", P, greedy(3))
    day.driver.abort("never admitted")
    day.at(60).start("busy", range(61, 65), greedy(1))  # 3 never seen, 1 remainder
    day.driver.start("busy", range(61, 65), greedy(1))
    with pytest.raises(AlreadyExists):
        day.driver.step()  # runs the first one all the same
    # The retry finds its block, idle for 1 s: 3 cached, 1 remainder.
    day.at(61).start("busy", range(61, 65), greedy(1))
    day.run(1)
    day.driver.start("too large", [5] * 50, greedy(6, n=3))
    day.run(1)
    assert isinstance(day.driver.errors["too large"], ResourceExhausted)


def afternoon(day: Day) -> None:
    """The pool is full but for a block: evictions, what they cost, a preemption, a search."""
    assert day.stats().blocks_free == 1
    # Three blocks: 11 never seen, 1 remainder. What goes: the fifth of P, idle since 4, and the
    # tenant's fourth, in the cache and idle since 20. It ends with a stop token.
    stopped = greedy(5, logit_bias={7: 100.0}, stop_token_ids=(7,))
    day.at(70).start("evicts", range(71, 83), stopped)
    day.run(1)
    # Three blocks, idle for 60 s, are there; of the fourth 3 tokens were evicted, 1 is remainder.
    # For it goes P's fourth, there since 2, idle since 21.
    day.at(80).start("tenant", [*P[:12], 101, 102, 103, 104], greedy(1), cache_salt="b")
    day.run(1)
    # 7 never seen, 1 remainder. For two blocks go P's third, idle since 21, and second, since 22.
    day.at(90).start("preempted", range(111, 119), greedy(3))
    day.driver.step()
    day.at(91).preempt("preempted")
    stats = day.stats()
    assert (stats.sequences_waiting, stats.sequences_preempted) == (1, 1)
    # One token is run again, on a third block: P's first goes. Then there is one more.
    day.run(2)
    assert day.stats().sequences_preempted == 0
    pin = day.ask(PinPrefix("pin", tuple(range(111, 119)), 50.0))
    assert isinstance(pin, PinInfo)
    assert day.stats().blocks_pinned == 2
    day.ask(UnpinPrefix("unpin", pin.pin_id))
    # 3 never seen, 1 remainder. At 101 two beams want a block each: the fork's own, there since 40
    # and idle since 41, and that of the aborted request, since 50 and 51.
    day.at(100).start("search", range(121, 125), BeamSearchParams(2, max_tokens=2, ignore_eos=True))
    day.run(2)


def test_every_figure_of_a_scripted_day(day: Day) -> None:
    morning(day)
    noon(day)
    afternoon(day)
    stats = day.stats()
    assert stats.prompt_tokens == 18 + 18 + 16 + 18 + 10 + 9 + 6 + 23 + 5 + 4 + 4 + 12 + 16 + 8 + 4
    assert stats.cached_tokens == 17 + 7 + 7 + 3 + 12
    assert stats.forked_tokens == 9 + 9
    assert stats.misses == {
        "never_seen": 16 + 3 + 4 + 3 + 4 + 3 + 11 + 7 + 3,
        "evicted": 3,
        "other_namespace": 12,
        "bypassed": 18 + 3 + 2,
        "remainder": 2 + 1 + 1 + 2 + 2 + 1 + 1 + 1 + 1 + 1 + 1 + 1,
    }
    assert stats.computed_tokens == sum(stats.misses.values()) == 171 - 46 - 18
    assert stats.hit_rate == 46 / (46 + 107)
    assert stats.recomputed_tokens == 1
    assert stats.completion_tokens == 3 + 4 + 1 + 1 + 4 + 4 + 1 + 1 + 1 + 1 + 1 + 3 + 2
    assert (stats.preemptions, stats.forks, stats.block_copies) == (1, 1 + 2 + 1, 2 + 1 + 2)
    ended = (stats.requests_finished, stats.requests_aborted, stats.requests_failed)
    assert ended == (13, 2, 2)
    assert stats.finish_reasons == {"stop": 1, "length": 15, "abort": 2}
    assert stats.evicted_blocks == 8
    assert stats.tenants == (
        TenantStats("e3b0c44298fc", 34, 18, 87, 25),
        TenantStats("other", 12, 0, 20, 2),
    )
    assert stats.size_curve[2].hit_rate == pytest.approx(stats.hit_rate)
    assert [point.blocks for point in stats.size_curve] == [4, 8, 16, 32, 64, 128]
    check_times(stats)
    (kept,) = [entry.sequence.id for entry in day.engine.registry.entries(None)]
    day.ask(Release("release", kept))
    assert day.stats().blocks_leased == 0


def check_times(stats: CacheStats) -> None:
    assert times(stats, "eviction_age_seconds") == (8, 66 + 50 + 78 + 88 + 88 + 89 + 61 + 51)
    assert times(stats, "eviction_idle_seconds") == (8, 66 + 50 + 59 + 69 + 68 + 69 + 60 + 50)
    assert times(stats, "reuse_gap_seconds") == (12, 4 * 6 + 2 * 1 + 2 * 0 + 1 + 3 * 60)
    gaps = histogram(stats, "reuse_gap_seconds")
    assert dict(zip(gaps.bounds, gaps.counts, strict=False)) == {
        0.0: 2, 0.1: 0, 1.0: 3, 5.0: 0, 15.0: 4, 60.0: 3,
        300.0: 0, 900.0: 0, 3600.0: 0, 14400.0: 0, 86400.0: 0,
    }  # fmt: skip
    assert times(stats, "queue_time_seconds") == (14, 2)
    assert times(stats, "prefill_time_seconds") == (12, 0)
    bands = {
        one.labels["hit_rate"]: sum(one.counts)
        for one in stats.histograms
        if one.name == "time_to_first_token_seconds"
    }
    assert bands == {"0": 8, "0-50": 0, "50-90": 3, "90-100": 1}
    assert times(stats, "time_between_tokens_seconds") == (2 + 2 + 3 + 2 + 2, 11)
    assert times(stats, "request_duration_seconds") == (14, 4 + 1 + 3 + 1 + 1 + 2 + 1)
    steps = 3 + 2 + 1 + 1 + 1 + 4 + 2 + 1 + 1 + 1 + 1 + 1 + 3 + 2
    assert times(stats, "step_duration_seconds") == (steps, 0)


def histogram(stats: CacheStats, name: str) -> Histogram:
    (found,) = [one for one in stats.histograms if one.name == name]
    return found


def times(stats: CacheStats, name: str) -> tuple[int, float]:
    """How often, and the sum."""
    found = histogram(stats, name)
    return sum(found.counts), found.sum


def test_with_the_cache_off_all_is_bypassed(
    checkpoint_of: Callable[..., Path], engines: list[Engine]
) -> None:
    config = EngineConfig(
        model=str(checkpoint_of()),
        enable_prefix_caching=False,
        block_size=4,
        num_gpu_blocks_override=16,
        max_model_len=64,
    )
    engine = Engine(config)
    engines.append(engine)
    for _ in range(2):
        engine.generate([P], greedy(2, n=2))
    engine.execute(GetStats("stats"))
    (reply,) = engine.take_events()
    assert isinstance(reply, Reply)
    stats = reply.value
    assert isinstance(stats, CacheStats)
    assert {cause: n for cause, n in stats.misses.items() if n} == {"bypassed": 36}
    assert stats.computed_tokens == 36
    assert all(point.hit_rate is None for point in stats.size_curve)
