"""The real gateway in front of a real server, asked by OpenAI's and Anthropic's own clients."""

import http.client
import json
import urllib.request

import numpy as np
import openai
import pytest

from tests.service.gateway.waiting import until

MODEL = "llama"
CHAT = [{"role": "user", "content": "The quick brown fox"}]
GREEDY = {"temperature": 0.0}
JSON = {"content-type": "application/json"}
WORDS = ["a", "fox", "and the", "dog", "jumps over", "12", "lazy", "cafés,", "你好", "🙂", "def x"]


def own_chat(client, **settings):
    return client.generate(CHAT, **settings)


def text_of(output):
    """A gateway leaves out a character that is not complete at the end; ours is U+FFFD."""
    return output.text.rstrip("\ufffd")


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


# ---------------------------------------------------------------- OpenAI


def test_the_model_is_listed_by_its_name(openai_client, client):
    assert [model.id for model in openai_client.models.list()] == [client.model_info().name]


def test_a_chat_gives_what_our_own_api_gives(openai_client, client):
    own = own_chat(client, max_tokens=12, n=2, seed=7, logprobs=3)
    reply = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, n=2, seed=7, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    for choice, output in zip(reply.choices, own.outputs, strict=True):
        assert choice.finish_reason == output.finish_reason == "length"
        assert choice.message.content.rstrip("\ufffd") == text_of(output)
        entries = choice.logprobs.content  # but for those of a last character that is not complete
        got = [np.float32(entry.logprob) for entry in entries]
        want = [np.float32(entry.chosen.logprob) for entry in output.logprobs]
        assert got == want[: len(got)]
        assert len(got) >= 6
        for entry, own_entry in zip(entries, output.logprobs, strict=False):
            tops = [np.float32(top.logprob) for top in entry.top_logprobs]
            assert tops == [np.float32(top.logprob) for top in own_entry.top]
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (own.usage.prompt_tokens, 24)
    assert cached(usage) == usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_choices_keep_their_index_whichever_ends_first(openai_client, client, stream):
    settings = {"max_tokens": 20, "n": 3, "seed": 7}
    first, second, _ = own_chat(client, **settings).outputs
    stop = next(letter for letter in second.text if letter not in first.text)
    own = own_chat(client, stop=[stop], **settings)
    assert own.outputs[1].finish_reason == "stop" != own.outputs[0].finish_reason
    reply = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, stop=[stop], stream=stream, **settings
    )
    texts, reasons = [""] * 3, [None] * 3
    for part in reply if stream else [reply]:
        for choice in part.choices:
            said = choice.delta if stream else choice.message
            texts[choice.index] += said.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [text.rstrip("\ufffd") for text in texts] == [text_of(o) for o in own.outputs]
    assert reasons == [output.finish_reason for output in own.outputs]


def test_a_streamed_chat_joins_to_the_whole_one(openai_client, client):
    own = own_chat(client, max_tokens=12, n=2, seed=7)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in openai_client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=12,
        n=2,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert [text.rstrip("\ufffd") for text in texts] == [text_of(o) for o in own.outputs]
    assert reasons == ["length", "length"]
    assert usage.completion_tokens == 24
    assert cached(usage) == usage.prompt_tokens - 1 == own.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_completions_give_what_our_own_api_gives(openai_client, client, stream):
    own = client.generate("The quick", max_tokens=9, **GREEDY)
    reply = openai_client.completions.create(
        model=MODEL, prompt="The quick", max_tokens=9, stream=stream, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in reply if chunk.choices] if stream else reply.choices
    assert "".join(choice.text for choice in choices).rstrip("\ufffd") == text_of(own)
    assert choices[-1].finish_reason == "length"


def test_a_stop_string_is_found_by_the_server_itself(openai_client, client):
    """The gateway finds it too, and would let the server go on."""
    plain = own_chat(client, max_tokens=40, **GREEDY)
    stop = plain.text[6:8]
    own = own_chat(client, max_tokens=40, stop=[stop], **GREEDY)
    before = client.stats().completion_tokens
    reply = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=40, stop=[stop], **GREEDY
    )
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", own.text)
    assert choice.matched_stop == stop
    assert client.stats().completion_tokens - before == len(own.token_ids) < 40


# ---------------------------------------------------------------- Anthropic


def test_messages_give_what_our_own_api_gives(anthropic_client, client):
    own = own_chat(client, max_tokens=10, **GREEDY)
    before = client.stats().cached_tokens
    reply = anthropic_client.messages.create(
        model=MODEL, messages=CHAT, max_tokens=10, extra_body=GREEDY
    )
    assert reply.content[0].text.rstrip("\ufffd") == text_of(own)
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 10
    assert reply.usage.input_tokens == own.usage.prompt_tokens
    assert client.stats().cached_tokens - before == own.usage.prompt_tokens - 1
    with anthropic_client.messages.stream(
        model=MODEL, messages=CHAT, max_tokens=10, extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream).rstrip("\ufffd") == text_of(own)


# ---------------------------------------------------------------- the same tokens


def generated(smg, text, **params):
    """Token ids of the gateway's own endpoint, which tells them."""
    body = {"model": MODEL, "text": text, "sampling_params": {**params, "temperature": 0.0}}
    post = urllib.request.Request(f"{smg.url}/generate", json.dumps(body).encode(), JSON)
    with urllib.request.urlopen(post, timeout=60) as response:
        (answer,) = json.load(response)
    return answer["output_ids"]


def test_fifty_prompts_give_the_same_token_ids(smg, server, client):
    for number in range(50):
        text = " ".join(WORDS[(number * k) % len(WORDS)] for k in range(1, 3 + number % 9))
        own = client.generate(text, max_tokens=12, **GREEDY)
        assert tuple(generated(smg, text, max_new_tokens=12)) == own.token_ids


# ---------------------------------------------------------------- ending early


def test_a_stream_that_its_client_leaves_frees_its_blocks(openai_client, slow, client):
    aborted = client.stats().requests_aborted
    stream = openai_client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: client.stats().requests_aborted - aborted == 1)
    assert slow.settle().blocks_in_use == 0


def test_a_client_that_leaves_before_the_first_token_frees_its_blocks(smg, slow, client):
    aborted = client.stats().requests_aborted
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 400, "ignore_eos": True}
    asking = http.client.HTTPConnection(smg.url.partition("//")[2])
    asking.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    until(lambda: client.stats().sequences_running)
    asking.close()
    until(lambda: client.stats().requests_aborted - aborted == 1)
    assert slow.settle().blocks_in_use == 0


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "what", "settings"),
    [
        (openai.BadRequestError, "sampling_params.max_tokens", {"max_tokens": 10_000}),
        (
            openai.BadRequestError,
            "sampling_params.json_schema",
            {"response_format": {"type": "json_object"}},
        ),
        (openai.BadRequestError, "sampling_params.regex", {"extra_body": {"regex": "a*"}}),
        (openai.RateLimitError, "blocks", {"n": 10, "max_tokens": 480}),
        (openai.NotFoundError, "nobody", {"model": "nobody"}),
    ],
)
def test_errors_keep_their_meaning(openai_client, error, what, settings):
    for _ in range(12):  # more than open a circuit breaker, were the server to blame
        with pytest.raises(error, match=what):
            openai_client.chat.completions.create(
                **{"model": MODEL, "messages": CHAT, "max_tokens": 4, **settings}
            )
        if error is not openai.BadRequestError:
            break  # these are tried again by the gateway, which takes a while
    assert openai_client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1).choices


def test_embeddings_are_refused_by_name(openai_client):
    with pytest.raises(openai.APIStatusError, match="Embed") as caught:
        openai_client.embeddings.create(model=MODEL, input="x")
    assert caught.value.status_code == 501
