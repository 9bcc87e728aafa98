"""The curve of sizes against replays through the cache itself, exactly and sampled."""

import random

import numpy as np
import pytest

from prefixcache.cache import BlockDigest, BlockManager, CacheObserver
from prefixcache.cache.reuse import ReuseCurve

SCALES = (0.25, 0.5, 1, 2, 4, 8)
NAMESPACE = b"namespace"


class Pool(CacheObserver):
    """A pool of one-token blocks that feeds a curve as the engine does, where it has one."""

    def __init__(self, num_blocks: int, curve: ReuseCurve | None = None, seed: int = 1) -> None:
        self.manager = BlockManager(num_blocks, 1, BlockDigest(seed))
        self.curve = curve
        self.asked = self.hits = 0
        self.manager.observers.append(self)

    def idled(self, digests: bytes) -> None:
        if self.curve is not None:
            self.curve.touch(digests)

    def run(self, prompt: list[int], generated: list[int]) -> None:
        tokens = np.array(prompt + generated, np.uint32)
        data = tokens[: len(prompt)].tobytes()
        match = self.manager.match(NAMESPACE, data)
        table = self.manager.admit(NAMESPACE, data, match)
        self.asked += len(prompt)
        self.hits += match.num_blocks
        if self.curve is not None:
            digest = self.manager.trie.digest
            digests = b"".join(digest.chain(digest(NAMESPACE), data, 0, 4))
            self.curve.access(digests, len(prompt), match.num_blocks)
        self.manager.grow(table, len(tokens))
        self.manager.publish(table, tokens, len(tokens))
        self.manager.release(table)

    def hit_rate(self) -> float:
        return self.hits / self.asked


Request = tuple[list[int], list[int]]


def conversations(number: int, seed: int, heads: int = 12) -> list[Request]:
    """Chats that come back with their history: shared heads, turns of 4 to 40 blocks, answers."""
    choose, requests, open_chats = random.Random(seed), [], []
    tokens = iter(range(10_000, 10**9))
    for _ in range(number):
        if len(open_chats) < 60 or choose.random() < 0.3:
            head = min(int(choose.expovariate(0.4)), heads - 1)
            open_chats.append([head * 20 + i for i in range(20)])
        chat = open_chats[-1 - min(int(choose.expovariate(0.06)), len(open_chats) - 1)]
        chat += [next(tokens) for _ in range(choose.randint(4, 40))]
        answer = [next(tokens) for _ in range(choose.randint(1, 10))]
        requests.append((list(chat), answer))
        chat += answer
        if len(chat) > 300:
            open_chats.remove(chat)
    return requests


def curve_and_replays(
    requests: list[Request], size: int, max_samples: int, seed: int = 1
) -> tuple[list[float], list[float]]:
    curve = ReuseCurve(size, 8 * size, max_samples=max_samples)
    pool = Pool(size, curve, seed)
    pools = [Pool(int(size * scale)) for scale in SCALES]
    for request in requests:
        for one in (pool, *pools):
            one.run(*request)
    rates = curve.hit_rates([int(size * scale) for scale in SCALES])
    return [rate for rate in rates if rate is not None], [one.hit_rate() for one in pools]


def test_unsampled_it_is_the_replay_at_every_size() -> None:
    rates, replayed = curve_and_replays(conversations(400, 1), 1500, max_samples=12_000)
    assert replayed[-1] - replayed[0] > 0.2
    assert rates == pytest.approx(replayed, abs=0.002)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_sampled_it_is_within_two_points(seed: int) -> None:
    requests = conversations(700, seed)
    rates, replayed = curve_and_replays(requests, 2000, max_samples=8000, seed=seed)
    assert replayed[-1] - replayed[0] > 0.2
    assert rates == pytest.approx(replayed, abs=0.02)


def test_memory_is_bounded() -> None:
    curve = ReuseCurve(100, 800, max_samples=200)
    digest = BlockDigest(3)
    for number in range(300):
        curve.access(b"".join(digest.chain(bytes([number % 256]), bytes(4 * 50), 0, 4)), 50, 0)
        assert len(curve) <= 200
    assert curve.rate == 0.25


def prompt(*letters: str) -> bytes:
    return b"".join(letter.encode() * 16 for letter in letters)


def test_distances_by_hand() -> None:
    curve = ReuseCurve(size=4, max_size=8)
    assert curve.hit_rates([4]) == (None,)
    curve.access(prompt("a", "b"), 2, 0)  # the order of use is now a b, from near to far
    curve.access(prompt("c"), 1, 0)  # c a b
    curve.access(prompt("a", "b"), 2, 2)  # a is at distance 1, b at 2
    assert curve.hit_rates([1, 2, 3, 4]) == (0, 1 / 5, 2 / 5, 2 / 5)


def test_what_kept_sequences_cost_is_made_up_for_by_a_larger_pool() -> None:
    curve = ReuseCurve(size=4, max_size=8)
    curve.access(prompt("a", "b"), 2, 0)
    curve.access(prompt("a", "b"), 2, 0)  # the pool held other blocks, though four would have done
    assert curve.hit_rates([2, 4, 5, 8]) == (0, 0, 2 / 4, 2 / 4)
    curve.access(prompt("c", "d", "e"), 3, 0)
    curve.access(prompt("a", "b"), 2, 1)  # a is at distance 3, b at 4: of four, the pool had one
    # By distances four blocks hit three of nine, five hit four, and no more can be had: so there
    # nothing is left of the two that were lost.
    assert curve.hit_rates([4, 5, 8]) == pytest.approx((1 / 9, 4 / 9, 4 / 9))


def test_what_is_hit_beside_whole_blocks_is_hit_in_any_pool() -> None:
    curve = ReuseCurve(size=4, max_size=8)
    curve.access(prompt("a", "b"), 2.5, 0)
    curve.access(prompt("a", "b"), 2.5, 0, 0.5)  # kept sequences stood in the way of a and b
    assert curve.hit_rates([2, 4, 8]) == pytest.approx((0.5 / 5, 0.5 / 5, 2.5 / 5))


def test_what_is_behind_a_block_that_is_there_is_there_in_front_of_it_too() -> None:
    """The front of a prompt may be held by a sequence that runs, and so not have been moved."""
    curve = ReuseCurve(size=4, max_size=8)
    curve.access(prompt("a"), 1, 0)
    curve.touch(prompt("b"))  # behind a, which another sequence still holds
    curve.touch(prompt("c", "d"))
    curve.access(prompt("a", "b"), 2, 2)  # b is at distance 2; a, at 3, is a hit where b is
    assert curve.hit_rates([2, 3, 4]) == (0, 2 / 3, 2 / 3)


def test_it_forgets_the_distant_past(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.cache.reuse.WINDOW", 100)
    curve = ReuseCurve(size=4, max_size=8)
    for number in range(200):
        curve.access(prompt(chr(number % 100)), 1, 0)  # far too many to be held
    assert curve.hit_rates([8]) == (0,)
    for _ in range(500):
        curve.access(prompt("a"), 1, 1)
    (rate,) = curve.hit_rates([4])
    assert rate is not None
    assert rate > 0.95
