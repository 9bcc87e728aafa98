"""Reading traces: Mooncake's, Azure's, and those that `serve --record` writes.

Owns what a line means and what is wrong with it. A malformed line is an error that names file, line
and reason; with `skip_bad` it is left out and counted.

| format | a line | source |
|---|---|---|
| mooncake | timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens | FAST '25 |
| azure | TIMESTAMP,ContextTokens,GeneratedTokens: lengths, no blocks | Azure Public Dataset |
| prefixcache | a header, then a request a line, see `prefixcache.engine.recorder` | ours |
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, count, islice
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np

from prefixcache.errors import TraceError
from prefixcache.simulate.fields import json_object, number, whole
from prefixcache.simulate.recorded import RecordedReader
from prefixcache.simulate.trace import Names, Request, SequenceRecord, Trace

Format = Literal["auto", "mooncake", "azure", "prefixcache"]
Progress = Callable[[str, int, int], None]

MOONCAKE_BLOCK = 512
MAX_LINE_BYTES = 2**28
"""A line has a byte for each token of a request, about."""

_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_NO_BLOCKS: Names = np.empty(0, np.uint64)
_REPORT_LINES = 1000


class _Reader(Protocol):
    """One format. block_size and pool_blocks are known once a line has been read."""

    block_size: int | None
    pool_blocks: int | None

    def parse(self, line: str) -> Request | None:
        """What a line holds; None where that is no request. Raises ValueError with the reason."""


class MooncakeReader:
    """One JSON object a line. The ids stand for prompts only; outputs have none."""

    block_size: int | None = MOONCAKE_BLOCK
    pool_blocks: int | None = None

    def parse(self, line: str) -> Request:
        """A request of one sequence."""
        fields = json_object(line)
        arrival = number(fields, "timestamp") / 1000
        prompt = whole(fields, "input_length", least=1)
        output = whole(fields, "output_length")
        ids = fields.get("hash_ids")
        if not isinstance(ids, list) or not all(_is_name(i) for i in ids):
            raise ValueError("hash_ids must be a list of whole numbers of 64 bits")
        needed = -(-prompt // MOONCAKE_BLOCK)
        if len(ids) != needed:
            raise ValueError(
                f"{len(ids)} hash_ids for input_length {prompt}: {needed} blocks of "
                f"{MOONCAKE_BLOCK} tokens are needed"
            )
        names = np.array(ids, np.uint64)
        filled = needed * MOONCAKE_BLOCK
        sequence = SequenceRecord(prompt, output, filled, names, needed)
        return Request(arrival, arrival, (sequence,))


class AzureReader:
    """Lines of three comma-separated fields behind a header."""

    block_size: int | None = None
    pool_blocks: int | None = None

    def parse(self, line: str) -> Request | None:
        """A request of lengths only."""
        cells = [cell.strip() for cell in line.split(",")]
        if cells[0].upper() == "TIMESTAMP":
            return None
        if len(cells) != 3:
            raise ValueError(f"{len(cells)} fields; TIMESTAMP,ContextTokens,GeneratedTokens wanted")
        try:
            when = datetime.fromisoformat(cells[0])
        except ValueError:
            raise ValueError(f"TIMESTAMP is {cells[0]!r}, not a date and time") from None
        prompt, output = (_count(cell) for cell in cells[1:])
        if prompt < 1:
            raise ValueError("ContextTokens must be at least 1")
        arrival = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        sequence = SequenceRecord(prompt, output, prompt + output, _NO_BLOCKS, 0)
        return Request(arrival, arrival, (sequence,))


_READERS: dict[str, Callable[[], _Reader]] = {
    "mooncake": MooncakeReader,
    "azure": AzureReader,
    "prefixcache": RecordedReader,
}


def read_trace(
    path: Path,
    format: Format = "auto",
    *,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace file.

    format: "auto" looks at the first line. limit: requests to read at most.
    progress: called with (step, bytes read, bytes in all).
    Raises TraceError: the file cannot be read, is of no known format, holds no request, or, without
    `skip_bad`, has a malformed line.
    """
    with closing(_Lines(path, progress)) as lines:
        kind = _detect(path, lines.first()) if format == "auto" else format
        reader = _READERS[kind]()
        requests, skipped = _requests(path, lines, reader, limit, skip_bad)
    if not requests:
        bad = f"; {skipped} malformed lines were skipped" if skipped else ""
        raise TraceError(f"{path}: holds no request{bad}")
    ordered = _from_zero(requests)
    return Trace(str(path), kind, ordered, reader.block_size, skipped, reader.pool_blocks)


def _requests(
    path: Path, lines: "_Lines", reader: _Reader, limit: int | None, skip_bad: bool
) -> tuple[list[Request], int]:
    """The requests in the order of the file, and how many lines were left out."""
    requests: list[Request] = []
    skipped = 0
    for line in lines:
        try:
            request = reader.parse(line.decode())
        except ValueError as error:
            if not skip_bad:
                raise TraceError(f"{path}:{line.number}: {_reason(error)}") from None
            skipped += 1
            continue
        if request is not None:
            requests.append(request)
            if len(requests) == limit:
                break
    return requests, skipped


def _from_zero(requests: list[Request]) -> tuple[Request, ...]:
    """In order of admission; the first arrives at 0."""
    requests.sort(key=lambda request: request.admitted)
    start = min(request.arrival for request in requests)
    return tuple(
        replace(request, arrival=request.arrival - start, admitted=request.admitted - start)
        for request in requests
    )


def _detect(path: Path, first: bytes) -> str:
    if not first:
        raise TraceError(f"{path}: is empty")
    if first.startswith(_GZIP):
        raise TraceError(f"{path}: is compressed: unpack it first (gzip -d)")
    line = first.decode("utf-8", "replace").strip()
    if line.upper().startswith("TIMESTAMP,"):
        return "azure"
    try:
        fields = json_object(line)
    except ValueError:
        fields = {}
    if "prefixcache_trace" in fields:
        return "prefixcache"
    if "hash_ids" in fields:
        return "mooncake"
    raise TraceError(
        f"{path}:1: begins like no known trace (mooncake, azure, prefixcache): say which it is "
        "with --format"
    )


class _Line(NamedTuple):
    number: int
    data: bytes

    def decode(self) -> str:
        """Its text. Raises ValueError where it is not UTF-8."""
        return self.data.decode("utf-8", "strict").strip()


def _is_name(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


class _Lines:
    """The lines of a file that are not blank, with their numbers; read once, so a pipe will do."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._path = path
        self._progress = progress
        self._total = 0
        self._lines = self._read()
        self._first: list[_Line] = []

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def first(self) -> bytes:
        """The first of them, which will come again; empty where there is none."""
        self._first = list(islice(self._lines, 1))
        return self._first[0].data if self._first else b""

    def __iter__(self) -> Iterator[_Line]:
        done = 0
        for line in chain(self._first, self._lines):
            done += len(line.data)
            if self._progress is not None and line.number % _REPORT_LINES == 0:
                self._progress("read trace", done, self._total)
            yield line
        if self._progress is not None:
            self._progress("read trace", self._total, self._total)

    def _read(self) -> Generator[_Line, None, None]:
        try:
            with self._path.open("rb") as file:
                self._total = os.fstat(file.fileno()).st_size
                for number in count(1):
                    data = file.readline(MAX_LINE_BYTES)
                    if not data:
                        return
                    if len(data) == MAX_LINE_BYTES:
                        raise TraceError(f"{self._path}:{number}: is too long for a line")
                    if data.strip():
                        yield _Line(number, data.removeprefix(_MARK) if number == 1 else data)
        except OSError as error:
            raise TraceError(f"{self._path}: cannot be read: {error.strerror}") from None


def _count(cell: str) -> int:
    if not cell.isdecimal() or len(cell) > 10 or not int(cell) < 2**31:
        raise ValueError(f"{cell[:60]!r} is no number of tokens")
    return int(cell)


def _reason(error: ValueError) -> str:
    return "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
