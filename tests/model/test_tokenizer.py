"""Token ids, text and bytes against transformers: the default model and small vocabularies."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import pre_tokenizers, processors
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from prefixcache.errors import FailedPrecondition, InvalidArgument, ModelError
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.gguf_tokenizer import SPLITS, tokenizer_from_gguf
from prefixcache.model.tokenizer import Tokenizer, tokenizer_from_path
from tests.model.checkpoints import (
    SPECIAL_TOKENS,
    TOKENIZER_SIZE,
    default_model_path,
    tiny_tokenizer,
    write_tokenizer,
)

PROMPTS = [
    "Hello, world!",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n",
    "def fib(n):\n    if n < 2:\n\treturn n\n    return fib(n - 1) + fib(n - 2)  # é\n",
    "for (int i = 0; i < 1024; ++i) { x[i] *= 3.14159e-10; }",
    "1 22 333 4444 55555, 6.02214076e23 and 0xDEADBEEF",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 flags 🇩🇪🇯🇵",
    "Привет, мир! Γειά Κόσμε. שלום עולם. مرحبا بالعالم",
    "你好世界。 日本語のテキスト、カタカナ。 한국어 문장입니다. ภาษาไทย हिन्दी",
    " leading", "trailing ", "   three and three   ", "\ttab\n", "\n", " ", "", "a",
    "\u00a0nbsp", "\x00\x7f",
    "it's we'll they'd I'M DON'T",
    "e\u0301 is not é; ﬁ\ufb01 Å",
    "<|endoftext|><|im_end|> <|unknown|>",
    "x" * 300,
    "word " * 400,
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(default_model_path()))


@pytest.fixture(scope="module")
def reference() -> Any:
    path = default_model_path()
    return transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", PROMPTS, ids=lambda text: repr(text[:20]))
def test_ids_and_text_equal_transformers(smollm2: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == reference(text).input_ids
    assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(smollm2.token_bytes, ids)).decode() == text


@pytest.mark.parametrize(
    "text",
    ["Steps:\n\n1. mix\n\n2. bake", "x =  7", "  3", "\n\n\n22", "a\n\n    1", "٣ ٤", " ½ ²"],
)
def test_digits_are_cut_off_before_anything_else(
    smollm2: Tokenizer, reference: Any, text: str
) -> None:
    """SmolLM2's own tokenizer.json and llama.cpp ("smollm") cut digits off first.

    transformers, reading the GGUF file, does not know that split and uses GPT-2's, which differs
    where a digit follows several blanks. So the reference gets the model's pre-tokenizer here.
    """
    plain = reference(text).input_ids
    backend = reference.backend_tokenizer
    saved = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), saved]
    )
    try:
        expected = reference(text).input_ids
    finally:
        backend.pre_tokenizer = saved
    assert smollm2.encode(text) == expected
    assert plain != expected


def test_facts_of_the_default_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.has_chat_template


def test_bytes_of_every_token_are_what_it_decodes_to(smollm2: Tokenizer) -> None:
    for token_id in range(0, smollm2.vocab_size, 7):
        text = smollm2.decode([token_id], skip_special_tokens=False)
        assert smollm2.token_bytes(token_id).decode(errors="replace") == text


def test_a_character_over_several_tokens_joins_from_its_bytes(smollm2: Tokenizer) -> None:
    """DT-03, DT-08: the pieces of a character are bytes and never replacement marks."""
    ids = smollm2.encode("🦤")
    assert len(ids) > 1
    assert [smollm2.token_bytes(token_id).isascii() for token_id in ids] == [False] * len(ids)
    assert b"".join(map(smollm2.token_bytes, ids)) == "🦤".encode()


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 tail"])
def test_half_a_surrogate_pair_is_refused_with_the_field(smollm2: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        smollm2.encode(text)
    assert caught.value.field == "prompt.text"
    with pytest.raises(InvalidArgument) as caught:
        smollm2.encode(text, field="branches[0].text")
    assert caught.value.field == "branches[0].text"
    assert smollm2.decode(smollm2.encode("ok")) == "ok"


@pytest.mark.parametrize("token_id", [-1, 49152, 2**31, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(smollm2: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidArgument, match=str(token_id)):
        smollm2.decode([1, token_id])
    with pytest.raises(InvalidArgument, match="49152"):
        smollm2.token_bytes(token_id)


# --- a directory with a tokenizer.json -------------------------------------------------------


def _transformers(directory: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"bos_token": {"content": "<think>", "__type": "AddedToken"}},
        {"add_bos_token": True, "bos_token": None},
    ],
    ids=str,
)
def test_a_directory_reads_as_transformers_reads_it(tmp_path: Path, flags: dict[str, Any]) -> None:
    write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **flags}))
    ours, theirs = tokenizer_from_path(tmp_path), _transformers(tmp_path)
    for text in PROMPTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    # flags beside a tokenizer.json are not obeyed: its own post-processor says what is added
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_vocabulary_size_counts_real_ids_only(tmp_path: Path) -> None:
    """SM-16: the output layer is wider; ids beyond belong to no token."""
    tokenizer = tokenizer_from_path(write_tokenizer(tmp_path))
    assert tokenizer.vocab_size == TOKENIZER_SIZE
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    with pytest.raises(InvalidArgument):
        tokenizer.token_bytes(TOKENIZER_SIZE)


def test_the_post_processor_of_a_directory_is_obeyed(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    write_tokenizer(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours, theirs = tokenizer_from_path(tmp_path), _transformers(tmp_path)
    assert ours.encode("hi")[0] == 1
    assert ours.encode("hi") == theirs("hi").input_ids
    assert ours.encode("hi", add_special_tokens=False) == ours.encode("hi")[1:]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(tokenizer_from_path(tmp_path / "tokenizer.json").encode("a b c d e f g")) == 13


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: is missing"):
        tokenizer_from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a tokenizer"):
        tokenizer_from_path(tmp_path)


def test_without_a_template_messages_are_a_failed_precondition(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_path(write_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(FailedPrecondition, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


# --- vocabularies in GGUF metadata -----------------------------------------------------------


def _byte_level_fields(**changes: Any) -> dict[str, Any]:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**fields, **changes}


def _sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    pieces = ["▁", "H", "i", "▁Hi", "Hi", ".", "O", "k", "Ok", "▁Ok", "t", "h", "e", "r", "th"]
    pieces += ["▁th", "er", "▁there", "ere", "▁the", "▁▁", "re", "é", "<tool>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 1), 4],
        "scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {**fields, **changes}


def _gguf(path: Path, fields: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        if value is not None:
            add.get(type(value), writer.add_array)(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _ours(path: Path) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(path))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_each_way_of_splitting_equals_transformers(tmp_path: Path, pre: str) -> None:
    path = _gguf(tmp_path / "tiny.gguf", _byte_level_fields(pre=pre))
    architecture, fields, _ = get_gguf_tokenizer(str(path))
    theirs = convert_gguf_tokenizer(architecture, fields)[0]
    ours = _ours(path)
    for text in [*PROMPTS, "\n\n1. x", "a  1", "CamelCaseWords/path\r\n\r\nX"]:
        if pre == "qwen2" and "\u0301" in text:
            continue  # see the next test
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text).ids


def test_qwen2_text_is_composed_first(tmp_path: Path) -> None:
    """The model's own tokenizer normalises to NFC; a GGUF file does not say so."""
    fields = _byte_level_fields(pre="qwen2")
    ours = _ours(_gguf(tmp_path / "qwen2.gguf", fields))
    theirs = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(fields["tokens"])},
        merges=[tuple(merge.split(" ")) for merge in fields["merges"]],
    )
    for text in ["e\u0301te\u0301", "it's 2024\n\n  ok", "a\u030angstrom"]:
        assert ours.encode(text) == theirs(text).input_ids
    assert ours.encode("e\u0301") == ours.encode("é")


def test_a_word_in_the_vocabulary_is_taken_whole_where_llama3_says_so(tmp_path: Path) -> None:
    """Llama 3 has words that no sequence of merges makes."""
    fields = _byte_level_fields()
    tokens, kinds = [*fields["tokens"], "zyx"], [*fields["token_type"], 1]
    for pre, count in (("gpt-2", 3), ("llama-bpe", 1)):
        path = _gguf(
            tmp_path / f"{pre}.gguf", {**fields, "tokens": tokens, "token_type": kinds, "pre": pre}
        )
        assert len(_ours(path).encode("zyx", add_special_tokens=False)) == count


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "spm.gguf", _sentencepiece_fields())
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = _ours(path)
    texts = ["Hi.", "Hi. Ok there", " Hi", "  Hi  there ", "<s>Hi", "Hi</s> there", "naïve 🙂", ""]
    for text in [*texts, "<tool> Hi", "Hi<tool>", "▁Hi", "<0x41>"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_sentencepiece_bytes_join_without_losing_spaces(tmp_path: Path) -> None:
    """DT-06: the decoder strips one space, at the very beginning only."""
    ours = _ours(_gguf(tmp_path / "spm.gguf", _sentencepiece_fields()))
    prompt = ours.encode("Hi.", add_special_tokens=False)
    output = ours.encode(" Ok there é🙂", add_special_tokens=False)[1:]
    assert [ours.token_bytes(token_id) for token_id in prompt] == [b" Hi", b"."]
    delta = b"".join(map(ours.token_bytes, output)).decode()
    assert ours.decode(prompt + output) == "Hi." + delta
    assert ours.token_bytes(3 + 0xF0) == b"\xf0"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (_sentencepiece_fields(), [1]),
        (_sentencepiece_fields(add_bos_token=False, add_eos_token=True), [2]),
        (_byte_level_fields(), []),
        (_byte_level_fields(pre="llama-bpe"), [1]),
        (_byte_level_fields(pre="llama-bpe", add_bos_token=False), []),
        (_byte_level_fields(add_bos_token=True, add_eos_token=True), [1, 2]),
    ],
)
def test_what_is_added_around_a_prompt_follows_the_file(
    tmp_path: Path, fields: dict[str, Any], expected: list[int]
) -> None:
    ours = _ours(_gguf(tmp_path / "f.gguf", fields))
    assert ours.encode("") == expected
    assert ours.encode("", add_special_tokens=False) == []


def test_unused_entries_at_the_end_are_no_tokens(tmp_path: Path) -> None:
    """SM-16: converters pad the vocabulary up to the output layer's width."""
    fields = _byte_level_fields()
    tokens = [*fields["tokens"], "[PAD300]", "[PAD301]"]
    kinds = [*fields["token_type"], 5, 5]
    ours = _ours(_gguf(tmp_path / "f.gguf", {**fields, "tokens": tokens, "token_type": kinds}))
    assert ours.vocab_size == TOKENIZER_SIZE
    assert max(ours.encode("[PAD300]")) < TOKENIZER_SIZE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (_byte_level_fields(pre="my-own"), r"tokenizer\.ggml\.pre is 'my-own'"),
        (_byte_level_fields(model="bert"), r"tokenizer\.ggml\.model is 'bert'"),
        (_byte_level_fields(model=None), r"tokenizer\.ggml\.model is None"),
        (_byte_level_fields(tokens=None), r"tokenizer\.ggml\.tokens is missing"),
        (_byte_level_fields(tokens=[1, 2]), r"tokenizer\.ggml\.tokens is not an array of str"),
        (_byte_level_fields(merges=None), r"tokenizer\.ggml\.merges is missing"),
        (_byte_level_fields(merges=["a b c"]), "not a pair"),
        (_byte_level_fields(merges=["zzz yyy"]), "do not fit"),
        (_byte_level_fields(token_type=[1]), "differ in length"),
        (_byte_level_fields(bos_token_id=300), r"tokenizer\.ggml\.bos_token_id is 300"),
        (_byte_level_fields(add_bos_token="yes"), r"tokenizer\.ggml\.add_bos_token is 'yes'"),
        (_sentencepiece_fields(scores=[0.5]), "differ in length"),
    ],
)
def test_a_broken_vocabulary_is_refused_by_its_field(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _ours(_gguf(tmp_path / "broken.gguf", fields))


def test_the_supported_splits_are_listed_where_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        _ours(_gguf(tmp_path / "broken.gguf", _byte_level_fields(pre="my-own")))
    assert all(name in str(caught.value) for name in SPLITS)
