"""Tokens to text as they come. Owns the bytes of an unfinished character; never decodes twice.

Text comes from the tokens' bytes, not from per-token strings, so a character split over tokens is
held back until it is whole (DT-03), and the work is constant per token.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class TokenBytes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_token_ids(self) -> Collection[int]: ...  # noqa: D102

    def token_bytes(self, token_id: int) -> bytes: ...  # noqa: D102

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...  # noqa: D102


class IncrementalDetokenizer:
    """The text of one sequence's output.

    The deltas joined are the decoded prompt + output, less the prompt's text: a SentencePiece
    output behind a prompt keeps its leading space, one behind a prompt without text loses it
    (DT-06). Where the prompt ends inside a character, the first delta completes it. Invalid UTF-8
    becomes U+FFFD as by `bytes.decode(errors="replace")`; a genuine U+FFFD is kept.

    prompt_token_ids: the whole prompt, or a tail that holds its last visible tokens.

    >>> text = IncrementalDetokenizer(tokenizer, prompt_ids)       # tokens of the bytes of "é"
    >>> text.push([195]), text.push([169]), text.flush()
    ('', 'é', '')
    """

    __slots__ = ("_at_start", "_pending", "_skip_special_tokens", "_tokenizer")

    def __init__(
        self,
        tokenizer: TokenBytes,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        tail, any_visible = self._tail(prompt_token_ids)
        self._at_start = not any_visible
        self._pending = tail[codecs.utf_8_decode(tail, "replace", False)[1] :]

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that has become final with these tokens; perhaps none."""
        data = b"".join(self._bytes(token) for token in token_ids if self._visible(token))
        return self._decode(data, final=False)

    def flush(self) -> str:
        """The rest at the end of the output: U+FFFD for a character that was never completed."""
        return self._decode(b"", final=True)

    def fork(self) -> "IncrementalDetokenizer":
        """One for a fork at the end: its text begins behind what this one has returned."""
        child = IncrementalDetokenizer.__new__(IncrementalDetokenizer)
        for name in self.__slots__:
            setattr(child, name, getattr(self, name))
        return child

    def _decode(self, data: bytes, final: bool) -> str:
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start:
            self._at_start = False
            # Only decoding knows how many leading spaces this tokenizer strips: none, one or all.
            text = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)
            stripped = (len(data) - len(data.lstrip(b" "))) - (len(text) - len(text.lstrip(" ")))
            return data[max(0, stripped) :]
        return data

    def _visible(self, token_id: int) -> bool:
        hidden = self._skip_special_tokens and token_id in self._tokenizer.special_token_ids
        return not hidden

    def _tail(self, token_ids: Sequence[int]) -> tuple[bytes, bool]:
        """The last bytes of a prompt, enough for any unfinished character; is there any text?"""
        tail = b""
        any_visible = False
        for token in reversed(token_ids):
            if self._visible(token):
                any_visible = True
                tail = self._tokenizer.token_bytes(token) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail, any_visible
