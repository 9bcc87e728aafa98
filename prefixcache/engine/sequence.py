"""Sequences and groups: what the engine knows of a request while it lives.

Plain state. The scheduler changes tables, leases and progress; the engine appends tokens.
"""

import secrets
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixcache.cache import BlockTable, Lease
from prefixcache.engine.beam import BeamSearch, Floats, Ints
from prefixcache.engine.detokenizer import IncrementalDetokenizer
from prefixcache.engine.messages import TokenLogprobs, Usage
from prefixcache.engine.sampler import SamplerState
from prefixcache.engine.stop import StopChecker
from prefixcache.params import SamplingParams

Tokens = npt.NDArray[np.uint32]


class Owner(NamedTuple):
    """Whose a sequence or pin is. Nothing is shared, or seen, across owners."""

    tenant: str = ""
    salt: str = ""


class State(Enum):
    """WAITING: holds no table (new, queued, preempted). RUNNING: has one. FINISHED: has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenBuffer:
    """Token ids of one sequence, growing at the end: uint32, as the cache compares them."""

    __slots__ = ("_array", "_length")

    def __init__(self, token_ids: Tokens | tuple[int, ...]) -> None:
        self._array = np.array(token_ids, np.uint32)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self._length == len(self._array):
            room = np.empty(max(64, self._length // 2), np.uint32)
            self._array = np.concatenate([self._array, room])
        self._array[self._length] = token_id
        self._length += 1

    def view(self) -> Tokens:
        """uint32 [length], a view."""
        return self._array[: self._length]

    def copy(self) -> "TokenBuffer":
        """A buffer of its own."""
        return TokenBuffer(self.view())


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of tokens: a sample, a branch, or a scored continuation.

    num_prompt_tokens: tokens it began with; for a fork all up to the end of the forced
        continuation. fork_position: how many of them came from the parent.
    num_computed: tokens whose forward pass has run, or whose KV was found; reset by preemption.
    stop_ids: the model's end tokens, unless ignored, and the request's own.
    beam_candidates: in a beam search, logprobs and ids of the best next tokens.
    logprob_start: first prompt position whose logprob is wanted, or None. Its prompt must be run
        from there on, so only what lies before is looked up.
    counts_prompt: False for samples after the first, whose prompt that one has counted.
    lease: blocks that a queued fork inherits. keep_seconds: how long to keep it after its end.
    """

    index: int
    params: SamplingParams
    stop_ids: frozenset[int]
    stream_key: int
    tokens: TokenBuffer
    detokenizer: IncrementalDetokenizer
    stop: StopChecker
    sampler_state: SamplerState | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    parent_id: str = ""
    fork_position: int = 0
    keep_seconds: float = 0.0
    logprob_start: int | None = None
    top_logprobs: int = 0
    owner: Owner = field(default_factory=Owner)

    state: State = State.WAITING
    table: BlockTable | None = None
    lease: Lease | None = None
    num_computed: int = 0
    num_prompt_tokens: int = field(init=False)
    next_branch: int = 0
    blocked_on: bytes | None = None

    announced: bool = False
    counts_prompt: bool = True
    counted: bool = False
    num_cached_tokens: int = 0
    num_forked_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    beam_candidates: tuple[Floats, Ints] | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    def branch(self) -> "Sequence":
        """Another beam with the same past: prompt, output and text state."""
        state = self.sampler_state
        child = Sequence(
            index=self.index,
            params=self.params,
            stop_ids=self.stop_ids,
            stream_key=self.stream_key,
            tokens=self.tokens.copy(),
            detokenizer=self.detokenizer.fork(),
            stop=self.stop.fork(),
            sampler_state=None if state is None else state.copy(),
            owner=self.owner,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.announced = True  # the search was, under its first beam
        return child

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def usage(self) -> Usage:
        """Tokens by source; samples of one prompt count it once, at index 0, once admitted."""
        prompt = self.num_prompt_tokens if self.counts_prompt and self.counted else 0
        cached, forked = self.num_cached_tokens, self.num_forked_tokens
        return Usage(prompt, cached, forked, prompt - cached - forked, self.num_generated)

    @property
    def next_logprob_position(self) -> int | None:
        """The first prompt position whose logprob is still missing; None where none is."""
        if self.logprob_start is None:
            return None
        position = self.logprob_start + len(self.prompt_logprobs)
        return position if position < self.num_prompt_tokens else None

    @property
    def last_useful_cached(self) -> int:
        """How many tokens may be taken from the cache: the last one is always run."""
        limit = len(self.tokens) - 1
        wanted = self.next_logprob_position
        return limit if wanted is None else min(limit, wanted - 1)


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """The sequences of one request: queued, admitted and preempted together.

    priority: lower is more urgent. arrival: order among equals, kept through preemption.
    num_samples: branches of the prompt that will be sampled; the first sequence runs the prompt,
    the others are forked from it when it is done. beam: the search that the sequences serve, whose
    `live` ones are its running beams in order. first: the sequence that ran the prompt.
    most_blocks: what it may hold when all of it has grown to its end.
    trace_parent: as in its command.
    """

    request_id: str
    sequences: list[Sequence]
    priority: int
    arrival: int
    namespace: bytes
    num_samples: int = 1
    is_fork: bool = False
    beam: BeamSearch | None = None
    most_blocks: int = 0
    trace_parent: str = ""
    first: Sequence = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.sequences[0]

    @property
    def tenant(self) -> str:
        """Whose it is; empty where there are no tenants."""
        return self.first.owner.tenant

    @property
    def order(self) -> tuple[int, int]:
        """Most urgent first, then oldest first."""
        return (self.priority, self.arrival)

    @property
    def live(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [s for s in self.sequences if s.state is not State.FINISHED]

    @property
    def num_to_keep(self) -> int:
        """Sequences that will be kept at their end, those still to be forked included."""
        of_first = 1 if self.first.keep_seconds else 0
        if self.beam is not None:  # beams come and go; its results are kept
            return of_first * self.beam.params.num_return_sequences
        return sum(1 for s in self.live if s.keep_seconds) + of_first * (self.num_samples - 1)

    def take_unborn(self) -> range:
        """Indices of samples that will not be forked after all: the first one ended before."""
        born = len(self.sequences)
        unborn = range(born, born + self.num_samples - 1)
        self.num_samples = 1
        return unborn

    @property
    def num_branches(self) -> int:
        """Rows that the group may take in a step, those still to be forked included."""
        if self.beam is not None:
            return self.beam.params.num_beams
        return len(self.live) + self.num_samples - 1
