"""The decoder against transformers, and the bits of its logits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from prefixcache.errors import ModelError
from prefixcache.model.loader import load_checkpoint
from prefixcache.model.selftest import check_batch_invariance
from tests.kernels.backends import every_backend
from tests.model.checkpoints import default_model_path, write_checkpoint, write_gguf
from tests.model.served import Served, transformers_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-one-kv-head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-all-heads-odd-size": ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-window-in-one-layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 140,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other crawl where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def smollm2() -> transformers.LlamaForCausalLM:
    """SmolLM2 in transformers, with the very weights of the default GGUF file."""
    checkpoint = load_checkpoint(str(default_model_path()))
    config = checkpoint.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
        )
    )
    names = checkpoint.weights.names()
    missing = model.load_state_dict({n: checkpoint.weights.get(n) for n in names}, strict=False)
    assert set(missing.missing_keys) == {"lm_head.weight"}
    return model.eval()


@every_backend
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_transformers(backend: str, name: str, tmp_path: Path) -> None:
    family, fields = MODELS[name]
    directory = write_checkpoint(tmp_path, family, **fields)
    served = Served(directory, backend)
    tokens = served.tokens(200)
    logits = served.run((tokens, 0, list(range(20, 33))))
    with torch.inference_mode():
        expected = transformers_model(directory)(torch.tensor([tokens])).logits[0]
    assert logits.dtype == torch.float32
    assert logits.shape == (200, served.config.vocab_size)
    torch.testing.assert_close(_logprobs(logits), _logprobs(expected), rtol=0, atol=1e-4)


@every_backend
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "BF16", "F16"])
def test_quantised_weights_equal_transformers_on_their_values(
    backend: str, kind: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path / "model", "llama")
    served = Served(write_gguf(tmp_path / "model.gguf", directory, kind), backend)
    weights = load_checkpoint(str(tmp_path / "model.gguf")).weights
    model = transformers_model(directory)
    model.load_state_dict({name: weights.get(name).float() for name in weights.names()})
    tokens = served.tokens(150)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    logits = served.run((tokens, 0, list(range(10))))
    torch.testing.assert_close(_logprobs(logits), _logprobs(expected), rtol=0, atol=1e-4)


@every_backend
def test_smollm2_equals_transformers(backend: str, smollm2: transformers.LlamaForCausalLM) -> None:
    checkpoint = load_checkpoint(str(default_model_path()))
    text = (
        "A hash trie shares what prompts have in common. Primes: 2, 3, 5, 7, 11. Grüße! 你好 🙂\n"
    )
    tokens = checkpoint.tokenizer.encode(text * 4)
    served = Served(checkpoint, backend, blocks=16)
    logits = served.run((tokens, 0, list(range(16))))
    with torch.inference_mode():
        expected = smollm2(torch.tensor([tokens])).logits[0]
    # Far down the tail, transformers' own float32 is 8e-5 away from its float64.
    likely = expected.topk(200).indices
    ours, theirs = (_logprobs(x).gather(-1, likely) for x in (logits, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    sure = expected.topk(2).values.diff().abs().squeeze(-1) > 1e-4
    assert torch.equal(logits.argmax(-1)[sure], expected.argmax(-1)[sure])


@every_backend
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3-window-in-one-layer"])
def test_bits_do_not_depend_on_how_a_prompt_is_served(
    backend: str, name: str, tmp_path: Path
) -> None:
    family, fields = MODELS[name]
    served = Served(write_checkpoint(tmp_path, family, **fields), backend)
    tokens, other = served.tokens(170), served.tokens(60, seed=1)
    expected = served.run((tokens, 0, list(range(11))))
    rng = np.random.default_rng(2)
    try:
        for workers in (1, 2, 3):
            torch.set_num_threads(workers)
            served.cache.keys.fill_(torch.nan)
            served.cache.values.fill_(torch.nan)
            ids = rng.permutation(64).tolist()
            mine, theirs = ids[:11], ids[11:]
            done = 0
            while done < len(tokens):
                size = min(int(rng.choice([1, 2, 5, 16, 31, 64])), len(tokens) - done)
                beside = [
                    (other[: int(n)], 0, theirs[4 * i : 4 * i + 4])
                    for i, n in enumerate(rng.integers(1, 60, int(rng.integers(0, 12))))
                ]
                logits = served.run(*beside, (tokens[done : done + size], done, mine))
                assert torch.equal(logits[-size:], expected[done : done + size]), (workers, done)
                done += size
    finally:
        torch.set_num_threads(1)


@every_backend
def test_smollm2_decodes_to_the_bits_of_its_prefill_alone_or_beside_forks(backend: str) -> None:
    served = Served(str(default_model_path()), backend, blocks=40)
    tokens = served.tokens(150)
    expected = served.run((tokens, 0, list(range(10))))
    served.cache.keys.fill_(torch.nan)
    served.cache.values.fill_(torch.nan)
    assert torch.equal(served.run((tokens[:140], 0, list(range(10)))), expected[:140])
    for branches in (1, 2, 3, 16):
        # Each branch has its own copy of the last, partly filled block.
        served.cache.copy_blocks([(8, 20 + i) for i in range(branches)])
        rows = [(tokens[140:141], 140, [*range(8), 20 + i]) for i in range(branches)]
        assert torch.equal(served.run(*rows), expected[140:141].expand(branches, -1))
    again = served.run((tokens[139:140], 139, list(range(9))), write=False)
    assert torch.equal(again, expected[139:140])


@every_backend
def test_the_self_test_passes_on_the_default_model(backend: str) -> None:
    served = Served(str(default_model_path()), backend, blocks=1)
    assert check_batch_invariance(served.decoder).failures == ()


def test_the_self_test_names_what_differs(tmp_path: Path) -> None:
    served = Served(write_checkpoint(tmp_path), "torch")
    kernels: Any = served.decoder.kernels
    silu_mul = kernels.silu_mul
    kernels.silu_mul = lambda x: silu_mul(x) * (1.0 + 1e-6 * (len(x) == 16))
    assert check_batch_invariance(served.decoder).failures == (
        "16 sequences at once: other bits than one alone",
    )


@every_backend
def test_logits_come_for_the_rows_asked_for(backend: str, tmp_path: Path) -> None:
    served = Served(write_checkpoint(tmp_path), backend)
    step = served.step((served.tokens(30), 0, [3, 4]), (served.tokens(9, 1), 0, [5]))
    every = served.decoder.forward(step, served.cache)
    for rows in ([29, 38], [38, 0, 0], []):
        some = replace(step, logits_rows=np.array(rows, np.int32))
        logits = served.decoder.forward(some, served.cache)
        assert logits.shape == (len(rows), served.config.vocab_size)
        assert torch.equal(logits, every[rows])


@every_backend
def test_a_slot_of_minus_one_writes_nothing(backend: str, tmp_path: Path) -> None:
    served = Served(write_checkpoint(tmp_path), backend)
    tokens = served.tokens(20)
    served.run((tokens, 0, [3, 4]))
    before = served.cache.keys.clone(), served.cache.values.clone()
    served.run((tokens[5:], 5, [3, 4]), write=False)
    torch.testing.assert_close(served.cache.keys, before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(served.cache.values, before[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("positions", np.zeros(3, np.int32), "positions: shape"),
        ("positions", np.array([0, 1, 2, 4], np.int32), "positions: must be consecutive"),
        ("slot_mapping", np.array([0, 1, 2, 9999], np.int64), "slot_mapping: values"),
        ("query_start_loc", np.array([0, 3], np.int32), "query_start_loc: must rise"),
        ("seq_lens", np.array([400], np.int32), "block_table: too narrow"),
        ("block_table", np.array([[64]], np.int32), "block_table: values"),
        ("token_ids", np.array([0, 1, 2, 320], np.int32), "token_ids: values"),
        ("logits_rows", np.array([4], np.int32), "logits_rows: values"),
    ],
)
def test_a_wrong_step_is_refused_by_field(
    field: str, value: np.ndarray, message: str, tmp_path: Path
) -> None:
    served = Served(write_checkpoint(tmp_path), "torch")
    step = served.step(([5, 6, 7, 8], 0, [0]))
    object.__setattr__(step, field, value)
    with pytest.raises(ValueError, match=message):
        served.decoder.forward(step, served.cache)
    assert served.cache.keys.isnan().all()


def test_positions_beyond_the_longest_sequence_are_refused(tmp_path: Path) -> None:
    served = Served(write_checkpoint(tmp_path), "torch", max_model_len=32)
    with pytest.raises(ValueError, match="below max_model_len 32"):
        served.run((served.tokens(33), 0, [0, 1, 2]))


def test_dynamic_rope_is_served_up_to_its_original_length_only(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    directory = write_checkpoint(tmp_path, rope_parameters=rope, max_position_embeddings=256)
    served = Served(directory, "torch", max_model_len=256)
    tokens = served.tokens(200)
    with torch.inference_mode():
        expected = transformers_model(directory)(torch.tensor([tokens])).logits[0]
    logits = served.run((tokens, 0, list(range(13))))
    torch.testing.assert_close(_logprobs(logits), _logprobs(expected), rtol=0, atol=1e-4)
    with pytest.raises(ModelError, match="original length of 256 tokens, not 257"):
        Served(directory, "torch", max_model_len=257)
