"""Replay through the real cache: hits that are known in closed form, forks, samples, priorities."""

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from prefixcache.cache import check_integrity
from prefixcache.simulate.replay import Hits, Replay, room_of
from prefixcache.simulate.trace import (
    Request,
    SequenceRecord,
    Trace,
    distinct_blocks,
    with_block_size,
)
from tests.simulate.traces import BLOCK, forked, group, requests, sequence, shared_prompt


def replay(trace: list[Request], num_blocks: int) -> Hits:
    pool = Replay(num_blocks, BLOCK)
    hits = pool.run(trace)
    check_integrity(pool.manager)
    assert pool.manager.num_in_use == 0
    return hits


@pytest.mark.parametrize("room", [12, 13, 40, 10_000])
def test_a_shared_prompt_is_hit_by_all_but_the_first(room):
    hits = replay(shared_prompt(50, shared=8, own=4), room)
    assert (hits.asked_blocks, hits.hit_blocks) == (50 * 12, 49 * 8)
    assert (hits.asked_tokens, hits.hit_tokens) == (50 * 12 * BLOCK, 49 * 8 * BLOCK)
    assert hits.refused == 0


def test_prompts_in_turn_lose_their_leaves_where_they_do_not_all_fit():
    prompts = [[10 * p + at for at in range(4)] for p in range(5)]
    assert replay(requests(*prompts * 10), 19).hit_blocks == 45 * 3  # each time one leaf has gone
    assert replay(requests(*prompts * 10), 20).hit_blocks == 9 * 20


def test_the_last_token_of_a_prompt_is_always_run():
    hits = replay(requests([1, 2], [1, 2]), 8)
    assert (hits.hit_blocks, hits.hit_tokens) == (2, 2 * BLOCK - 1)


def test_a_request_that_does_not_fit_is_refused_and_misses_everything():
    hits = replay(requests([1, 2], [1, 2, 3, 4], [1, 2]), 3)
    assert (hits.refused, hits.asked_blocks, hits.hit_blocks) == (1, 8, 2)


def test_generated_blocks_are_hit_by_the_next_turn():
    turn = group(0, sequence([1, 2], made=[3]))
    hits = replay([turn, group(1, sequence([1, 2, 3, 4]))], 8)
    assert (hits.asked_blocks, hits.hit_blocks) == (6, 3)


def test_blocks_without_a_name_take_room_while_the_request_runs():
    long = replace(sequence([1]), output_tokens=3 * BLOCK, filled_tokens=4 * BLOCK - 1)
    assert room_of(group(0, long), BLOCK) == 4
    kept = replay([*requests([7, 8]), group(2, long), *requests([7, 8])], 6)
    assert kept.hit_blocks == 2
    driven_out = replay([*requests([7, 8]), group(2, long), *requests([7, 8])], 5)
    assert driven_out.hit_blocks == 1


def test_samples_ask_for_their_prompt_once_and_share_its_room():
    first = sequence([1, 2, 3], made=[4])
    second = replace(sequence([1, 2, 3], made=[5]), sample=True)
    assert room_of(group(0, first, second), BLOCK) == 5
    hits = replay([group(0, first, second), *requests([1, 2, 3, 5])], 5)
    assert (hits.asked_blocks, hits.hit_blocks) == (3 + 4, 4)


def test_what_a_fork_inherits_is_neither_asked_for_nor_hit():
    parent = sequence([1, 2], made=[3])
    child = forked(sequence([1, 2, 3, 9]), 3 * BLOCK)
    hits = replay([group(0, parent), group(1, child)], 16)
    assert (hits.asked_blocks, hits.hit_blocks) == (2 + 1, 0)
    assert (hits.inherited_tokens, hits.asked_tokens) == (3 * BLOCK, 2 * BLOCK + BLOCK)


def test_an_inheritance_that_was_evicted_counts_as_run():
    child = forked(sequence([1, 2, 3, 9]), 3 * BLOCK)
    hits = replay([group(0, child)], 16)
    assert (hits.inherited_tokens, hits.hit_tokens, hits.asked_tokens) == (0, 0, 4 * BLOCK)


def test_scored_tokens_are_run_whatever_is_cached():
    scored = replace(sequence([1, 2, 3]), usable_tokens=BLOCK + 3)
    hits = replay([*requests([1, 2, 3]), group(1, scored)], 16)
    assert (hits.hit_blocks, hits.hit_tokens) == (2, BLOCK + 3)


def test_pruned_branches_go_first_and_less_urgent_requests_before_urgent_ones():
    pruned = replace(sequence([1, 2]), pruned=True)
    late = [*requests([3, 4])]
    trace = [*late, group(1, pruned), *requests([5]), *requests([3, 4])]
    assert replay(trace, 4).hit_blocks == 2
    urgent = group(0, sequence([1, 2]), priority=-1)
    trace = [urgent, *requests([3, 4]), *requests([5, 6]), *requests([1, 2])]
    assert replay(trace, 4).hit_blocks == 2


def test_kept_sequences_go_last_until_their_time_is_over():
    kept = group(0, replace(sequence([1, 2]), keep_seconds=2.5))
    others = [group(t, sequence([10 * t, 10 * t + 1])) for t in (1, 2)]
    again = group(2.4, sequence([1, 2]))
    assert replay([kept, *others, again], 4).hit_blocks == 2
    later = [group(3 + t, sequence([100 + 10 * t, 101 + 10 * t])) for t in range(2)]
    assert replay([kept, *others, *later, group(9, sequence([1, 2]))], 4).hit_blocks == 0


def test_larger_blocks_hit_whole_ones_only():
    trace = Trace("t", "mooncake", tuple(requests([1, 2, 3, 4], [1, 2, 3, 9])), BLOCK)
    twice = with_block_size(trace, 2 * BLOCK)
    assert [list(s.blocks) for s in twice.sequences] == [[2, 4], [2, 9]]
    hits = Replay(16, 2 * BLOCK).run(twice.requests)
    assert (hits.asked_blocks, hits.hit_blocks, hits.hit_tokens) == (4, 1, 2 * BLOCK)
    with pytest.raises(ValueError, match="no multiple"):
        with_block_size(trace, 24)


def test_distinct_blocks_are_counted_over_all_requests():
    assert distinct_blocks(tuple(shared_prompt(5, shared=3, own=2))) == 3 + 5 * 2


def test_memory_is_that_of_the_pool_and_not_of_the_trace():
    def endless(count: int) -> Iterator[Request]:
        random = np.random.default_rng(0)
        for at in range(count):
            names = np.concatenate(
                [np.arange(4, dtype=np.uint64), random.integers(2**40, 2**50, 12, np.uint64)]
            )
            yield Request(at, at, (SequenceRecord(256, 0, 256, names, 16),))

    def held(count: int) -> int:
        replay = Replay(256, BLOCK)
        tracemalloc.start()
        try:
            replay.run(endless(count))
            gc.collect()  # what is garbage waits longer for it in a process with many objects
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    held(100)  # caches of the libraries are filled
    few, many = held(100), held(1500)
    assert many - few < 100_000, (few, many)  # a name kept for each block would be a megabyte
    assert many < 256 * 2000
