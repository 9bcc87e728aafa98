"""Belady's bound against exhaustive search, and the three policies beside one another."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from prefixcache.simulate.bounds import BlockNumbers, belady, plain_lru
from prefixcache.simulate.replay import Replay
from prefixcache.simulate.trace import Request
from tests.simulate.traces import BLOCK, group, requests, sequence, shared_prompt


def best_by_search(prompts: list[list[int]], room: int) -> int:
    """Most hits of any policy: all ways to keep blocks after each request, prefixes only."""
    parents = {block: p[at - 1] if at else None for p in prompts for at, block in enumerate(p)}

    def is_closed(kept: frozenset[int]) -> bool:
        return all(parents[block] is None or parents[block] in kept for block in kept)

    @cache
    def most(now: int, cached: frozenset[int]) -> int:
        if now == len(prompts):
            return 0
        asked = frozenset(prompts[now])
        spare = cached - asked
        count = min(len(spare), room - len(asked))
        ways = {asked | frozenset(some) for some in combinations(spare, count)}
        after = [most(now + 1, kept) for kept in ways if is_closed(kept)]
        return len(asked & cached) + max(after)

    return most(0, frozenset())


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Walks down a random tree; a block's name is its path, so equal names share all before."""
    random = np.random.default_rng(seed)
    prompts = []
    for _ in range(count):
        path, prompt = 0, []
        for _ in range(random.integers(1, 4)):
            path = path * 3 + int(random.integers(1, 3))
            prompt.append(path)
        prompts.append(prompt)
    return prompts


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("room", [3, 5])
def test_no_policy_does_better_and_one_does_as_well(seed, room):
    prompts = random_prompts(seed, 14)
    numbers = BlockNumbers(requests(*prompts), BLOCK)
    assert belady(numbers, room).hit_blocks == best_by_search(prompts, room)


@pytest.mark.parametrize("seed", range(5))
def test_neither_the_cache_nor_lru_passes_the_bound(seed):
    trace = requests(*random_prompts(seed, 300))
    numbers = BlockNumbers(trace, BLOCK)
    for room in (3, 6, 12, 30):
        bound = belady(numbers, room)
        ours, lru = Replay(room, BLOCK).run(trace), plain_lru(numbers, room)
        assert ours.asked_blocks == lru.asked_blocks == bound.asked_blocks
        assert max(ours.hit_blocks, lru.hit_blocks) <= bound.hit_blocks


def test_prompts_in_turn_are_the_worst_case_of_lru_and_known_for_the_bound():
    count, room, rounds = 9, 5, 16
    numbers = BlockNumbers(requests(*[[block] for block in range(count)] * rounds), BLOCK)
    assert plain_lru(numbers, room).hit_blocks == 0
    # Of each count - 1 requests, count - room are missed once the pool is full.
    expected = (count * rounds - room) * (room - 1) / (count - 1)
    assert belady(numbers, room).hit_blocks == pytest.approx(expected, abs=room)


def test_plain_lru_lets_the_front_go_first_and_the_cache_the_leaves():
    front = [1, 2, 3, 4]
    trace = requests(front, [5], [*front, 6])
    assert plain_lru(BlockNumbers(trace, BLOCK), 4 + 1).hit_blocks == 4
    trace = requests(front, [5, 6], front)
    assert plain_lru(BlockNumbers(trace, BLOCK), 5).hit_blocks == 0
    assert Replay(5, BLOCK).run(trace).hit_blocks == 3


def test_all_count_what_is_refused_and_what_has_no_name_alike():
    trace = [
        group(0, sequence([1, 2], made=[3])),
        group(1, sequence([1, 2, 3, 4])),
        group(2, sequence(list(range(20, 30)))),
        group(3, sequence([1, 2, 3], output=40)),
    ]
    numbers = BlockNumbers(trace, BLOCK)
    for room in (4, 8, 9):
        results = [Replay(room, BLOCK).run(trace), plain_lru(numbers, room), belady(numbers, room)]
        assert {(h.asked_blocks, h.refused) for h in results} == {(2 + 4 + 10 + 3, 1)}
        assert {h.hit_blocks for h in results} == {6}


def test_with_room_for_everything_all_are_equal():
    trace: list[Request] = shared_prompt(30, shared=5, own=3)
    numbers = BlockNumbers(trace, BLOCK)
    results = [Replay(500, BLOCK).run(trace), plain_lru(numbers, 500), belady(numbers, 500)]
    assert {(h.hit_blocks, h.hit_tokens) for h in results} == {(29 * 5, 29 * 5 * BLOCK)}
