"""Why a block is not cached: each cause by hand, and bounded memory."""

import numpy as np
import pytest

from prefixcache.cache import BlockDigest, BlockManager, namespace_key
from prefixcache.cache.ghosts import REMEMBERED, BlockHistory

BLOCK = 4
ALICE, BOB, CAROL = (namespace_key(model=b"m", salt=salt) for salt in ("alice", "bob", "carol"))
PROMPT = list(range(1, 13))  # three blocks


class Cache:
    """A block manager with its history, on a clock that stands still unless it is set."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.time = 0.0
        self.manager = BlockManager(num_blocks, BLOCK, BlockDigest(1), clock=lambda: self.time)
        self.history = BlockHistory(num_blocks, BLOCK, 2, lambda: self.time)
        self.manager.observers.append(self.history)

    def run(self, namespace: bytes, tokens: list[int]) -> None:
        """A sequence comes, is computed, and ends."""
        array = np.array(tokens, np.uint32)
        data = array.tobytes()
        table = self.manager.admit(namespace, data, self.manager.match(namespace, data))
        self.manager.grow(table, len(tokens))
        self.manager.publish(table, array, len(tokens))
        self.manager.release(table)

    def absences(self, namespace: bytes, tokens: list[int]) -> list[str]:
        """The causes for the blocks that a lookup does not find."""
        data = np.array(tokens, np.uint32).tobytes()
        match = self.manager.match(namespace, data)
        root = self.manager.trie.digest(namespace)
        parent = match.path[-1].digest_of(match.num_blocks - 1) if match.path else root
        at = match.num_blocks * BLOCK * 4
        digests = self.manager.trie.digest.chain(parent, data, at, BLOCK * 4)
        return list(self.history.absences(parent, digests, data[at:]))


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_what_nobody_had_was_never_seen(cache: Cache) -> None:
    assert cache.absences(ALICE, PROMPT) == ["never_seen"] * 3
    cache.run(ALICE, PROMPT[:4])
    assert cache.absences(ALICE, PROMPT) == ["never_seen"] * 2


def test_what_made_room_was_evicted_until_it_comes_back(cache: Cache) -> None:
    cache.run(ALICE, PROMPT)
    cache.run(ALICE, list(range(101, 129)))  # seven of eight blocks: the deepest two must go
    assert cache.absences(ALICE, PROMPT) == ["evicted"] * 2
    cache.run(ALICE, PROMPT)
    assert cache.absences(ALICE, PROMPT) == []
    assert cache.absences(ALICE, [*PROMPT[:8], 9, 9, 9, 9]) == ["never_seen"]


def test_what_was_flushed_counts_as_evicted(cache: Cache) -> None:
    cache.run(ALICE, PROMPT)
    cache.manager.flush()
    assert cache.absences(ALICE, PROMPT) == ["evicted"] * 3


def test_what_only_others_had_is_of_another_namespace(cache: Cache) -> None:
    cache.run(ALICE, PROMPT)
    assert cache.absences(BOB, PROMPT) == ["other_namespace"] * 3
    cache.run(BOB, PROMPT[:4])
    assert cache.absences(BOB, PROMPT) == ["other_namespace"] * 2
    assert cache.absences(CAROL, PROMPT) == ["other_namespace"] * 3
    assert cache.absences(BOB, [*PROMPT[:4], *PROMPT[8:]]) == [
        "never_seen"
    ]  # elsewhere in a prompt


def test_ones_own_eviction_goes_before_what_others_had(cache: Cache) -> None:
    cache.run(ALICE, PROMPT)
    cache.run(BOB, PROMPT)
    cache.manager.flush(BOB)
    assert cache.absences(BOB, PROMPT) == ["evicted"] * 3
    assert cache.absences(CAROL, PROMPT) == ["other_namespace"] * 3


def test_a_block_that_is_still_cached_elsewhere_is_not_forgotten() -> None:
    cache = Cache()
    cache.run(ALICE, PROMPT)
    for number in range(20 * REMEMBERED):
        cache.run(CAROL, [1000 + number] * 4)
        cache.run(ALICE, PROMPT)  # so that it stays
    assert cache.absences(BOB, PROMPT) == ["other_namespace"] * 3


def test_memory_is_bounded_by_the_pool_and_the_oldest_is_forgotten() -> None:
    cache = Cache(num_blocks=8)
    for number in range(40 * REMEMBERED):
        cache.run(ALICE, [number + 1] * 4)
        history = cache.history
        assert len(history._ghosts) + len(history._old_ghosts) <= 2 * REMEMBERED * 8
        assert len(history._seen) + len(history._old_seen) <= 2 * REMEMBERED * 8
        assert len(history._residents) <= 8
    assert cache.absences(ALICE, [1] * 4) == ["never_seen"]
    assert cache.absences(ALICE, [40 * REMEMBERED - REMEMBERED * 8] * 4) == ["evicted"]


def test_ages(cache: Cache) -> None:
    cache.run(ALICE, PROMPT[:4])
    cache.time = 7.0
    digest = cache.manager.trie.digest(
        cache.manager.trie.digest(ALICE) + np.array(PROMPT[:4], np.uint32).tobytes()
    )
    assert cache.history.age(digest) == 7.0
    assert cache.history.age(b"unknown") == 0.0
