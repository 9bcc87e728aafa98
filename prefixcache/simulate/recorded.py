"""Reading what `serve --record FILE` has written; `prefixcache.engine.recorder` says what is in it.

A file may hold several runs of the server, each behind a header of its own: their digests have
different keys, so blocks of one run are never those of another.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from prefixcache.simulate.fields import json_object, number, whole
from prefixcache.simulate.trace import Names, Request, SequenceRecord

VERSION = 1
MAX_BEAMS = 2**16
_NAME_DIGITS = 16


class RecordedReader:
    """A header, then one request a line."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self.pool_blocks: int | None = None
        self._started = 0.0
        self._in_run = False

    def parse(self, line: str) -> Request | None:
        """A request; None for a header. Raises ValueError with the reason."""
        fields = json_object(line)
        if "prefixcache_trace" in fields:
            self._header(fields)
            return None
        if self.block_size is None or not self._in_run:
            raise ValueError("comes before a header that can be read")
        sequences = fields.get("sequences")
        if not isinstance(sequences, list) or not all(isinstance(s, dict) for s in sequences):
            raise ValueError("sequences must be a list of objects")
        if not sequences:
            raise ValueError("a request needs at least one sequence")
        read = [self._sequence(s, self.block_size) for s in sequences]
        arrival = self._started + number(fields, "arrival")
        admitted = self._started + number(fields, "admitted")
        beams = whole(fields, "beams", most=MAX_BEAMS) if "beams" in fields else 0
        read += _other_beams(read[0], beams - len(read), self.block_size)
        return Request(arrival, admitted, tuple(read), _priority(fields))

    def _header(self, fields: dict[str, Any]) -> None:
        self._in_run = False  # what follows a header that is wrong is not of the run before it
        version = fields["prefixcache_trace"]
        if version != VERSION:
            raise ValueError(f"is of version {version!r}; this program reads {VERSION}")
        size = whole(fields, "block_size", least=1)
        if self.block_size not in (None, size):
            raise ValueError(f"block_size changes from {self.block_size} to {size} within the file")
        pool = whole(fields, "num_blocks", least=1)
        self._started = number(fields, "started")
        self.block_size, self.pool_blocks = size, pool
        self._in_run = True

    def _sequence(self, fields: dict[str, Any], size: int) -> SequenceRecord:
        prompt = whole(fields, "prompt", least=1)
        output = whole(fields, "output")
        filled = whole(fields, "filled")
        if filled > prompt + output:
            raise ValueError(f"filled is {filled}, more than prompt and output together")
        names = _names(fields.get("blocks"))
        needed = max(prompt, filled) // size
        if len(names) != needed:
            raise ValueError(f"blocks holds {len(names)} digests; its lengths need {needed}")
        return SequenceRecord(
            prompt,
            output,
            filled,
            names,
            prompt // size,
            inherited_tokens=whole(fields, "position") if "position" in fields else 0,
            usable_tokens=whole(fields, "usable") if "usable" in fields else None,
            sample=fields.get("sample") is True,
            pruned=fields.get("pruned") is True,
            keep_seconds=number(fields, "keep") if "keep" in fields else 0.0,
        )


def _other_beams(first: SequenceRecord, count: int, size: int) -> list[SequenceRecord]:
    """Beams that were no result: as long as the first, with blocks that nobody knows."""
    whole_prompt = first.blocks[: first.prompt_tokens // size]
    beam = replace(first, blocks=whole_prompt, sample=True, pruned=True, keep_seconds=0.0)
    return [beam] * max(count, 0)


def _priority(fields: dict[str, Any]) -> int:
    value = fields.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise ValueError(f"priority is {value!r}, not a whole number of 32 bits")
    return value


def _names(value: object) -> Names:
    """Digests of 64 bits from one hexadecimal string."""
    if not isinstance(value, str) or len(value) % _NAME_DIGITS:
        raise ValueError("blocks must be a string of 16 hexadecimal digits a block")
    try:
        return np.frombuffer(bytes.fromhex(value), ">u8").astype(np.uint64)
    except ValueError:
        raise ValueError("blocks holds other characters than hexadecimal digits") from None
