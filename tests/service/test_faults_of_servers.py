"""Faults of the server itself, each in a process of its own: what callers see, and how it ends."""

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixcache.errors import Cancelled, Internal, ResourceExhausted, Unavailable
from prefixcache.simulate.formats import read_trace
from prefixcache_service import Branch, Client
from tests.model.checkpoints import write_gguf
from tests.service.process import FAULTY, Process

PROMPT = list(range(10, 40))
FOREVER = {"temperature": 0.0, "ignore_eos": True}
DAYS = 86_400


@pytest.fixture(scope="module")
def flags(checkpoint):
    return ("--model", str(checkpoint), "--block-size", "4", "--num-gpu-blocks-override", "512",
            "--max-model-len", "512", "--max-num-seqs", "16", "--log-level", "info")  # fmt: skip


@contextlib.contextmanager
def faulty(flags):
    """A server whose steps take 10 ms, and whose requests fail if their request_id says so."""
    environment = {"FAULTS_STEP_SECONDS": "0.01"}
    with Process(*flags, "--port", "0", program=FAULTY, **environment) as process:
        yield process, f"127.0.0.1:{process.ready()}"


@pytest.fixture(scope="module")
def broken(flags):
    with faulty(flags) as (process, target):
        yield target
        process.popen.send_signal(signal.SIGTERM)
        code, _, err = process.end(20)
        assert code == 0
        assert "raise-exception" in err  # the log says what the callers are not told


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("raise-exception", Internal, "the forward pass failed: InjectedFault"),
        ("raise-memory", ResourceExhausted, "not enough memory to run this request, even alone"),
    ],
)
def test_a_request_that_fails_fails_alone(broken, name, error, message):
    """A model that raises, or memory that runs out, in the middle of others' work."""
    with Client(broken, timeout=60) as client:
        alone = client.generate(PROMPT, max_tokens=100, **FOREVER).token_ids
        parent = client.generate(PROMPT, max_tokens=1, keep_seconds=60).sequence_id
        streams = [client.stream(PROMPT, max_tokens=100, **FOREVER) for _ in range(4)]
        assert all(stream.sequence_id for stream in streams)
        for ask in (
            lambda: client.generate(PROMPT, request_id=name),
            lambda: client.generate(PROMPT, n=4, request_id=name),
            lambda: client.beam(PROMPT, num_beams=4, request_id=name),
            lambda: client.fork([Branch(parent)] * 3, request_id=name),
            lambda: client.score(PROMPT, [[5], [6, 7]], request_id=name),
        ):
            with pytest.raises(error, match=message):
                ask()
        assert {stream.result().token_ids for stream in streams} == {alone}
        client.release(parent)
        stats = client.stats()
        assert stats.blocks_in_use == stats.sequences_running == stats.sequences_kept == 0
        assert stats.requests_failed >= 5


def test_a_fault_of_the_engines_loop_ends_the_process(flags):
    """Not one request's fault, so nobody can be served: all are told, and a supervisor restarts."""
    with faulty(flags) as (process, target), Client(target, timeout=60) as client:
        states = []
        with grpc.insecure_channel(target) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

            def follow():
                with contextlib.suppress(grpc.RpcError):
                    states.extend(response.status for response in watch)

            watcher = threading.Thread(target=follow)
            watcher.start()
            stream = client.stream(PROMPT, max_tokens=450, **FOREVER)
            assert stream.sequence_id
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.generate([5, 6], request_id="lose-device")
            with pytest.raises(Unavailable):
                stream.result()
            code, _, err = process.end(10)
            watcher.join(10)
        assert code == 1
        assert time.monotonic() - began < 5  # the grace of ten seconds is for engines that work
        assert "event=engine_down" in err
        status = health_pb2.HealthCheckResponse
        assert states == [status.SERVING, status.NOT_SERVING]


@pytest.mark.slow
def test_a_killed_server_is_told_from_a_slow_one_and_its_successor_serves(flags):
    """kill -9 in mid-stream; the same client goes on with the server that takes its place."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with Client(f"127.0.0.1:{port}", timeout=60) as client:
        with Process(*flags, "--port", port) as first:
            first.ready()
            kept = client.generate(PROMPT, max_tokens=40, keep_seconds=60, **FOREVER)
            stream = client.stream(PROMPT, max_tokens=450, **FOREVER)
            assert stream.sequence_id
            first.popen.kill()
            with pytest.raises(Unavailable):
                stream.result()
        with Process(*flags, "--port", port) as second:
            second.ready()
            deadline = time.monotonic() + 20  # gRPC waits before it tries again
            again = None
            while again is None:
                with contextlib.suppress(Unavailable):
                    again = client.generate(PROMPT, max_tokens=40, **FOREVER)
                assert time.monotonic() < deadline
            assert again.num_cached_tokens == 0
            assert again.token_ids == kept.token_ids
            with pytest.raises(Exception, match="not known"):
                client.fork([Branch(kept.sequence_id)])


@pytest.mark.slow
def test_a_drain_under_load_ends_what_it_can_and_loses_no_answer(flags):
    """SIGTERM while callers come: each has its whole answer, or UNAVAILABLE; exit code 0."""
    outcomes = []

    def call(target, number):
        with Client(target, timeout=60) as client, contextlib.suppress(Unavailable):
            for round_ in range(1_000):
                outcomes.append("asked")
                result = client.generate([*PROMPT, number, round_ % 250], max_tokens=5, **FOREVER)
                outcomes.append(len(result.token_ids))
        outcomes.append("refused")

    with faulty(flags) as (process, target):
        threads = [threading.Thread(target=call, args=(target, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        assert process.end(15)[0] == 0
        assert time.monotonic() - began < 3
        for thread in threads:
            thread.join(10)
    assert outcomes.count("asked") == outcomes.count(5) + outcomes.count("refused")
    assert outcomes.count("refused") == len(threads)
    assert outcomes.count(5) > 8


def test_a_full_disk_ends_the_recording_and_nothing_else(flags, tmp_path):
    """The size that files may have is taken away from the running server: a write then fails."""
    path = tmp_path / "trace"
    with Process(*flags, "--port", "0", "--record", str(path)) as process:
        with Client(f"127.0.0.1:{process.ready()}", timeout=60) as client:
            before = client.generate(PROMPT, max_tokens=5, **FOREVER)
            assert client.stats().extra == {"recording_failed": 0}
            room = path.stat().st_size + 10
            resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (room, room))
            for _ in range(5):
                again = client.generate(PROMPT, max_tokens=5, **FOREVER)
                assert again.token_ids == before.token_ids
            assert client.stats().extra == {"recording_failed": 1}
        process.popen.send_signal(signal.SIGTERM)
        code, _, err = process.end(20)
    assert code == 0
    assert err.count("recording has stopped") == 1
    assert len(read_trace(path).requests) == 1


def test_a_disk_that_is_full_from_the_start_stops_no_server(flags):
    with Process(*flags, "--port", "0", "--record", "/dev/full") as process:
        with Client(f"127.0.0.1:{process.ready()}", timeout=60) as client:
            assert client.stats().extra == {"recording_failed": 1}
            assert client.generate(PROMPT, max_tokens=5, **FOREVER).token_ids
        process.popen.send_signal(signal.SIGTERM)
        code, _, err = process.end(20)
    assert code == 0
    assert err.count("recording has stopped") == 1


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Environment of a process whose wall clock can be moved, and the way to move it."""
    directory = tmp_path_factory.mktemp("clock")
    source = os.path.join(os.path.dirname(__file__), "clock_jump.c")
    library, file = directory / "clock_jump.so", directory / "jump"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"]
    subprocess.run(command, check=True)
    file.write_bytes(struct.pack("<q", 0))

    def jump(seconds):
        with file.open("r+b") as opened:
            opened.write(struct.pack("<q", seconds))

    return {"LD_PRELOAD": str(library), "CLOCK_JUMP_FILE": str(file)}, jump


@pytest.mark.slow
@pytest.mark.parametrize("days", [10, -10])
def test_a_jump_of_the_wall_clock_ends_nothing(flags, clock, days):
    """Leases, pins, deadlines and streams run on the monotonic clock."""
    environment, jump = clock
    jump(0)
    slow = {"FAULTS_STEP_SECONDS": "0.01", **environment}
    with Process(*flags, "--port", "0", program=FAULTY, **slow) as process:
        with Client(f"127.0.0.1:{process.ready()}", timeout=60) as client:
            kept = client.generate(PROMPT, max_tokens=8, keep_seconds=60, **FOREVER)
            brief = client.generate(PROMPT, max_tokens=8, keep_seconds=0.5, **FOREVER)
            pin = client.pin(PROMPT, seconds=60)
            stream = client.stream(PROMPT, max_tokens=100, **FOREVER)
            assert stream.sequence_id
            jump(days * DAYS)
            assert len(stream.result().token_ids) == 100
            (left,) = (i for i in client.sequences() if i.sequence_id == kept.sequence_id)
            assert 50 < left.kept_seconds <= 60
            assert len(client.fork([Branch(kept.sequence_id)], max_tokens=3)[0].token_ids) <= 3
            assert client.unpin(pin.pin_id).seconds > 50
            with Client(f"127.0.0.1:{process.port}", timeout=0.2) as hurried:
                began = time.monotonic()
                with pytest.raises(Cancelled, match="deadline"):
                    hurried.generate(PROMPT, max_tokens=450, **FOREVER)
                assert 0.15 < time.monotonic() - began < 2
            time.sleep(0.5)
            assert brief.sequence_id not in {i.sequence_id for i in client.sequences()}
        process.popen.send_signal(signal.SIGTERM)
        code, _, err = process.end(20)
    assert code == 0
    years = set(re.findall(r"ts=(\d{4}-\d\d-\d\d)", err))
    assert len(years) >= 2  # its wall clock did jump


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_model_that_is_cut_off_is_refused_in_one_sentence(kind, checkpoint, tmp_path):
    """And what a header claims is never believed: see tests/model for each lie."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    file = model / "model.safetensors"
    if kind == "gguf":
        model = file = write_gguf(tmp_path / "cut.gguf", checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with Process("--model", str(model), "--port", "0") as process:
        code, out, err = process.end(60)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert file.name in err
    assert "Traceback" not in err
