"""The table of limits: each at its number and one beyond, over gRPC, and told where it should be.

One server whose limits are all small, so that a test is about the limit and not about a size.
"""

import re
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from prefixcache.errors import ConfigurationError, InvalidArgument, ResourceExhausted
from prefixcache.limits import Limits
from prefixcache_service import Branch
from prefixcache_service.cli import app
from prefixcache_service.limits import CLIENT_OPTIONS
from prefixcache_service.tenants import entry_for, fresh_token
from prefixcache_service.v1 import prefixcache_pb2 as pb
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub
from tests.service.conftest import RunningServer

SMALL = Limits(
    n=3, num_beams=4, branches=3, continuations=3, score_logprobs=12, logprobs=5, stop=2,
    stop_chars=6, stop_token_ids=2, logit_bias=3, chat_messages=2, sequence_ids=4,
    request_id_chars=33, cache_salt_chars=7, message_bytes=20_000, open_calls=4, tenant_calls=2,
    waiting_events=20,
)  # fmt: skip
PROMPT = [10, 11, 12]
ONE = {"max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def small(tiny_config):
    server = RunningServer(replace(tiny_config, limits=SMALL), limits=SMALL).load()
    yield server
    server.close()


@pytest.fixture
def server(small):
    """The tests below are about this one, not the session's."""
    yield small
    small.check()


def chat(count):
    return [{"role": "user", "content": "x"}] * count


def kept(client):
    return client.generate(PROMPT, keep_seconds=60, **ONE).sequence_id


def fork(client, count):
    parent = kept(client)
    try:
        return client.fork([Branch(parent)] * count, max_tokens=1)
    finally:
        client.release(parent)


def release(client, count):
    parent = kept(client)
    try:
        return client.release(*[parent] * count)
    finally:
        for info in client.sequences():
            client.release(info.sequence_id)


# limit: (what to send with so many, the field that is named one beyond)
REQUESTS = {
    "n": (lambda c, k: c.generate(PROMPT, n=k, **ONE), "sampling.n"),
    "num_beams": (
        lambda c, k: c.beam(PROMPT, num_beams=k, max_tokens=1),
        "beam_search.num_beams",
    ),
    "branches": (fork, "branches"),
    "continuations": (lambda c, k: c.score(PROMPT, [[5]] * k), "continuations"),
    "score_logprobs": (lambda c, k: c.score(PROMPT, [[5] * k]), "continuations"),
    "logprobs": (lambda c, k: c.generate(PROMPT, logprobs=k, **ONE), "sampling.logprobs"),
    "stop": (lambda c, k: c.generate(PROMPT, stop=["x"] * k, **ONE), "sampling.stop"),
    "stop_chars": (lambda c, k: c.generate(PROMPT, stop=["x" * k], **ONE), "sampling.stop"),
    "stop_token_ids": (
        lambda c, k: c.generate(PROMPT, stop_token_ids=[7] * k, **ONE),
        "sampling.stop_token_ids",
    ),
    "logit_bias": (
        lambda c, k: c.generate(PROMPT, logit_bias=dict.fromkeys(range(k), 1.0), **ONE),
        "sampling.logit_bias",
    ),
    "chat_messages": (lambda c, k: c.generate(chat(k), **ONE), "chat.messages"),
    "sequence_ids": (release, "sequence_ids"),
    "request_id_chars": (lambda c, k: c.generate(PROMPT, request_id="x" * k, **ONE), "request_id"),
}


@pytest.mark.parametrize("limit", REQUESTS)
def test_a_limit_itself_passes_and_one_beyond_is_refused_by_name(limit, client):
    """SE-10."""
    ask, field = REQUESTS[limit]
    most = getattr(SMALL, limit)
    ask(client, most)
    before = client.stats()
    with pytest.raises(InvalidArgument) as caught:
        ask(client, most + 1)
    assert caught.value.field == field
    assert re.search(rf"\b{most}\b.*\(--limit {limit}\)", caught.value.message)
    if limit not in ("branches", "sequence_ids"):  # which prepare a sequence
        assert client.stats() == before


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda c, k: c.generate(PROMPT, prompt_logprobs=k, **ONE), "sampling.prompt_logprobs"),
        (lambda c, k: c.score(PROMPT, [[5]], top_logprobs=k), "top_logprobs"),
        (
            lambda c, k: c.fork([Branch("nobody", sampling={"logprobs": k})]),
            "branches[0].sampling.logprobs",
        ),
    ],
)
def test_log_probabilities_have_one_limit_wherever_they_are_asked_for(ask, field, client):
    with pytest.raises(InvalidArgument, match=r"5 \(--limit logprobs\)") as caught:
        ask(client, 6)
    assert caught.value.field == field


def test_a_score_whose_reply_would_be_too_long_is_refused_before_any_work(client):
    """GR-01: a Score answers with one message. Top ones count too."""
    assert len(client.score([5], [[7] * 2], top_logprobs=5).scores) == 1
    before = client.stats()
    with pytest.raises(InvalidArgument, match=r"have 18 .* at most 12 .*score_logprobs"):
        client.score([5], [[7] * 2, [8]], top_logprobs=5)
    assert client.stats() == before


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.generate(PROMPT, **ONE),
        lambda c: c.fork([Branch("nobody")]),
        lambda c: c.score(PROMPT, [[5]]),
        lambda c: c.sequences(),
        lambda c: c.release("nobody"),
        lambda c: c.flush(),
        lambda c: c.pin(PROMPT, seconds=1),
        lambda c: c.unpin("nothing"),
    ],
)
def test_every_call_looks_at_its_salt(ask, server):
    says = r"at most 7 .*\(--limit cache_salt_chars\)"
    with (
        server.client(cache_salt="x" * 8) as client,
        pytest.raises(InvalidArgument, match=says),
    ):
        ask(client)
    with server.client(cache_salt="x" * 7) as client:
        try:
            ask(client)
        except Exception as error:
            assert not isinstance(error, InvalidArgument), error  # noqa: PT017 (some find nothing)


def test_a_request_may_have_so_many_bytes(server, client):
    """What the limit itself holds gets further, to where its text is found too long."""

    def ask(size):
        request = pb.TokenizeRequest(text="x" * (size - 4))
        assert request.ByteSize() == size
        return client.tokenize(request.text, add_special_tokens=None)

    with pytest.raises(InvalidArgument) as caught:
        ask(20_000)
    assert caught.value.field == "text"
    with pytest.raises(ResourceExhausted, match=r"20000.*\(--limit message_bytes\)"):
        ask(20_001)
    assert client.tokenize("x")


# ---------------------------------------------------------------- calls that are open


def until(is_so, seconds=20):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def refused(client):
    """The sentence of a call that is one too many; None where it is not."""
    try:
        client.model_info()
    except ResourceExhausted as error:
        return f"{error}; {error.retry_after}"
    return None


def test_so_many_calls_may_be_open(server):
    with (
        server.client() as client,
        grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel,
    ):
        stub = PrefixCacheStub(channel)
        watches = [stub.WatchCacheEvents(pb.WatchCacheEventsRequest()) for _ in range(3)]
        assert refused(client) is None  # the fourth
        watches.append(stub.WatchCacheEvents(pb.WatchCacheEventsRequest()))
        until(lambda: refused(client))
        assert "at most 4 calls open at once (--limit open_calls); 1.0" in refused(client)
        watches.pop().cancel()
        until(lambda: refused(client) is None)
        for watch in watches:
            watch.cancel()


def test_a_tenant_may_have_so_many_of_them(tiny_config, tmp_path):
    """Over all its connections; another still gets in."""
    tokens = {name: fresh_token() for name in ("operator", "alice")}
    path = tmp_path / "tokens.toml"
    path.write_text(
        entry_for("operator", tokens["operator"]) + "admin = true\n"
        + entry_for("alice", tokens["alice"])
    )  # fmt: skip
    server = RunningServer(tiny_config, limits=SMALL, tokens=path).load()
    metadata = [("authorization", f"Bearer {tokens['operator']}")]
    with (
        server.client(token=tokens["operator"]) as operator,
        server.client(token=tokens["alice"]) as alice,
        grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel,
    ):
        stub = PrefixCacheStub(channel)
        request = pb.WatchCacheEventsRequest()
        watches = [stub.WatchCacheEvents(request, metadata=metadata) for _ in range(2)]
        until(lambda: refused(operator))
        assert "you have 2 calls open, the most at once (--limit tenant_calls); 1.0" in refused(
            operator
        )
        assert refused(alice) is None
        for watch in watches:
            watch.cancel()
        until(lambda: refused(operator) is None)
    server.close()


# ---------------------------------------------------------------- where they are told


def test_every_limit_is_tried():
    elsewhere = {"cache_salt_chars", "message_bytes", "open_calls", "tenant_calls",
                 "waiting_events"}  # fmt: skip
    assert set(REQUESTS) | elsewhere == {row.name for row in fields(Limits)}


def test_a_server_tells_its_limits(client):
    told = client.model_info().limits
    assert told == {**asdict(SMALL), "max_queue": 32, "max_leases": 1024}


def test_the_page_lists_the_table():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    table = page.partition("| `--limit` | at most | of |\n|---|---:|---|\n")[2].partition("\n\n")[0]
    rows = [f"| `{r.name}` | {r.default:,} | {r.metadata['what']} |" for r in fields(Limits)]
    assert table.splitlines() == rows


def test_the_command_lists_the_table():
    result = CliRunner().invoke(app, ["serve", "--limit", "list"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == len(fields(Limits))
    for line, row in zip(lines, fields(Limits), strict=True):
        assert line.split()[:2] == [row.name, str(row.default)]


# ---------------------------------------------------------------- setting them


def test_settings_change_what_they_name():
    assert Limits.parse([]) == Limits()
    assert Limits.parse(["n=3", "stop-chars = 1_000"]) == Limits(n=3, stop_chars=1000)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("m=3", "no such limit; write NAME=NUMBER, such as n=256, num_beams=256"),
        ("n", "'' is no whole number"),
        ("n=many", "'many' is no whole number"),
        ("n=0", "n must be a whole number from 1 to 2147483647, not 0"),
        ("n=-1", "not -1"),
        ("logprobs=257", "from 1 to 256, not 257"),
        ("score_logprobs=500001", "from 1 to 500000"),
        ("request_id_chars=31", "from 32"),
    ],
)
def test_a_setting_that_cannot_be_is_said_in_a_sentence(setting, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        Limits.parse([setting])
