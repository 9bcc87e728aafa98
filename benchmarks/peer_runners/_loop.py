"""What every runner does: read a job, warm up, time its rows, print one JSON line.

Imports the standard library alone, because each peer's own interpreter runs it. Owns the clock and
the checks, so that no peer is timed or checked in another way than ours.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Tokens = list[int]


@dataclass
class Result:
    """Of one call: output tokens of each sequence, and what the server says of its cache.

    cached: prompt tokens that came from the cache, the fewest over the prompts; None where the
        server doesn't say. first_token_s: its own figure for the first token, likewise.
    """

    lengths: list[int]
    cached: int | None = None
    first_token_s: float | None = None


class Server:
    """What a runner gives. `sample` and `beam` return when the last token is there."""

    version: str
    facts: dict[str, Any]

    def prepare(self, row: dict[str, Any]) -> None:
        """Before the clock starts: nothing, unless a peer needs its prefix handed to it."""

    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        """Sample n sequences of exactly max_tokens behind each prompt; greedy where n = 1."""
        raise NotImplementedError

    def beam(self, prompt: Tokens, width: int, max_tokens: int) -> Result:
        """Search max_tokens steps with `width` beams, and return the best hypothesis."""
        raise NotImplementedError


@dataclass
class Timing:
    """A row's calls: seconds of each, and of the last one what the server said."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    cached: list[int | None] = field(default_factory=list)
    first_token_s: list[float | None] = field(default_factory=list)
    error: str | None = None


def serve(make: Callable[[dict[str, Any]], Server]) -> None:
    """Run the job on stdin against the server that `make` starts; chatter goes to stderr."""
    job = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    server = make(job)
    started = time.perf_counter() - start
    for row in job["warm_up"]:
        _call(server, row, row["calls"][0])
    rows = {row["name"]: asdict(_row(server, row)) for row in job["rows"]}
    line = {"version": server.version, "facts": server.facts, "start_s": started, "rows": rows}
    print(json.dumps(line), file=answer, flush=True)
    answer.close()
    os._exit(0)  # servers with threads of their own may hang in an orderly end


def _row(server: Server, row: dict[str, Any]) -> Timing:
    """Time each call of a row, behind requests that warm its prefix where there are some."""
    timing = Timing()
    try:
        for prompt in row["warm"]:
            server.sample([prompt], 1, 1)
        for prompts in row["calls"]:
            server.prepare(row)
            start = time.perf_counter()
            result = _call(server, row, prompts)
            timing.seconds.append(time.perf_counter() - start)
            _check(row, len(prompts), result.lengths)
            timing.tokens = sum(result.lengths)
            timing.cached.append(result.cached)
            timing.first_token_s.append(result.first_token_s)
    except Exception as error:  # one row that a peer cannot do must not cost the others
        timing.error = f"{type(error).__name__}: {error}"[:300]
    print(f"{row['name']}: {asdict(timing)}", file=sys.stderr, flush=True)
    return timing


def _call(server: Server, row: dict[str, Any], prompts: list[Tokens]) -> Result:
    if row["kind"] == "beam":
        return server.beam(prompts[0], row["n"], row["max_tokens"])
    return server.sample(prompts, row["n"], row["max_tokens"])


def _check(row: dict[str, Any], prompts: int, lengths: Sequence[int]) -> None:
    """Raise where the work that was asked for has not been done."""
    sequences = 1 if row["kind"] == "beam" else prompts * row["n"]
    if list(lengths) != [row["max_tokens"]] * sequences:
        raise ValueError(
            f"wanted {sequences} of {row['max_tokens']} tokens, got {len(lengths)} sequences of "
            f"{min(lengths, default=0)} to {max(lengths, default=0)}"
        )
