"""Text to token ids and back, over the `tokenizers` library.

Owns the one Tokenizer class that the engine and the service see, and reading it from a Hugging
Face directory; `gguf_tokenizer.py` builds the same from GGUF metadata. Never touches weights. All
methods may be called from several threads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from prefixcache.errors import FailedPrecondition, InvalidArgument, ModelError
from prefixcache.model.chat import ChatTemplate
from prefixcache.model.hf_config import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table).

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are U+0100 onwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(0x100 + position): byte for position, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


@dataclass(frozen=True)
class TokenizerSettings:
    """What a tokenizer's files say beside the vocabulary.

    special_tokens: text of `bos_token`, `eos_token`, …, as templates and ids need them.
    chat_templates: source by name; "default", and "tool_use" where there is one for tools.
    add_bos, add_eos: whether `encode` adds them; None leaves it to the backend's post-processor.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None


class Tokenizer:
    """Encoder and decoder of one model's vocabulary.

    vocab_size: number of real ids; a model's output layer may be wider, and ids beyond must never
        be sampled.
    eos_token_ids: ids that end an output; bos_token_id: the id that starts a prompt, if any.
    special_token_ids: ids that `decode` leaves out by default.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        *,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._settings = settings
        self._add_named(settings.special_tokens)
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = vocab_size or 1 + max(backend.get_vocab().values(), default=-1)
        self.bos_token_id: int | None = self._id_of(settings.special_tokens.get("bos_token"))
        own_end = self._id_of(settings.special_tokens.get("eos_token"))
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids) or (
            () if own_end is None else (own_end,)
        )
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_text = {i: token.content for i, token in added.items()}
        self._spelling = _spelling(backend)
        self._own_frame = settings.add_bos is not None or settings.add_eos is not None
        self._prefix = (
            [self.bos_token_id] if settings.add_bos and self.bos_token_id is not None else []
        )
        self._suffix = [own_end] if settings.add_eos and own_end is not None else []
        self._templates = {
            name: ChatTemplate(source, settings.special_tokens)
            for name, source in settings.chat_templates.items()
        }

    def encode(
        self, text: str, *, add_special_tokens: bool = True, field: str = "prompt.text"
    ) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text become their ids.

        add_special_tokens: add what the model wants around a prompt (often a beginning-of-sequence
            token); False for a rendered chat template and for a continuation.
        Raises InvalidArgument(field) if the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(field, f"is not Unicode text: {error.reason}") from error
        if add_special_tokens and self._own_frame:
            return [*self._prefix, *self._ids(text, False), *self._suffix]
        return self._ids(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD.

        Raises InvalidArgument("token_ids") for an id outside the vocabulary.
        """
        for token_id in ids:
            self._check(token_id)
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be part of a character.

        Joined over a sequence they are its text, but for the leading space that a SentencePiece
        decoder strips at the very beginning. Special tokens give their own spelling.

        >>> b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("naïve"))
        b'na\\xc3\\xafve'
        """
        self._check(token_id)
        added = self._added_text.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling.bytes_of(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat; encode it with `add_special_tokens=False`.

        Raises InvalidArgument("messages") if the template refuses them, and FailedPrecondition if
        the model has no chat template.
        """
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise FailedPrecondition(
                "the model has no chat template: send text or token_ids instead of messages"
            )
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can be used."""
        return bool(self._templates)

    def files(self) -> dict[str, str]:
        """What `tokenizer_from_path` and other readers of such files make this tokenizer from.

        Raises FailedPrecondition where the backend has parts that cannot be written.
        """
        settings = self._settings
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **settings.special_tokens,
            "add_bos_token": settings.add_bos,
            "add_eos_token": settings.add_eos,
            "chat_template": settings.chat_templates.get("default"),
        }
        try:
            tokenizer = self._backend.to_str()
        except Exception as error:  # the library raises bare Exception
            raise FailedPrecondition(
                f"the tokenizer cannot be written as tokenizer.json: {error}"
            ) from None
        return {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": json.dumps({k: v for k, v in config.items() if v is not None}),
            "generation_config.json": json.dumps({"eos_token_id": list(self.eos_token_ids)}),
        }

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidArgument(
                "token_ids", f"{token_id} is not in the vocabulary of {self.vocab_size}"
            )

    def _add_named(self, special_tokens: Mapping[str, str]) -> None:
        """Make the named tokens special, unless a name is not in the vocabulary (it would grow)."""
        known = [text for text in special_tokens.values() if self._id_of(text) is not None]
        already = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        self._backend.add_special_tokens(
            [
                tokenizers.AddedToken(text, normalized=False, special=True)
                for text in dict.fromkeys(known)
                if text not in already
            ]
        )


@dataclass(frozen=True)
class _Spelling:
    """How vocabulary entries spell bytes: "byte_level", "sentencepiece" or "plain"."""

    kind: str
    alphabet: Mapping[str, int]

    def bytes_of(self, token: str) -> bytes:
        if self.kind == "byte_level":
            try:
                return bytes(self.alphabet[character] for character in token)
            except KeyError:
                return token.encode()
        if self.kind == "sentencepiece":
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()
        return token.encode()


def _spelling(backend: tokenizers.Tokenizer) -> _Spelling:
    """Read off the decoder, which is the part that turns tokens back into text."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b""
    if b'"ByteLevel"' in state:
        return _Spelling("byte_level", byte_alphabet())
    if b'"ByteFallback"' in state or b'"Metaspace"' in state:
        return _Spelling("sentencepiece", {})
    return _Spelling("plain", {})


def tokenizer_from_path(path: Path, *, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Read a tokenizer from a directory with a tokenizer.json, or from such a file.

    Raises ModelError naming the file that is missing or broken.
    """
    directory = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{file}: is missing; only tokenizers with a tokenizer.json can be read")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file}: is not a tokenizer: {error}") from error
    return Tokenizer(backend, _settings(directory), eos_token_ids=eos_token_ids)


def _settings(directory: Path) -> TokenizerSettings:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config.update(read_json(directory / name))
    return TokenizerSettings(
        special_tokens={name: text for name in _NAMED if (text := _token_text(config.get(name)))},
        chat_templates=_chat_templates(directory, config),
    )


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object with its `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The newest convention goes first: a file of its own, then a field of the configuration."""
    default = directory / "chat_template.jinja"
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if default.is_file():
        return {**{file.stem: _text(file) for file in others}, "default": _text(default)}
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict)]
        return {str(item.get("name")): str(item.get("template")) for item in named}
    return {}


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
