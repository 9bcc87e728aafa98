"""The main job on the real model: generate, fork, and see the prefix reused, over gRPC."""

import pytest

from prefixcache.config import EngineConfig
from prefixcache_service import Branch
from tests.model.checkpoints import default_model_path
from tests.service.conftest import RunningServer


@pytest.fixture(scope="module")
def real():
    config = EngineConfig(
        model=str(default_model_path()), num_gpu_blocks_override=512, max_num_seqs=16
    )
    running = RunningServer(config).load()
    yield running
    running.check()
    running.close()


@pytest.fixture
def client(real):
    with real.client() as client:
        yield client
    real.check()


def test_it_knows_the_capital_of_france(client):
    chat = [{"role": "user", "content": "What is the capital of France? One word."}]
    assert "Paris" in client.generate(chat, max_tokens=12, temperature=0).text


def test_yes_and_no_part_from_one_kept_question(client):
    s = client.generate("Is the sky blue? The answer is", max_tokens=8, temperature=0,
                        keep_seconds=60)  # fmt: skip
    asked = s.usage.prompt_tokens
    branches = [Branch(s.sequence_id, text=text, position=asked) for text in (" yes", " no")]
    outs = client.fork(branches, max_tokens=6, temperature=0)
    for text, out in zip((" yes", " no"), outs, strict=True):
        ids = client.tokenize("Is the sky blue? The answer is")
        ids += client.tokenize(text, add_special_tokens=False)
        assert out.text == client.generate(ids, max_tokens=6, temperature=0).text
    assert outs[0].text != outs[1].text


def test_deltas_never_split_a_character(client):
    """DT-03: emoji and CJK take several tokens; each delta is whole text."""
    prompt = "Repeat: 😀🎉 你好世界 ñ\nAgain: 😀🎉 你好世界 ñ\nAgain:"
    whole = client.generate(prompt, max_tokens=30, temperature=0)
    deltas = [delta.text for delta in client.stream(prompt, max_tokens=30, temperature=0)]
    assert "".join(deltas) == whole.text
    assert any("你" in delta for delta in deltas)
    assert all("\ufffd" not in delta for delta in deltas)
    assert whole.text == client.detokenize(whole.token_ids)


def test_a_shared_system_prompt_is_run_once(client):
    """Hits are counted to the token: exactly what the two chats have in common."""
    system = {"role": "system", "content": "Advise on rivers, lakes and other waters. " * 6}
    chats = [[system, {"role": "user", "content": q}] for q in ("Name a river.", "Why is it wet?")]
    first, second = (client.generate(chat, max_tokens=8, ignore_eos=True) for chat in chats)
    assert first.num_cached_tokens < 16
    pairs = zip(*(client.tokenize(chat) for chat in chats), strict=False)
    assert second.num_cached_tokens == [a == b for a, b in pairs].index(False)
