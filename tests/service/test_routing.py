"""Sequences behind a plain load balancer: who holds them, and what is sent there."""

import asyncio
import os
import pickle
import socket
import time
from contextlib import ExitStack

import pytest
import trustme
from typer.testing import CliRunner

from prefixcache.errors import ConfigurationError, InvalidArgument, NotFound, Unavailable
from prefixcache_service import AsyncClient, Branch, Client, Delta, routing
from prefixcache_service.cli import app
from prefixcache_service.ports import advertised
from prefixcache_service.tenants import entry_for, fresh_token
from prefixcache_service.tls import TlsFiles
from tests.service.balancer import Balancer
from tests.service.conftest import RunningServer
from tests.service.process import FAULTY, Process

PROMPT = list(range(10, 40))
SAMPLED = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}
ANY_PORT = "127.0.0.1:0"


def start(config, **settings):
    return RunningServer(config, advertise_address=ANY_PORT, **settings).load()


@pytest.fixture(scope="module")
def pair(tiny_config):
    servers = [start(tiny_config), start(tiny_config)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def balancer(pair):
    with Balancer(*(server.server.port for server in pair)) as balancer:
        yield balancer
    for server in pair:
        with server.client() as client:
            for info in client.sequences():
                client.release(info.sequence_id)
        server.check()


@pytest.fixture
def client(balancer):
    with Client(balancer.target, timeout=60) as client:
        yield client


def until_answered(call):
    """What a call gives once it goes through: it may meet the connection that is being cut, or come
    before gRPC connects again."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def moved(balancer, client, away_from):
    """A sequence of the same client on the other server, kept."""
    for _ in range(20):
        balancer.cut()
        other = until_answered(lambda: client.generate(PROMPT, keep_seconds=60, **SAMPLED))
        if other.address != away_from:
            return other
        client.release(other.sequence_id)
    raise AssertionError("the balancer always chose the same server")


def test_a_fork_goes_to_the_server_that_holds_its_parent(pair, balancer, client):
    parent = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
    assert parent.address in {server.target for server in pair}
    other = moved(balancer, client, parent.address)
    for held in (parent, other, parent):
        outs = client.fork([Branch(held.sequence_id), Branch(held.sequence_id)], **SAMPLED)
        assert {out.address for out in outs} == {held.address}
        assert all(out.num_forked_tokens >= len(PROMPT) for out in outs)
    with Client(other.address, timeout=60) as stranger, pytest.raises(NotFound):
        stranger.fork([Branch(parent.sequence_id)], **SAMPLED)


def test_a_running_sequence_is_forked_where_it_runs(balancer, client):
    with client.stream(PROMPT, max_tokens=400, ignore_eos=True, keep_seconds=60) as stream:
        (out,) = client.fork([Branch(stream.sequence_id)], **SAMPLED)
        assert out.address == next(stream).address


def test_release_goes_to_every_server_that_holds_some(balancer, client):
    one = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
    two = moved(balancer, client, one.address)
    names = [one.sequence_id, two.sequence_id]
    assert set(client.release(*names, "unknown").sequence_ids) == set(names)
    with pytest.raises(NotFound):
        client.release(*names)
    with pytest.raises(InvalidArgument, match="sequence_ids"):
        client.release()


def test_parents_on_different_servers_are_refused_with_both_addresses(balancer, client):
    one = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
    two = moved(balancer, client, one.address)
    with pytest.raises(InvalidArgument, match="in a call of its own") as caught:
        client.fork([Branch(one.sequence_id), Branch(two.sequence_id)], **SAMPLED)
    assert caught.value.field == "branches"
    assert one.address in str(caught.value)
    assert two.address in str(caught.value)


def test_a_pin_and_listed_sequences_are_found_again(balancer, client):
    one = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
    pin = client.pin(PROMPT, seconds=60)
    moved(balancer, client, one.address)
    assert client.unpin(pin.pin_id).pin_id == pin.pin_id
    with Client(one.address, timeout=60) as direct, Client(balancer.target, timeout=60) as later:
        (listed,) = direct.sequences()
        later._replicas.learn([listed.sequence_id], one.address)
        (out,) = later.fork([Branch(listed.sequence_id)], **SAMPLED)
    assert out.address == one.address


def test_the_client_for_asyncio_goes_there_too(balancer, client):
    parent = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
    other = moved(balancer, client, parent.address)

    async def run():
        async with AsyncClient(other.address, timeout=60) as later:
            own = await later.generate(PROMPT, keep_seconds=60, **SAMPLED)
            later._replicas.learn([parent.sequence_id], parent.address)
            (out,) = await later.fork([Branch(parent.sequence_id)], **SAMPLED)
            receipt = await later.release(parent.sequence_id, own.sequence_id)
            pin = await later.pin(PROMPT, seconds=60)
            await later.unpin(pin.pin_id)
            return own, out, receipt

    own, out, receipt = asyncio.run(run())
    assert own.address == other.address
    assert out.address == parent.address
    assert set(receipt.sequence_ids) == {parent.sequence_id, own.sequence_id}


def test_a_dead_holder_is_named_and_its_tokens_go_on_elsewhere_with_the_same_bits(tiny_config):
    """Two real servers of one model, and whichever holds the sequence goes away."""
    with ExitStack() as stack:
        servers = [start(tiny_config) for _ in range(2)]
        balancer = stack.enter_context(Balancer(*(server.server.port for server in servers)))
        client = stack.enter_context(Client(balancer.target, timeout=60))
        parent = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
        (before,) = client.fork([Branch(parent.sequence_id, token_ids=[50])], **SAMPLED)
        (holder,) = [server for server in servers if server.target == parent.address]
        holder.close()
        with pytest.raises(Unavailable) as caught:
            client.fork([Branch(parent.sequence_id)], **SAMPLED)
        assert caught.value.address == parent.address
        assert parent.address in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).address == parent.address
        with pytest.raises(Unavailable, match=parent.address):
            client.release(parent.sequence_id)
        tokens = [*PROMPT, *parent.token_ids, 50]
        after = until_answered(
            lambda: client.generate(tokens, stream_key=before.stream_key, **SAMPLED)
        )
        assert after.address != parent.address
        assert after.token_ids == before.token_ids
        assert after.logprobs == before.logprobs
        (other,) = [server for server in servers if server is not holder]
        other.check()
        other.close()


@pytest.mark.slow
def test_a_stream_whose_server_is_killed_goes_on_elsewhere(checkpoint):
    flags = ["--model", str(checkpoint), "--port", "0", "--advertise-address", ANY_PORT]
    flags += ["--num-gpu-blocks-override", "512", "--block-size", "4", "--max-model-len", "512"]
    with (
        Process(*flags, program=FAULTY, FAULTS_STEP_SECONDS="0.02") as one,
        Process(*flags, program=FAULTY) as two,
    ):
        ports = [one.ready(), two.ready()]
        with Balancer(*ports) as balancer, Client(balancer.target, timeout=60) as client:
            stream = client.stream(PROMPT, max_tokens=400, ignore_eos=True, logprobs=0)
            seen: list[Delta] = []
            while sum(len(delta.token_ids) for delta in seen) < 5:
                seen.append(next(stream))
            os.kill(one.popen.pid, 9)
            with pytest.raises(Unavailable) as caught:
                seen.extend(stream)
            assert caught.value.address == f"127.0.0.1:{ports[0]}"
            tokens = [token for delta in seen for token in delta.token_ids]
            key = seen[0].stream_key
            options = {"stream_key": key, "ignore_eos": True, "logprobs": 0}
            whole = client.generate(PROMPT, max_tokens=len(tokens) + 20, **options)
            rest = client.generate([*PROMPT, *tokens], max_tokens=20, **options)
        assert whole.token_ids == (*tokens, *rest.token_ids)
        told = [entry for delta in seen for entry in delta.logprobs]
        assert whole.logprobs == (*told, *rest.logprobs)


def test_the_second_connection_has_the_same_token_and_certificates(tiny_config, tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("client.example")
    own.private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    token = fresh_token()
    (tmp_path / "tokens.toml").write_text(entry_for("alice", token))
    files = TlsFiles(tmp_path / "server.pem", tmp_path / "server.pem", tmp_path / "ca.pem")
    secure = {"tls": files, "tokens": tmp_path / "tokens.toml"}
    shown = {"ca": tmp_path / "ca.pem", "certificate": tmp_path / "own.pem", "token": token}
    with ExitStack() as stack:
        servers = [start(tiny_config, **secure) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        balancer = stack.enter_context(Balancer(*(server.server.port for server in servers)))
        client = stack.enter_context(Client(balancer.target, timeout=60, **shown))
        parent = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
        moved(balancer, client, parent.address)
        (out,) = client.fork([Branch(parent.sequence_id)], **SAMPLED)
        assert out.address == parent.address
        assert client.release(parent.sequence_id).sequence_ids == (parent.sequence_id,)


def test_the_command_line_says_where_a_sequence_is_held(pair):
    server = pair[0]
    flags = ["--server", server.target, "--max-tokens", "2"]
    done = CliRunner().invoke(app, ["generate", "Hello", "--keep", "60", *flags])
    assert f": on {server.target}, " in done.stderr
    sequence_id = done.stderr.split()[1].rstrip(":")
    assert CliRunner().invoke(app, ["fork", sequence_id, *flags]).exit_code == 0
    with server.client() as client:
        client.release(sequence_id)


def test_without_an_advertised_address_nothing_is_told(server):
    with server.client() as client:
        kept = client.generate(PROMPT, keep_seconds=60, **SAMPLED)
        assert kept.address == ""
        assert client._replicas.by_holder([kept.sequence_id]) == {"": [kept.sequence_id]}
        (out,) = client.fork([Branch(kept.sequence_id)], **SAMPLED)
        assert out.address == ""


# -------------------------------------------------------------------------------- bookkeeping


class Nowhere:
    """A channel that makes no call."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def test_what_a_client_remembers_is_bounded_and_ends_with_its_sequence(monkeypatch):
    monkeypatch.setattr(routing, "MAX_HELD", 3)
    monkeypatch.setattr(routing, "MAX_CONNECTIONS", 2)
    replicas = routing.Replicas("lb:1", lambda address: Nowhere())
    for name in "abcd":
        replicas.note(Delta(0, name, address="one:1"))
    assert replicas.by_holder(["a", "b", "c", "d"]) == {"": ["a"], "one:1": ["b", "c", "d"]}
    replicas.note(Delta(0, "b", finish_reason="stop", address="one:1", kept_seconds=5.0))
    replicas.note(Delta(0, "c", finish_reason="stop", address="one:1"))
    assert replicas.by_holder(["b", "c"]) == {"one:1": ["b"], "": ["c"]}
    first = replicas.stub("one:1")
    assert replicas.stub("one:1") is first
    assert replicas.stub("lb:1") is replicas.stub()
    replicas.stub("two:1")
    replicas.stub("three:1")
    assert len(replicas.take_channels()) == 3
    assert replicas.stub("one:1") is not first


# -------------------------------------------------------------------------------- the flag


def test_an_address_is_a_host_and_a_port():
    assert advertised("127.0.0.1:50051") == ("127.0.0.1", 50051)
    assert advertised("[::1]:7") == ("::1", 7)
    assert advertised("localhost:0") == ("localhost", 0)


@pytest.mark.parametrize(
    "text", ["", "localhost", ":50051", "localhost:", "localhost:x", "localhost:70000", "::1:5"]
)
def test_an_address_without_host_or_port_stops_the_start(text):
    with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
        advertised(text)


def test_an_address_that_cannot_be_resolved_stops_the_start(tiny_config, monkeypatch):
    with pytest.raises(ConfigurationError, match="cannot be resolved"):
        advertised("a..b:50051")

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match=r"'nobody' cannot be resolved \(Name or service"):
        advertised("nobody:50051")


def test_a_wrong_address_is_said_before_the_model_is_loaded():
    process = Process("--port", "0", "--advertise-address", "localhost")
    code, out, err = process.end(60)
    assert (code, out) == (1, "")
    assert err.startswith("error: --advertise-address 'localhost' is not HOST:PORT")
    assert err.count("\n") == 1
