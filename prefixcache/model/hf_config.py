"""From a Hugging Face config.json (and generation_config.json) to ModelConfig.

Owns the meaning of the fields of Llama, Mistral, Qwen2 and Qwen3, in the style of transformers 4
(`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). A feature that the decoder lacks is
refused by name and never ignored. Never reads tensors.
"""

import json
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Far beyond any model; these bound what a broken file makes us allocate.
MAX_LAYERS = 10_000
MAX_INTEGER = 2**31 - 1
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


def config_from_directory(directory: Path) -> ModelConfig:
    """Read config.json; generation_config.json, where there is one, says what ends an output.

    Raises ModelError naming the file and the field that is missing, malformed or unsupported.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: holds neither config.json nor a single .gguf file")
    generation = directory / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None
    return config_from_fields(read_json(path), where=str(path), eos_token_id=ends)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming it."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def config_from_fields(
    fields: Mapping[str, Any], *, where: str = "config.json", eos_token_id: Any = None
) -> ModelConfig:
    """`fields` is the content of config.json; `eos_token_id`, if given, goes before its own."""
    reader = _Fields(fields, where)
    architecture = _architecture(reader)
    _refuse_unsupported(reader)
    heads, kv_heads, head_dim = _heads(reader, architecture)
    layers = reader.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        reader.fail("num_hidden_layers", f"is {layers}; at most {MAX_LAYERS} are supported")
    theta, scaling = _rope(reader)
    window, sliding = _sliding(reader, architecture, layers)
    bias = reader.flag("attention_bias") and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=reader.integer("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=reader.flag("tie_word_embeddings"),
        attention_bias=bias or architecture == "qwen2",
        attention_output_bias=bias,
        mlp_bias=reader.flag("mlp_bias") and architecture == "llama",
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        sliding_layers=sliding,
        eos_token_ids=_token_ids(reader, eos_token_id),
        bos_token_id=reader.optional_integer("bos_token_id"),
    )


class _Fields:
    """Typed access to a JSON object; a field that is null counts as absent."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields, self.where = fields, where

    def get(self, name: str) -> Any:
        return self.fields.get(name)

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ModelError(f"{self.where}: field {name} {problem}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_INTEGER:
            self.fail(name, _problem(value, f"an integer from 1 to {MAX_INTEGER}"))
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:  # no NaN
            self.fail(name, _problem(value, "a positive number"))
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(name, _problem(value, "true or false"))
        return value


def _problem(value: Any, wanted: str) -> str:
    return "is missing" if value is None else f"is {reprlib.repr(value)}, not {wanted}"


def _architecture(reader: _Fields) -> str:
    """`architectures` decides; a file without it is known by `model_type`."""
    names = reader.get("architectures")
    if isinstance(names, list) and names:
        if isinstance(names[0], str) and names[0] in ARCHITECTURES:
            return ARCHITECTURES[names[0]]
        reader.fail("architectures", f"is {names!r}; supported: {', '.join(ARCHITECTURES)}")
    kind = reader.get("model_type")
    if kind not in ARCHITECTURES.values():
        reader.fail("model_type", f"is {kind!r}; supported: {', '.join(ARCHITECTURES.values())}")
    return str(kind)


def _heads(reader: _Fields, architecture: str) -> tuple[int, int, int]:
    """(query heads, key heads, size of a head)."""
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.fail("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} heads")
    usual = 128 if architecture == "qwen3" else reader.integer("hidden_size") // heads
    size = reader.integer("head_dim", usual)
    if size % 2:
        reader.fail("head_dim", f"is {size}; rotary positions need an even one")
    return heads, kv_heads, size


def _refuse_unsupported(reader: _Fields) -> None:
    activation = reader.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        reader.fail("hidden_act", f"is {activation!r}; only silu is supported")
    if reader.get("quantization_config"):
        reader.fail(
            "quantization_config", "is set: quantised safetensors are not supported, GGUF is"
        )
    if reader.get("partial_rotary_factor") not in (None, 1, 1.0):
        reader.fail("partial_rotary_factor", "must be 1: all of a head is rotated here")


def _rope(reader: _Fields) -> tuple[float, RopeScaling]:
    """(base, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if reader.get("rope_parameters") else "rope_scaling"
    values = reader.get(name) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        reader.fail(name, "is not a flat object; parameters by layer type are not supported")
    rope = _Fields(values, f"{reader.where}: {name}")
    theta = rope.optional_number("rope_theta") or reader.number("rope_theta", 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_KINDS:
        rope.fail("rope_type", f"is {kind!r}; supported: {', '.join(_ROPE_KINDS)}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        rope.fail("partial_rotary_factor", "must be 1: all of a head is rotated here")
    return theta, RopeScaling() if kind == "default" else _scaling(kind, rope, reader)


def _scaling(kind: Any, rope: _Fields, reader: _Fields) -> RopeScaling:
    longest = reader.integer("max_position_embeddings")
    # transformers lets a length beside the dictionary go before the one inside it
    original = reader.integer(
        "original_max_position_embeddings",
        rope.integer("original_max_position_embeddings", longest),
    )
    if kind == "dynamic":
        original = rope.integer("original_max_position_embeddings", longest)
    plain = RopeScaling()
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor", longest / original if kind == "yarn" else None),
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", plain.beta_fast),
        beta_slow=rope.number("beta_slow", plain.beta_slow),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _sliding(
    reader: _Fields, architecture: str, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """(window, per-layer flags); (None, ()) where every layer sees everything."""
    if architecture == "llama" or reader.get("sliding_window") is None:
        return None, ()
    if architecture != "mistral" and not reader.flag("use_sliding_window"):
        return None, ()
    kinds = reader.get("layer_types")
    if isinstance(kinds, list):
        known = {"sliding_attention", "full_attention"}
        if len(kinds) != layers or any(kind not in known for kind in map(str, kinds)):
            reader.fail("layer_types", f"must list {layers} of {sorted(known)}")
        flags = tuple(kind == "sliding_attention" for kind in kinds)
    elif architecture == "mistral":
        flags = (True,) * layers
    else:
        first = reader.get("max_window_layers")
        first = 28 if first is None else first
        if not isinstance(first, int):
            reader.fail("max_window_layers", f"is {first!r}, not an integer")
        flags = tuple(layer >= first for layer in range(layers))
    return (reader.integer("sliding_window"), flags) if any(flags) else (None, ())


def _token_ids(reader: _Fields, preferred: Any) -> tuple[int, ...]:
    value = reader.get("eos_token_id") if preferred is None else preferred
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        reader.fail("eos_token_id", f"is {value!r}, not a token id or a list of them")
    return tuple(dict.fromkeys(ids))
