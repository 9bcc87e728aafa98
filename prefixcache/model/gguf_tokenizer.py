"""Building a Tokenizer from the metadata of a GGUF file.

Owns the two vocabulary kinds that Llama-shaped models use, byte-level BPE ("gpt2") and
SentencePiece ("llama"), and how each kind of text is split before merging. A GGUF file names
that split and does not hold it; the expressions here are those of the models' own tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from prefixcache.errors import ModelError
from prefixcache.model.gguf_file import GgufFile
from prefixcache.model.tokenizer import Tokenizer, TokenizerSettings

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


@dataclass(frozen=True)
class _Split:
    """How text is cut before merging.

    pattern: the expression; None is GPT-2's own. digits: cut every digit off first. whole_words: a
    piece that is in the vocabulary is taken as it is. add_bos: what a file without the flag means.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2, _DIGITS = _Split(), _Split(digits=True)
_LLAMA3_SPLIT = _Split(_LLAMA3, whole_words=True, add_bos=True)
SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3)),
    "qwen2": _Split(_QWEN2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "kormo"), _Split(_QWEN2)),
    "tekken": _Split(_TEKKEN, whole_words=True, add_bos=True),
}


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(file: GgufFile, *, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Build the tokenizer that the file describes.

    Raises ModelError naming the field that is missing, broken, or of a kind that is not supported.
    """
    vocabulary = _Vocabulary(file)
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        split = _split_of(file)
        backend, add_bos = _byte_level(vocabulary, split), split.add_bos
    elif model == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
    else:
        raise ModelError(
            f"{file.path}: field tokenizer.ggml.model is {model!r}; supported: gpt2, llama. "
            "A tokenizer.json can be given instead"
        )
    backend.add_special_tokens(vocabulary.added(_Kind.CONTROL))
    backend.add_tokens(vocabulary.added(_Kind.USER_DEFINED))
    settings = TokenizerSettings(
        special_tokens=vocabulary.special_tokens(),
        chat_templates=_templates(file),
        add_bos=vocabulary.flag("add_bos_token", add_bos),
        add_eos=vocabulary.flag("add_eos_token", False),
    )
    return Tokenizer(
        backend, settings, vocab_size=vocabulary.real_size, eos_token_ids=eos_token_ids
    )


class _Vocabulary:
    """The vocabulary's arrays, checked against one another."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: list[str] = self._array("tokens", str)
        size = len(self.tokens)
        self.kinds: list[int] = self._array("token_type", int, [int(_Kind.NORMAL)] * size)
        self.scores: list[float] = self._array("scores", float, [0.0] * size)
        if len(self.kinds) != size or len(self.scores) != size:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.tokens, token_type and scores differ in length"
            )
        # Files pad the vocabulary with unused entries up to the width of the output layer.
        real = (index for index in reversed(range(size)) if self.kinds[index] != _Kind.UNUSED)
        self.real_size = 1 + next(real, -1)

    def entries(self) -> dict[str, int]:
        """Id by spelling, without the unused entries."""
        return {
            token: index
            for index, token in enumerate(self.tokens)
            if self.kinds[index] != _Kind.UNUSED
        }

    def added(self, kind: _Kind) -> list[AddedToken]:
        """The tokens that are matched whole in a text, before any splitting."""
        return [
            AddedToken(token, normalized=False, special=kind == _Kind.CONTROL)
            for token, found in zip(self.tokens, self.kinds, strict=True)
            if found == kind
        ]

    def merges(self) -> list[tuple[str, str]]:
        """The merge list of a byte-level vocabulary, best first."""
        pairs = [tuple(merge.split(" ")) for merge in self._array("merges", str)]
        broken = next((pair for pair in pairs if len(pair) != 2), None)
        if broken is not None:
            raise ModelError(
                f"{self.file.path}: tokenizer.ggml.merges holds {broken!r}, not a pair"
            )
        return [(left, right) for left, right in pairs]

    def special_tokens(self) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        found = {name: self.token_id(field) for name, field in names.items()}
        return {
            f"{name}_token": self.tokens[index]
            for name, index in found.items()
            if index is not None
        }

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise ModelError(f"{self.file.path}: field {key} is {value!r}, not a token id")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.file.path}: field tokenizer.ggml.{name} is {value!r}")
        return value

    def _array(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            problem = "is missing" if value is None else f"is not an array of {kind.__name__}"
            raise ModelError(f"{self.file.path}: field tokenizer.ggml.{name} {problem}")
        return value


def _split_of(file: GgufFile) -> _Split:
    """Old files name no split; they are read as GPT-2's, as everyone does."""
    name = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    split = SPLITS.get("gpt-2" if name == "default" else name) if isinstance(name, str) else None
    if split is None:
        raise ModelError(
            f"{file.path}: field tokenizer.ggml.pre is {name!r}, a way to split text that is not "
            f"supported; supported: {', '.join(SPLITS)}. A tokenizer.json can be given instead"
        )
    return split


def _byte_level(vocabulary: _Vocabulary, split: _Split) -> tokenizers.Tokenizer:
    backend = _backend(
        vocabulary, vocabulary.entries(), vocabulary.merges(), ignore_merges=split.whole_words
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    prefix = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.special_tokens().get("unk_token")
    backend = _backend(
        vocabulary,
        vocabulary.entries(),
        _merges_by_score(vocabulary),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _backend(
    vocabulary: _Vocabulary, entries: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=entries, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens
        raise ModelError(
            f"{vocabulary.file.path}: tokenizer.ggml.tokens and merges do not fit: {error}"
        ) from error


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: as a merge list, best first.

    Every way to cut a piece into two pieces is a merge of that piece's score.
    """
    entries = vocabulary.entries()
    scored = []
    for token, index in entries.items():
        if vocabulary.kinds[index] not in (_Kind.NORMAL, _Kind.USER_DEFINED):
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in entries and right in entries]
        pairs.sort(key=lambda pair: (entries[pair[0]], entries[pair[1]]))
        scored += [
            (vocabulary.scores[index], len(left), len(right), left, right) for left, right in pairs
        ]
    scored.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in scored]


def _templates(file: GgufFile) -> dict[str, str]:
    template = file.metadata.get("tokenizer.chat_template")
    tools = file.metadata.get("tokenizer.chat_template.tool_use")
    found = {"default": template, "tool_use": tools}
    return {name: source for name, source in found.items() if isinstance(source, str)}
