"""What gateways speak, asked through a real channel of the tests' real server."""

import time

import anthropic
import grpc
import openai
import pytest
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from benchmarks._gateway import gateway
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


@pytest.fixture(scope="package")
def smg(running):
    """The real gateway in front of the session's server, for all tests here."""
    with gateway([running.target]) as front:
        yield front


@pytest.fixture
def openai_client(smg, server):
    with openai.OpenAI(base_url=f"{smg.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(smg, server):
    with anthropic.Anthropic(base_url=smg.url, api_key="none", max_retries=0) as client:
        yield client
