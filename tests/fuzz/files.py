"""Model files that lie: GGUF headers, safetensors headers, and the JSON beside them.

Whatever a file says, it is opened or refused with a ModelError; nothing is sized by what it claims.
"""

import contextlib
import json
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from prefixcache.errors import ModelError
from prefixcache.model.loader import load_checkpoint
from prefixcache.model.safetensors_files import SafetensorsWeights
from tests.fuzz.mutations import mostly, mutated
from tests.fuzz.target import Check, Target, dump_named, load_named
from tests.model.checkpoints import write_checkpoint, write_gguf

MEMORY = 1 << 26
"""Bytes that opening a file of some 100 KB may take at its peak."""

HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
COUNTS = st.integers(0, 9) | st.sampled_from(HUGE) | st.integers(0, 2**64 - 1)


def opened(path: Path) -> None:
    """Open a model and read all of it, or be told in a sentence why not."""
    tracemalloc.start()
    try:
        weights = load_checkpoint(str(path)).weights
        for name in weights.names():
            weights.get(name)
            weights.raw(name)
    except ModelError as error:
        assert path.name in str(error) or "tensor" in str(error)  # noqa: PT017 (few are right)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY, peak


# ---------------------------------------------------------------- GGUF


@cache
def good_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "tiny", "llama")
        return write_gguf(Path(folder) / "tiny.gguf", directory, "Q4_0").read_bytes()


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@cache
def parts() -> tuple[list[bytes], list[bytes], bytes]:
    """The good file's metadata fields, its rows of the tensor table, and its data."""
    data = good_gguf()
    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    at, fields, table = 24, [], []
    for _ in range(num_fields):
        end = _after_value(data, _after_string(data, at))
        fields.append(data[at:end])
        at = end
    for _ in range(num_tensors):
        end = _after_string(data, at)
        end += 4 + 8 * struct.unpack_from("<I", data, end)[0] + 12
        table.append(data[at:end])
        at = end
    return fields, table, data[-(-at // 32) * 32 :]


def _after_string(data: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _after_value(data: bytes, at: int) -> int:
    kind = struct.unpack_from("<I", data, at)[0]
    if kind == 8:
        return _after_string(data, at + 4)
    if kind != 9:
        return at + 4 + _SIZES[kind]
    kind, count = struct.unpack_from("<IQ", data, at + 4)
    at += 16
    if kind != 8:
        return at + _SIZES[kind] * int(count)
    for _ in range(count):
        at = _after_string(data, at)
    return at


KEYS = st.sampled_from(
    ["general.architecture", "general.alignment", "split.count", "llama.block_count",
     "llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv",
     "llama.attention.key_length", "llama.context_length", "llama.feed_forward_length",
     "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "llama.rope.scaling.type",
     "llama.rope.scaling.factor", "llama.rope.dimension_count", "llama.attention.sliding_window",
     "llama.expert_count", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
     "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
     "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
     "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token",
     "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["llama", "qwen2", "qwen3", "gpt2", "yarn", "linear", "default", "qwen2", "smollm", "<0x0A>",
     "a", "b", "ab", "a b", "▁", "<s>", ""]
)  # fmt: skip


@st.composite
def string(draw: st.DrawFn) -> bytes:
    data = draw(WORDS.map(str.encode) | st.binary(max_size=6))
    claimed = draw(mostly(st.just(len(data)), COUNTS))
    return struct.pack("<Q", claimed) + data


@st.composite
def value(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 13) | st.sampled_from([4, 5, 6, 7, 8, 9]))
    return struct.pack("<I", kind) + draw(_payload(kind))


def _payload(kind: int) -> st.SearchStrategy[bytes]:
    if kind in _SIZES:
        size = _SIZES[kind]
        small = st.integers(0, min(127, 2 ** (8 * size) - 1))
        return small.map(lambda n: n.to_bytes(size, "little")) | st.binary(
            min_size=size, max_size=size
        )
    return string() if kind == 8 else array() if kind == 9 else st.binary(max_size=8)


@st.composite
def array(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from([8, 8, 4, 5, 6, 7, 9, 12]) | st.integers(0, 14))
    items = draw(st.lists(_payload(kind), max_size=6))
    claimed = draw(mostly(st.just(len(items)), COUNTS))
    return struct.pack("<IQ", kind, claimed) + b"".join(items)


@st.composite
def row(draw: st.DrawFn) -> bytes:
    """A row of the tensor table."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 32, 64, 96, 300, 320]) | COUNTS, max_size=5))
    claimed = draw(mostly(st.just(len(sizes)), st.integers(0, 2**32 - 1)))
    name = draw(
        st.sampled_from(["token_embd.weight", "output.weight", "rope_freqs.weight",
                         "blk.0.attn_q.weight", "blk.1.attn_q.bias"]).map(str.encode)
        | st.binary(max_size=4)
    )  # fmt: skip
    kind = draw(st.integers(0, 40) | st.integers(0, 2**32 - 1))
    offset = draw(st.sampled_from([0, 32, 64, 4096]) | COUNTS)
    packed = struct.pack("<Q", len(name)) + name + struct.pack("<I", claimed)
    return packed + struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)


@st.composite
def gguf_file(draw: st.DrawFn) -> bytes:
    """The good file with some fields and rows put in the place of others, added or left out."""
    fields, table, data = (list(one) if isinstance(one, list) else one for one in parts())
    assert isinstance(fields, list)
    assert isinstance(table, list)
    keyed = st.builds(lambda key, v: struct.pack("<Q", len(key)) + key.encode() + v, KEYS, value())
    for _ in range(draw(st.integers(0, 3))):
        new = draw(keyed | st.builds(bytes.__add__, string(), value()))
        key = new[: _key_end(new)]
        old = [at for at, field in enumerate(fields) if field.startswith(key)]
        if old and draw(st.integers(0, 9)):
            fields[old[0]] = new
        else:
            fields.append(new)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(table)))
        table[at : at + draw(st.integers(0, 1))] = [draw(row())]
    version = draw(mostly(st.just(3), st.integers(0, 2**32 - 1)))
    counts = [draw(mostly(st.just(len(one)), COUNTS)) for one in (table, fields)]
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(fields + table)
    return head + bytes(-len(head) % 32) + bytes(data)


def _key_end(field: bytes) -> int:
    size = int(struct.unpack_from("<Q", field)[0])
    return 8 + size if size < len(field) else len(field)


@contextlib.contextmanager
def gguf_reader() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.gguf"

        def check(data: bytes) -> None:
            path.write_bytes(data)
            opened(path)

        yield check


GGUF = Target(
    "gguf",
    st.deferred(lambda: gguf_file() | mutated(good_gguf(), first=12_000)),
    gguf_reader,
    few=100,
    many=1_500,
    load=bytes,
    dump=bytes,
)

# ---------------------------------------------------------------- safetensors

DTYPES = st.sampled_from(["F32", "F16", "BF16", "I8", "U8", "F64", "F8_E4M3", "BOOL", "", "f32"])
NUMBERS = st.integers(-2, 70) | st.sampled_from([-1, *HUGE, 10**30, 10**400, 0.5, 1e308])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": DTYPES | JSON,
        "shape": st.lists(NUMBERS, max_size=5) | JSON,
        "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2) | JSON,
        "more": JSON,
    },
)
NAMES = st.sampled_from(["model.norm.weight", "lm_head.weight", "__metadata__", "a", ""])
BOMBS = st.sampled_from(
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":[' * 50_000, b"9" * 100_000, b'"' + b"\\u00" * 9,
     b'{"a":' + b"1" + b"0" * 5_000 + b"}", b"\xef\xbb\xbf{}", b"{}" + b" " * 100_000, b"nul",
     b'{"a":1,"a":1}', b"NaN", b'{"__metadata__":{"a":1}}']
)  # fmt: skip


@st.composite
def safetensors_file(draw: st.DrawFn) -> bytes:
    """A header, perhaps of tensors that overlap, overflow or are not there, and some data."""
    tensors = st.dictionaries(NAMES | st.text(max_size=3), TENSOR | JSON, max_size=4)
    header = draw(tensors.map(lambda one: json.dumps(one).encode()) | BOMBS)
    claimed = draw(st.just(len(header)) | st.just(len(header)) | COUNTS)
    return struct.pack("<Q", claimed) + header + bytes(draw(st.sampled_from([0, 1, 64, 4096])))


@cache
def good_safetensors() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "tiny", "llama")
        return (directory / "model.safetensors").read_bytes()


@contextlib.contextmanager
def safetensors_reader() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "fuzzed", "llama")

        def check(data: bytes) -> None:
            (directory / "model.safetensors").write_bytes(data)
            opened(directory)
            with contextlib.suppress(ModelError):  # also those that no configuration asks for
                weights = SafetensorsWeights(directory)
                for name in weights.names():
                    with contextlib.suppress(ModelError):
                        weights.shape(name), weights.storage_type(name), weights.get(name)

        yield check


SAFETENSORS = Target(
    "safetensors",
    st.deferred(lambda: safetensors_file() | mutated(good_safetensors(), first=2_500)),
    safetensors_reader,
    few=100,
    many=1_500,
    load=bytes,
    dump=bytes,
)

# ---------------------------------------------------------------- the JSON beside them

FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "special_tokens_map.json", "model.safetensors.index.json"]  # fmt: skip


MORE_KEYS = ["weight_map", "rope_scaling", "sliding_window", "use_sliding_window", "layer_types",
             "max_window_layers", "partial_rotary_factor", "quantization_config", "head_dim",
             "original_max_position_embeddings", "chat_template", "unk_token"]  # fmt: skip
KINDS = st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"])
ROPE_KEYS = ["rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
             "high_freq_factor", "beta_fast", "attention_factor", "mscale", "truncate"]  # fmt: skip
ROPE = st.fixed_dictionaries({"rope_type": KINDS}, optional=dict.fromkeys(ROPE_KEYS, JSON))


@st.composite
def json_file(draw: st.DrawFn) -> tuple[str, bytes]:
    """One of the files with something else in it, and where."""
    name = draw(st.sampled_from(FILES))
    if draw(st.integers(0, 4)) == 0:
        return name, draw(BOMBS | JSON.map(lambda one: json.dumps(one).encode()))
    good = json.loads(good_json().get(name, "{}"))
    keys = draw(st.lists(st.sampled_from(sorted({*good, *MORE_KEYS})), min_size=1, max_size=3))
    for key in keys:
        good[key] = draw(ROPE | JSON if key.startswith("rope") else JSON)
    return name, json.dumps(good).encode()


@cache
def good_json() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        directory = write_checkpoint(Path(folder) / "tiny", "llama")
        return {file.name: file.read_text() for file in directory.glob("*.json")}


@contextlib.contextmanager
def json_reader() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        good = write_checkpoint(Path(folder) / "good", "llama")

        def check(one: tuple[str, bytes]) -> None:
            directory = Path(folder) / "fuzzed"
            shutil.copytree(good, directory)
            (directory / one[0]).write_bytes(one[1])
            try:
                with contextlib.suppress(ModelError):
                    load_checkpoint(str(directory))
            finally:
                shutil.rmtree(directory)

        yield check


CONFIGURATION = Target(
    "configuration",
    json_file(),
    json_reader,
    few=80,
    many=1_500,
    load=load_named,
    dump=dump_named,
)
