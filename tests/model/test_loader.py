"""Opening models by every way of naming them, and refusing what is not whole."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
import transformers

from prefixcache.errors import ModelError
from prefixcache.model.loader import load_checkpoint
from prefixcache.model.weights import expected_tensors
from tests.model.checkpoints import (
    FAMILIES,
    TOKENIZER_SIZE,
    VOCAB_SIZE,
    write_checkpoint,
    write_gguf,
    write_tokenizer,
)

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-llama", "llama")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_equals_transformers(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    directory = write_checkpoint(tmp_path / family, family, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    checkpoint = load_checkpoint(str(directory))
    theirs = model.state_dict()
    assert checkpoint.weights.names() == set(theirs)
    for name, tensor in theirs.items():
        ours = checkpoint.weights.get(name)
        assert ours.dtype == dtype
        assert torch.equal(ours, tensor), name
    assert checkpoint.config.architecture == family
    assert checkpoint.name == family


@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_tensors_are_exactly_those_of_transformers(
    tmp_path: Path, family: str
) -> None:
    overrides = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    directory = write_checkpoint(tmp_path / family, family, **overrides)
    checkpoint = load_checkpoint(str(directory))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert dict(expected_tensors(checkpoint.config)) == theirs


def test_shards_are_joined_by_their_index(tmp_path: Path, llama: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", "llama", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = load_checkpoint(str(llama)).weights, load_checkpoint(str(sharded)).weights
    assert whole.names() == parts.names()
    assert all(torch.equal(whole.get(name), parts.get(name)) for name in whole.names())


def test_a_tied_output_layer_is_not_asked_for(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tied", "qwen2", tie_word_embeddings=True)
    checkpoint = load_checkpoint(str(directory))
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.weights.names()


def test_a_tensor_that_is_not_there_is_named(llama: Path) -> None:
    weights = load_checkpoint(str(llama)).weights
    assert torch.equal(weights.get(QUERY), weights.get(QUERY))
    with pytest.raises(ModelError, match=r"there is no tensor model\.nothing"):
        weights.get("model.nothing")


# --- ways to name a model --------------------------------------------------------------------


def test_the_default_model_by_its_name() -> None:
    checkpoint = load_checkpoint("smollm2")
    assert checkpoint.name == "smollm2"
    assert checkpoint.config.num_layers == 30
    assert checkpoint.tokenizer.eos_token_ids == checkpoint.config.eos_token_ids == (2,)


def test_a_gguf_file_and_a_directory_that_holds_one(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "alone").mkdir()
    path = write_gguf(tmp_path / "alone" / "tiny.gguf", llama)
    by_file, by_directory = load_checkpoint(str(path)), load_checkpoint(str(path.parent))
    assert by_file.fingerprint == by_directory.fingerprint
    assert by_file.name == by_directory.name == "tiny"
    assert by_file.tokenizer.encode("Hi 12") == load_checkpoint(str(llama)).tokenizer.encode(
        "Hi 12"
    )


def test_a_hub_id_is_found_in_the_local_cache(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cache_snapshot(tmp_path / "hub", "owner/tiny-model", llama)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    checkpoint = load_checkpoint("owner/tiny-model")
    assert checkpoint.name == "owner/tiny-model"
    assert checkpoint.fingerprint == load_checkpoint(str(llama)).fingerprint
    assert load_checkpoint(str(llama), "owner/tiny-model").tokenizer.vocab_size == TOKENIZER_SIZE
    with pytest.raises(ModelError, match="owner/other-model: cannot be fetched"):
        load_checkpoint("owner/other-model")


def _cache_snapshot(cache: Path, repository: str, source: Path) -> None:
    folder = cache / f"models--{repository.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(source, folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/directory", "", "a/b/c", "../x/y"])
def test_a_name_that_is_nothing_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_checkpoint(name if name else str(tmp_path / "nothing"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin: is neither"):
        load_checkpoint(str(tmp_path / "model.bin"))


def test_a_missing_default_model_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="prefixcache pull"):
        load_checkpoint("smollm2")


@pytest.mark.parametrize("place", ["directory", "file", "gguf"])
def test_another_tokenizer_can_be_given(tmp_path: Path, llama: Path, place: str) -> None:
    other = write_tokenizer(tmp_path / "other", chat_template="other")
    source = {
        "directory": other,
        "file": other / "tokenizer.json",
        "gguf": write_gguf(tmp_path / "m.gguf", llama, fields={"tokenizer.chat_template": "other"}),
    }[place]
    tokenizer = load_checkpoint(str(llama), str(source)).tokenizer
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "other"


def test_progress_is_reported_step_by_step(llama: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    load_checkpoint(str(llama), progress=lambda *step: steps.append(step))
    assert [done for _, done, _ in steps] == [0, 1, 2, 3, 4]
    assert {total for *_, total in steps} == {4}


# --- ids -------------------------------------------------------------------------------------


def test_the_tokenizer_may_be_narrower_than_the_output_layer(llama: Path) -> None:
    """SM-16."""
    checkpoint = load_checkpoint(str(llama))
    assert checkpoint.config.vocab_size == VOCAB_SIZE
    assert checkpoint.tokenizer.vocab_size == TOKENIZER_SIZE


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "narrow", "llama", vocab_size=TOKENIZER_SIZE - 1)
    with pytest.raises(ModelError, match="300 ids, the model's output layer only 299 rows"):
        load_checkpoint(str(directory))


def test_ends_come_from_the_tokenizer_where_the_model_names_none(llama: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        _edit(llama / name, eos_token_id=None)
    checkpoint = load_checkpoint(str(llama))
    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_token_ids == (2,)


# --- the fingerprint -------------------------------------------------------------------------


def test_the_fingerprint_is_of_the_content(tmp_path: Path, llama: Path) -> None:
    own = load_checkpoint(str(llama)).fingerprint
    shutil.copytree(llama, tmp_path / "elsewhere")
    script = (
        "import sys; from prefixcache.model.loader import load_checkpoint;"
        "print(load_checkpoint(sys.argv[1]).fingerprint.hex())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "elsewhere")]
    other_process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(own) == 16
    assert other_process.stdout.strip() == own.hex()


def test_models_of_one_shape_but_other_weights_differ(tmp_path: Path, llama: Path) -> None:
    tuned = write_checkpoint(tmp_path / "tuned", "llama", seed=1)
    longer = write_checkpoint(tmp_path / "longer", "llama", max_position_embeddings=1024)
    found = {load_checkpoint(str(path)).fingerprint for path in (llama, tuned, longer)}
    assert len(found) == 3


# --- broken checkpoints ----------------------------------------------------------------------


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(QUERY), rf"{QUERY} is missing; its shape should be \(64, 64\)"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda t: t.update({QUERY: torch.zeros(32, 64)}),
            rf"{QUERY} has shape \(32, 64\), the configuration implies \(64, 64\)",
        ),
        (lambda t: t.update({QUERY: t[QUERY].reshape(1, 64, 64)}), r"\(1, 64, 64\)"),
        (lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}), f"{QUERY} is stored as I8"),
        (lambda t: t.update({QUERY: t[QUERY].double()}), f"{QUERY} is stored as F64"),
        (
            lambda t: t.update({QUERY.replace("weight", "bias"): torch.zeros(64)}),
            r"q_proj\.bias .* has no place in a llama decoder",
        ),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}),
            r"layers\.2\..* has no place",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(llama: Path, change: Any, message: str) -> None:
    _tensors(llama, change)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(str(llama))


def test_leftovers_of_old_checkpoints_are_let_be(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _tensors(llama, lambda t: t.update({name: torch.ones(8)}))
    load_checkpoint(str(llama))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_safetensors_file_is_named(llama: Path, keep: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_checkpoint(str(llama))


@pytest.mark.parametrize(
    "header",
    [
        (2**63).to_bytes(8, "little") + b"{}",
        (50_000_000).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}" + b"x",
        (9).to_bytes(8, "little") + b'{"a": 1}}',
    ],
)
def test_a_hostile_safetensors_header_is_refused(llama: Path, header: bytes) -> None:
    (llama / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError):
        load_checkpoint(str(llama))


def test_a_directory_without_weights_or_configuration_says_so(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(str(llama))
    (llama / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_checkpoint(str(llama))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "field weight_map"),
        ({"weight_map": {"a": 1}}, "field weight_map"),
        ({"weight_map": {"a": "model-9.safetensors"}}, r"model-9\.safetensors: is missing"),
        ({"weight_map": {"a": "../tiny-llama/model.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"a": "model.safetensors"}}, r"tensor a is not in model\.safetensors"),
    ],
)
def test_a_broken_index_is_named(llama: Path, index: Any, message: str) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        load_checkpoint(str(llama))


def test_a_gguf_file_that_lacks_a_tensor_names_it(tmp_path: Path, llama: Path) -> None:
    fields = {"llama.block_count": 3}
    path = write_gguf(tmp_path / "m.gguf", llama, fields=fields)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight is missing"):
        load_checkpoint(str(path))
