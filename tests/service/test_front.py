"""The seam between event loop and engine, with a scripted engine: order, merging, ends."""

import asyncio

import pytest

from prefixcache.engine.messages import (
    Abort,
    CacheEvent,
    CacheEvents,
    Failed,
    Finished,
    Generate,
    GetStats,
    Output,
    Reply,
    Started,
    SubscribeEvents,
    TokenLogprobs,
    UnsubscribeEvents,
    Usage,
)
from prefixcache.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from prefixcache.params import SamplingParams
from prefixcache_service.front import AsyncFront
from prefixcache_service.mailbox import MAX_MERGED_TOKENS


class Script:
    """Takes commands and remembers them."""

    def __init__(self):
        self.commands = []

    def submit(self, command):
        self.commands.append(command)


def connected(**settings):
    front, script = AsyncFront(**settings), Script()
    front.connect(script)
    return front, script


def request(name="tenant/a", n=1):
    return Generate(name, (1, 2), SamplingParams(n=n))


def started(key, index=0):
    return Started(key, index, f"s{index}", 7, 2, 0)


def output(key, token, index=0):
    return Output(key, index, (token,), f"<{token}>", (TokenLogprobs(token, -1.0),))


def finished(key, index=0):
    return Finished(key, index, "length", None, Usage())


async def begin(front, script, **settings):
    """Start a request; returns its stream, its first event, and the engine's id of it."""
    stream = front.stream(request(**settings))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    key = script.commands[-1].request_id
    front.deliver([started(key)])
    assert await first == started(key)
    return stream, key


def test_a_slow_reader_finds_its_outputs_merged():
    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script)
        for token in range(2000):
            front.deliver([output(key, token)])
        front.deliver([finished(key)])
        await asyncio.sleep(0.01)
        return [event async for event in stream]

    *outputs, last = asyncio.run(scenario())
    assert [len(event.token_ids) for event in outputs] == [MAX_MERGED_TOKENS, 2000 - 1024]
    assert [token for event in outputs for token in event.token_ids] == list(range(2000))
    assert "".join(event.text for event in outputs) == "".join(f"<{t}>" for t in range(2000))
    assert sum(len(event.logprobs) for event in outputs) == 2000
    assert isinstance(last, Finished)


def test_samples_that_end_at_different_times_are_kept_apart():
    """PS-05: the stream ends after the last index, and nothing is lost when it is read late."""

    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script, n=2)
        front.deliver([output(key, 1, 0), started(key, 1), finished(key, 0), output(key, 2, 1)])
        front.deliver([output(key, 3, 1), finished(key, 1)])
        await asyncio.sleep(0)
        return [event async for event in stream]

    events = asyncio.run(scenario())
    tokens = {i: [t for e in events if isinstance(e, Output) and e.index == i for t in e.token_ids]
              for i in (0, 1)}  # fmt: skip
    assert tokens == {0: [1], 1: [2, 3]}
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1]


def test_leaving_early_aborts_once_and_late_events_go_nowhere():
    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script)
        await stream.aclose()
        assert script.commands[-1] == Abort(key)
        again, other = await begin(front, script)
        assert other != key
        front.deliver([output(key, 1), finished(key), output(other, 2), finished(other)])
        events = [event async for event in again]
        assert [event.request_id for event in events] == [other, other]
        assert script.commands.count(Abort(other)) == 0

    asyncio.run(scenario())


def test_a_live_request_id_cannot_be_used_twice():
    """RC-08: the second call is refused, the first is not disturbed."""

    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script)
        with pytest.raises(AlreadyExists):
            await anext(front.stream(request()))
        front.deliver([finished(key)])
        assert [type(event) async for event in stream] == [Finished]
        await begin(front, script)

    asyncio.run(scenario())


def test_errors_end_a_request_behind_what_came_before():
    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script)
        front.deliver([output(key, 1), Failed(key, ResourceExhausted("full"))])
        await asyncio.sleep(0)
        assert (await anext(stream)).token_ids == (1,)
        with pytest.raises(ResourceExhausted, match="full"):
            await anext(stream)
        assert Abort(key) not in script.commands

    asyncio.run(scenario())


def test_fail_all_reaches_streams_calls_and_watchers():
    async def scenario():
        front, script = connected()
        stream, key = await begin(front, script)
        call = asyncio.ensure_future(front.call(GetStats))
        watch = front.watch(SubscribeEvents)
        subscribed = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        front.deliver([Reply(script.commands[-1].call_id, 0)])
        assert await subscribed == ()
        front.fail_all(Unavailable("over"))
        for waiting in (anext(stream), call, anext(watch)):
            with pytest.raises(Unavailable, match="over"):
                await waiting
        assert Abort(key) in script.commands

    asyncio.run(scenario())


def test_calls_get_their_reply_or_its_error():
    async def scenario():
        front, script = connected()
        good, bad = (asyncio.ensure_future(front.call(GetStats)) for _ in range(2))
        await asyncio.sleep(0)
        first, second = (command.call_id for command in script.commands)
        front.deliver([Reply(second, error=NotFound("gone")), Reply(first, 5)])
        assert await good == 5
        with pytest.raises(NotFound):
            await bad

    asyncio.run(scenario())


def test_before_an_engine_is_there_everything_is_unavailable():
    async def scenario():
        front = AsyncFront()
        with pytest.raises(Unavailable):
            await anext(front.stream(request()))
        with pytest.raises(Unavailable):
            await front.call(GetStats)

    asyncio.run(scenario())


def events(first, last):
    return tuple(CacheEvent(number, "removed") for number in range(first, last + 1))


def test_a_watcher_gets_the_backlog_first_and_is_told_where_to_resume():
    async def scenario():
        front, script = connected(waiting_events=20)
        watch = front.watch(lambda call_id: SubscribeEvents(call_id, after=0))
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        call_id = script.commands[-1].call_id
        front.deliver([Reply(call_id, events(1, 3)), CacheEvents(call_id, events(4, 4))])
        assert [event.number for event in await first] == [1, 2, 3]
        assert [event.number for event in await anext(watch)] == [4]
        front.deliver([CacheEvents(call_id, events(5, 9))])
        front.deliver([CacheEvents(call_id, events(10, 24))])
        await asyncio.sleep(0)
        assert len(await anext(watch)) == 20
        front.deliver([CacheEvents(call_id, events(25, 45))])
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted, match=r"more than 20 .*events\): .*after = 24"):
            await anext(watch)
        assert script.commands[-1] == UnsubscribeEvents(call_id)

    asyncio.run(scenario())
