"""Incremental text against one-shot decoding, on small tokenizers and on SmolLM2's."""

import random

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from prefixcache.engine.detokenizer import IncrementalDetokenizer
from prefixcache.engine.stop import StopChecker, StopStrings
from prefixcache.model.loader import load_checkpoint
from prefixcache.model.tokenizer import Tokenizer, TokenizerSettings, byte_alphabet

SPELLED = {byte: character for character, byte in byte_alphabet().items()}
END = 256 + 6  # the special token of the byte-level tokenizer
WORDS = [b" Hi", b"ban", b"ana", "é".encode(), "�".encode(), b"\x80\xe6"]


def byte_level():
    """Ids 0 to 255 are the bytes; then WORDS; the last one ends a character and begins another."""
    vocab = {SPELLED[byte]: byte for byte in range(256)}
    for word in WORDS:
        vocab["".join(SPELLED[byte] for byte in word)] = len(vocab)
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=SPELLED[0]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, TokenizerSettings())


BYTE_LEVEL = byte_level()


def sentencepiece(decoder):
    """Ids 0 to 255 are <0x00> to <0xFF>; then pieces with U+2581 for a space."""
    pieces = ["▁Hi", ".", "▁Ok", "▁there", "▁", "there", "▁▁▁", "日", "�"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        piece: 256 + position for position, piece in enumerate(pieces)
    }
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="."))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, TokenizerSettings())


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
METASPACE = decoders.Metaspace()
HI, DOT, OK, THERE, SPACE = range(256, 261)
BOS = 265


@pytest.fixture(scope="module")
def smollm2():
    return load_checkpoint("smollm2").tokenizer


def deltas(tokenizer, prompt, output, *, skip=True, size=1):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    texts = [detokenizer.push(output[i : i + size]) for i in range(0, len(output), size)]
    return [*texts, detokenizer.flush()]


def one_shot(tokenizer, prompt, output, *, skip=True):
    """The decoded prompt + output, less the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


# ---------------------------------------------------------------- characters split over tokens


@pytest.mark.parametrize("text", ["😀", "ñ", "日本語", "e\u0301", "👩‍👩‍👧", "a😀b"])
def test_a_character_split_over_tokens_is_sent_whole(text):
    """DT-03: four byte tokens F0 9F 98 80; two bytes; combinations. No U+FFFD at any moment."""
    tokenizer = byte_level()
    found = deltas(tokenizer, [65], list(text.encode()))
    assert "".join(found) == text
    assert found[: len(text.encode())] == _whole_characters(text)


def _whole_characters(text):
    """Each character with its last byte, nothing before."""
    return [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]


def test_a_token_that_ends_one_character_and_begins_the_next():
    """DT-03: a CJK character whose last byte shares a token with the next one's first byte."""
    shared = 256 + WORDS.index(b"\x80\xe6")
    output = [0xE3, 0x80, shared, 0x97, 0xA5]  # U+3000, then 日
    assert deltas(byte_level(), [65], output) == ["", "", "\u3000", "", "日", ""]


def test_a_genuine_replacement_character_is_kept():
    """DT-03"""
    genuine = 256 + WORDS.index("�".encode())
    assert deltas(byte_level(), [65], [genuine, 66, *"�".encode()]) == ["�", "B", "", "", "�", ""]


def test_an_unfinished_character_at_the_end_becomes_one_mark():
    assert deltas(byte_level(), [65], [66, 0xF0, 0x9F]) == ["B", "", "", "�"]


def test_invalid_bytes_become_marks_at_once():
    found = deltas(byte_level(), [65], [0xFF, 0xE3, 0x42])
    assert found == ["�", "", "�B", ""]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, END), max_size=24),
    st.lists(st.sampled_from(["é", "日", "😀", "�", "a"]).map(str.encode), max_size=6),
    st.integers(1, 4),
    st.booleans(),
)
def test_byte_level_deltas_join_to_the_one_shot_text(noise, characters, size, skip):
    """Any bytes, valid or not, special tokens among them, in steps of any size."""
    tokenizer = BYTE_LEVEL
    output = [*b"".join(characters), *noise]
    found = deltas(tokenizer, [65, END], output, skip=skip, size=size)
    assert "".join(found) == one_shot(tokenizer, [65, END], output, skip=skip)


# ---------------------------------------------------------------- spaces


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE], ids=["llama", "metaspace"])
@pytest.mark.parametrize("prompt", [[OK], [BOS], [BOS, OK, DOT], [BOS, BOS]])
@pytest.mark.parametrize(
    "output", [[HI, DOT, OK, THERE], [SPACE, HI], [DOT, HI], [262, 261], [BOS, HI]]
)
@pytest.mark.parametrize("skip", [True, False])
def test_spaces_between_pieces_are_those_of_one_shot_decoding(decoder, prompt, output, skip):
    """DT-06: '_Hi', '.', '_Ok', '_there'; output that begins with '_'; prompts without any text."""
    tokenizer = sentencepiece(decoder)
    expected = one_shot(tokenizer, prompt, output, skip=skip)
    assert "".join(deltas(tokenizer, prompt, output, skip=skip)) == expected


def test_the_space_of_the_first_piece_behind_a_prompt_is_kept():
    """DT-06"""
    tokenizer = sentencepiece(LLAMA)
    assert deltas(tokenizer, [BOS, OK], [HI, DOT]) == [" Hi", ".", ""]
    assert deltas(tokenizer, [BOS], [HI, DOT, OK]) == ["Hi", ".", " Ok", ""]


def test_byte_fallback_characters_are_sent_whole():
    """DT-03 for SentencePiece: <0xF0> <0x9F> <0x98> <0x80>, then a piece."""
    output = [*"😀".encode(), 263, HI]
    assert deltas(sentencepiece(LLAMA), [OK], output) == ["", "", "", "😀", "日", " Hi", ""]


# ---------------------------------------------------------------- special tokens


def test_special_tokens_are_left_out_or_spelled():
    tokenizer = byte_level()
    assert deltas(tokenizer, [65], [66, END, 67]) == ["B", "", "C", ""]
    assert deltas(tokenizer, [65], [66, END], skip=False) == ["B", "<|end|>", ""]


def test_a_hidden_special_token_does_not_break_a_character():
    output = [0xF0, 0x9F, END, 0x98, 0x80]
    assert deltas(byte_level(), [65], output) == ["", "", "", "", "😀", ""]


# ---------------------------------------------------------------- forks


def test_a_fork_begins_behind_its_parents_text_and_goes_its_own_way():
    parent = IncrementalDetokenizer(byte_level(), [65])
    assert parent.push([66, 0xC3]) == "B"
    child = parent.fork()
    assert child.push([0xA9]) == "é"  # the character completed here belongs here
    assert parent.push([0xB1, 67]) == "ñC"
    assert parent.flush() == child.flush() == ""


def test_a_prompt_that_ends_inside_a_character_has_it_completed():
    """A fork at an earlier position is a prompt of those tokens, perhaps half a character."""
    assert deltas(byte_level(), [65, 0xF0, 0x9F], [0x98, 0x80, 66]) == ["", "😀", "B", ""]
    assert deltas(byte_level(), [0xC3, END], [0xA9]) == ["é", ""]
    assert deltas(byte_level(), [65, 0xC3], [66]) == ["�B", ""]


def test_of_a_long_prompt_only_the_end_is_read():
    class Counted:
        special_token_ids = frozenset()
        reads = 0

        def token_bytes(self, token_id):
            self.reads += 1
            return bytes([token_id])

        def decode(self, ids, *, skip_special_tokens):
            raise AssertionError("nothing is decoded behind a prompt with text")

    tokenizer = Counted()
    detokenizer = IncrementalDetokenizer(tokenizer, [65] * 100_000)
    for _ in range(1000):
        detokenizer.push([66])
    assert tokenizer.reads <= 1000 + 4


# ---------------------------------------------------------------- with stop strings; SmolLM2


def test_stop_string_across_the_edges_of_tokens():
    """DT-01: 'ban', 'ana', 's' with stop 'anan': text 'b', two tokens."""
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [65])
    checker = StopChecker(StopStrings(["anan"]))
    ban, ana = 256 + WORDS.index(b"ban"), 256 + WORDS.index(b"ana")
    results = [checker.push(detokenizer.push([token])) for token in (ban, ana)]
    assert results == [("b", None), ("", "anan")]


SCRIPTS = [
    "Hello, world! 1234567890",
    "def f(x):\n    return x ** 2  # naïve\n\n\tprint(f'{x!r}')",
    "Ünïcödé — “quotes” … ½ €",
    "日本語のテキスト、中文文本。한국어 텍스트",
    "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji and \ufffd and \x00",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("skip", [True, False])
def test_smollm2_deltas_join_to_the_one_shot_text(smollm2, text, skip):
    """DT-03, with the real tokenizer; each script behind each cut of it as a prompt."""
    ids = smollm2.encode(text)
    for cut in range(1, len(ids), 3):
        found = "".join(deltas(smollm2, ids[:cut], ids[cut:], skip=skip))
        before = smollm2.decode(ids[:cut], skip_special_tokens=skip)
        whole = smollm2.decode(ids, skip_special_tokens=skip)
        if before.endswith("\ufffd") and not whole.startswith(before):
            before = before.rstrip("\ufffd")  # the prompt ends inside a character
        assert before + found == whole


def test_smollm2_random_tokens_join_to_the_one_shot_text(smollm2):
    """Sampled nonsense: tokens that are parts of characters, in no sensible order."""
    rng = random.Random(2)
    for _ in range(60):
        output = rng.choices(range(smollm2.vocab_size), k=30)
        if rng.random() < 0.5:  # the tokens that split characters are among the first
            output[5:25] = rng.choices(range(150, 300), k=20)
        assert "".join(deltas(smollm2, [300], output)) == one_shot(smollm2, [300], output)


def test_bytes_of_logprob_entries_make_up_the_text(smollm2):
    """DT-08: text is not joined from per-token strings; entries carry bytes, which do join."""
    ids = smollm2.encode(" 😀 naïve 日")
    per_token = [smollm2.decode([token]) for token in ids]
    assert "\ufffd" in "".join(per_token)
    text = "".join(deltas(smollm2, smollm2.encode("x"), ids))
    assert b"".join(smollm2.token_bytes(token) for token in ids).decode() == text
