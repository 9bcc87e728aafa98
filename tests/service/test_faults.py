"""Faults that were found by attacking a server, each with the smallest thing that shows it."""

import asyncio
import threading
import time

import grpc
import pytest

from prefixcache.errors import Cancelled, InvalidArgument
from prefixcache_service import Client, render, strict
from prefixcache_service.calls import SERVICE, Calls
from prefixcache_service.v1 import prefixcache_pb2 as pb

GROUP = b"\xa3\x06" + b"\x08\x01" + b"\xa4\x06"  # field 100, which no message has


def test_two_members_of_a_oneof_are_found_behind_an_unknown_group():
    text = pb.GenerateRequest(text="one").SerializeToString()
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    for data in (GROUP + text + ids, text + GROUP + ids):
        with pytest.raises(InvalidArgument) as caught:
            strict.parse(pb.GenerateRequest, data)
        assert caught.value.field == "token_ids"
    assert strict.parse(pb.GenerateRequest, GROUP + ids).token_ids.ids == [1]


def test_a_scoring_that_is_released_says_so(server):
    """It was answered as OK, with the log-probabilities of the other continuations only."""
    with server.client() as client:
        caught = []

        def score():
            with Client(server.target, timeout=60) as other, pytest.raises(Cancelled) as error:
                other.score([7] * 300, [[8 + i] * 150 for i in range(4)])
            caught.append(error.value)

        thread = threading.Thread(target=score)
        thread.start()
        deadline = time.monotonic() + 10
        while not (running := client.sequences()):
            assert time.monotonic() < deadline
        client.release(running[-1].sequence_id)
        thread.join(30)
    assert len(caught) == 1
    assert "Release" in str(caught[0])


def test_a_large_score_is_rendered_off_the_event_loop(server, client, monkeypatch):
    """Seconds of work for many log-probabilities, in which no other call was served."""
    threads = []

    def watched(*args, render_score=render.score):
        threads.append(threading.current_thread())
        return render_score(*args)

    monkeypatch.setattr(render, "score", watched)
    client.score([5, 6], [[7]], top_logprobs=1)
    assert threads != [server.call(_current_thread())]


async def _current_thread():
    return threading.current_thread()


def test_a_caller_who_leaves_during_a_write_is_no_fault_of_the_server(monkeypatch, caplog):
    """gRPC raises an error of its own then; it was logged as a fault, with a traceback."""

    class Gone:
        code = None

        def invocation_metadata(self):
            return ()

        async def write(self, message, /):
            raise grpc.aio.InternalError("failed to execute a batch")

        async def abort(self, code, details="", trailing_metadata=()):
            self.code = code

    class Servicer:
        def __getattr__(self, name):
            return self.answer

        async def answer(self, request, caller):
            yield pb.GenerateResponse()

    calls = Calls()
    calls.open()
    context = Gone()

    class Details:
        method = "/prefixcache.v1.PrefixCache/Generate"

    handler = calls.handler(SERVICE, Servicer()).service(Details)
    request = pb.GenerateRequest(text="x").SerializeToString()
    asyncio.run(handler.unary_stream(request, context))
    assert context.code is grpc.StatusCode.CANCELLED
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
