"""Random trees of forks over gRPC: each branch equals a fresh request, and nothing stays behind.

A seed decides everything that a test asks for, so that a failure replays from its seed.
"""

import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest

from prefixcache.errors import Cancelled, NotFound, ResourceExhausted
from prefixcache_service import Branch, Completion

TOKENS = (5, 6, 7, 280)  # few, so that branches share more and less than whole blocks


@dataclass(frozen=True)
class Node:
    """A sequence of the tree: the tokens it began with, how it was drawn, and what came."""

    prompt: list[int]
    sampling: dict[str, object]
    out: Completion

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.out.token_ids]


def some_tokens(choose: random.Random, most: int) -> list[int]:
    return choose.choices(TOKENS, k=choose.randint(1, most))


def some_sampling(choose: random.Random) -> dict[str, object]:
    return {
        "temperature": choose.choice((0.0, 0.8, 1.3)),
        "max_tokens": choose.choice((0, 1, 3, 6, 11)),
        "repetition_penalty": choose.choice((1.0, 1.0, 1.2)),
        "top_p": choose.choice((1.0, 0.9)),
        "min_tokens": 0,
        "ignore_eos": choose.random() < 0.7,
        "logprobs": choose.choice((0, 3)),
    }


class Tree:
    """A root and its descendants, all kept."""

    def __init__(self, client, seed: int) -> None:
        self.client = client
        self.choose = random.Random(seed)
        prompt, sampling = some_tokens(self.choose, 30), some_sampling(self.choose)
        root = client.generate(prompt, keep_seconds=60, **sampling).outputs[0]
        self.nodes = [Node(prompt, sampling, root)]

    def fork_kept(self) -> None:
        """Several parents in one call, rewound or not, forced on or not."""
        parents = self.choose.choices(self.nodes, k=self.choose.randint(1, 5))
        plans = [(p, self.choose.choice((None, self.choose.randint(1, len(p.tokens)))),
                  self.choose.choice(([], some_tokens(self.choose, 6))),
                  some_sampling(self.choose)) for p in parents]  # fmt: skip
        branches = [
            Branch(p.out.sequence_id, position=at, token_ids=forced or None, sampling=sampling)
            for p, at, forced, sampling in plans
        ]
        outs = self.client.fork(branches, keep_seconds=60)
        for (parent, at, forced, sampling), out in zip(plans, outs, strict=True):
            self.nodes.append(Node([*parent.tokens[:at], *forced], sampling, out))

    def fork_running(self) -> None:
        """Branches of a sequence that runs on: at its end, wherever that is, and before."""
        prompt = some_tokens(self.choose, 30)
        sampling = {**some_sampling(self.choose), "max_tokens": 40, "ignore_eos": True}
        stream = self.client.stream(prompt, keep_seconds=60, **sampling)
        at, own = self.choose.randint(1, len(prompt)), some_sampling(self.choose)
        branches = [
            Branch(stream.sequence_id, sampling=own),
            Branch(stream.sequence_id, sampling=own, position=at),
        ]
        outs = self.client.fork(branches, keep_seconds=60)
        trunk = Node(prompt, sampling, stream.result().outputs[0])
        self.nodes.append(trunk)
        self.nodes += [Node(trunk.tokens[: out.num_prompt_tokens], own, out) for out in outs]
        assert outs[1].num_prompt_tokens == at


SEEDS = [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 100))]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_branch_equals_a_fresh_request(server, client, seed):
    """To the bit: tokens, logprobs and the next token's distribution."""
    tree = Tree(client, seed)
    for _ in range(4):
        tree.fork_kept()
    if tree.choose.random() < 0.5:
        tree.fork_running()
        tree.fork_kept()
    assert sum(node.out.num_forked_tokens for node in tree.nodes) > 0
    with server.client(cache_salt=f"cold {seed}") as cold:
        for node in tree.nodes:
            fresh = cold.generate(node.prompt, stream_key=node.out.stream_key, **node.sampling)
            cold.flush()
            assert fresh.num_cached_tokens == 0
            assert fresh.token_ids == node.out.token_ids
            assert fresh.logprobs == node.out.logprobs
            assert fresh.outputs[0].next_token == node.out.next_token
            assert fresh.text == node.out.text
    for node in tree.nodes:
        client.release(node.out.sequence_id)


class Clients:
    """Clients that come and go, each in its own way."""

    def __init__(self, server, seed: int) -> None:
        self.server = server
        self.choose = random.Random(seed)
        self.client = server.client()
        self.streams: list[tuple[object, object]] = []
        self.known: list[str] = []

    def act(self) -> None:
        acts = [self.generate, self.fork, self.search, self.cancel, self.disconnect, self.release,
                self.expire, self.read]  # fmt: skip
        weights = [5, 5, 1, 2, 2, 3, 1, 2]
        with suppress(NotFound, ResourceExhausted, Cancelled):
            self.choose.choices(acts, weights)[0]()

    def keep(self) -> float:
        return self.choose.choice((0.0, 0.02, 0.1, 0.3))

    def open(self, stream) -> None:
        """A call on a channel of its own is the one to cut off later."""
        self.streams.append(stream)
        self.known.append(stream[1].sequence_id)

    def generate(self) -> None:
        own = self.server.client()
        stream = own.stream(
            some_tokens(self.choose, 30),
            n=self.choose.choice((1, 1, 3)),
            max_tokens=self.choose.choice((2, 20, 200)),
            keep_seconds=self.keep(),
            ignore_eos=True,
        )
        self.open((own, stream))

    def fork(self) -> None:
        if not self.known:
            return
        own = self.server.client()
        parents = self.choose.choices(self.known[-8:], k=self.choose.randint(1, 4))
        stream = own.stream_fork(
            [Branch(parent, token_ids=some_tokens(self.choose, 5)) for parent in parents],
            max_tokens=self.choose.choice((0, 3, 100)),
            keep_seconds=self.keep(),
            ignore_eos=True,
        )
        self.open((own, stream))

    def search(self) -> None:
        out = self.client.beam(
            some_tokens(self.choose, 20), num_beams=3, max_tokens=6, keep_seconds=self.keep()
        )
        self.known.append(out.sequence_id)

    def cancel(self) -> None:
        if self.streams:
            self.choose.choice(self.streams)[1].cancel()

    def disconnect(self) -> None:
        if self.streams:
            own, _ = self.streams.pop(self.choose.randrange(len(self.streams)))
            own.close()

    def release(self) -> None:
        if self.known:
            self.client.release(self.choose.choice(self.known), subtree=self.choose.random() < 0.5)

    def read(self) -> None:
        if self.streams:
            self.streams.pop(0)[1].result()

    def expire(self) -> None:
        time.sleep(0.05)

    def leave(self) -> None:
        """Some read on to the end, some hang up, all at once."""

        def end(own, stream, reads: bool) -> None:
            with suppress(NotFound, ResourceExhausted, Cancelled):
                if reads:
                    stream.result()
            own.close()

        threads = [
            threading.Thread(target=end, args=(*pair, self.choose.random() < 0.5))
            for pair in self.streams
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.client.close()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_stays_behind_whatever_the_order(server, seed):
    """Forks, releases, cancels, ends of leases and disconnects: then all is free or evictable."""
    before = server.settle()
    clients = Clients(server, seed)
    for _ in range(60):
        clients.act()
    clients.leave()
    deadline = time.monotonic() + 5
    while (stats := server.settle()).sequences_kept and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stats.forks > before.forks
    assert stats.requests_aborted > before.requests_aborted
    assert stats.sequences_kept == stats.blocks_in_use == 0
    assert stats.blocks_free + stats.blocks_evictable == stats.blocks_total
    with server.client() as client:
        assert client.sequences() == ()
    server.engine.check_integrity()
