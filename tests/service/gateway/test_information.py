"""What a gateway asks of a server besides tokens: its health, card, load and tokenizer."""

import hashlib
import io
import json
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from prefixcache.model.tokenizer import tokenizer_from_path
from prefixcache_service.gateway import bundle
from tests.model.checkpoints import CHAT_TEMPLATE
from tests.service.gateway.calls import GREEDY, generate

TEXTS = ["The quick brown fox 123", "naïve café\n", "Привет 🙂", " <|im_start|>user\n"]


def test_health_and_cards(stub, client):
    assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
    card = stub.GetModelInfo(vllm.GetModelInfoRequest())
    own = client.model_info()
    assert card.served_model_name == card.model_path == own.name
    assert card.is_generation
    assert (card.max_context_length, card.vocab_size) == (own.max_model_len, own.vocab_size)
    assert list(card.eos_token_ids) == list(own.eos_token_ids)
    info = stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (info.server_type, info.active_requests) == ("prefixcache", 0)
    assert info.uptime_seconds > 0


def test_loads_are_the_figures_of_the_stats(stub, client):
    generate(stub, max_tokens=2, **GREEDY)
    generate(stub, max_tokens=2, **GREEDY)
    stats = client.stats()
    response = stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))
    (load,) = response.loads
    assert response.dp_rank_count == 1
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens) == (0, 0, 0)
    assert load.max_total_num_tokens == stats.blocks_total * stats.block_size
    assert load.cache_hit_rate == pytest.approx(stats.hit_rate)
    assert (load.token_usage, load.max_running_requests) == (0.0, 16)


def test_flush_drops_what_is_cached(stub, client):
    generate(stub, max_tokens=2, **GREEDY)
    response = stub.FlushCache(common.FlushCacheRequest())
    assert (response.success, response.message) == (True, "7 blocks freed")
    assert client.stats().blocks_evictable == 0


# ---------------------------------------------------------------- tokenizer


def archive(stub):
    chunks = list(stub.GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    return data


def test_the_tokenizer_that_is_sent_is_the_one_that_is_served(stub, server, tmp_path):
    zipfile.ZipFile(io.BytesIO(archive(stub))).extractall(tmp_path)
    sent, own = tokenizer_from_path(tmp_path), server.engine.tokenizer
    for text in TEXTS:
        assert sent.encode(text) == own.encode(text)
        assert sent.decode(own.encode(text)) == own.decode(own.encode(text))
    assert sent.eos_token_ids == own.eos_token_ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    messages = [{"role": "user", "content": "Hi"}]
    assert sent.apply_chat_template(messages) == own.apply_chat_template(messages)


def test_a_long_archive_comes_in_chunks():
    data = bytes(3 * bundle.CHUNK_BYTES + 1)
    chunks = list(bundle.chunks(data))
    assert [len(chunk.data) for chunk in chunks] == [*[bundle.CHUNK_BYTES] * 3, 1]
    assert b"".join(chunk.data for chunk in chunks) == data
    assert [bool(chunk.sha256) for chunk in chunks] == [False, False, False, True]


def test_a_tokenizer_that_cannot_be_written_is_a_clear_error(stub, server, monkeypatch):
    class Broken:
        def to_str(self):
            raise Exception("custom parts")

    servicer = next(s for s in server.server._services.values() if hasattr(s, "_archive"))
    monkeypatch.setattr(servicer, "_archive", None)
    monkeypatch.setattr(server.engine.tokenizer, "_backend", Broken())
    with pytest.raises(grpc.RpcError, match=r"cannot be written.*custom parts") as caught:
        list(stub.GetTokenizer(common.GetTokenizerRequest()))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
