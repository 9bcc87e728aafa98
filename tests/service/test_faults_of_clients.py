"""Clients that die, freeze, vanish, hurry or dawdle: their work ends, and nobody else notices.

Real sockets throughout. Steps take 20 ms, so that calls are still at work when the fault comes.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from prefixcache.engine.injection import Injection
from prefixcache.errors import Cancelled
from prefixcache_service import Branch
from prefixcache_service.v1 import prefixcache_pb2 as pb
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub
from tests.service.conftest import RunningServer

STEP_SECONDS = 0.02
KEEPALIVE = 1.0  # a client has a second and a half to show that it is there
LONG = 450  # tokens, each a step: nine seconds
PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}
KINDS = ("plain", "n", "beam", "fork")

CLIENT = f"""
import sys
from prefixcache_service import Branch, Client
from prefixcache_service.requests import beam
client = Client(sys.argv[1])
options = dict(max_tokens={LONG}, ignore_eos=True)
parent = client.generate({PROMPT}, max_tokens=4, keep_seconds=60)
search = beam([7, 8, 9], "", dict(num_beams=3, **options))
calls = [
    client.stream([5, 6, 7], **options)._call,
    client.stream([6, 7, 8], n=3, **options)._call,
    client._stream("Generate", search)._call,
    client.stream_fork([Branch(parent.sequence_id)] * 3, **options)._call,
]
for call in calls:
    next(call)
print("under way", flush=True)
for call in calls:
    for _ in call:
        pass
"""


class Slow(Injection):
    """Makes each step last, as a larger model would."""

    def before_step(self, engine):
        time.sleep(STEP_SECONDS)


@pytest.fixture(scope="module")
def slow_running(tiny_config):
    config = replace(tiny_config, num_gpu_blocks_override=2_600)
    running = RunningServer(config, injection=Slow(), keepalive=KEEPALIVE).load()
    yield running
    running.close()


@pytest.fixture
def slow(slow_running):
    yield slow_running
    with slow_running.client() as client:
        for info in client.sequences():
            client.release(info.sequence_id)
    assert slow_running.settle().blocks_in_use == 0
    slow_running.check()


@contextlib.contextmanager
def client_with_a_call_of_each_kind(target):
    command = [sys.executable, "-c", CLIENT, target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "under way\n"
            yield process
        finally:
            process.kill()


def assert_all_calls_ended(server, before, seconds):
    after = server.settle(seconds)
    assert after.blocks_in_use == before.blocks_in_use
    assert after.requests_aborted == before.requests_aborted + len(KINDS)


def test_a_killed_client_leaves_nothing_behind(slow):
    """GR-04: kill -9 in mid-stream; one call, samples, a search and a fork."""
    before = slow.settle()
    with client_with_a_call_of_each_kind(slow.target) as process:
        process.kill()
        assert_all_calls_ended(slow, before, 2)


def test_a_frozen_client_is_noticed_by_keepalive(slow):
    """Its sockets stay open and its kernel answers: only its own silence tells."""
    before = slow.settle()
    with client_with_a_call_of_each_kind(slow.target) as process:
        process.send_signal(signal.SIGSTOP)
        assert_all_calls_ended(slow, before, 4)


class Wire:
    """A TCP connection through us, which can be cut without a word to either end."""

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._cut = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=pair))
                    self._threads[-1].start()

    def _pump(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self._cut.is_set():
                    target.sendall(data)

    def cut(self):
        self._cut.set()

    def close(self):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(5)


@pytest.mark.slow
def test_a_dropped_connection_is_noticed_by_keepalive(slow):
    """No FIN, no RST, as when a machine loses power or a network parts."""
    before = slow.settle()
    with (
        contextlib.closing(Wire(slow.server.port)) as wire,
        client_with_a_call_of_each_kind(wire.target),
    ):
        wire.cut()
        assert_all_calls_ended(slow, before, 4)


@pytest.mark.slow
def test_a_quiet_call_is_not_taken_for_a_dead_one(slow):
    """It waits in the queue for longer than keepalive, and hears nothing meanwhile."""
    with slow.client() as client, slow.client() as other:
        blocker = client.stream(PROMPT, n=16, max_tokens=150, seed=1, ignore_eos=True)
        assert blocker.sequence_id
        began = time.monotonic()
        assert len(other.generate([5, 6], max_tokens=3, **GREEDY).token_ids) == 3
        assert time.monotonic() - began > 2 * KEEPALIVE
        blocker.result()


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode", "search", "fork"])
def test_a_deadline_ends_the_work_in_every_phase(slow, phase):
    """GR-14: the caller is told on time, and within a step or two the work has ended."""
    with slow.client() as patient, slow.client(timeout=0.1) as hurried:
        kept = patient.generate(PROMPT, max_tokens=2, keep_seconds=60)
        before = slow.settle()
        if phase == "queue":
            blocker = patient.stream(PROMPT, n=16, max_tokens=LONG, seed=1, ignore_eos=True)
            assert blocker.sequence_id
        work = {
            "queue": lambda: hurried.generate([5, 6], max_tokens=2),
            "prefill": lambda: hurried.generate([8] * 500, max_tokens=2),
            "decode": lambda: hurried.generate([5, 6], n=2, max_tokens=LONG, ignore_eos=True),
            "search": lambda: hurried.beam([5], num_beams=3, max_tokens=LONG, ignore_eos=True),
            "fork": lambda: hurried.fork([Branch(kept.sequence_id)], max_tokens=LONG, **GREEDY),
        }[phase]
        began = time.monotonic()
        with pytest.raises(Cancelled, match="deadline"):
            work()
        assert time.monotonic() - began < 1
        if phase == "queue":
            assert {info.state for info in patient.sequences()} <= {"running", "kept"}
            blocker.cancel()
        after = slow.settle(2)
        patient.release(kept.sequence_id)
    assert after.requests_aborted == before.requests_aborted + (2 if phase == "queue" else 1)
    if phase == "prefill":
        assert after.completion_tokens == before.completion_tokens


def test_a_reader_who_dawdles_is_buffered_within_bounds_and_delays_nobody(server, client):
    """What waits for it is merged: never more than its sequences themselves."""
    alone = client.generate(PROMPT, max_tokens=50, **GREEDY).token_ids
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(n=3, max_tokens=LONG, ignore_eos=True, logprobs=64, seed=1),
    )
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    with grpc.insecure_channel(server.target, options=small) as channel:
        dawdler = PrefixCacheStub(channel).Generate(request)
        messages = [next(dawdler)]
        with ThreadPoolExecutor(4) as pool:
            others = [
                pool.submit(client.generate, PROMPT, max_tokens=50, **GREEDY) for _ in range(8)
            ]
            assert {other.result(30).token_ids for other in others} == {alone}
        server.settle(60)
        (mailbox,) = server.server._front._mailboxes.values()
        assert mailbox.complete  # the engine is done with it, and the reader has it all to come
        assert 0 < len(mailbox._waiting) <= 3 * 3  # one start, one merged output, one end each
        messages += dawdler
    tokens = [len(m.chunk.token_ids) for m in messages if m.WhichOneof("response") == "chunk"]
    assert sum(tokens) == 3 * LONG
