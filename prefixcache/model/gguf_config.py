"""From GGUF metadata to ModelConfig.

Owns the meaning of the fields of the llama, qwen2 and qwen3 architectures (Mistral and SmolLM2
files are of the llama architecture). Never reads tensors, but for the rotary factors of Llama 3.
"""

import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig, RopeScaling
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.hf_config import MAX_INTEGER, MAX_LAYERS

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_END_TOKENS = ("eos", "eot", "eom")
# llama.cpp's converter fixes these two for Llama 3.1 and later, and stores only their effect.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read a model's shape. Raises ModelError naming the field that is missing or unsupported."""
    fields = _Fields(file)
    heads, kv_heads, head_dim = _heads(fields)
    layers = fields.integer("block_count")
    if layers > MAX_LAYERS:
        fields.fail("block_count", f"is {layers}; at most {MAX_LAYERS} are supported")
    fields.require_equal("expert_count", 0)
    window = fields.integer("attention.sliding_window", 0, least=0) or None
    return ModelConfig(
        architecture=fields.architecture,
        vocab_size=_embedding_rows(file),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=fields.integer("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=window,
        sliding_layers=(True,) * layers if window else (),
        eos_token_ids=_end_tokens(file),
        bos_token_id=_token_id(file, "bos"),
    )


class _Fields:
    """Typed access to `{architecture}.*` with messages that name the file and the field."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{file.path}: the architecture {architecture!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        if file.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(
                f"{file.path}: split.count: files in several parts must be joined first"
            )
        self.architecture: str = architecture

    def get(self, name: str) -> Any:
        """The value, with a per-layer array of equal values taken as that value."""
        value = self.file.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.fail(name, "differs from layer to layer, which is not supported")
            return value[0]
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or not least <= value <= MAX_INTEGER:
            self.fail(name, "is missing" if value is None else f"is {value!r}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(name, "is missing" if value is None else f"is {value!r}")
        # The file holds float32; 1e-05 comes back as the shortest decimal that means the same.
        return float(str(np.float32(value)))

    def require_equal(self, name: str, value: int) -> None:
        found = self.get(name)
        if found is not None and found != value:
            self.fail(name, f"is {found!r}; only {value} is supported here")

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ModelError(f"{self.file.path}: field {self.architecture}.{name} {problem}")


def _heads(fields: _Fields) -> tuple[int, int, int]:
    """(query heads, key heads, size of a head)."""
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        fields.fail("attention.head_count_kv", f"is {kv_heads}, which does not divide {heads}")
    size = fields.integer("attention.key_length", fields.integer("embedding_length") // heads)
    if size < 2 or size % 2:
        fields.fail("attention.key_length", f"is {size}; rotary positions need an even one")
    fields.require_equal("attention.value_length", size)
    fields.require_equal("rope.dimension_count", size)
    return heads, kv_heads, size


def _embedding_rows(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _end_tokens(file: GgufFile) -> tuple[int, ...]:
    ids = (_token_id(file, kind) for kind in _END_TOKENS)
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _token_id(file: GgufFile, kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = file.metadata.get(key)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise ModelError(f"{file.path}: field {key} is {value!r}, not a token id")
    return value


def _rope_scaling(fields: _Fields, head_dim: int) -> RopeScaling:
    kind = fields.get("rope.scaling.type")
    if "rope_freqs.weight" in fields.file.tensors:
        return _llama3_scaling(fields, head_dim)
    if kind is None and fields.get("rope.scale_linear") not in (None, 0.0, 1.0):
        return RopeScaling("linear", fields.number("rope.scale_linear"))
    if kind in (None, "none"):
        return RopeScaling()
    factor = fields.number("rope.scaling.factor", 1.0)
    original = fields.integer("rope.scaling.original_context_length", 0, least=0)
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind != "yarn":
        fields.fail("rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn")
    return RopeScaling(
        "yarn",
        factor,
        original or fields.integer("context_length"),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _yarn_attention_factor(fields: _Fields, factor: float) -> float | None:
    """llama.cpp's factor multiplies the usual one; None leaves the usual one alone."""
    extra = fields.number(
        "rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0)
    )
    return None if extra == 1.0 else extra * (0.1 * math.log(max(factor, 1.0)) + 1.0)


def _llama3_scaling(fields: _Fields, head_dim: int) -> RopeScaling:
    """Recover Llama 3's parameters from the frequency divisors that the file stores instead.

    The largest divisor is the factor. The original length is the one whose divisors are those of
    the file; a file for which there is none is refused.
    """
    divisors = fields.file.tensor("rope_freqs.weight").double().numpy().reshape(-1)
    base = fields.number("rope.freq_base", 10000.0)
    factor = float(divisors.max(initial=1.0))
    for original in (2**power for power in range(11, 21)):
        expected = _llama3_divisors(head_dim, base, factor, original)
        if expected.shape == divisors.shape and np.allclose(expected, divisors, rtol=1e-4):
            return RopeScaling("llama3", factor, original, _LLAMA3_LOW, _LLAMA3_HIGH)
    raise ModelError(
        f"{fields.file.path}: tensor rope_freqs.weight does not hold the divisors of a Llama 3 "
        f"scaling by {factor:g}; other kinds are not supported"
    )


def _llama3_divisors(
    head_dim: int, base: float, factor: float, original: int
) -> npt.NDArray[np.float64]:
    """Divisor of each of the head_dim / 2 rotary frequencies (Llama 3.1's rule)."""
    wavelengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = smooth.clip(0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))
