"""Prompts of all of Unicode, and stop strings, through tokenizers and what makes text of tokens."""

import codecs
import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from prefixcache.engine.detokenizer import IncrementalDetokenizer
from prefixcache.engine.stop import StopChecker, StopStrings
from prefixcache.errors import InvalidArgument
from prefixcache.model.loader import load_checkpoint
from prefixcache.model.tokenizer import Tokenizer, tokenizer_from_path
from tests.fuzz.target import Check, Target
from tests.model.checkpoints import write_tokenizer

# ---------------------------------------------------------------- prompts

PIECES = [
    "e\u0301", "\u0301", "\u1112\u1161\u11ab", "👩‍👩‍👧‍👦", "🏳️‍🌈", "😀", "\u200d", "\ufe0f",
    "שלום", "\u202e", "\ufeff", "\ufffd", "\x00", "\x7f", "\r\n", "\u2028", "  ", "\t", "\xa0",
    "▁", "Ġ", "<0x41>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "12345", "don't",
    "\ud800", "\udc00", "\ud83d\ude00", "𐀀", "\U0010ffff", "ﬃ", "İ", "ß",
]  # fmt: skip
ANY = st.characters(exclude_categories=())  # halves of surrogate pairs included
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(ANY, max_size=6), max_size=12).map("".join)


@contextlib.contextmanager
def prompts() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        tiny = tokenizer_from_path(write_tokenizer(Path(folder)))
    smollm2 = load_checkpoint("smollm2").tokenizer
    unknown = set(range(256)) - {b for i in range(600) for b in smollm2.token_bytes(i)[:1]}

    def check(one: tuple[str, int]) -> None:
        text, cut = one
        check_prompt(tiny, text, cut)
        with contextlib.suppress(UnicodeEncodeError):
            text = bytes(b for b in text.encode() if b not in unknown).decode(errors="ignore")
        check_prompt(smollm2, text, cut)  # whose vocabulary lacks some bytes, as first of a token

    yield check


def check_prompt(tokenizer: Tokenizer, text: str, cut: int) -> None:
    """Text and tokens are the same thing, from any token on; what is no text is refused."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        with pytest.raises(InvalidArgument):
            tokenizer.encode(text)
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    cut = cut % (len(ids) + 1)
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut], skip_special_tokens=False)
    rest = "".join(detokenizer.push([token]) for token in ids[cut:]) + detokenizer.flush()
    before = b"".join(map(tokenizer.token_bytes, ids[:cut])).decode(errors="ignore")
    assert before + rest == text


PROMPTS = Target(
    "prompts",
    st.tuples(TEXTS, st.integers(0, 40)),
    prompts,
    few=200,
    many=2_500,
    load=lambda data: tuple(json.loads(data)),
    dump=lambda one: json.dumps(one).encode(),
)

# ---------------------------------------------------------------- stop strings

# Few characters, of one to four bytes, so that stop strings occur and are cut by tokens.
FEW = st.text("ab é日😀", max_size=6)
Stops = tuple[list[bytes], list[str], int, int]


@st.composite
def stopped(draw: st.DrawFn) -> Stops:
    """Tokens' bytes, stop strings, min_tokens, and after which token to fork."""
    data = draw(st.lists(FEW.map(str.encode) | st.binary(max_size=3), max_size=8).map(b"".join))
    edges = draw(st.sets(st.integers(0, len(data)), max_size=16)) | {0, len(data)}
    cuts = sorted(edges)
    tokens = [data[a:b] for a, b in itertools.pairwise(cuts)]
    stops = draw(st.lists(FEW.filter(bool) | st.sampled_from(["\ufffd", "aa"]), max_size=4))
    return tokens, stops, draw(st.integers(0, 8)), draw(st.integers(0, 8))


class Pieces:
    """A tokenizer whose tokens are these bytes, and one more that stands for a prompt."""

    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = [*tokens, b"x"]

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise AssertionError("nothing is decoded behind a prompt")


Result = tuple[str, str | None, int]


def generated(tokens: list[bytes], stops: list[str], min_tokens: int, fork_at: int) -> Result:
    """Text, stop string and tokens taken, as the engine has them; halfway a fork takes over."""
    detokenizer = IncrementalDetokenizer(Pieces(tokens), [len(tokens)])
    checker = StopChecker(StopStrings(stops))
    text, enough = "", min_tokens <= 0
    for count in range(1, len(tokens) + 1):
        enough = count >= min_tokens
        emit, matched = checker.push(detokenizer.push([count - 1]), enough)
        text += emit
        if matched is not None:
            return text, matched, count
        if count == fork_at:
            detokenizer, checker = detokenizer.fork(), checker.fork()
    emit, matched = checker.push(detokenizer.flush(), enough)
    return text + emit + ("" if matched else checker.flush()), matched, len(tokens)


def reference(tokens: list[bytes], stops: list[str], min_tokens: int) -> Result:
    """The same from the whole text: each character comes with the token that completes it."""
    text, came_with = "", []
    for count in range(1, len(tokens) + 2):
        final = count > len(tokens)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        known = decoder.decode(b"".join(tokens[:count]), final)
        came_with += [min(count, len(tokens))] * (len(known) - len(text))
        text = known
    for end in range(1, len(text) + 1):
        if came_with[end - 1] >= min_tokens:
            for stop in stops:
                if text[:end].endswith(stop):
                    return text[: end - len(stop)], stop, came_with[end - 1]
    return text, None, len(tokens)


def check_stops(one: Stops) -> None:
    tokens, stops, min_tokens, fork_at = one
    assert generated(tokens, stops, min_tokens, fork_at) == reference(tokens, stops, min_tokens)


def _load_stops(data: bytes) -> Stops:
    tokens, stops, min_tokens, fork_at = json.loads(data)
    return [bytes.fromhex(token) for token in tokens], stops, min_tokens, fork_at


STOPS = Target(
    "stops",
    stopped(),
    lambda: contextlib.nullcontext(check_stops),
    few=300,
    many=2_500,
    load=_load_stops,
    dump=lambda one: json.dumps([[t.hex() for t in one[0]], *one[1:]]).encode(),
)
