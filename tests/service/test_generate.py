"""Generate over a real channel: what comes back, in pieces and as a whole."""

import asyncio
import threading
import time

import grpc
import pytest

from prefixcache.errors import AlreadyExists
from prefixcache_service import AsyncClient
from prefixcache_service.v1 import prefixcache_pb2 as pb

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_a_result_tells_all_that_was_promised(client):
    result = client.generate(PROMPT, max_tokens=5, logprobs=2, **GREEDY)
    assert len(result.token_ids) == len(result.logprobs) == 5
    assert result.text == client.detokenize(result.token_ids)
    assert result.finish_reason == "length"
    assert len(result.sequence_id) >= 22  # 128 random bits
    assert result.usage.prompt_tokens == 30
    assert result.usage.computed_tokens + result.num_cached_tokens == 30
    assert result.usage.completion_tokens == 5
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.chosen.token_id == entry.top[0].token_id == token_id
        assert entry.chosen.logprob == entry.top[0].logprob < 0
        assert len(entry.top) == 2
    assert (
        b"".join(entry.chosen.token for entry in result.logprobs)
        .decode(errors="replace")
        .startswith(result.text[:1])
    )


def test_deltas_join_to_the_unary_reply_for_each_sample(client):
    """PS-01, PS-03, PS-05: n samples differ, repeat with the seed, and are complete by index."""
    settings = {"n": 4, "seed": 2**64 - 1, "max_tokens": 12, "temperature": 1.0, "logprobs": 0}
    whole = client.generate(PROMPT, **settings)
    assert [output.index for output in whole.outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in whole.outputs}) == 4
    deltas = list(client.stream(PROMPT, **settings))
    for output in whole.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert "".join(delta.text for delta in own) == output.text
        assert tuple(token for delta in own for token in delta.token_ids) == output.token_ids
        assert tuple(entry for delta in own for entry in delta.logprobs) == output.logprobs
        assert [delta.finish_reason for delta in own if delta.finish_reason] == [
            output.finish_reason
        ]
        assert (bool(own[0].sequence_id), own[0].token_ids) == (True, ())


def test_cached_tokens_are_counted_to_the_token(client):
    """HM-04: samples of one new prompt are no hits on each other."""
    first = client.generate(PROMPT, n=4, max_tokens=4, seed=1, ignore_eos=True)
    assert first.num_cached_tokens == 0
    assert sum(output.usage.prompt_tokens for output in first.outputs) == len(PROMPT)
    again = client.generate(PROMPT, max_tokens=4, seed=1, ignore_eos=True)
    assert again.num_cached_tokens == len(PROMPT) - 1
    assert again.token_ids == first.token_ids


def test_a_stream_key_repeats_a_stream(client):
    first = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
    again = client.generate(PROMPT, max_tokens=8, ignore_eos=True, stream_key=first.stream_key)
    assert again.token_ids == first.token_ids


def test_text_ids_and_chat_are_the_same_prompt(client):
    ids = client.tokenize("Hello, world")
    by_text = client.generate("Hello, world", max_tokens=4, **GREEDY)
    by_ids = client.generate(ids, max_tokens=4, **GREEDY)
    assert by_text.token_ids == by_ids.token_ids
    chat = [{"role": "user", "content": "Hello"}]
    by_chat = client.generate(chat, max_tokens=4, **GREEDY)
    assert by_chat.usage.prompt_tokens == len(client.tokenize(chat))


def test_stop_strings_end_the_text_and_are_named(client):
    """DT-01, DT-08: the text comes from the decoder, and usage counts what was generated."""
    free = client.generate(PROMPT, max_tokens=20, **GREEDY)
    stop = free.text[3:5]
    stopped = client.generate(PROMPT, max_tokens=20, stop=stop, **GREEDY)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert stopped.usage.completion_tokens == len(stopped.token_ids) <= 20


def test_stop_tokens_are_named_too(client):
    free = client.generate(PROMPT, max_tokens=20, **GREEDY)
    token = free.token_ids[6]
    stopped = client.generate(PROMPT, max_tokens=20, stop_token_ids=[token], **GREEDY)
    assert stopped.outputs[0].stop_reason == token
    assert stopped.token_ids[-1] == token


def test_no_tokens_wanted_gives_the_next_ones_distribution(client):
    """GR-12: max_tokens = 0, with and without prompt log-probabilities."""
    result = client.generate(PROMPT, max_tokens=0, logprobs=5)
    follow = client.generate(PROMPT, max_tokens=1, **GREEDY)
    output = result.outputs[0]
    assert (output.text, output.token_ids, output.finish_reason) == ("", (), "length")
    assert output.next_token.chosen.token_id == follow.token_ids[0]
    assert len(output.next_token.top) == 5
    scored = client.generate(PROMPT, max_tokens=0, prompt_logprobs=1).outputs[0]
    assert len(scored.prompt_logprobs) == len(PROMPT)
    assert scored.prompt_logprobs[0].chosen is None
    assert [entry.chosen.token_id for entry in scored.prompt_logprobs[1:]] == PROMPT[1:]


def test_a_request_id_lives_as_long_as_its_request(client):
    """RC-08: the second is refused, the first is not disturbed, and then the name is free."""
    alone = client.generate(PROMPT, max_tokens=200, **GREEDY)
    stream = client.stream(PROMPT, max_tokens=200, request_id="mine", **GREEDY)
    assert stream.sequence_id
    with pytest.raises(AlreadyExists):
        client.generate([1, 2, 3], max_tokens=1, request_id="mine")
    assert "mine" in [info.request_id for info in client.sequences()]
    assert stream.result().token_ids == alone.token_ids
    client.generate([1, 2, 3], max_tokens=1, request_id="mine")


def test_request_ids_of_other_salts_are_other_names(server, client):
    with server.client(cache_salt="other") as other:
        stream = client.stream(PROMPT, max_tokens=200, request_id="mine", **GREEDY)
        assert stream.sequence_id
        other.generate(PROMPT, max_tokens=1, request_id="mine")
        stream.cancel()


def test_salts_share_nothing(server, client):
    """SE-03: no hit across salts, and hits within each."""
    with server.client(cache_salt="a") as a, server.client(cache_salt="b") as b:
        assert a.generate(PROMPT, max_tokens=4, **GREEDY).num_cached_tokens == 0
        assert b.generate(PROMPT, max_tokens=4, **GREEDY).num_cached_tokens == 0
        assert a.generate([*PROMPT, 9], max_tokens=1).num_cached_tokens == len(PROMPT)


@pytest.mark.parametrize("n", [1, 4])
def test_dropping_a_stream_frees_its_blocks(server, client, n):
    """RC-01, GR-04: the work stops, and is counted as aborted."""
    before = server.settle()
    stream = client.stream(PROMPT, n=n, max_tokens=400, seed=3, ignore_eos=True)
    for _ in range(3 * n):
        next(stream)
    assert client.stats().blocks_in_use > before.blocks_in_use
    stream.cancel()
    after = server.settle(2)
    assert after.blocks_in_use == before.blocks_in_use
    assert after.requests_aborted == before.requests_aborted + 1
    assert after.completion_tokens - before.completion_tokens < 400 * n


def test_a_closed_channel_frees_everything(server):
    """GR-04: a client that vanishes with several calls open."""
    before = server.settle()
    vanishing = server.client()
    streams = [vanishing.stream([*PROMPT, i], max_tokens=400, **GREEDY) for i in range(4)]
    for stream in streams:
        assert stream.sequence_id
    vanishing.close()
    after = server.settle(2)
    assert after.blocks_in_use == before.blocks_in_use
    assert after.requests_aborted == before.requests_aborted + 4


def test_a_slow_reader_loses_nothing(client, stub):
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, logprobs=64),
    )
    whole = client.generate(PROMPT, max_tokens=200, **GREEDY)
    call = stub.Generate(request)
    messages = [next(call)]
    time.sleep(1)
    messages.extend(call)
    tokens = [token for message in messages for token in message.chunk.token_ids]
    assert tuple(tokens) == whole.token_ids
    assert "".join(message.chunk.text for message in messages) == whole.text
    assert messages[-1].WhichOneof("response") == "complete"


def test_many_callers_at_once_get_their_own_answers(server, client):
    alone = [client.generate([*PROMPT, i], max_tokens=12, **GREEDY).token_ids for i in range(12)]
    found = [None] * 12

    def ask(index):
        result = client.generate([*PROMPT, index], max_tokens=12, **GREEDY)
        found[index] = result.token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_the_async_client_says_the_same(server, client):
    async def scenario():
        async with AsyncClient(server.target) as c:
            result = await c.generate(PROMPT, n=2, max_tokens=6, seed=4)
            stream = c.stream(PROMPT, n=2, max_tokens=6, seed=4)
            assert await stream.sequence_id()
            deltas = [delta async for delta in stream]
            return result, deltas, await stream.result()

    result, deltas, streamed = asyncio.run(scenario())
    assert [output.token_ids for output in streamed.outputs] == [
        output.token_ids for output in result.outputs
    ]
    assert (bool(deltas[0].sequence_id), deltas[0].token_ids) == (True, ())
    same = client.generate(PROMPT, n=2, max_tokens=6, seed=4)
    assert [o.token_ids for o in same.outputs] == [o.token_ids for o in result.outputs]


def test_big_messages_pass_and_too_big_ones_are_refused_clearly(server, client, stub):
    """GR-01: the limit is 32 MiB on both sides; the engine never sees what is too long."""
    text = "word " * (1 << 20)  # 5 MB
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text=text)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    ids = pb.TokenIds(ids=[7] * 1_500_000)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(token_ids=ids)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with grpc.insecure_channel(
        server.target, options=[("grpc.max_send_message_length", 1 << 26)]
    ) as channel:
        call = channel.unary_stream("/prefixcache.v1.PrefixCache/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(bytes(33 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.generate(PROMPT, max_tokens=1).token_ids
