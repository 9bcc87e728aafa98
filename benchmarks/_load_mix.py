"""What callers do in `benchmarks.load`: sessions of three kinds that arrive at random.

A session's prompts, its length and its moment follow from the seed alone: every server is asked for
the same, at the same times, however it copes. Owns what is asked; knows no server but by `Target`.

    shared   one call behind one of three system prompts of 512 tokens
    chat     three turns; each prompt holds the whole conversation so far
    fork     an answer behind 256 tokens, then four ways on from it
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Tokens = list[int]

SYSTEM_PROMPTS, SYSTEM_TOKENS = 3, 512
OWN_TOKENS, ANSWER_TOKENS = 32, 32
TURNS, THINK_SECONDS = 3, 0.5
FORK_TOKENS, BRANCHES, BRANCH_OWN = 256, 4, 8
WEIGHTS = {"shared": 0.5, "chat": 0.3, "fork": 0.2}


@dataclass(slots=True)
class Call:
    """One answer that somebody waited for. Times in seconds of one clock; error: None if whole."""

    kind: str
    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.first - self.sent

    @property
    def token_s(self) -> float:
        """Mean time between its tokens."""
        return (self.last - self.first) / max(self.tokens - 1, 1)

    @property
    def whole_s(self) -> float:
        return self.last - self.sent


class Refused(Exception):
    """The server would not take a call; `str` is its reason's name."""


class Target(Protocol):
    """A server under load. Both methods fill in `calls` as tokens arrive; ends are ignored."""

    name: str

    async def generate(self, prompt: Tokens, max_tokens: int, call: Call) -> tuple[Tokens, str]:
        """An answer, and a handle by which `branch` may go on from it. Raises Refused."""

    async def branch(
        self,
        before: Tokens,
        handle: str,
        ways: Sequence[Tokens],
        max_tokens: int,
        calls: list[Call],
    ) -> None:
        """Go on in several ways behind `before`, which is prompt and answer. Raises Refused."""


@dataclass(frozen=True)
class Session:
    """One arrival. parts: the tokens that its caller adds, call by call or branch by branch."""

    kind: str
    at: float
    prompt: Tokens
    parts: list[Tokens]


def sessions(rate: float, seconds: float, seed: int) -> list[Session]:
    """Arrivals of a Poisson process: so many a second on average, for so long."""
    draw = random.Random(f"{seed}/{rate}")
    systems = random.Random(seed)
    prompts = [ids(systems, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    arrivals: list[Session] = []
    at = draw.expovariate(rate)
    while at < seconds:
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "fork":
            prompt = ids(draw, FORK_TOKENS)
            parts = [ids(draw, BRANCH_OWN) for _ in range(BRANCHES)]
        else:
            prompt = draw.choice(prompts) if kind == "shared" else []
            parts = [ids(draw, OWN_TOKENS) for _ in range(1 if kind == "shared" else TURNS)]
        arrivals.append(Session(kind, at, prompt, parts))
        at += draw.expovariate(rate)
    return arrivals


def ids(draw: random.Random, count: int) -> Tokens:
    return [draw.randrange(100, 40_000) for _ in range(count)]


async def run_session(session: Session, target: Target, calls: list[Call]) -> None:
    """Live through one session, and add its calls; one that is refused or fails ends it."""
    own: list[Call] = []
    try:
        if session.kind == "fork":
            await _fork(session, target, own)
        else:
            await _talk(session, target, own)
    except Refused as refusal:
        for call in own:
            if not call.last or call is own[-1]:
                call.error = str(refusal)
    finally:
        calls += own


async def _talk(session: Session, target: Target, calls: list[Call]) -> None:
    history = list(session.prompt)
    for number, own in enumerate(session.parts):
        if number:
            await asyncio.sleep(THINK_SECONDS)
        history += own
        answer, _ = await target.generate(history, ANSWER_TOKENS, _new(session.kind, calls))
        history += answer


async def _fork(session: Session, target: Target, calls: list[Call]) -> None:
    answer, handle = await target.generate(
        session.prompt, ANSWER_TOKENS // 2, _new(session.kind, calls)
    )
    branches = [_new(session.kind, calls) for _ in session.parts]
    before = session.prompt + answer
    await target.branch(before, handle, session.parts, ANSWER_TOKENS // 2, branches)


def _new(kind: str, calls: list[Call]) -> Call:
    call = Call(kind, asyncio.get_running_loop().time())
    calls.append(call)
    return call
