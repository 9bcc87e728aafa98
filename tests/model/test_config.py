"""Configurations from config.json and GGUF metadata, against transformers and field by field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from prefixcache.errors import ModelError
from prefixcache.model.config import ModelConfig, RopeScaling
from prefixcache.model.gguf_config import config_from_gguf
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.hf_config import config_from_directory, config_from_fields
from tests.model.checkpoints import FAMILIES, default_model_path, write_checkpoint, write_gguf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


def _with(**changes: Any) -> ModelConfig:
    return config_from_fields({**LLAMA, **changes})


def _family(name: str, **changes: Any) -> ModelConfig:
    architecture = f"{name.capitalize()}ForCausalLM"
    return _with(architectures=[architecture], model_type=name, **changes)


def test_a_plain_llama_field_by_field() -> None:
    assert config_from_fields(LLAMA) == ModelConfig(
        architecture="llama",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=4096,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


@pytest.mark.parametrize(
    ("config", "qkv", "output", "mlp", "norms"),
    [
        (_family("llama", attention_bias=True, mlp_bias=True), True, True, True, False),
        (_family("mistral", attention_bias=True), False, False, False, False),
        (_family("qwen2"), True, False, False, False),
        (_family("qwen3"), False, False, False, True),
        (_family("qwen3", attention_bias=True), True, True, False, True),
    ],
)
def test_each_family_has_its_biases_and_norms(
    config: ModelConfig, qkv: bool, output: bool, mlp: bool, norms: bool
) -> None:
    found = config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm
    assert found == (qkv, output, mlp, norms)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_back(tmp_path: Path, family: str) -> None:
    theirs = transformers.AutoConfig.from_pretrained(write_checkpoint(tmp_path, family))
    ours = config_from_directory(tmp_path)
    assert ours.architecture == theirs.model_type
    assert ours.head_dim == getattr(theirs, "head_dim", 16)
    assert (ours.num_heads, ours.num_kv_heads) == (4, 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_defaults_of_absent_fields() -> None:
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    config = config_from_fields({k: v for k, v in LLAMA.items() if k not in absent})
    assert (config.num_kv_heads, config.rms_norm_eps) == (4, 1e-6)
    assert (config.rope_theta, config.tie_embeddings) == (10000.0, False)
    assert _with(head_dim=None).head_dim == 16
    assert _family("qwen3").head_dim == 128
    assert config_from_fields({**LLAMA, "architectures": None}).architecture == "llama"


# --- rotary scaling --------------------------------------------------------------------------

SCALINGS: list[tuple[dict[str, Any], RopeScaling]] = [
    ({"rope_type": "default"}, RopeScaling()),
    ({"rope_type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0, 4096)),
    ({"type": "linear", "factor": 4}, RopeScaling("linear", 4.0, 4096)),
    ({"rope_type": "dynamic", "factor": 2.0}, RopeScaling("dynamic", 2.0, 4096)),
    (LLAMA3, RopeScaling("llama3", 8.0, 2048, 1.0, 4.0)),
    (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        RopeScaling("yarn", 4.0, 1024),
    ),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 16,
            "beta_slow": 2,
            "attention_factor": 1.5,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        RopeScaling("yarn", 4.0, 1024, 1.0, 4.0, 16.0, 2.0, 1.5, 0.7, 0.9, False),
    ),
    (
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
        RopeScaling("yarn", 8.0, 512),
    ),
]


@pytest.mark.parametrize(("values", "expected"), SCALINGS, ids=str)
def test_rope_scaling_in_both_styles(values: dict[str, Any], expected: RopeScaling) -> None:
    old = _with(rope_scaling=values)
    new = _with(rope_theta=None, rope_parameters={"rope_theta": 500000.0, **values})
    assert old.rope_scaling == new.rope_scaling == expected
    assert old.rope_theta == new.rope_theta == 500000.0


def test_a_length_beside_the_dictionary_goes_first_as_in_transformers() -> None:
    config = _with(rope_scaling=LLAMA3, original_max_position_embeddings=1024)
    assert config.rope_scaling.original_max_position == 1024


# --- sliding windows -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
        ),
    ],
)
def test_sliding_layers_equal_transformers(family: str, fields: dict[str, Any]) -> None:
    ours = _family(family, **fields)
    theirs = getattr(transformers, f"{family.capitalize()}Config")(num_hidden_layers=4, **fields)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:  # Mistral: one window for all layers
        kinds = ["sliding_attention" if theirs.sliding_window else "full_attention"] * 4
    flags = tuple(kind == "sliding_attention" for kind in kinds)
    assert ours.sliding_layers == (flags if any(flags) else ())
    assert ours.sliding_window == (8 if any(flags) else None)


# --- what ends an output ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 7, 2], None, (2, 7)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"temperature": 0.6}, (2,)),
        (None, {"eos_token_id": 5}, (5,)),
        (None, None, ()),
    ],
)
def test_generation_config_says_what_ends_an_output(
    tmp_path: Path, own: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert config_from_directory(tmp_path).eos_token_ids == expected


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"architectures": None, "model_type": "mixtral"}, "'mixtral'"),
        ({"hidden_act": "gelu"}, "field hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_parameters": [1]}, "rope_parameters is not a flat object"),
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"hidden_size": 0}, "field hidden_size is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 10**5, "sliding_window": 8}, "at most 10000"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "does not divide 4 heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [-1]}, "eos_token_id"),
    ],
)
def test_what_is_missing_malformed_or_unsupported_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _with(**changes)


def test_a_wrong_layer_list_is_refused() -> None:
    fields = {"use_sliding_window": True, "sliding_window": 8}
    for kinds in (["sliding_attention"], ["chunked_attention"] * 4):
        with pytest.raises(ModelError, match="layer_types must list 4"):
            _family("qwen3", **fields, layer_types=kinds)


@pytest.mark.parametrize("content", ["", "[1]", "{", "\xff", "[" * 100_000])
def test_a_broken_json_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        config_from_directory(tmp_path)


# --- GGUF metadata ---------------------------------------------------------------------------


def test_the_default_models_configuration() -> None:
    assert config_from_gguf(GgufFile(default_model_path())) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_metadata_mean_the_same_as_config_json(
    tmp_path: Path, family: str, tied: bool
) -> None:
    directory = write_checkpoint(tmp_path / "m", family, tie_word_embeddings=tied)
    ours = config_from_gguf(GgufFile(write_gguf(tmp_path / "m.gguf", directory)))
    theirs = config_from_directory(directory)
    architecture = {"mistral": "llama"}.get(family, family)  # llama.cpp knows no Mistral
    assert ours.architecture == architecture
    assert {**_fields(ours), "architecture": family} == _fields(theirs)


def _fields(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.__slots__}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    return write_checkpoint(directory, "llama", head_dim=64, max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeScaling()),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scale_linear": 1.0}, RopeScaling()),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 2048,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeScaling("yarn", 4.0, 2048, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling_in_gguf(
    tmp_path: Path, tiny: Path, fields: dict[str, Any], expected: RopeScaling
) -> None:
    named = {f"llama.{name}": value for name, value in fields.items()}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", tiny, fields=named))
    assert config_from_gguf(file).rope_scaling == expected


def test_an_extra_yarn_factor_multiplies_the_usual_one(tmp_path: Path, tiny: Path) -> None:
    fields = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.yarn_attn_factor": 0.5,
    }
    scaling = config_from_gguf(GgufFile(write_gguf(tmp_path / "m.gguf", tiny, fields=fields)))
    expected = 0.5 * (0.1 * np.log(4.0) + 1.0)
    assert scaling.rope_scaling.attention_factor == pytest.approx(expected, rel=1e-12)
    assert scaling.rope_scaling.original_max_position == 8192


@pytest.mark.parametrize(("factor", "original", "base"), [(8.0, 8192, 5e5), (32.0, 4096, 1e4)])
def test_llama3_scaling_is_recovered_from_its_divisors(
    tmp_path: Path, tiny: Path, factor: float, original: int, base: float
) -> None:
    """The file holds what each frequency is divided by; the reference is transformers."""
    expected = RopeScaling("llama3", factor, original, 1.0, 4.0)
    divisors = _divisors(factor, original, base)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny,
        fields={"llama.rope.freq_base": base},
        extra={"rope_freqs.weight": divisors},
    )
    assert config_from_gguf(GgufFile(path)).rope_scaling == expected


def _divisors(factor: float, original: int, base: float) -> np.ndarray:
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": original}
    plain, scaled = (
        transformers.LlamaConfig(
            head_dim=64, max_position_embeddings=131072, rope_parameters={"rope_theta": base, **r}
        )
        for r in ({"rope_type": "linear", "factor": 1.0}, rope)
    )
    before, _ = ROPE_INIT_FUNCTIONS["linear"](plain, torch.device("cpu"))
    after, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    return (before / after).numpy()


def test_other_divisors_are_refused(tmp_path: Path, tiny: Path) -> None:
    extra = {"rope_freqs.weight": np.linspace(1, 3, 32, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny, extra=extra)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_from_gguf(GgufFile(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "gemma"}, "'gemma' is not supported"),
        ({"llama.embedding_length": None}, r"llama\.embedding_length is missing"),
        ({"llama.block_count": 0}, r"llama\.block_count is 0"),
        ({"llama.block_count": "2"}, r"llama\.block_count is '2'"),
        ({"llama.block_count": 10**5}, "at most 10000"),
        ({"llama.attention.head_count_kv": 3}, "does not divide 4"),
        ({"llama.attention.head_count_kv": 0}, r"head_count_kv is 0"),
        ({"llama.attention.key_length": 7}, r"key_length is 7"),
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count is 32; only 64"),
        ({"llama.attention.value_length": 32}, r"attention\.value_length is 32"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type is 'longrope'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.rope.freq_base": -1.0}, r"rope\.freq_base is -1\.0"),
        ({"tokenizer.ggml.eot_token_id": "2"}, r"eot_token_id is '2'"),
        ({"tokenizer.ggml.bos_token_id": -1.5}, r"bos_token_id is -1\.5"),
        ({"split.count": "x"}, r"split\.count"),
        ({"split.count": 2}, r"split\.count"),
    ],
)
def test_gguf_fields_that_are_missing_or_unsupported_are_named(
    tmp_path: Path, tiny: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_gguf(GgufFile(write_gguf(tmp_path / "m.gguf", tiny, fields=fields)))


def test_equal_values_by_layer_are_one_value(tmp_path: Path, tiny: Path) -> None:
    fields = {"llama.attention.head_count_kv": [2, 2]}
    config = config_from_gguf(GgufFile(write_gguf(tmp_path / "m.gguf", tiny, fields=fields)))
    assert config.num_kv_heads == 2


def test_a_window_in_gguf_holds_for_every_layer(tmp_path: Path, tiny: Path) -> None:
    fields = {"llama.attention.sliding_window": 64}
    config = config_from_gguf(GgufFile(write_gguf(tmp_path / "m.gguf", tiny, fields=fields)))
    assert (config.sliding_window, config.sliding_layers) == (64, (True, True))
