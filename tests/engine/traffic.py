"""Clients of one engine, driven by a seed, and the proof that each got a quiet engine's answer."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import (
    Abort,
    Event,
    Failed,
    Finished,
    FlushCache,
    Fork,
    ForkBranch,
    Generate,
    Output,
    PinPrefix,
    Release,
    Score,
    SetTenants,
    Started,
    TenantPolicy,
    TokenLogprobs,
)
from prefixcache.engine.outputs import RequestOutput
from prefixcache.engine.registry import Entry
from prefixcache.engine.sequence import Owner
from prefixcache.errors import InvalidArgument, NotFound, PrefixCacheError, ResourceExhausted

SALTS = ("", "tenant")
REFUSALS = (ResourceExhausted, InvalidArgument, NotFound)


@dataclass
class Answer:
    """What one index of a request gave, and what it was asked."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sequence_id: str = ""
    stream_key: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None


class Traffic:
    """Clients of one engine, driven by a seed; those of several tenants, if there are policies."""

    def __init__(self, engine: Engine, seed: int, policies: Sequence[TenantPolicy] = ()) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.policies = tuple(policies)
        names = [policy.name for policy in policies] or [""]
        self.owners = [Owner(name, salt) for name in names for salt in SALTS]
        engine.execute(SetTenants(self.policies))
        self.answers: dict[tuple[str, int], Answer] = {}
        self.searches: dict[str, tuple[Generate | Score, RequestOutput]] = {}
        self.owner_of: dict[str, Owner] = {}
        self.failed: dict[str, Failed] = {}
        self.number = 0
        self.allowed: tuple[type[PrefixCacheError], ...] = REFUSALS

    def act(self) -> None:
        """One client does something."""
        kind = self.random.choices(
            ["generate", "fork", "beam", "score", "abort", "release", "flush", "pin"],
            [5, 4, 0.7, 0.7, 1, 1, 0.5, 0.5],
        )[0]
        getattr(self, kind)()

    def generate(self) -> None:
        prompt = self.prompt(20)
        params = self.params(n=self.random.choice((1, 1, 2, 3)))
        owner = self.random.choice(self.owners)
        name = self.name(owner)
        for index in range(params.n):
            self.answers[name, index] = Answer(prompt, params)
        priority, keep = self.random.randint(-1, 1), self.random.choice((0, 60))
        self.engine.execute(
            Generate(name, prompt, params, owner.salt, priority, keep, owner.tenant)
        )

    def fork(self) -> None:
        entry = self.some_sequence()
        if entry is None:
            return
        owner = entry.sequence.owner
        parents = [entry, *(self.some_sequence(owner) for _ in range(self.random.randint(0, 2)))]
        name = self.name(owner)
        branches = []
        for index, parent in enumerate(p for p in parents if p is not None):
            tokens = parent.sequence.tokens.view().tolist()
            position = self.random.choice((None, self.random.randint(1, len(tokens))))
            forced = tuple(self.random.choices((5, 6), k=self.random.randint(0, 5)))
            params = self.params(n=1)
            self.answers[name, index] = Answer((*tokens[:position], *forced), params)
            keep = self.random.choice((0.0, 60.0))
            branches.append(ForkBranch(parent.sequence.id, params, position, forced, keep))
        priority = self.random.randint(-1, 1)
        self.engine.execute(Fork(name, tuple(branches), owner.salt, priority, owner.tenant))

    def beam(self) -> None:
        width = self.random.choice((2, 3))
        params = BeamSearchParams(width, self.random.randint(1, width), max_tokens=6)
        owner = self.random.choice(self.owners)
        name = self.name(owner)
        prompt = self.prompt(20)
        self.searches[name] = (Generate("quiet", prompt, params), RequestOutput(name, []))
        keep = self.random.choice((0, 60))
        self.engine.execute(Generate(name, prompt, params, owner.salt, 0, keep, owner.tenant))

    def score(self) -> None:
        owner = self.random.choice(self.owners)
        name = self.name(owner)
        prefix, continuations = self.prompt(12), (self.prompt(9), self.prompt(9))
        quiet = Score("quiet", prefix, continuations, top_logprobs=1)
        self.searches[name] = (quiet, RequestOutput(name, []))
        self.engine.execute(Score(name, prefix, continuations, owner.salt, 0, 1, owner.tenant))

    def prompt(self, longest: int) -> tuple[int, ...]:
        """Few different tokens and lengths around the block size: many partial and whole hits."""
        return tuple(self.random.choices((5, 6), k=self.random.randint(1, longest)))

    def abort(self) -> None:
        self.engine.execute(Abort(f"r{self.random.randint(0, self.number + 1)}"))

    def release(self) -> None:
        entry = self.some_sequence()
        if entry is not None:
            subtree = self.random.random() < 0.5
            tenant, salt = entry.sequence.owner
            self.engine.execute(Release("call", entry.sequence.id, subtree, salt, tenant))

    def flush(self) -> None:
        owner = self.random.choice((None, *self.owners))
        chosen = self.owners[0] if owner is None else owner
        salt = None if owner is None else owner.salt
        self.engine.execute(FlushCache("call", salt, chosen.tenant))

    def pin(self) -> None:
        prompt = tuple(self.random.choices((5, 6), k=8))
        owner = self.random.choice(self.owners)
        self.engine.execute(PinPrefix("call", prompt, 60.0, owner.salt, owner.tenant))

    def params(self, n: int) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=self.random.choice((0.0, 1.0)),
            max_tokens=self.random.choice((1, 3, 9, 14)),
            repetition_penalty=self.random.choice((1.0, 1.3)),
            min_tokens=self.random.choice((0, 0, 1)),
            seed=self.random.choice((None, 7)),
            logprobs=2,
        )

    def name(self, owner: Owner) -> str:
        self.number += 1
        self.owner_of[f"r{self.number}"] = owner
        return f"r{self.number}"

    def some_sequence(self, owner: Owner | None = None) -> Entry | None:
        owners = self.owners if owner is None else (owner,)
        entries = [entry for one in owners for entry in self.engine.registry.entries(one)]
        return self.random.choice(entries) if entries else None

    def step(self) -> None:
        for event in self.engine.step():
            self.take(event)
        self.engine.check_integrity()
        self.check_owners()

    def check_owners(self) -> None:
        """No block is held for two owners, and no tenant holds more than it may."""
        held: dict[int, Owner] = {}
        live, kept = Counter[str](), Counter[str]()
        for owner in self.owners:
            for entry in self.engine.registry.entries(owner):
                (live if entry.lease is None else kept)[owner.tenant] += 1
                for block in blocks_of(entry):
                    assert held.setdefault(block, owner) == owner
        for policy in self.policies:
            assert policy.max_sequences is None or live[policy.name] <= policy.max_sequences
            assert policy.max_leases is None or kept[policy.name] <= policy.max_leases

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            assert isinstance(event.error, self.allowed), event
            self.failed[event.request_id] = event
        if not isinstance(event, (Started, Output, Finished)):
            return
        if event.request_id in self.searches:
            self.searches[event.request_id][1].apply([event])
            return
        answer = self.answers[event.request_id, event.index]
        match event:
            case Started():
                assert not answer.sequence_id
                answer.sequence_id, answer.stream_key = event.sequence_id, event.stream_key
            case Output():
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs
            case Finished():
                assert answer.finished is None
                answer.finished = event

    def drain(self) -> None:
        for _ in range(3_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def blocks_of(entry: Entry) -> list[int]:
    """What is held for a sequence, as far as it is there: a lease may have lost some."""
    lease, table = entry.lease, entry.sequence.table
    if lease is not None:
        return lease.row[: lease.node_blocks].tolist() if lease.intact else []
    return [] if table is None else table.block_ids().tolist()


def compare(traffic: Traffic, quiet: Engine) -> int:
    """Assert that every answer is a quiet engine's; how many tokens were compared.

    Aborted ones stop early, and so do lone ones that fill the pool: what they have is right.
    """
    compared = 0
    for (name, _), answer in traffic.answers.items():
        if name in traffic.failed or not answer.sequence_id:
            continue
        assert answer.finished is not None, name
        tokens, logprobs = expected(quiet, answer)
        got = len(answer.token_ids)
        assert answer.token_ids == tokens[:got]
        assert answer.logprobs == logprobs[:got]
        compared += got
        if answer.finished.reason == "stop":
            assert got == len(tokens)
    for name, (command, output) in traffic.searches.items():
        ends = {out.finish_reason for out in output.outputs}
        if name in traffic.failed or not ends or "abort" in ends:
            continue
        assert None not in ends, name
        expected_output = quiet.run([command])[0]
        for ours, theirs in zip(output.outputs, expected_output.outputs, strict=True):
            assert (ours.token_ids, ours.score) == (theirs.token_ids, theirs.score)
        # the order of two continuations' scores in the stream is the order of their steps
        scores = [sorted(map(repr, o.prompt_logprobs)) for o in (output, expected_output)]
        assert scores[0] == scores[1]
        compared += sum(len(out.token_ids) for out in output.outputs) + len(scores[0])
    return compared


def expected(quiet: Engine, answer: Answer) -> tuple[list[int], list[TokenLogprobs]]:
    params = SamplingParams(
        temperature=answer.params.temperature,
        max_tokens=answer.params.max_tokens,
        repetition_penalty=answer.params.repetition_penalty,
        min_tokens=answer.params.min_tokens,
        stream_key=answer.stream_key,
        logprobs=2,
    )
    output = quiet.generate([answer.prompt], params)[0].outputs[0]
    return output.token_ids, output.logprobs
