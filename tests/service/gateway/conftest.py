"""What gateways speak, asked through a real channel of the tests' real server."""

import time

import grpc
import pytest
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from prefixcache.engine.injection import Injection
from prefixcache_service.limits import CLIENT_OPTIONS


class Slow(Injection):
    """A step takes a while on any machine."""

    def before_step(self, engine):
        time.sleep(0.01)


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return VllmEngineStub(channel)


@pytest.fixture
def slow(server, monkeypatch):
    """The server, whose longest request takes seconds."""
    monkeypatch.setattr(server.engine, "_injection", Slow())
    return server
