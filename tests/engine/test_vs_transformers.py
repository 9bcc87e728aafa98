"""Greedy tokens and logprobs equal those of Hugging Face transformers, in float32.

One forward pass of theirs over prompt and output stands for 64 steps of `generate`: by induction
both have produced the same tokens exactly if, at each output position, their most probable token
behind the same tokens is ours. Where their own two best logits are closer than 1e-4 either may
come out; a test then names the place in a warning.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from prefixcache import Engine, SamplingParams
from prefixcache.engine.outputs import RequestOutput
from tests.engine.conftest import MakeEngine
from tests.model.checkpoints import TOKENIZER_SIZE
from tests.model.served import transformers_model

TIE = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=5)

CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "Name three rivers of Europe."}],
    "chat with a system prompt and turns": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is a hash table?"},
        {"role": "assistant", "content": "It maps keys to values by hashing the keys."},
        {"role": "user", "content": "And a trie? 🌲"},
    ],
}
TEXTS = {
    "one word": "Once",
    "prose": "The old lighthouse keeper climbed the stairs, as on every evening, and",
    "python": "def fibonacci(n: int) -> list[int]:\n    if n <= 0:\n        return []\n",
    "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Ada", "born": 1815, "tags": ["maths", "engines"], "notes": null, "',
    "markdown": "# Results\n\n| model | tokens/s |\n|---|---|\n| small | 120 |\n| large |",
    "digits": "3.14159265358979323846264338327950288419716939937510",
    "counting": "1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "emoji": "🙂🙃😀 👍🏽 👩‍👩‍👧‍👦 🇫🇷🇯🇵 ❤️‍🔥",
    "chinese and japanese": "你好,世界。今天天气很好。こんにちは、元気ですか。",
    "cyrillic and greek": "Привет, мир! Как дела? Καλημέρα κόσμε.",
    "arabic and hebrew": "مرحبا بالعالم، كيف حالك؟ שלום עולם",
    "hindi, thai, korean": "नमस्ते दुनिया। สวัสดีชาวโลก 안녕하세요 세계",
    "accents": "Größenwahn, naïveté, señor, Łódź, İstanbul, cœur, ångström:",
    "white space": "a\n\n\n\tb   c \r\n  d\t\t\te\n\n",
    "special tokens inside": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
}
LONG = "".join(f"Entry {i}: the {i * 7 % 13}th of {i * 31 % 97} items, " for i in range(200))


def prompts_of(engine: Engine) -> dict[str, list[int]]:
    """Twenty prompts by name."""
    tokenizer = engine.tokenizer
    prompts = {
        name: tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        for name, messages in CHATS.items()
    }
    prompts |= {name: tokenizer.encode(text) for name, text in TEXTS.items()}
    prompts["one token"] = prompts["prose"][:1]
    prompts["1,500 tokens"] = tokenizer.encode(LONG)[:1500]
    assert len(prompts["one token"]) == 1
    assert len(prompts["1,500 tokens"]) == 1500
    assert len(prompts) == 20
    return prompts


@pytest.fixture
def reference(smollm2_reference: Any) -> Any:
    """SmolLM2 as transformers reads it."""
    return smollm2_reference


@pytest.fixture(scope="module")
def answers(smollm2_engine: Engine) -> dict[str, RequestOutput]:
    """All twenty prompts, run together."""
    prompts = prompts_of(smollm2_engine)
    return dict(zip(prompts, smollm2_engine.generate(list(prompts.values()), GREEDY), strict=True))


def check_greedy(
    name: str, model: torch.nn.Module, output: RequestOutput, known_ids: int | None = None
) -> None:
    """Each of our tokens is transformers' next one, and our logprobs are theirs.

    known_ids: ids from there on belong to no token of the tokenizer; we never draw them.
    """
    prompt, sample = output.prompt_token_ids, output.outputs[0]
    sequence = torch.tensor([[*prompt, *sample.token_ids[:-1]]])
    with torch.inference_mode():
        hidden = model.model(sequence).last_hidden_state[0, len(prompt) - 1 :]
        logits = model.lm_head(hidden).double()
    assert len(logits) == len(sample.token_ids) == len(sample.logprobs)
    best = logits[:, :known_ids].topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    logprobs = logits.log_softmax(-1)
    for at, token in enumerate(sample.token_ids):
        choices = best.indices[at].tolist()
        if margins[at] < TIE:
            message = f"{name}, output token {at}: {choices} are {margins[at]:.1e} apart"
            warnings.warn(message, stacklevel=2)
            assert token in choices, message
        else:
            assert token == choices[0], (name, at)
        entry = sample.logprobs[at]
        ids = [entry.token_id, *(other for other, _ in entry.top)]
        ours = torch.tensor([entry.logprob, *(value for _, value in entry.top)]).double()
        assert entry.token_id == token
        theirs = logprobs[at, ids]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4, msg=lambda m: f"{name}: {m}")


def generated(
    model: transformers.PreTrainedModel, prompt: Sequence[int], **settings: Any
) -> list[int]:
    """What transformers' own `generate` puts behind a prompt, its end token included."""
    config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, **settings)
    tokens = torch.tensor([list(prompt)])
    with torch.inference_mode():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
    return output[0, len(prompt) :].tolist()


def up_to_the_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Tokens up to the first end token, it included."""
    stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: stop + 1])


# -------------------------------------------------------------------------------- SmolLM2

NAMES = [*CHATS, *TEXTS, "one token", "1,500 tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_smollm2_greedy_equals_transformers(
    name: str,
    smollm2_engine: Engine,
    reference: transformers.LlamaForCausalLM,
    answers: dict[str, RequestOutput],
) -> None:
    output = answers[name]
    assert len(output.outputs[0].token_ids) == 64
    check_greedy(name, reference, output)
    text = smollm2_engine.tokenizer.decode(output.outputs[0].token_ids)
    assert output.outputs[0].text == text or "\ufffd" in text  # a character may be half done


def check_generate(
    name: str, engine: Engine, model: Any, answers: dict[str, RequestOutput]
) -> None:
    ends = list(engine.model_config.eos_token_ids)
    output = answers[name]
    expected = generated(model, output.prompt_token_ids, max_new_tokens=64, eos_token_id=ends)
    assert up_to_the_end(output.outputs[0].token_ids, ends) == expected


@pytest.mark.parametrize("name", ["chat", "python", "emoji"])
def test_smollm2_equals_transformers_generate(
    name: str, smollm2_engine: Engine, reference: Any, answers: dict[str, RequestOutput]
) -> None:
    check_generate(name, smollm2_engine, reference, answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_smollm2_equals_transformers_generate_on_all_prompts(
    name: str, smollm2_engine: Engine, reference: Any, answers: dict[str, RequestOutput]
) -> None:
    check_generate(name, smollm2_engine, reference, answers)


def test_smollm2_ends_where_transformers_ends(smollm2: Engine, reference: Any) -> None:
    """Its end token ends a chat, here after a few words."""
    messages = [{"role": "user", "content": "Reply with the one word: yes"}]
    text = smollm2.tokenizer.apply_chat_template(messages)
    tokens = smollm2.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    sample = smollm2.generate([tokens], params)[0].outputs[0]
    ends = list(smollm2.model_config.eos_token_ids)
    assert generated(reference, tokens, max_new_tokens=64, eos_token_id=ends) == sample.token_ids
    assert (sample.finish_reason, sample.stop_reason) == ("stop", sample.token_ids[-1])
    assert len(sample.token_ids) < 64


# -------------------------------------------------------------------------------- families

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mistral-window-above-the-prompt": ("mistral", {"sliding_window": 250}),
    "mistral-window-passed-by-the-output": ("mistral", {"sliding_window": 60}),
    "mistral-window-below-the-prompt": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
Pair = tuple[Engine, transformers.PreTrainedModel]


@pytest.fixture
def pair(make_engine: MakeEngine, checkpoint_of: Callable[..., Path]) -> Callable[[str], Pair]:
    """Our engine and their model of one tiny checkpoint."""

    def load(name: str) -> Pair:
        family, fields = FAMILIES[name]
        engine = make_engine(family, fields, max_num_batched_tokens=64)
        return engine, transformers_model(checkpoint_of(family, **fields))

    return load


def tiny_prompts() -> dict[str, list[int]]:
    rng = np.random.default_rng(12)
    return {f"{n} tokens": rng.integers(4, TOKENIZER_SIZE, n).tolist() for n in (1, 4, 40, 150)}


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_equal_transformers(name: str, pair: Callable[[str], Pair]) -> None:
    """Ids from TOKENIZER_SIZE on belong to no token; `generate` is told not to draw them."""
    engine, model = pair(name)
    nobody = list(range(TOKENIZER_SIZE, engine.model_config.vocab_size))
    prompts = tiny_prompts()
    outputs = engine.generate(list(prompts.values()), GREEDY)
    for label, output in zip(prompts, outputs, strict=True):
        check_greedy(label, model, output, TOKENIZER_SIZE)
    prompt, output = prompts["40 tokens"], outputs[2]
    expected = generated(model, prompt, max_new_tokens=64, suppress_tokens=nobody, eos_token_id=[])
    assert output.outputs[0].token_ids == expected


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        ({"logit_bias": {20: 6.0, 21: -5.0}}, {"sequence_bias": [[[20], 6.0], [[21], -5.0]]}),
    ],
    ids=["penalty", "reward", "bias"],
)
def test_greedy_under_penalties_equals_transformers(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], pair: Callable[[str], Pair]
) -> None:
    engine, model = pair(name)
    nobody = list(range(TOKENIZER_SIZE, engine.model_config.vocab_size))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **ours)
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for label, prompt in tiny_prompts().items():
        tokens, without = (engine.generate([prompt], p)[0].outputs[0] for p in (params, plain))
        expected = generated(
            model, prompt, max_new_tokens=40, suppress_tokens=nobody, eos_token_id=[], **theirs
        )
        assert tokens.token_ids == expected, label
        assert tokens.token_ids != without.token_ids, label


@pytest.mark.parametrize("least", [0, 5, 30])
def test_end_tokens_and_min_tokens_equal_transformers(
    least: int, pair: Callable[[str], Pair]
) -> None:
    """Half of the vocabulary ends the output: at once, or not before min_tokens."""
    engine, model = pair("llama")
    ends = list(range(4, 150))
    nobody = list(range(TOKENIZER_SIZE, engine.model_config.vocab_size))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        min_tokens=least,
        ignore_eos=True,
        stop_token_ids=tuple(ends),
    )
    for label, prompt in tiny_prompts().items():
        sample = engine.generate([prompt], params)[0].outputs[0]
        expected = generated(
            model,
            prompt,
            max_new_tokens=40,
            min_new_tokens=least,
            eos_token_id=ends,
            suppress_tokens=nobody,
        )
        assert sample.token_ids == expected, label
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] in ends else "length")
        assert len(sample.token_ids) >= max(least, 1)


def test_repetition_penalty_on_smollm2_equals_transformers(smollm2: Engine, reference: Any) -> None:
    tokens = smollm2.tokenizer.encode(TEXTS["prose"])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=1.4)
    sample = smollm2.generate([tokens], params)[0].outputs[0]
    expected = generated(
        reference, tokens, max_new_tokens=24, repetition_penalty=1.4, eos_token_id=[]
    )
    assert sample.token_ids == expected
