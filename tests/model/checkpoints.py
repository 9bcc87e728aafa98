"""Small real checkpoints for tests: written by transformers and by gguf, never by our own code.

    directory = write_checkpoint(tmp_path / "llama", "llama")
    file = write_gguf(tmp_path / "llama.gguf", directory, "Q8_0")

Weights are random but not flat, norms and biases included, so that a wrong permutation, a forgotten
bias or a swapped norm changes the output. The output layer is wider than the tokenizer (rows beyond
`TOKENIZER_SIZE` belong to no token).
"""

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from prefixcache.model.default_model import find_default_model, pull_default_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 320
TOKENIZER_SIZE = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
# Each family's own traits; a head of Qwen3 need not be hidden_size / heads wide.
_TRAITS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
}
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the other foxes look on.",
    "def main():\n    return [x * 10 for x in range(100)]\n",
    "naïve café, Übergröße, élève; 12345 and 67890; ¿qué?",
    "Привет, мир! 你好世界。 こんにちは 🙂🙃",
] * 3


def default_model_path() -> Path:
    """The default model's GGUF file, fetched if it is not here yet."""
    return find_default_model() or pull_default_model()


def write_checkpoint(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a two-layer model with its tokenizer into `directory`, as transformers would.

    overrides: fields of the transformers configuration, such as `tie_word_embeddings=True` or
        `rope_parameters={"rope_type": "llama3", …}`.
    shard_size: "20KB" gives several shards and an index.
    """
    config = _CONFIGS[family](**{**_SHAPE, **_TRAITS.get(family, {}), **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level BPE tokenizer of `TOKENIZER_SIZE` ids, the first four special."""
    directory.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer itself: 4 special tokens, 256 bytes, 40 merges; digits are split off singly."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def write_gguf(
    path: Path,
    directory: Path,
    quantisation: str = "Q8_0",
    *,
    fields: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Convert a checkpoint of `write_checkpoint` the way llama.cpp's converter does.

    Matrices get the type `quantisation` (any that gguf can write), norms and biases are float32;
    q and k rows of the llama architecture are interleaved.
    fields: extra metadata, by full key; a value of None leaves a field out.
    extra: float32 tensors to add, by their name in the file.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    merged = {**_gguf_fields(config, architecture, directory), **(fields or {})}
    writer = gguf.GGUFWriter(path, merged.pop("general.architecture", architecture))
    for key, value in merged.items():
        if value is not None:
            _add_field(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantisation]
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            values = _llama_rows(name, tensor.float().numpy(), config, architecture)
            data = gguf.quants.quantize(values, kind) if values.ndim > 1 else values
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind if values.ndim > 1 else None)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def _gguf_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)


def gguf_name(name: str) -> str:
    """Name in a GGUF file of a Hugging Face tensor, by gguf's own table (up to 8 layers)."""
    found = _gguf_names().get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _llama_rows(
    name: str, values: np.ndarray, config: dict[str, Any], architecture: str
) -> np.ndarray:
    heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
    count = next((config[field] for part, field in heads.items() if part in name), None)
    if architecture != "llama" or count is None:
        return values
    rows = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(values.shape))


def _gguf_fields(config: dict[str, Any], architecture: str, directory: Path) -> dict[str, Any]:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    padding = [f"[PAD{index}]" for index in range(len(vocabulary), config["vocab_size"])]
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    kinds = [3 if token in special else 1 for token in vocabulary] + [5] * len(padding)
    prefix = f"{architecture}."
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        prefix + "context_length": config["max_position_embeddings"],
        prefix + "embedding_length": config["hidden_size"],
        prefix + "feed_forward_length": config["intermediate_size"],
        prefix + "block_count": config["num_hidden_layers"],
        prefix + "attention.head_count": heads,
        prefix + "attention.head_count_kv": config["num_key_value_heads"],
        prefix + "attention.key_length": head_dim,
        prefix + "attention.value_length": head_dim,
        prefix + "rope.dimension_count": head_dim,
        prefix + "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        prefix + "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary + padding,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
