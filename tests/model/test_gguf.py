"""GGUF files: what is read equals gguf's own reader, and no file can do more than be refused."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from prefixcache.errors import ModelError
from prefixcache.model.gguf_config import config_from_gguf
from prefixcache.model.gguf_file import READABLE_TYPES, GgufFile
from prefixcache.model.gguf_weights import GgufWeights, hugging_face_name
from prefixcache.model.loader import load_checkpoint
from tests.model.checkpoints import FAMILIES, default_model_path, write_checkpoint, write_gguf

WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


# --- the file --------------------------------------------------------------------------------


def test_metadata_and_tensors_equal_ggufs_reader(tmp_path: Path, tiny: Path) -> None:
    fields = {"a.flag": True, "a.floats": [0.5, 1.5], "a.negative": [-3, 4], "a.text": "größe"}
    path = write_gguf(tmp_path / "m.gguf", tiny, "Q5_1", fields=fields)
    theirs, ours = gguf.GGUFReader(path), GgufFile(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name
    assert {tensor.name for tensor in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].type_name == tensor.tensor_type.name
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        stored = np.ascontiguousarray(tensor.data).view(np.uint8)
        assert np.array_equal(ours.bytes_of(tensor.name), stored.reshape(-1, stored.shape[-1]))


def test_an_alignment_of_its_own_is_obeyed(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(4, dtype=np.float32))
    _close(writer)
    file = GgufFile(tmp_path / "m.gguf")
    assert file.tensors["b"].offset - file.tensors["a"].offset == 256
    assert file.tensor("b").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", WRITABLE)
def test_each_type_is_read_as_gguf_dequantises_it(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    quantisation = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, quantisation)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", stored, raw_dtype=quantisation)
    _close(writer)
    tensor = GgufFile(tmp_path / "m.gguf").tensor("t")
    own = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert tensor.dtype == own
    assert np.array_equal(tensor.float().numpy(), gguf.quants.dequantize(stored, quantisation))
    largest_error = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(kind, 0.5)
    assert (tensor.float() - torch.from_numpy(values)).abs().max() <= largest_error


@pytest.mark.parametrize("kind", sorted(READABLE_TYPES - set(WRITABLE)))
def test_types_that_gguf_only_reads(tmp_path: Path, kind: str) -> None:
    """Random blocks: gguf cannot make these, and any bytes are a valid block."""
    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    stored = np.random.default_rng(0).integers(0, 60, (3, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", stored, raw_dtype=quantisation)
    _close(writer)
    tensor = GgufFile(tmp_path / "m.gguf").tensor("t")
    assert tensor.shape == (3, 512)
    assert torch.isfinite(tensor).all()
    assert tensor.abs().max() > 0
    assert np.array_equal(tensor.numpy(), gguf.quants.dequantize(stored, quantisation))


def _close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- the weights of a model ------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_weights_come_back_under_their_names_and_in_order(
    tmp_path: Path, family: str, kind: str
) -> None:
    directory = write_checkpoint(tmp_path / "m", family)
    original = load_checkpoint(str(directory)).weights
    ours = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", directory, kind))).weights
    assert ours.names() == original.names()
    quantisation = gguf.GGMLQuantizationType[kind]
    for name in original.names():
        expected = original.get(name).numpy()
        if expected.ndim > 1:  # quantising row by row commutes with moving rows
            expected = gguf.quants.quantize(expected, quantisation)
            expected = gguf.quants.dequantize(expected, quantisation)
        assert np.array_equal(ours.get(name).numpy(), expected), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_raw_blocks_have_the_rows_of_the_tensor(tmp_path: Path, tiny: Path, kind: str) -> None:
    weights = load_checkpoint(str(write_gguf(tmp_path / "m.gguf", tiny, kind))).weights
    for name in sorted(weights.names()):
        raw = weights.raw(name)
        if name.endswith("norm.weight"):
            assert raw is None
            continue
        assert raw is not None
        type_name, blocks, shape = raw
        assert (type_name, shape) == (kind, weights.shape(name))
        assert blocks.dtype == np.uint8
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(values, weights.get(name).numpy()), name
    assert load_checkpoint(str(tiny)).weights.raw("lm_head.weight") is None


def test_names_that_have_no_counterpart_stay() -> None:
    assert hugging_face_name("blk.12.ffn_down.bias") == "model.layers.12.mlp.down_proj.bias"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    assert hugging_face_name("blk.0.ssm_a") == "blk.0.ssm_a"


@pytest.mark.parametrize("layer", [0, 13, 29])
def test_layers_of_the_default_model_equal_transformers(layer: int) -> None:
    """The bytes through gguf's reader, the rows through transformers' own permutation."""
    file = GgufFile(default_model_path())
    ours = GgufWeights(file, config_from_gguf(file))
    undo = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    for name in [name for name in file.tensors if name.startswith(f"blk.{layer}.")]:
        info = file.tensors[name]
        kind = gguf.GGMLQuantizationType[info.type_name]
        values = gguf.quants.dequantize(file.bytes_of(name), kind).reshape(info.shape)
        expected = undo.process(values, name).weights
        assert np.array_equal(ours.get(hugging_face_name(name)).numpy(), expected), name


@pytest.mark.slow
def test_every_tensor_of_the_default_model_equals_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    path = default_model_path()
    fields = load_gguf_checkpoint(str(path))["config"]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**fields))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_checkpoint("smollm2").weights
    assert set(theirs) == ours.names()
    assert [name for name in theirs if not torch.equal(theirs[name], ours.get(name))] == []


def test_the_default_model_opens_in_under_two_seconds() -> None:
    """gguf's reader alone takes longer; here it is about 0.1 s."""
    started = time.perf_counter()
    load_checkpoint("smollm2")
    assert time.perf_counter() - started < 2.0


# --- broken and hostile files ----------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused_as_truncated(tmp_path: Path, tiny: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", tiny, "Q4_0").read_bytes()
    generator = random.Random(0)
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, 24, *sorted(generator.sample(range(25, len(data) - 32), 60))]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufFile(cut)


def test_flipped_bytes_never_raise_anything_but_model_error(tmp_path: Path, tiny: Path) -> None:
    data = bytearray(write_gguf(tmp_path / "m.gguf", tiny, "Q4_0").read_bytes())
    header = GgufFile(tmp_path / "m.gguf").tensors["token_embd.weight"].offset
    generator = random.Random(0)
    broken, refused = tmp_path / "broken.gguf", 0
    for _ in range(250):
        copy = bytearray(data)
        for _ in range(generator.randint(1, 3)):
            copy[generator.randrange(min(header, 1500))] = generator.choice([0, 1, 127, 128, 255])
        broken.write_bytes(copy)
        try:
            load_checkpoint(str(broken))
        except ModelError as error:
            assert "broken.gguf" in str(error)  # noqa: PT017 (not every flip is an error)
            refused += 1
    assert refused > 100


HUGE = 2**63 + 7


def _header(tensors: int, fields: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _tensor(name: bytes = b"t", sizes: Any = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack("<I", len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return _text(name) + dimensions + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" * 20, "does not start with the letters GGUF"),
        (_header(0, 0, version=1), "version 1"),
        (_header(0, 0, version=3 << 24), "big-endian"),
        (_header(HUGE, 0), f"claims {HUGE} tensors"),
        (_header(0, HUGE), f"claims {HUGE} metadata fields"),
        (_header(0, 1, struct.pack("<Q", HUGE) + bytes(16)), f"claims {HUGE} bytes"),
        (_header(0, 1, _text(b"k") + struct.pack("<I", 99) + bytes(9)), "k has the unknown type"),
        (_header(0, 1, _text(b"k") + struct.pack("<IIQ", 9, 4, HUGE)), f"{HUGE} elements in"),
        (_header(0, 1, _text(b"k") + struct.pack("<IIQ", 9, 8, HUGE)), f"{HUGE} strings in"),
        (_header(0, 1, _text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "k is an array of type 9"),
        (_header(0, 1, _text(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE)), "past the end"),
        (_header(0, 1, _text(b"\xff") + struct.pack("<IIQ", 4, 1, 1)), "not UTF-8"),
        (_header(0, 2, (_text(b"k") + struct.pack("<II", 4, 1)) * 2), "k is listed twice"),
        (_header(1, 0, _text(b"t") + struct.pack("<I", 2**31) + bytes(20)), "2147483648 dim"),
        (_header(1, 0, _tensor(kind=9999)), "t has the unknown type 9999"),
        (_header(1, 0, _tensor(sizes=(2**62, 2**62))), "truncated"),
        (_header(1, 0, _tensor(sizes=(0,))), "impossible size"),
        (_header(1, 0, _tensor(sizes=(33,), kind=2)), "impossible size"),
        (_header(1, 0, _tensor(offset=HUGE)), "truncated"),
        (_header(2, 0, _tensor() * 2 + bytes(64)), "t is listed twice"),
        (
            _header(0, 1, _text(b"general.alignment") + struct.pack("<II", 4, 3)),
            r"general\.alignment is 3",
        ),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_hostile_headers_are_refused_before_anything_is_sized_by_them(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    started = time.perf_counter()
    with pytest.raises(ModelError, match=message) as caught:
        GgufFile(path)
    assert "hostile.gguf" in str(caught.value)
    assert time.perf_counter() - started < 0.5
