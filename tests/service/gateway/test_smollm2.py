"""Text through the gateway is text through our own API, on the real model."""

import json
import urllib.request

import numpy as np
import openai
import pytest

from benchmarks._gateway import gateway
from prefixcache.config import EngineConfig
from tests.model.checkpoints import default_model_path
from tests.service.conftest import RunningServer

TOPICS = [
    "the sea",
    "bread",
    "a lighthouse",
    "12 apples",
    "naïve café owners",
    "你好",
    "for i in x",
]
OPENINGS = ["Once upon a time,", "A short note on", "Dear friend, I write about", "def main():  #"]
PROMPTS = [f"{opening} {topic}" for topic in TOPICS for opening in OPENINGS][:25]
QUESTIONS = [f"Say something about {topic}, number {n}." for topic in TOPICS for n in range(4)][:25]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served():
    config = EngineConfig(
        model=str(default_model_path()), num_gpu_blocks_override=512, max_model_len=1024
    )
    server = RunningServer(config).load()
    try:
        with gateway([server.target]) as front, server.client() as client:
            yield front, client, client.model_info().name
    finally:
        server.close()


def generated(front, model, text):
    """Token ids of the gateway's own endpoint, which tells them."""
    params = {"max_new_tokens": 16, "temperature": 0.0}
    body = json.dumps({"model": model, "text": text, "sampling_params": params}).encode()
    headers = {"content-type": "application/json"}
    post = urllib.request.Request(f"{front.url}/generate", body, headers)
    with urllib.request.urlopen(post, timeout=60) as response:
        (answer,) = json.load(response)
    return answer["text"], tuple(answer["output_ids"])


def test_twenty_five_prompts_and_as_many_chats_give_the_same(served):
    front, client, model = served
    for text in PROMPTS:
        own = client.generate(text, max_tokens=16, temperature=0.0)
        told, ids = generated(front, model, text)
        assert ids == own.token_ids
        assert told.rstrip("\ufffd") == own.text.rstrip("\ufffd")
    settings = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 16}
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as asking:
        for seed, question in enumerate(QUESTIONS):
            chat = [{"role": "user", "content": question}]
            own = client.generate(chat, seed=seed, logprobs=0, **settings)
            reply = asking.chat.completions.create(
                model=model, messages=chat, seed=seed, logprobs=True, **settings
            )
            (choice,) = reply.choices
            assert choice.message.content.rstrip("\ufffd") == own.text.rstrip("\ufffd")
            told = [np.float32(entry.logprob) for entry in choice.logprobs.content]
            drawn = [np.float32(entry.chosen.logprob) for entry in own.logprobs]
            assert told == drawn[: len(told)]  # of the same tokens, to the bit
            assert len(told) >= len(drawn) - 4  # but for an end that is no whole character
            assert reply.usage.completion_tokens == len(own.token_ids)
