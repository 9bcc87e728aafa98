"""A server with a tokens file asks a gateway who it is, like anybody."""

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from prefixcache_service.tenants import entry_for, fresh_token
from tests.service.conftest import RunningServer
from tests.service.gateway.calls import GREEDY, generate, request

TOKENS = {name: fresh_token() for name in ("operator", "alice", "bob")}


@pytest.fixture(scope="module")
def guarded(tiny_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tables = [entry_for(name, token) for name, token in TOKENS.items()]
    path.write_text(tables[0] + "admin = true\n" + "".join(tables[1:]))
    server = RunningServer(tiny_config, tokens=path).load()
    yield server
    server.close()


class As:
    """The stub, whose calls bear a tenant's token."""

    def __init__(self, channel, name):
        self._stub = VllmEngineStub(channel)
        self._named = {"metadata": [("authorization", f"Bearer {TOKENS[name]}")]}

    def __getattr__(self, method):
        return lambda message: getattr(self._stub, method)(message, **self._named)


@pytest.fixture
def channel(guarded):
    with grpc.insecure_channel(guarded.target) as channel:
        yield channel


def test_a_call_without_a_token_is_unauthenticated(channel):
    stub = VllmEngineStub(channel)
    for call in (
        lambda: stub.HealthCheck(vllm.HealthCheckRequest()),
        lambda: list(stub.Generate(request(max_tokens=1))),
        lambda: next(stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_tenant_has_its_own_cache_and_sees_its_own_figures(channel):
    alice, bob = As(channel, "alice"), As(channel, "bob")
    generate(alice, max_tokens=1, **GREEDY)
    assert generate(bob, max_tokens=1, **GREEDY).completes[0].cached_tokens == 0
    assert generate(alice, max_tokens=1, **GREEDY).completes[0].cached_tokens == 28
    (load,) = alice.GetLoads(vllm.GetLoadsRequest()).loads
    assert (load.max_total_num_tokens, load.token_usage) == (0, 0.0)
    assert alice.FlushCache(common.FlushCacheRequest()).message == "7 blocks freed"
    assert generate(bob, max_tokens=1, **GREEDY).completes[0].cached_tokens == 28


def test_cache_events_are_for_the_operator(channel):
    with pytest.raises(grpc.RpcError) as caught:
        next(As(channel, "alice").SubscribeKvEvents(common.SubscribeKvEventsRequest()))
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    events = As(channel, "operator").SubscribeKvEvents(common.SubscribeKvEventsRequest())
    first = next(events)
    assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
    events.cancel()


def test_no_tenant_can_abort_a_request_of_another(channel):
    alice, bob = As(channel, "alice"), As(channel, "bob")
    call = alice.Generate(request(request_id="mine", stream=True, max_tokens=50, ignore_eos=True))
    next(call)
    bob.Abort(vllm.AbortRequest(request_ids=["mine"]))
    assert [r.complete.finish_reason for r in call if r.HasField("complete")] == ["length"]
