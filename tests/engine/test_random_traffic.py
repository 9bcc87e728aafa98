"""Random traffic on a pool that is far too small, and every answer equal to a quiet engine's.

The seed decides arrivals, forks, aborts, releases, flushes, priorities, pool and budget, so that a
failure replays from its seed. After each step no block is lost; at the end each sequence has the
tokens and logprobs of a fresh request with the same tokens and stream key, alone and uncached.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prefixcache import Engine, EngineConfig, SamplingParams
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
    Started,
    TokenLogprobs,
)
from prefixcache.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.model.checkpoints import write_checkpoint

SALTS = ("", "tenant")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("random") / "llama", "llama", seed=3)


@pytest.fixture(scope="module")
def quiet(checkpoint: Path) -> Engine:
    """The reference: nothing cached, nothing shared, nothing else running."""
    return Engine(
        EngineConfig(
            model=str(checkpoint),
            enable_prefix_caching=False,
            num_gpu_blocks_override=64,
            max_model_len=128,
        )
    )


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
    """Clients of one engine, driven by a seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.salt_of: dict[str, str] = {}
        self.failed: dict[str, Failed] = {}
        self.number = 0

    def act(self) -> None:
        """One client does something."""
        kind = self.random.choices(
            ["generate", "fork", "abort", "release", "flush", "pin"], [5, 4, 1, 1, 0.5, 0.5]
        )[0]
        getattr(self, kind)()

    def generate(self) -> None:
        # Few different tokens and lengths around the block size: many partial and whole hits.
        prompt = tuple(self.random.choices((5, 6), k=self.random.randint(1, 20)))
        params = self.params(n=self.random.choice((1, 1, 2, 3)))
        salt = self.random.choice(SALTS)
        name = self.name(salt)
        for index in range(params.n):
            self.answers[name, index] = Answer(prompt, params)
        self.engine.execute(
            Generate(
                name, prompt, params, salt, self.random.randint(-1, 1), self.random.choice((0, 60))
            )
        )

    def fork(self) -> None:
        entry = self.some_sequence()
        if entry is None:
            return
        salt = entry.sequence.salt
        parents = [entry, *(self.some_sequence(salt) for _ in range(self.random.randint(0, 2)))]
        name = self.name(salt)
        branches = []
        for index, parent in enumerate(p for p in parents if p is not None):
            tokens = parent.sequence.tokens.view().tolist()
            position = self.random.choice((None, self.random.randint(1, len(tokens))))
            forced = tuple(self.random.choices((5, 6), k=self.random.randint(0, 5)))
            params = self.params(n=1)
            self.answers[name, index] = Answer((*tokens[:position], *forced), params)
            keep = self.random.choice((0.0, 60.0))
            branches.append(ForkBranch(parent.sequence.id, params, position, forced, keep))
        self.engine.execute(Fork(name, tuple(branches), salt, self.random.randint(-1, 1)))

    def abort(self) -> None:
        self.engine.execute(Abort(f"r{self.random.randint(0, self.number + 1)}"))

    def release(self) -> None:
        entry = self.some_sequence()
        if entry is not None:
            subtree = self.random.random() < 0.5
            self.engine.execute(Release("call", entry.sequence.id, subtree, entry.sequence.salt))

    def flush(self) -> None:
        self.engine.execute(FlushCache("call", self.random.choice((None, *SALTS))))

    def pin(self) -> None:
        prompt = tuple(self.random.choices((5, 6), k=8))
        self.engine.execute(PinPrefix("call", prompt, 60.0, self.random.choice(SALTS)))

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

    def name(self, salt: str) -> str:
        self.number += 1
        self.salt_of[f"r{self.number}"] = salt
        return f"r{self.number}"

    def some_sequence(self, salt: str | None = None):
        salts = SALTS if salt is None else (salt,)
        entries = [entry for s in salts for entry in self.engine.registry.entries(s)]
        return self.random.choice(entries) if entries else None

    def step(self) -> None:
        for event in self.engine.step():
            self.take(event)
        self.engine.check_integrity()

    def take(self, event: Event) -> None:
        if isinstance(event, Failed):
            assert isinstance(event.error, (ResourceExhausted, InvalidArgument, NotFound)), event
            self.failed[event.request_id] = event
        if not isinstance(event, (Started, Output, Finished)):
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


def run_seed(checkpoint: Path, quiet: Engine, seed: int) -> Traffic:
    choose = random.Random(seed)
    engine = Engine(
        EngineConfig(
            model=str(checkpoint),
            block_size=4,
            num_gpu_blocks_override=choose.choice((12, 16, 24, 40)),
            max_model_len=40,
            max_num_seqs=choose.choice((3, 6)),
            max_num_batched_tokens=choose.choice((6, 9, 64)),
            enable_prefix_caching=choose.random() < 0.85,
            wait_for_inflight=choose.random() < 0.7,
            seed=seed,
        )
    )
    traffic = Traffic(engine, seed)
    for _ in range(120):
        if choose.random() < 0.5:
            traffic.act()
        traffic.step()
    traffic.drain()
    return traffic


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_traffic(checkpoint: Path, quiet: Engine, seed: int) -> None:
    check_seed(checkpoint, quiet, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_answers_do_not_depend_on_more_traffic(checkpoint: Path, quiet: Engine, seed: int) -> None:
    check_seed(checkpoint, quiet, seed)


def check_seed(checkpoint: Path, quiet: Engine, seed: int) -> None:
    traffic = run_seed(checkpoint, quiet, seed)
    engine = traffic.engine
    compared = 0
    for (name, _), answer in traffic.answers.items():
        if name in traffic.failed or not answer.sequence_id:
            continue
        assert answer.finished is not None
        tokens, logprobs = expected(quiet, answer)
        got = len(answer.token_ids)
        # Aborted ones stop early, and so do lone ones that fill the pool: what they have is right.
        assert answer.token_ids == tokens[:got]
        assert answer.logprobs == logprobs[:got]
        compared += got
        if answer.finished.reason == "stop":
            assert got == len(tokens)
    assert compared > 50
    assert engine.manager.num_in_use == engine.manager.num_pinned()
    counters = engine.scheduler.counters
    sources = counters.cached_tokens + counters.forked_tokens + counters.computed_tokens
    assert sources == counters.prompt_tokens
