"""Recording requests for `prefixcache simulate`: lengths, times and digests, no text and no token.

Owns the file's format. One JSON object a line, each written whole when its request has ended:

    {"prefixcache_trace": 1, "started": …, "block_size": 16, "num_blocks": 4096}
    {"arrival": 0.2, "admitted": 0.2, "end": 1.4, "kind": "fork", "salt": "…", "priority": 0,
     "sequences": [{"id": "…", "parent": "…", "position": 40, "prompt": 44, "cached": 0,
                    "forked": 40, "output": 9, "filled": 52, "blocks": "…", "reason": "stop"}]}

Times are seconds: `started` of the wall clock, the others since then. blocks: 16 hexadecimal digits
for each whole block of the prompt, and of what was generated and run behind it; a block's digest
covers its namespace and all tokens before it. filled: tokens whose KV was there at the end.

Digests, and those that stand for salts and sequence ids, are keyed BLAKE2b. The key is drawn for
each run of the server, never written, and so nobody can try out prompts against the file.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from prefixcache.cache import token_bytes
from prefixcache.cache.digest import TOKEN_BYTES
from prefixcache.engine.messages import FinishReason
from prefixcache.engine.observer import EngineObserver
from prefixcache.engine.sequence import Sequence, SequenceGroup, Tokens
from prefixcache.errors import ConfigurationError, PrefixCacheError

logger = logging.getLogger(__name__)

VERSION = 1
_DIGEST_BYTES = 8


@dataclass(slots=True)
class _Live:
    """What is known of a request before it ends."""

    arrival: float
    admitted: float | None = None
    reasons: dict[str, FinishReason] = field(default_factory=dict)


class Recorder(EngineObserver):
    """Appends to a file. A write that fails ends the recording, and is logged once.

    The file then ends with the last whole line. `recording_failed` in the stats tells of it.

    clock: monotonic, seconds.
    """

    def __init__(self, file: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: TextIO | None = file
        self._clock = clock
        self._started = clock()
        self._key = secrets.token_bytes(32)
        self._block_size = 0
        self._size = _size(file)
        self._live: dict[str, _Live] = {}

    def begin(self, block_size: int, num_blocks: int) -> None:
        """Write the header, before the first request."""
        self._block_size = block_size
        header = {"prefixcache_trace": VERSION, "started": round(time.time(), 3)}
        self._write({**header, "block_size": block_size, "num_blocks": num_blocks})

    def queued(self, group: SequenceGroup) -> None:
        """Note when it came."""
        if self._file is not None:
            self._live[group.request_id] = _Live(self._now())

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """Note when it got its first blocks."""
        live = self._live.get(group.request_id)
        if live is not None and live.admitted is None:
            live.admitted = self._now()

    def finished(self, sequence: Sequence, group: SequenceGroup, reason: FinishReason) -> None:
        """Note how a sequence ended."""
        live = self._live.get(group.request_id)
        if live is not None:
            live.reasons[sequence.id] = reason

    def ended(
        self, request_id: str, group: SequenceGroup | None, error: PrefixCacheError | None
    ) -> None:
        """Write a request that had got blocks; one that had none has asked for nothing."""
        live = self._live.pop(request_id, None) if group is not None else None
        if live is None or group is None or live.admitted is None:
            return
        record: dict[str, Any] = {
            "arrival": live.arrival,
            "admitted": live.admitted,
            "end": self._now(),
            "kind": "fork" if group.is_fork else "beam" if group.beam else "generate",
            "priority": group.priority,
        }
        tenant, salt = group.first.owner
        if tenant or salt:
            record["salt"] = self._name(f"{len(tenant)}:{tenant}{salt}")
        if group.beam is not None:
            record["beams"] = group.beam.params.num_beams
            record["sequences"] = list(self._results(group))
        else:
            record["sequences"] = [
                self._sequence(s, group, live.reasons.get(s.id)) for s in group.sequences
            ]
        if error is not None:
            record["error"] = type(error).__name__
        self._write(record)

    def figures(self) -> dict[str, float]:
        """Whether it goes on."""
        return {"recording_failed": float(self._file is None)}

    # ------------------------------------------------------------ one sequence

    def _sequence(
        self, sequence: Sequence, group: SequenceGroup, reason: FinishReason | None
    ) -> dict[str, Any]:
        tokens, prompt = sequence.tokens.view(), sequence.num_prompt_tokens
        filled = min(sequence.num_computed, len(tokens))
        record: dict[str, Any] = {
            "id": self._name(sequence.id),
            "prompt": prompt,
            "cached": sequence.num_cached_tokens,
            "forked": sequence.num_forked_tokens,
            "output": sequence.num_generated,
            "filled": filled,
            "blocks": self._digests(group, tokens[: max(prompt, filled)]),
            "reason": reason,
        }
        if sequence.logprob_start is not None:
            record["usable"] = max(sequence.logprob_start - 1, 0)
        if not sequence.counts_prompt:
            record["sample"] = True
        elif sequence.parent_id:
            record["parent"] = self._name(sequence.parent_id)
            record["position"] = sequence.fork_position
        if reason is None or (reason == "abort" and group.is_fork):
            record["pruned"] = True
        if sequence.keep_seconds and reason not in (None, "abort"):
            record["keep"] = sequence.keep_seconds
        return record

    def _results(self, group: SequenceGroup) -> Iterator[dict[str, Any]]:
        """The results of a search, or its prompt where it has none; its beams come and go."""
        first, search = group.first, group.beam
        assert search is not None
        prompt = first.tokens.view()[: first.num_prompt_tokens]
        results = [h.ending.tokens for h in search.finished[: search.params.num_return_sequences]]
        for index, generated in enumerate(results or [()]):
            tokens = np.concatenate([prompt, np.array(generated, np.uint32)])
            filled = len(tokens) - 1 if generated else min(first.num_computed, len(prompt))
            yield {
                "prompt": len(prompt),
                "cached": first.num_cached_tokens if index == 0 else 0,
                "output": len(generated),
                "filled": filled,
                "blocks": self._digests(group, tokens[: max(len(prompt), filled)]),
                "pruned": True,
                **({"sample": True} if index else {}),
                **({"keep": first.keep_seconds} if generated and first.keep_seconds else {}),
            }

    def _digests(self, group: SequenceGroup, tokens: Tokens) -> str:
        """Chained digests of the whole blocks, as one hexadecimal string."""
        data, size = token_bytes(tokens), self._block_size * TOKEN_BYTES
        digest = self._digest(group.namespace)
        names = []
        for start in range(0, len(data) - size + 1, size):
            digest = self._digest(digest + data[start : start + size])
            names.append(digest)
        return b"".join(names).hex()

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=self._key).digest()

    def _name(self, text: str) -> str:
        return self._digest(b"name" + text.encode()).hex()

    # ------------------------------------------------------------ the file

    def _now(self) -> float:
        return round(self._clock() - self._started, 6)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()
            self._size = _size(self._file)
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            logger.error("recording has stopped: %s", error)
            _end(self._file, self._size)
            self._file = None
            self._live.clear()


def _size(file: TextIO) -> int:
    try:
        return os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # it is not one of the system's
        return 0


def _end(file: TextIO, size: int) -> None:
    """Close a file that cannot be written; what there is of a line behind `size` bytes goes."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.dup(file.fileno())
        with contextlib.suppress(OSError):
            file.close()  # which tries to write once more
        with contextlib.suppress(OSError):
            os.ftruncate(handle, size)
        os.close(handle)


def open_record(path: Path) -> TextIO:
    """A file to append to, readable by its owner alone. Raises ConfigurationError."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return os.fdopen(handle, "a", encoding="ascii")
    except OSError as error:
        raise ConfigurationError(f"--record {path}: {error.strerror}") from None
