"""The calls around the cache and the model, over a real channel, and the metrics page."""

import asyncio
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixcache.errors import FailedPrecondition, NotFound
from prefixcache_service import AsyncClient
from tests.service.conftest import BLOCK_SIZE, MAX_MODEL_LEN

PROMPT = list(range(10, 40))  # 7 full blocks and 2 tokens
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def test_figures_add_up(client):
    before = client.stats()
    client.generate(PROMPT, max_tokens=3, **GREEDY)
    client.generate(PROMPT, n=2, max_tokens=3, seed=1, ignore_eos=True)
    after = client.stats()
    assert after.blocks_free + after.blocks_evictable + after.blocks_in_use == after.blocks_total
    assert after.prompt_tokens - before.prompt_tokens == 60
    assert after.cached_tokens - before.cached_tokens == 29
    assert after.computed_tokens - before.computed_tokens == 31
    assert after.completion_tokens - before.completion_tokens == 9
    assert after.requests_finished - before.requests_finished == 2
    assert after.block_size == BLOCK_SIZE


def test_flush_is_per_salt(server, client):
    with server.client(cache_salt="other") as other:
        client.generate(PROMPT, max_tokens=1)
        other.generate(PROMPT, max_tokens=1)
        assert client.flush() >= 7
        assert client.flush() == 0
        assert client.generate(PROMPT, max_tokens=1).num_cached_tokens == 0
        assert other.generate(PROMPT, max_tokens=1).num_cached_tokens == 28
        assert client.flush(all_salts=True) >= 14
        assert other.generate(PROMPT, max_tokens=1).num_cached_tokens == 0


def test_a_pin_holds_what_is_cached_and_survives_a_flush(client):
    with pytest.raises(FailedPrecondition):
        client.pin(PROMPT, seconds=60)
    client.generate(PROMPT, max_tokens=1)
    pin = client.pin(PROMPT, seconds=60)
    assert (pin.num_blocks, pin.num_tokens) == (7, 28)
    assert 59 < pin.seconds <= 60
    assert client.stats().blocks_pinned == 7
    client.flush(all_salts=True)
    assert client.generate(PROMPT, max_tokens=1).num_cached_tokens >= 28
    assert client.unpin(pin.pin_id).num_blocks == 7
    assert client.stats().blocks_pinned == 0
    with pytest.raises(NotFound):
        client.unpin(pin.pin_id)


def test_events_come_as_they_happen_and_can_be_resumed(client):
    batches, seen = [], threading.Event()
    watcher = client.watch_events(with_tokens=True)

    def watch():
        for event in watcher:
            batches.append(event)
            if sum(len(event.digests) for event in batches if event.kind == "stored") >= 7:
                seen.set()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    while not seen.wait(0.2):  # the subscription may begin behind a request
        client.flush()
        client.generate(PROMPT, max_tokens=1)
    thread.join()
    numbers = [event.number for event in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    stored = [event for event in batches if event.kind == "stored"]
    for event in stored:
        assert len(event.token_ids) == len(event.digests) * event.block_size
        assert all(len(digest) == 16 for digest in event.digests)
        assert event.parent == b""  # it is the beginning of a prompt, whole
    resumed = client.watch_events(after=numbers[0] - 1)
    again = [next(resumed) for _ in numbers]
    resumed.close()
    assert [(e.number, e.kind, e.digests) for e in again] == [
        (e.number, e.kind, e.digests) for e in batches
    ]
    with pytest.raises(FailedPrecondition):
        next(client.watch_events(after=10**9))


def test_sequences_show_the_tree(client):
    parent = client.generate(PROMPT, max_tokens=3, keep_seconds=60, request_id="root", **GREEDY)
    (info,) = client.sequences()
    assert info.sequence_id == parent.sequence_id
    assert (info.parent_id, info.request_id, info.state) == ("", "root", "kept")
    assert info.num_tokens == 33
    assert info.stream_key == parent.stream_key
    assert 50 < info.kept_seconds <= 60


def test_scores_are_those_of_generation(client):
    greedy = client.generate(PROMPT, max_tokens=6, logprobs=0, **GREEDY)
    other = [99, 98, 97]
    result = client.score(PROMPT, [greedy.token_ids, other], top_logprobs=3)
    assert result.num_prefix_tokens == 30
    first, second = result.scores
    assert first.token_ids == greedy.token_ids
    assert [e.chosen.logprob for e in first.logprobs] == [e.chosen.logprob for e in greedy.logprobs]
    assert first.sum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob)
    assert [entry.chosen.token_id for entry in second.logprobs] == other
    assert all(len(entry.top) == 3 for entry in second.logprobs)
    assert second.sum_logprob < first.sum_logprob


def test_model_info_says_what_is_served(client):
    info = client.model_info()
    assert info.vocab_size == 300
    assert info.max_model_len == MAX_MODEL_LEN
    assert info.block_size == BLOCK_SIZE
    assert (info.num_blocks, info.max_num_seqs) == (512, 16)
    assert info.eos_token_ids == (2,)
    assert (info.dtype, info.kv_cache_dtype) == ("float32", "float32")
    assert (info.attention_backend, info.activation_quantization) == ("cpu", "")


def test_tokenize_and_back(client):
    text = "naïve 🙂 <|im_end|> 123"
    ids = client.tokenize(text)
    assert client.detokenize(ids, skip_special_tokens=False) == text
    assert client.detokenize(ids) == "naïve 🙂  123"
    assert client.detokenize([]) == ""
    chat = client.tokenize([{"role": "user", "content": "Hi"}])
    assert client.detokenize(chat, skip_special_tokens=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_metrics_agree_with_the_figures(server, client):
    client.generate(PROMPT, max_tokens=3, **GREEDY)
    stats = client.stats()
    base = f"http://127.0.0.1:{server.server.http_port}"
    assert httpx.get(f"{base}/healthz").status_code == 200
    page = httpx.get(f"{base}/metrics").text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert all(name.startswith("prefixcache_") for name, *_ in samples)
    assert samples["prefixcache_prompt_tokens_total", "computed"] == stats.computed_tokens
    assert samples["prefixcache_blocks", "evictable"] == stats.blocks_evictable
    assert sum(value for key, value in samples.items() if key[0] == "prefixcache_blocks") == 512


def test_the_async_client_has_all_of_it(server):
    async def scenario():
        async with AsyncClient(server.target) as c:
            result = await c.generate(PROMPT, max_tokens=2, keep_seconds=30, **GREEDY)
            pin = await c.pin(PROMPT, seconds=5)
            assert (await c.unpin(pin.pin_id)).pin_id == pin.pin_id
            assert len(await c.sequences()) == 1
            assert (await c.score(PROMPT, [[5]])).scores[0].token_ids == (5,)
            assert (await c.release(result.sequence_id)).sequence_ids == (result.sequence_id,)
            assert (await c.stats()).blocks_total == 512
            assert await c.flush() >= 7
            assert (await c.model_info()).block_size == BLOCK_SIZE
            assert await c.detokenize(await c.tokenize("Hi")) == "Hi"
            watch = c.watch_events(after=0)
            number = (await anext(watch)).number
            await watch.aclose()
            return number

    assert asyncio.run(scenario()) == 1
