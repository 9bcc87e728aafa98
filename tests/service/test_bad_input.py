"""Bad input never reaches the engine's loop: status, field, and the next call works.

GR-06, GR-10, SE-06, SE-07, SE-10, SM-03, SM-12.
"""

import math

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from prefixcache.errors import InvalidArgument
from prefixcache_service import Branch
from prefixcache_service.v1 import prefixcache_pb2 as pb
from tests.service.conftest import MAX_MODEL_LEN

IDS = pb.TokenIds(ids=[10, 11, 12])
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = math.nan, math.inf


def generate(**fields):
    fields.setdefault("token_ids", IDS) if not {"text", "chat"} & set(fields) else None
    return "Generate", pb.GenerateRequest(**fields)


def sampling(**fields):
    return generate(sampling=pb.SamplingParams(**fields))


def beam(num_beams=2, **fields):
    return generate(beam_search=pb.BeamSearchParams(num_beams=num_beams, **fields))


def chat(*messages):
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=r, content=c) for r, c in messages])


def fork(**fields):
    fields.setdefault("parent_sequence_id", "nobody")
    return "Fork", pb.ForkRequest(branches=[pb.ForkBranch(**fields)])


def score(*continuations, **fields):
    fields.setdefault("token_ids", IDS)
    return "Score", pb.ScoreRequest(continuations=continuations, **fields)


ONE = pb.Continuation(text="x")

CASES = {
    "no prompt": (("Generate", pb.GenerateRequest()), "prompt"),
    "empty text": (generate(text=""), "text"),
    "empty ids": (generate(token_ids=pb.TokenIds()), "token_ids"),
    "empty chat": (generate(chat=pb.ChatPrompt()), "chat.messages"),
    "no role": (generate(chat=chat(("user", "x"), ("", "y"))), "chat.messages[1].role"),
    "long chat": (generate(chat=chat(*[("user", "x")] * 4097)), "chat.messages"),
    "id at vocabulary": (generate(token_ids=pb.TokenIds(ids=[1, 300])), "token_ids"),
    "id 2^32 - 1": (generate(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids"),
    "too long": (generate(token_ids=pb.TokenIds(ids=[5] * (MAX_MODEL_LEN + 1))), "token_ids"),
    "long text": (generate(text="x " * 3000), "text"),
    "no room for max_tokens": (sampling(max_tokens=MAX_MODEL_LEN - 2), "sampling.max_tokens"),
    "no room for one": (generate(token_ids=pb.TokenIds(ids=[5] * MAX_MODEL_LEN)),
                        "sampling.max_tokens"),
    "long request id": (generate(request_id="x" * 129), "request_id"),
    "request id with newline": (generate(request_id="a\nb"), "request_id"),
    "long salt": (generate(cache_salt="x" * 257), "cache_salt"),
    "keep nan": (generate(keep_seconds=NAN), "keep_seconds"),
    "keep negative": (generate(keep_seconds=-1), "keep_seconds"),
    "keep too long": (generate(keep_seconds=1e9), "keep_seconds"),
    "n = 0": (sampling(n=0), "sampling.n"),
    "n = -1": (sampling(n=-1), "sampling.n"),
    "n = 257": (sampling(n=257), "sampling.n"),
    "max_tokens < 0": (sampling(max_tokens=-1), "sampling.max_tokens"),
    "min_tokens > max_tokens": (sampling(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
    "top_k = -2": (sampling(top_k=-2), "sampling.top_k"),
    "top_p = 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p = 1.5": (sampling(top_p=1.5), "sampling.top_p"),
    "logprobs = 65": (sampling(logprobs=65), "sampling.logprobs"),
    "logprobs = -1": (sampling(logprobs=-1), "sampling.logprobs"),
    "seed and key": (sampling(seed=1, stream_key=1), "sampling.stream_key"),
    "bias id": (sampling(logit_bias={300: 1}), "sampling.logit_bias"),
    "bias id 2^31": (sampling(logit_bias={2**31: 1}), "sampling.logit_bias"),
    "bias nan": (sampling(logit_bias={1: NAN}), "sampling.logit_bias"),
    "many biases": (sampling(logit_bias=dict.fromkeys(range(10**5), 1)), "sampling.logit_bias"),
    "empty stop": (sampling(stop=[""]), "sampling.stop"),
    "long stop": (sampling(stop=["x" * 10**6]), "sampling.stop"),
    "many stops": (sampling(stop=["x"] * 500_000), "sampling.stop"),
    "stop id": (sampling(stop_token_ids=[300]), "sampling.stop_token_ids"),
    "many stop ids": (sampling(stop_token_ids=[1] * 257), "sampling.stop_token_ids"),
    "no width": (beam(0), "beam_search.num_beams"),
    "width 257": (beam(257), "beam_search.num_beams"),
    "width -1": (beam(-1), "beam_search.num_beams"),
    "width beyond the vocabulary": (beam(16, stop_token_ids=range(20)), "beam_search.num_beams"),
    "more results than beams": (beam(num_return_sequences=3), "beam_search.num_return_sequences"),
    "no results": (beam(num_return_sequences=0), "beam_search.num_return_sequences"),
    "beam max_tokens = 0": (beam(max_tokens=0), "beam_search.max_tokens"),
    "beam no room": (beam(max_tokens=MAX_MODEL_LEN), "beam_search.max_tokens"),
    "beam min_tokens": (beam(max_tokens=2, min_tokens=3), "beam_search.min_tokens"),
    "length_penalty nan": (beam(length_penalty=NAN), "beam_search.length_penalty"),
    "length_penalty 11": (beam(length_penalty=11), "beam_search.length_penalty"),
    "early_stopping 4": (beam(early_stopping=4), "beam_search.early_stopping"),
    "early_stopping -1": (beam(early_stopping=-1), "beam_search.early_stopping"),
    "uneven groups": (beam(4, num_beam_groups=3, diversity_penalty=1),
                      "beam_search.num_beam_groups"),
    "no groups": (beam(num_beam_groups=0), "beam_search.num_beam_groups"),
    "groups that are the same": (beam(num_beam_groups=2), "beam_search.diversity_penalty"),
    "diversity inf": (beam(num_beam_groups=2, diversity_penalty=INF),
                      "beam_search.diversity_penalty"),
    "beam empty stop": (beam(stop=[""]), "beam_search.stop"),
    "beam stop id": (beam(stop_token_ids=[300]), "beam_search.stop_token_ids"),
    "beam penalty 0": (beam(repetition_penalty=0), "beam_search.repetition_penalty"),
    "beam bias": (beam(logit_bias={300: 1}), "beam_search.logit_bias"),
    "no branches": (("Fork", pb.ForkRequest()), "branches"),
    "many branches": (("Fork", pb.ForkRequest(branches=[pb.ForkBranch()] * 257)), "branches"),
    "no parent": (fork(parent_sequence_id=""), "branches[0].parent_sequence_id"),
    "position 0": (fork(position=0), "branches[0].position"),
    "position -1": (fork(position=-1), "branches[0].position"),
    "position far": (fork(position=10**6), "branches[0].position"),
    "fork n": (fork(sampling=pb.SamplingParams(n=2)), "branches[0].sampling.n"),
    "fork empty text": (fork(text=""), "branches[0].text"),
    "fork bad id": (fork(token_ids=pb.TokenIds(ids=[300])), "branches[0].token_ids"),
    "fork prompt_logprobs": (fork(sampling=pb.SamplingParams(prompt_logprobs=1)),
                             "branches[0].sampling.prompt_logprobs"),
    "fork keep": (fork(keep_seconds=-1), "branches[0].keep_seconds"),
    "score nothing": (score(), "continuations"),
    "score empty": (score(ONE, pb.Continuation()), "continuations[1]"),
    "score empty ids": (score(pb.Continuation(token_ids=pb.TokenIds())),
                        "continuations[0].token_ids"),
    "score many": (score(*[ONE] * 257), "continuations"),
    "score long": (score(pb.Continuation(token_ids=pb.TokenIds(ids=[5] * MAX_MODEL_LEN))),
                   "continuations[0]"),
    "score no prefix": (("Score", pb.ScoreRequest(continuations=[ONE])), "prefix"),
    "score top": (score(ONE, top_logprobs=65), "top_logprobs"),
    "pin nan": (("PinPrefix", pb.PinPrefixRequest(token_ids=IDS, seconds=NAN)), "seconds"),
    "pin 0": (("PinPrefix", pb.PinPrefixRequest(token_ids=IDS)), "seconds"),
    "pin nothing": (("PinPrefix", pb.PinPrefixRequest(seconds=1)), "prompt"),
    "unpin nothing": (("UnpinPrefix", pb.UnpinPrefixRequest()), "pin_id"),
    "release nothing": (("Release", pb.ReleaseRequest()), "sequence_ids"),
    "release no name": (("Release", pb.ReleaseRequest(sequence_ids=["a", ""])), "sequence_ids[1]"),
    "release many": (("Release", pb.ReleaseRequest(sequence_ids=["a"] * 1025)), "sequence_ids"),
    "list salt": (("ListSequences", pb.ListSequencesRequest(cache_salt="x" * 257)), "cache_salt"),
    "tokenize nothing": (("Tokenize", pb.TokenizeRequest()), "prompt"),
    "detokenize id": (("Detokenize", pb.DetokenizeRequest(token_ids=[300])), "token_ids"),
}  # fmt: skip
for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty"):  # fmt: skip
    for value in (NAN, INF, -INF, 1e308, -3):
        CASES[f"{name} = {value}"] = (sampling(**{name: value}), f"sampling.{name}")


def ask(stub, method, request):
    """Call to the end, streaming or not."""
    call = getattr(stub, method)(request, timeout=20)
    return list(call) if method in ("Generate", "Fork") else call


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_field_is_named_and_the_next_call_works(stub, case):
    (method, request), field = CASES[case]
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, method, request)
    assert caught.value.code() is INVALID, caught.value.details()
    assert field_of(caught.value) == field
    good = pb.GenerateRequest(token_ids=IDS, sampling=pb.SamplingParams(max_tokens=1))
    assert [m.WhichOneof("response") for m in stub.Generate(good)][-1] == "complete"


def field_of(error):
    """The field in google.rpc.BadRequest, which must agree with the status."""
    data = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(data)
    assert (status.code, status.message) == (3, error.details())
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    return bad.field_violations[0].field


def test_two_kinds_of_prompt_are_refused_though_protobuf_would_keep_the_last(server):
    """GR-06: both text and ids."""
    data = b"".join(
        message.SerializeToString()
        for message in (pb.GenerateRequest(text="x"), pb.GenerateRequest(token_ids=IDS))
    )
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_stream("/prefixcache.v1.PrefixCache/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data))
        assert caught.value.code() is INVALID
        assert field_of(caught.value) == "token_ids"
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\x12\x03\xed\xa0\x80"))  # a lone surrogate
        assert caught.value.code() is INVALID
        assert field_of(caught.value) == "text"


def test_whitespace_is_a_prompt(client):
    """GR-10."""
    assert client.generate(" \n", max_tokens=1).usage.prompt_tokens >= 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.generate("\ud800"), "text"),
        (lambda c: c.generate([{"role": "user", "content": "\ud800"}]),
         "chat.messages[0].content"),
        (lambda c: c.generate([-1]), "token_ids"),
        (lambda c: c.generate("x", n=2**40), "sampling.n"),
        (lambda c: c.generate("x", logit_bias={-1: 1.0}), "sampling.logit_bias"),
        (lambda c: c.generate("x", tempurature=1), "sampling.tempurature"),
        (lambda c: c.beam("x", num_beams=2**40), "beam_search.num_beams"),
        (lambda c: c.beam("x", num_beams=2, temperature=1), "beam_search.temperature"),
        (lambda c: c.beam("x", num_beams=2, early_stopping="yes"), "beam_search.early_stopping"),
        (lambda c: c.beam("x", num_beams=2, early_stopping=1), "beam_search.early_stopping"),
        (lambda c: c.fork([Branch("p", text="a", token_ids=[1])]), "branches[0].text"),
        (lambda c: c.fork([Branch("p", text="\udfff")]), "branches[0].text"),
        (lambda c: c.generate("x", stop=["\ud800"]), "sampling.stop"),
        (lambda c: c.score("x", ["\ud800"]), "continuations[0].text"),
    ],
)  # fmt: skip
def test_the_client_names_what_the_wire_cannot_carry(client, call, field):
    with pytest.raises(InvalidArgument) as caught:
        call(client)
    assert caught.value.field == field


def test_the_client_gets_the_servers_field(client):
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", top_p=1.5)
    assert caught.value.field == "sampling.top_p"
    assert "1.5" in caught.value.message


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (beam(17), "RESOURCE_EXHAUSTED"),
        (beam(16, max_tokens=500), "RESOURCE_EXHAUSTED"),
        (sampling(n=17, max_tokens=1), "RESOURCE_EXHAUSTED"),
        (fork(), "NOT_FOUND"),
        (("Release", pb.ReleaseRequest(sequence_ids=["nobody", "none"])), "NOT_FOUND"),
        (("UnpinPrefix", pb.UnpinPrefixRequest(pin_id="nothing")), "NOT_FOUND"),
        (sampling(n=16, max_tokens=500), "RESOURCE_EXHAUSTED"),
    ],
)
def test_other_statuses(stub, request_, code):
    method, request = request_
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, method, request)
    assert caught.value.code().name == code, caught.value.details()
    assert caught.value.details()
