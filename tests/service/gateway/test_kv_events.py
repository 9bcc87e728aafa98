"""SubscribeKvEvents: a gateway's picture of the cache is the cache, also when it comes late."""

import threading

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from prefixcache_service.gateway import kv_events
from tests.service.conftest import BLOCK_SIZE, RunningServer
from tests.service.gateway.calls import GREEDY, PROMPT, generate


class Picture:
    """What a gateway makes of the events: for each block its place, as token prefixes."""

    def __init__(self):
        self.last = 0
        self.blocks = {}

    def apply(self, batch):
        assert self.last == 0 or batch.sequence_number <= self.last + 1  # no gap
        if batch.sequence_number <= self.last:
            return
        self.last = batch.sequence_number
        for event in batch.events:
            kind = event.WhichOneof("data")
            if kind == "cleared":
                self.blocks.clear()
            elif kind == "removed":
                for name in event.removed.block_hashes:
                    self.blocks.pop(name, None)
            else:
                self._store(event.stored)

    def _store(self, stored):
        before = ()
        if stored.HasField("parent_block_hash"):
            before = self.blocks[stored.parent_block_hash]
        for block in stored.blocks:
            assert len(block.token_ids) == block.block_size == BLOCK_SIZE
            before = self.blocks[block.block_hash] = before + tuple(block.token_ids)

    @property
    def prefixes(self):
        return sorted(self.blocks.values())


def prefixes(*prompts):
    """All whole blocks of these, as prefixes."""
    ends = range(BLOCK_SIZE, 10_000, BLOCK_SIZE)
    return sorted({tuple(p[:end]) for p in prompts for end in ends if end <= len(p)})


class Subscription:
    """A subscription that is read on a thread of its own."""

    def __init__(self, stub, picture, start=0):
        self.picture = picture
        self._call = stub.SubscribeKvEvents(
            common.SubscribeKvEventsRequest(start_sequence_number=start)
        )
        self.picture.apply(next(self._call))
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        try:
            for batch in self._call:
                with self._changed:
                    self.picture.apply(batch)
                    self._changed.notify()
        except grpc.RpcError:
            return

    def until(self, wanted):
        with self._changed:
            seen = self._changed.wait_for(lambda: self.picture.prefixes == wanted, 30)
        assert seen, (self.picture.prefixes, wanted)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._call.cancel()
        self._thread.join()


def test_a_gateway_that_comes_late_learns_what_is_there_and_what_follows(stub, client):
    other, longer = [1, *PROMPT], [*PROMPT[:18], 99, 98, 97, 96]
    for prompt in (PROMPT, longer):
        client.generate(prompt, max_tokens=1, **GREEDY)
    picture = Picture()
    with Subscription(stub, picture) as subscription:
        subscription.until(prefixes(PROMPT, longer))
        client.generate(other, max_tokens=1, **GREEDY)
        subscription.until(prefixes(PROMPT, longer, other))
        client.flush()
        subscription.until([])
        generate(stub, max_tokens=1, **GREEDY)
        subscription.until(prefixes(PROMPT))
    last = picture.last
    client.generate(longer, max_tokens=1, **GREEDY)
    with Subscription(stub, picture, last) as resumed:
        resumed.until(prefixes(PROMPT, longer))


def test_nothing_is_cached_yet(stub):
    picture = Picture()
    with Subscription(stub, picture) as subscription:
        assert picture.prefixes == []
        assert picture.last > 0
        generate(stub, max_tokens=1, **GREEDY)
        subscription.until(prefixes(PROMPT))


def test_prompts_of_other_namespaces_are_not_told(stub, client, server):
    """No request of a gateway can hit them."""
    with server.client(cache_salt="other") as other:
        other.generate(PROMPT, max_tokens=1, **GREEDY)
    picture = Picture()
    with Subscription(stub, picture) as subscription:
        assert picture.prefixes == []
        with server.client(cache_salt="another") as another:
            another.generate([*PROMPT, 7], max_tokens=1, **GREEDY)
        client.generate([8, *PROMPT], max_tokens=1, **GREEDY)
        subscription.until(prefixes([8, *PROMPT]))


def test_a_large_cache_comes_in_several_messages_without_gaps(stub, client, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_ITEMS", 1)
    prompts = [[first, *PROMPT] for first in range(1, 8)]
    for prompt in prompts:
        client.generate(prompt, max_tokens=1, **GREEDY)
    picture = Picture()
    with Subscription(stub, picture) as subscription:
        subscription.until(prefixes(*prompts))
        client.generate(PROMPT, max_tokens=1, **GREEDY)
        subscription.until(prefixes(PROMPT, *prompts))


@pytest.mark.parametrize("what", ["of another server", "still to come", "of a broken snapshot"])
def test_numbers_that_cannot_be_resumed_behind_are_out_of_range(stub, client, what, monkeypatch):
    """A gateway then forgets the server's blocks and asks for what is cached now."""
    monkeypatch.setattr(kv_events, "MAX_ITEMS", 1)
    client.generate(PROMPT, max_tokens=1, **GREEDY)
    picture = Picture()
    with Subscription(stub, picture) as subscription:
        subscription.until(prefixes(PROMPT))
    starts = {
        "of another server": 17,
        "still to come": picture.last + 1,
        "of a broken snapshot": picture.last - 1,
    }
    behind = common.SubscribeKvEventsRequest(start_sequence_number=starts[what])
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.SubscribeKvEvents(behind))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "0" in caught.value.details()


def test_a_server_that_drains_does_not_wait_for_its_gateways(tiny_config):
    """A subscription has no end of its own: it would take the whole grace, always."""
    server = RunningServer(tiny_config, grace=600.0).load()
    with grpc.insecure_channel(server.target) as channel:
        events = VllmEngineStub(channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        next(events)
        server.close()  # or this takes longer than it is given
        with pytest.raises(grpc.RpcError) as caught:
            list(events)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
