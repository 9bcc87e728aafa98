"""What is refused for its size, what a caller who has gone leaves behind, and what others see."""

import threading
import time
from collections import Counter
from contextlib import contextmanager

import grpc
import pytest

from prefixcache.engine.messages import CacheEvent, Output, TokenLogprobs
from prefixcache.engine.observer import EngineObserver
from prefixcache.errors import AlreadyExists, Cancelled, InvalidArgument
from prefixcache.limits import MAX_MESSAGE_BYTES
from prefixcache_service import Branch, render
from prefixcache_service.limits import CLIENT_OPTIONS
from prefixcache_service.mailbox import Mailbox
from prefixcache_service.v1 import prefixcache_pb2 as pb
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}
DEFAULT_LIMIT = 4 << 20
"""gRPC's own, in bytes, of a client that sets none."""


# ---------------------------------------------------------------- sizes of messages


def test_a_long_reply_with_logprobs_comes_in_messages_of_any_clients_size():
    """GR-01: logprobs = 20 over 4,000 tokens that nobody has read so far."""
    top = tuple((token, -1.0) for token in range(20))
    mailbox = Mailbox(1)
    for token in range(4_000):
        mailbox.put(Output("r", 0, (token,), "x", (TokenLogprobs(token, -1.0, top),)))
    messages = [
        m for event in take(mailbox) for m in render.responses(event, lambda token: b"eight by")
    ]
    assert [token for m in messages for token in m.chunk.token_ids] == list(range(4_000))
    assert sum(len(m.chunk.logprobs) for m in messages) == 4_000
    assert max(m.ByteSize() for m in messages) < DEFAULT_LIMIT


def take(mailbox):
    """What waits, without an event loop: `take` does not wait where something is there."""
    waiting = mailbox.take()
    with pytest.raises(StopIteration) as stop:
        waiting.send(None)
    return stop.value.value


def test_events_of_long_prompts_come_in_messages_of_any_clients_size():
    """GR-01: a thousand prompts of 8,000 tokens, which somebody watches with their tokens."""
    stored = CacheEvent(1, "stored", b"p" * 16, (b"d" * 16,) * 500, 16, (49_000,) * 8_000)
    messages = list(render.cache_events([stored] * 1_000))
    assert sum(len(message.events) for message in messages) == 1_000
    assert max(message.ByteSize() for message in messages) < DEFAULT_LIMIT
    removed = CacheEvent(1, "removed", digests=(b"d" * 16,))
    assert len(list(render.cache_events([removed] * 5_000))) == 1
    assert list(render.cache_events([])) == []


def test_the_longest_score_fits_into_a_message():
    """GR-01: 500,000 log-probabilities, each with a token of eight bytes."""
    top = tuple((49_000, -1.0) for _ in range(64))
    message = render.logprobs(TokenLogprobs(49_000, -1.0, top), lambda token: b"eight by")
    assert message.ByteSize() * (500_000 // 65) < MAX_MESSAGE_BYTES


# ---------------------------------------------------------------- calls that come at once


def test_calls_that_come_faster_than_they_are_taken_are_not_reset(server):
    """gRPC by itself resets all beyond 3,000, which a client takes for a server that stops."""
    held = threading.Event()
    server.loop.call_soon_threadsafe(held.wait, 60)
    with grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel:
        stub = PrefixCacheStub(channel)
        try:
            calls = [stub.GetModelInfo.future(pb.GetModelInfoRequest()) for _ in range(3_500)]
            time.sleep(0.5)  # for them to arrive; where they have not, less is tried
        finally:
            held.set()
        codes = Counter(call.code() for call in calls)
    assert codes == {grpc.StatusCode.OK: 3_500}


# ---------------------------------------------------------------- callers who go


@contextmanager
def slow_steps(server, seconds):
    """Steps of a tiny model that take as long as a big one's."""

    class Slow(EngineObserver):
        def stepped(self, num_rows, num_tokens, elapsed):
            if self.on:
                time.sleep(seconds)

        on = True

    slow = Slow()
    server.engine.observers.add(slow)
    try:
        yield
    finally:
        slow.on = False


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_five_callers_who_leave_are_five_aborted_requests(server, client):
    """HM-05: five streams, each cancelled after two tokens."""
    before = server.settle()
    for index in range(5):
        with client.stream([*PROMPT, index], max_tokens=400, **GREEDY) as stream:
            tokens = 0
            while tokens < 2:
                tokens += len(next(stream).token_ids)
    after = server.settle()
    assert after.requests_aborted - before.requests_aborted == 5
    assert after.requests_finished == before.requests_finished
    assert after.prompt_tokens - before.prompt_tokens == 5 * 31
    assert 10 <= after.completion_tokens - before.completion_tokens < 5 * 400


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_deadline_ends_a_call_in_every_phase(server, client, phase):
    """GR-14: 0.2 s; the caller hears DEADLINE_EXCEEDED, and nothing waits, runs or holds blocks."""
    before = server.settle()
    others = []
    if phase == "queue":
        others = [client.stream([i, *PROMPT], n=4, max_tokens=400, ignore_eos=True)
                  for i in range(4)]  # fmt: skip
        assert all(other.sequence_id for other in others)
    prompt = list(range(5, 300)) + list(range(5, 200)) if phase == "prefill" else PROMPT
    with slow_steps(server, 0.06), server.client(timeout=0.2) as hurried:
        began = time.monotonic()
        with pytest.raises(Cancelled, match="deadline"):
            hurried.generate(prompt, max_tokens=22, request_id="late", **GREEDY)
        assert time.monotonic() - began < 1
        wait_until(lambda: "late" not in {info.request_id for info in client.sequences()}, 2)
    for other in others:
        other.cancel()
    after = server.settle(5)
    assert after.blocks_in_use == before.blocks_in_use
    assert after.requests_aborted - before.requests_aborted == 1 + len(others)
    computed = after.computed_tokens - before.computed_tokens
    sampled = after.completion_tokens - before.completion_tokens
    if phase == "queue":
        assert computed == 4 * 31
    elif phase == "prefill":  # admitted whole, and not one token was sampled
        assert (computed, sampled) == (490, 0)
    else:
        assert 0 < sampled < 22


# ---------------------------------------------------------------- names


def test_a_name_in_use_is_refused_to_generate_and_to_fork(server, client):
    """RC-08: a second Generate and then a Fork of the same name; the first is not disturbed."""
    alone = client.generate(PROMPT, max_tokens=200, **GREEDY)
    parent = client.generate(PROMPT, max_tokens=1, keep_seconds=60, **GREEDY)
    mine = {"max_tokens": 200, "request_id": "mine", **GREEDY}
    with slow_steps(server, 0.005), client.stream(PROMPT, **mine) as stream:
        assert stream.sequence_id
        with pytest.raises(AlreadyExists):
            client.generate([1, 2, 3], max_tokens=1, request_id="mine")
        with pytest.raises(AlreadyExists):
            client.fork([Branch(parent.sequence_id)], max_tokens=1, request_id="mine")
        with pytest.raises(AlreadyExists):
            client.score([1, 2], [[3]], request_id="mine")
        assert Counter(info.request_id for info in client.sequences())["mine"] == 1
        assert stream.result().token_ids == alone.token_ids
    client.fork([Branch(parent.sequence_id)], max_tokens=1, request_id="mine")
    client.release(parent.sequence_id)


# ---------------------------------------------------------------- who sees what


def probes(client):
    """Cached tokens of ever longer beginnings of 64 tokens, a block of 4 more each time."""
    secret = list(range(100, 164))
    found = []
    for length in range(4, 65, 4):
        result = client.generate([*secret[:length], 9], max_tokens=1, **GREEDY)
        usage = result.usage
        found.append((result.num_cached_tokens, usage.cached_tokens, usage.computed_tokens))
    return found


def test_another_tenants_prefix_shows_in_no_number(server):
    """SE-03: B probes what A has cached, block by block: the same numbers as if A had not.

    What B finds from the second probe on is its own: a probe less its last token. A itself, with
    its 64 tokens and one more, has 64 cached; else a cache that is off would pass.
    """
    secret = list(range(100, 164))
    with server.client(cache_salt="b before") as before:
        expected = probes(before)
    assert expected[0] == (0, 0, 5)
    assert expected[1:] == [(length - 4, length - 4, 5) for length in range(8, 65, 4)]
    with server.client(cache_salt="a") as a, server.client(cache_salt="b") as b:
        a.generate(secret, max_tokens=1, **GREEDY)
        assert probes(b) == expected
        with server.client(cache_salt="b once") as once:
            assert once.generate(secret, max_tokens=1, **GREEDY).num_cached_tokens == 0
        assert a.generate([*secret, 9], max_tokens=1, **GREEDY).num_cached_tokens == 64


def test_bad_calls_disturb_no_stream(client):
    """SM-12, SE-10: refused calls beside one that runs."""
    alone = client.generate(PROMPT, max_tokens=150, **GREEDY)
    with client.stream(PROMPT, max_tokens=150, **GREEDY) as stream:
        next(stream)
        for bias in ({300: 1.0}, {2**31: 1.0}, {5: float("nan")}, {-1: 1.0}):
            with pytest.raises(InvalidArgument) as caught:
                client.generate(PROMPT, max_tokens=1, logit_bias=bias)
            assert caught.value.field == "sampling.logit_bias"
        assert stream.result().token_ids == alone.token_ids
