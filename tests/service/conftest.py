"""A real server on a free port of the loopback, with an engine on a tiny random checkpoint."""

import asyncio
import threading
import time

import grpc
import pytest

from prefixcache.config import EngineConfig
from prefixcache.engine.engine import Engine
from prefixcache_service import Client
from prefixcache_service.limits import CLIENT_OPTIONS
from prefixcache_service.server import Server, ServerConfig
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub
from tests.leaks import check_idle
from tests.model.checkpoints import write_checkpoint

MAX_MODEL_LEN = 512
BLOCK_SIZE = 4


class RunningServer:
    """A Server on an event loop in a thread of its own."""

    def __init__(self, config, grace=2.0, injection=None, **settings):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        where = ServerConfig(port=0, http_port=0, grace=grace, **settings)
        self.server = self.call(self._make(where))
        self.engine = None
        self.injection = injection
        self.config = config

    async def _make(self, config):
        server = Server(config)
        await server.open()
        return server

    def call(self, work, timeout=60):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def load(self):
        self.engine = self.call(
            self.server.load(lambda: Engine(self.config, injection=self.injection))
        )
        return self

    @property
    def target(self):
        return f"127.0.0.1:{self.server.port}"

    def client(self, timeout=60, **settings):
        return Client(self.target, timeout=timeout, **settings)

    def settle(self, seconds=10.0):
        """Wait until nothing runs; returns the figures then."""
        deadline = time.monotonic() + seconds
        with self.client() as client:
            while True:
                stats = client.stats()
                if stats.sequences_running == stats.sequences_waiting == 0:
                    return stats
                assert time.monotonic() < deadline, stats
                time.sleep(0.01)

    def check(self):
        """What must be true after each test: nothing runs, and all that is held has an owner."""
        stats = self.settle()
        assert stats.blocks_free + stats.blocks_evictable + stats.blocks_in_use == (
            stats.blocks_total
        )
        check_idle(self.engine)

    def close(self):
        self.call(self.server.drain())
        self.end()

    def end(self):
        """End the loop of a server that has been drained."""
        self.call(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@pytest.fixture(scope="session", autouse=True)
def grpc_poller():
    """gRPC's thread for asyncio, which else comes and goes with the servers of single tests."""
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def tiny_config(checkpoint):
    return EngineConfig(
        model=str(checkpoint),
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=512,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_queue=32,
        seed=5,
    )


@pytest.fixture(scope="session")
def running(tiny_config):
    running = RunningServer(tiny_config).load()
    yield running
    running.close()


@pytest.fixture
def server(running):
    """The session's server, with an empty cache; checked at the end of each test."""
    with running.client() as client:
        for info in client.sequences():
            client.release(info.sequence_id)
        client.flush(all_salts=True)
    yield running
    running.check()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel:
        yield PrefixCacheStub(channel)
