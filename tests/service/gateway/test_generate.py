"""Generate and Abort of VllmEngine: the same tokens as through our own API, in its messages."""

import time

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.service.gateway.calls import GREEDY, PROMPT, generate, request


def test_without_streaming_only_completes_come(stub, client):
    own = client.generate(PROMPT, max_tokens=6, **GREEDY)
    answer = generate(stub, max_tokens=6, **GREEDY)
    assert not answer.deltas
    (complete,) = answer.completes.values()
    assert tuple(complete.output_ids) == own.token_ids
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("length", None)
    assert (complete.prompt_tokens, complete.completion_tokens) == (30, 6)
    assert complete.cached_tokens == 29  # all but the last, which is always run


def test_completes_alone_come_in_the_order_of_their_indices(stub, client):
    """A gateway numbers the choices of a chat as they come."""
    settings = {"max_tokens": 20, "n": 3, "seed": 11, "ignore_eos": True}
    own = client.generate(PROMPT, **settings)
    early = next(t for t in own.outputs[1].token_ids if t not in own.outputs[0].token_ids)
    answer = generate(stub, stop_token_ids=[early], **settings)
    assert list(answer.completes) == [0, 1, 2]
    assert answer.completes[1].completion_tokens < 20
    assert tuple(answer.completes[0].output_ids) == own.outputs[0].token_ids


def test_streamed_deltas_join_to_the_tokens_and_each_index_ends_with_a_complete(stub, client):
    own = client.generate(PROMPT, max_tokens=9, n=3, seed=11, ignore_eos=True)
    answer = generate(stub, max_tokens=9, n=3, seed=11, ignore_eos=True, stream=True)
    assert sorted(answer.completes) == [0, 1, 2]
    for output in own.outputs:
        assert answer.tokens(output.index) == output.token_ids
        assert not answer.completes[output.index].output_ids
        assert answer.completes[output.index].completion_tokens == 9
        assert answer.completes[output.index].prompt_tokens == 30
        assert sum(c.completion_tokens for c in answer.deltas[output.index]) == 9


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told(stub, stream):
    assert generate(stub, max_tokens=1, **GREEDY).completes[0].cached_tokens == 0
    answer = generate(stub, max_tokens=3, n=2, seed=1, stream=stream)
    assert [complete.cached_tokens for complete in answer.completes.values()] == [28, 28]
    assert {c.cached_tokens for chunks in answer.deltas.values() for c in chunks} == (
        {28} if stream else set()
    )


def test_fields_that_are_zero_have_their_default(stub, client):
    """Temperature alone can be unset; of the others 0 is no value, or what it says."""
    own = client.generate(PROMPT, max_tokens=8, seed=3)
    whole = client.generate(PROMPT, seed=4, temperature=0.5)
    assert tuple(generate(stub, max_tokens=8, seed=3).completes[0].output_ids) == own.token_ids
    answer = generate(stub, seed=4, temperature=0.5)  # max_tokens unset: until the model ends
    assert tuple(answer.completes[0].output_ids) == whole.token_ids


def test_numbers_mean_what_the_client_wrote(stub, client):
    """A float32 of the wire is not cut to another number: a seed draws the same tokens."""
    settings = {
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "top_k": 40,
    }
    for seed in range(8):
        own = client.generate(PROMPT, max_tokens=24, seed=seed, **settings)
        answer = generate(stub, max_tokens=24, seed=seed, **settings)
        assert tuple(answer.completes[0].output_ids) == own.token_ids


def test_a_negative_seed_is_one_too(stub, client):
    own = client.generate(PROMPT, max_tokens=8, seed=2**64 - 5)
    assert tuple(generate(stub, max_tokens=8, seed=-5).completes[0].output_ids) == own.token_ids


def test_what_ended_an_output_is_told(stub, client):
    own = client.generate(PROMPT, max_tokens=12, **GREEDY)
    text = client.detokenize(own.token_ids[4:6])
    by_id = generate(stub, max_tokens=12, stop_token_ids=[own.token_ids[3]], **GREEDY)
    assert by_id.completes[0].finish_reason == "stop"
    assert by_id.completes[0].matched_token_id == own.token_ids[3]
    by_text = generate(stub, max_tokens=12, stop=["not there", text], stream=True, **GREEDY)
    assert by_text.completes[0].finish_reason == "stop"
    assert by_text.completes[0].matched_stop_str == text
    assert by_text.tokens() == own.token_ids[: len(by_text.tokens())]
    assert len(by_text.tokens()) <= 6


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_our_own_api(stub, client, stream):
    own = client.generate(PROMPT, max_tokens=5, logprobs=3, prompt_logprobs=2, **GREEDY)
    answer = generate(stub, max_tokens=5, logprobs=3, prompt_logprobs=2, stream=stream, **GREEDY)
    messages = answer.deltas[0] if stream else [answer.completes[0]]
    chosen = [p for m in messages for p in m.output_logprobs.token_logprobs]
    tokens = [t for m in messages for t in m.output_logprobs.token_ids]
    tops = [top for m in messages for top in m.output_logprobs.top_logprobs]
    assert tuple(tokens) == own.token_ids
    assert chosen == [entry.chosen.logprob for entry in own.logprobs]
    assert [list(top.token_ids) for top in tops] == [
        [one.token_id for one in entry.top] for entry in own.logprobs
    ]
    assert [list(top.values) for top in tops] == [
        [one.logprob for one in entry.top] for entry in own.logprobs
    ]
    (prompt,) = [m.input_logprobs for m in messages if m.HasField("input_logprobs")]
    assert list(prompt.token_ids) == PROMPT
    assert [p.HasField("value") for p in prompt.token_logprobs] == [False, *[True] * 29]
    assert [p.value for p in prompt.token_logprobs[1:]] == [
        entry.chosen.logprob for entry in own.outputs[0].prompt_logprobs[1:]
    ]
    assert [len(top.token_ids) for top in prompt.top_logprobs] == [0, *[2] * 29]


def test_text_is_tokenized_here_too(stub, client):
    text = "The quick brown fox"
    own = client.generate(text, max_tokens=4, **GREEDY)
    params = vllm.SamplingParams(max_tokens=4, **GREEDY)
    (response,) = stub.Generate(vllm.GenerateRequest(text=text, sampling_params=params))
    assert tuple(response.complete.output_ids) == own.token_ids


# ---------------------------------------------------------------- ending early


def test_abort_ends_a_stream_and_frees_its_blocks(stub, slow):
    call = stub.Generate(request(stream=True, request_id="long", n=2, seed=1, ignore_eos=True))
    next(call)
    stub.Abort(vllm.AbortRequest(request_ids=["long", "unknown"]))
    reasons = [r.complete.finish_reason for r in call if r.HasField("complete")]
    assert reasons == ["abort", "abort"]
    assert slow.settle().blocks_in_use == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_is_dropped_frees_its_blocks(stub, slow, client, begun):
    aborted = client.stats().requests_aborted
    call = stub.Generate(request(stream=begun, ignore_eos=True))
    if begun:
        next(call)
    else:
        while not client.stats().sequences_running:
            time.sleep(0.01)
    call.cancel()
    stats = slow.settle()
    assert (stats.blocks_in_use, stats.requests_aborted - aborted) == (0, 1)


def test_an_id_is_free_again_once_its_request_has_ended(stub):
    for _ in range(3):
        assert generate(stub, max_tokens=1, request_id="again", **GREEDY).completes


# ---------------------------------------------------------------- refusals


def refused(stub, message):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(message))
    return caught.value.code(), caught.value.details()


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("input", vllm.GenerateRequest()),
        ("tokenized.input_ids", request(())),
        ("tokenized.input_ids", request([5, 300])),
        ("tokenized.input_ids", request([5] * 600)),
        ("text", vllm.GenerateRequest(text="")),
        ("request_id", request(request_id="x" * 129)),
        ("sampling_params.max_tokens", request(max_tokens=10_000)),
        ("sampling_params.temperature", request(temperature=-1)),
        ("sampling_params.temperature", request(temperature=float("nan"))),
        ("sampling_params.top_p", request(top_p=1.5)),
        ("sampling_params.logprobs", request(logprobs=-1)),
        ("sampling_params.stop", request(stop=[""])),
        ("sampling_params.stop_token_ids", request(stop_token_ids=[300])),
        ("sampling_params.logit_bias", request(logit_bias={-1: 1.0})),
        ("sampling_params.json_schema", request(json_schema="{}")),
        ("sampling_params.json_object", request(json_object=True)),
        ("sampling_params.regex", request(regex="a*")),
        ("sampling_params.grammar", request(grammar="root ::= 'a'")),
        ("sampling_params.choice", request(choice=vllm.ChoiceConstraint(choices=["a"]))),
        ("sampling_params.structural_tag", request(structural_tag="{}")),
        ("sampling_params.truncate_prompt_tokens", request(truncate_prompt_tokens=5)),
        ("mm_inputs", vllm.GenerateRequest(text="x", mm_inputs=vllm.MultimodalInputs())),
        (
            "kv_transfer_params",
            vllm.GenerateRequest(text="x", kv_transfer_params=vllm.KvTransferParams()),
        ),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(stub, server, field, message):
    code, details = refused(stub, message)
    assert code is INVALID
    assert details.startswith(f"{field}: "), details
    assert server.settle().blocks_in_use == 0


def test_more_samples_than_run_at_once_are_refused(stub):
    code, details = refused(stub, request(n=17, max_tokens=1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "n: 17 are asked for" in details


@pytest.mark.parametrize("where", ["", "tokenized.", "sampling_params."])
def test_a_field_of_a_newer_gateway_is_refused_not_passed_over(stub, where):
    """It may be what the client asked for above all: a constraint, say."""
    message = request(max_tokens=1, **GREEDY)
    part = getattr(message, where.rstrip(".")) if where else message
    part.MergeFromString(b"\xfa\x3e\x01x")  # field 1007
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(message))
    assert caught.value.code() is INVALID
    assert caught.value.details().startswith(f"{where}1007: ")
    assert "newer" in caught.value.details()


def test_bytes_that_are_no_request_are_refused(channel):
    with pytest.raises(grpc.RpcError) as caught:
        raw(channel, b"\xff" * 40)
    assert caught.value.code() is INVALID


def raw(channel, data):
    """A Generate of bytes as they are."""
    return list(channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(data))


def test_embeddings_are_refused_by_name(stub):
    with pytest.raises(grpc.RpcError, match="Embed") as caught:
        stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[1])))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
