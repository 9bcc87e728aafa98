"""From the first port to the last call: health, reflection, faults, SIGTERM."""

import signal
import socket
import threading
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prefixcache.engine.engine import Engine
from prefixcache.errors import ConfigurationError, ModelError, Unavailable
from prefixcache_service import Client
from prefixcache_service.server import ServerConfig
from tests.model.checkpoints import default_model_path, write_checkpoint
from tests.service.conftest import RunningServer
from tests.service.process import Process

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "prefixcache.v1.PrefixCache"
PROMPT = list(range(10, 40))
FOREVER = {"temperature": 0.0, "ignore_eos": True}


def health(target, service=SERVICE):
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


@pytest.fixture
def starting(tiny_config):
    """A server that listens, with no engine yet."""
    server = RunningServer(tiny_config, grace=1.0)
    yield server
    server.close()


def test_serving_only_between_warm_up_and_drain(starting):
    states = []
    with grpc.insecure_channel(starting.target) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)

        def follow():
            try:
                states.extend(response.status for response in watch)
            except grpc.RpcError:
                return

        thread = threading.Thread(target=follow)
        thread.start()
        web = f"http://127.0.0.1:{starting.server.http_port}"
        assert health(starting.target) == health(starting.target, "") == NOT_SERVING
        assert httpx.get(f"{web}/healthz").status_code == 503
        assert httpx.get(f"{web}/metrics").status_code == 503
        with starting.client() as client, pytest.raises(Unavailable, match="loading"):
            client.model_info()
        starting.load()
        assert health(starting.target) == health(starting.target, "") == SERVING
        with starting.client() as client:
            client.generate(PROMPT, max_tokens=1)
        starting.check()
        starting.call(starting.server.drain())
        thread.join(10)
    assert states == [NOT_SERVING, SERVING, NOT_SERVING]


def test_a_failed_load_never_serves(starting):
    """GR-16: warm-up that raises."""

    def broken():
        raise ModelError("a tensor is missing")

    with pytest.raises(ModelError):
        starting.call(starting.server.load(broken))
    assert health(starting.target) == NOT_SERVING
    with starting.client() as client, pytest.raises(Unavailable):
        client.generate(PROMPT)


def test_a_dead_engine_is_not_served(starting):
    """GR-16: the engine's thread dies later; calls fail at once, running ones too."""
    starting.load()
    with starting.client() as client:
        stream = client.stream(PROMPT, max_tokens=450, **FOREVER)
        next(stream)

        def dies():
            raise MemoryError

        starting.engine.step = dies
        began = time.monotonic()
        with pytest.raises(Unavailable):
            stream.result()
        with pytest.raises(Unavailable):
            client.generate(PROMPT)
        assert time.monotonic() - began < 2
    assert health(starting.target) == NOT_SERVING


def test_reflection_describes_the_service(server):
    with grpc.insecure_channel(server.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, file = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert b"GenerateRequest" in file.file_descriptor_response.file_descriptor_proto[0]


def test_a_taken_port_is_a_clear_error(server, tiny_config):
    async def open_again(**ports):
        await type(server.server)(ServerConfig(**ports)).open()

    with pytest.raises(ConfigurationError, match="--port"):
        server.call(open_again(port=server.server.port, http_port=None))
    with pytest.raises(ConfigurationError, match="--http-port"):
        server.call(open_again(port=0, http_port=server.server.http_port))


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny-long")
    return write_checkpoint(directory / "llama", max_position_embeddings=32768)


def test_sigterm_drains(long_checkpoint):
    """GR-08: calls end within the grace, the rest get UNAVAILABLE; exit code 0 in grace + 1 s."""
    grace = 2.0
    process = Process(
        *("--model", str(long_checkpoint), "--port", "0", "--max-num-seqs", "2"),
        *("--num-gpu-blocks-override", "6000", "--grace", str(grace), "--max-model-len", "30000"),
    )
    target = f"127.0.0.1:{process.ready()}"
    outcomes = {}

    def call(name, prompt, max_tokens):
        with Client(target, timeout=60) as client:
            try:
                outcomes[name] = client.generate(prompt, max_tokens=max_tokens, **FOREVER)
            except Unavailable as error:
                outcomes[name] = error

    threads = [
        threading.Thread(target=call, args=arguments)
        for arguments in (
            ("endless", [5, 6, 7], 29000),
            ("short", [8, 9, 10], 20),
            ("prefill", [11] * 20000, 5),
            ("queued", [12] * 10, 25000),
        )
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    began = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with Client(target, timeout=5) as client, pytest.raises(Unavailable):
        client.generate([1], max_tokens=1)
    code, out, err = process.end(grace + 5)
    took = time.monotonic() - began
    for thread in threads:
        thread.join(5)
    assert (code, out) == (0, "")
    assert took < grace + 1
    assert isinstance(outcomes["endless"], Unavailable)
    assert isinstance(outcomes["queued"], Unavailable)
    assert len(outcomes["short"].token_ids) == 20
    assert set(outcomes) == {"endless", "short", "prefill", "queued"}
    assert "event=drain" in err
    assert "Traceback" not in err


def test_an_idle_server_leaves_at_once_and_flags_come_from_file_and_environment(
    checkpoint, tmp_path
):
    file = tmp_path / "server.toml"
    file.write_text(f'model = "{checkpoint}"\nblock-size = 8\nnum-gpu-blocks-override = 70\n')
    process = Process("--config", str(file), "--port", "0", PREFIXCACHE_BLOCK_SIZE="4",
                      PREFIXCACHE_MAX_MODEL_LEN="auto", PREFIXCACHE_GRACE="30")  # fmt: skip
    with Client(f"127.0.0.1:{process.ready()}", timeout=30) as client:
        info = client.model_info()
        assert (info.block_size, info.num_blocks) == (4, 70)  # environment before file
        assert info.max_model_len <= 280
    began = time.monotonic()
    process.popen.send_signal(signal.SIGTERM)
    assert process.end(10)[0] == 0
    assert time.monotonic() - began < 2


def wait_until_open(port: int) -> None:
    """By plain connections: a gRPC channel waits a second after the first that fails."""
    for _ in range(2_000):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError(f"nothing listens on port {port}")


def test_sigterm_while_loading_leaves_at_once():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Process("--model", str(default_model_path()), "--port", str(port))
    wait_until_open(port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(request, timeout=20, wait_for_ready=True).status == NOT_SERVING
    process.popen.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, _ = process.end(10)
    assert (code, out) == (0, "")
    assert time.monotonic() - began < 2


def test_a_server_that_cannot_start_says_why_in_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = Process("--port", str(port)).end(30)
    assert (code, out) == (1, "")
    assert err.startswith("error: cannot listen on")
    assert err.count("\n") == 1
    code, out, err = Process("--port", str(port), "--http-port", str(port)).end(30)
    assert (code, out) == (1, "")
    assert "--port and --http-port" in err
    code, out, err = Process("--port", "0", "--model", str(tmp_path / "none.gguf")).end(60)
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    assert "none.gguf" in err.splitlines()[-1]


def test_integrity_can_be_checked_while_idle(server):
    assert isinstance(server.engine, Engine)
    server.check()
