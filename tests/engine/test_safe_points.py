"""Requests that meet each other between steps: forks of what runs, queues and has ended; turns."""

from dataclasses import replace

import numpy as np
import pytest

from prefixcache import BeamSearchParams, SamplingParams
from prefixcache.engine.messages import Failed, Fork, ForkBranch, GetStats, Reply, Started
from prefixcache.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits, run_one
from tests.model.checkpoints import TOKENIZER_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, TOKENIZER_SIZE, count).tolist()


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("state", ["queued", "chunk 1", "chunk 2", "decoding", "preempted", "kept"])
@pytest.mark.parametrize("position", [None, 5, 18])
def test_a_fork_never_sees_kv_that_is_not_written(
    state: str, position: int | None, make_engine: MakeEngine
) -> None:
    """FK-06: of a prompt in three chunks. A child waits for what is missing, or computes it."""
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    driver = Driver(engine)
    tokens = prompt(20)
    parent = driver.start("parent", tokens, GREEDY, keep_seconds=60)
    name = driver.group("parent").first.id
    steps = {"queued": 0, "chunk 1": 1, "chunk 2": 2, "decoding": 5, "preempted": 5, "kept": 30}
    for _ in range(steps[state]):
        driver.step()
    if state == "preempted":
        driver.preempt("parent")
    assert parent.finished is (state == "kept")
    known = [*tokens, *(parent.outputs[0].token_ids if parent.outputs else [])]
    branches = [ForkBranch(name, GREEDY, position), ForkBranch(name, GREEDY, position, (90, 91))]
    children = driver.fork("children", *branches)
    driver.finish()
    for child, forced in zip(children.outputs, ([], [90, 91]), strict=True):
        quiet = make_engine(enable_prefix_caching=False)
        assert bits(child) == bits(run_one(quiet, [*known[:position], *forced], GREEDY))
    alone = run_one(make_engine(enable_prefix_caching=False), tokens, GREEDY)
    assert bits(parent.outputs[0]) == bits(alone)
    engine.registry.drop(engine.registry.get(name, None))


def test_a_fork_of_what_is_not_there_is_not_found(make_engine: MakeEngine) -> None:
    """FK-06: an unknown name, and one that has ended without being kept."""
    engine = make_engine()
    ended = run_one(engine, prompt(5), GREEDY).sequence_id
    for name in ("nobody", ended):
        engine.execute(Fork("fork", (ForkBranch(name, GREEDY),)))
        (failed,) = engine.step()
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, NotFound)


# ---------------------------------------------------------------- turns


def test_a_preempted_request_goes_before_later_ones(make_engine: MakeEngine) -> None:
    """SC-04: requests of equal priority arrive at every step; X, preempted once, is next."""
    engine = make_engine(max_num_seqs=3, num_gpu_blocks_override=64, max_model_len=64)
    driver = Driver(engine)
    names = ["before", "X", "beside", *[f"{number}" for number in range(12)]]
    for number, name in enumerate(names[:3]):
        driver.start(name, prompt(12, seed=number), replace(GREEDY, max_tokens=20))
    driver.step(4)
    driver.preempt("X")
    waited = 0
    for number, name in enumerate(names[3:], 3):
        driver.start(name, prompt(12, seed=number), replace(GREEDY, max_tokens=8))
        waiting = [group.request_id for group in engine.scheduler.waiting]
        assert waiting[0] == "X" or "X" not in waiting
        waited += "X" in waiting
        driver.step()
    assert waited == 1  # a seat was free, so the first step after it let X in again
    driver.finish()
    quiet = make_engine(enable_prefix_caching=False)
    for number, name in enumerate(names):
        params = replace(GREEDY, max_tokens=20 if number < 3 else 8)
        own = run_one(quiet, prompt(12, seed=number), params)
        assert bits(driver.outputs[name].outputs[0]) == bits(own)


def test_without_a_seat_a_preempted_request_is_the_next_to_get_one(
    make_engine: MakeEngine,
) -> None:
    """SC-04: its place was taken by a more urgent one; later ones of its own level wait behind."""
    engine = make_engine(max_num_seqs=1, num_gpu_blocks_override=64, max_model_len=64)
    driver = Driver(engine)
    driver.start("X", prompt(12), replace(GREEDY, max_tokens=20))
    driver.start("already waits", prompt(12, seed=9), GREEDY)
    driver.step(4)
    driver.preempt("X")
    driver.start("urgent", prompt(12, seed=1), GREEDY, priority=-1)
    started = []
    for number in range(5):
        driver.start(f"{number}", prompt(12, seed=2 + number), GREEDY)
        started += [e.request_id for e in driver.step() if isinstance(e, Started)]
        assert engine.scheduler.waiting[0].request_id == "X"
    assert started == ["urgent"]
    while engine.has_work:
        running = {group.request_id for group in engine.scheduler.running}
        if not driver.outputs["X"].finished:
            assert running <= {"urgent", "X"}
        driver.step()
    own = run_one(make_engine(), prompt(12), replace(GREEDY, max_tokens=20))
    assert bits(driver.outputs["X"].outputs[0]) == bits(own)


# ---------------------------------------------------------------- the smallest pools


def test_a_pool_of_eight_blocks_serves_what_fits(make_engine: MakeEngine) -> None:
    """SC-10: 8 blocks, 8 seats: it starts, runs the widest beam that fits, refuses the rest."""
    engine = make_engine(
        num_gpu_blocks_override=8, max_model_len="auto", max_num_seqs=8, max_num_batched_tokens=8
    )
    assert engine.max_model_len == 32
    search = BeamSearchParams(8, 8, max_tokens=2, ignore_eos=True)
    assert len({tuple(o.token_ids) for o in engine.generate([[5, 6, 7]], search)[0].outputs}) == 8
    with pytest.raises(ResourceExhausted, match="needs 16 blocks of 4 tokens; the pool has 8"):
        engine.generate([[5, 6, 7]], replace(search, max_tokens=3))
    assert len(run_one(engine, [5, 6, 7], replace(GREEDY, max_tokens=29)).token_ids) == 29


def test_beams_wider_than_the_batch_are_refused_and_the_server_starts(
    make_engine: MakeEngine,
) -> None:
    """SC-10: 8 blocks, a batch of 4, beam 8."""
    engine = make_engine(
        num_gpu_blocks_override=8, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=4
    )
    with pytest.raises(ResourceExhausted, match="at most max_num_seqs = 4"):
        engine.generate([[5, 6, 7]], BeamSearchParams(8, max_tokens=1))
    narrow = BeamSearchParams(4, 4, max_tokens=2, ignore_eos=True)
    assert len(engine.generate([[5, 6, 7]], narrow)[0].outputs) == 4


def test_the_size_of_the_pool_changes_no_bit(make_engine: MakeEngine) -> None:
    """KN-12: n = 4 from a pool of 16 blocks, whose idle slots hold NaN, and from a big one."""
    outputs = []
    for blocks in (16, 512):
        engine = make_engine(num_gpu_blocks_override=blocks, max_model_len=64)
        cache = engine._runner._kv_cache
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        params = replace(GREEDY, temperature=1.0, n=4, seed=3, max_tokens=9)
        outputs.append([bits(s) for s in engine.generate([prompt(10)], params)[0].outputs])
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- one bad request


def test_an_exception_for_one_request_ends_nothing_else(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SE-10: a limit that is found only inside the engine, as an exception that nobody expects."""
    engine = make_engine()
    driver = Driver(engine, fails=["bad"])
    driver.start("good", prompt(9), GREEDY)
    driver.step(2)
    number = engine.requests.generate

    def broken(command: object) -> object:
        if getattr(command, "request_id", "") == "bad":
            raise OverflowError("a size that no check has seen")
        return number(command)

    monkeypatch.setattr(engine.requests, "generate", broken)
    driver.start("bad", prompt(9), GREEDY)
    driver.start("later", prompt(9, seed=1), GREEDY)
    driver.finish()
    assert "OverflowError" in str(driver.errors["bad"])
    assert "bad" in caplog.text
    for name, seed in (("good", 0), ("later", 1)):
        own = run_one(make_engine(), prompt(9, seed=seed), GREEDY)
        assert bits(driver.outputs[name].outputs[0]) == bits(own)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {TOKENIZER_SIZE: 1.0}, {2**31: 1.0}, {5: np.nan}])
def test_a_bias_beyond_the_vocabulary_fails_its_own_call(
    bias: dict[int, float], make_engine: MakeEngine
) -> None:
    """SM-12: ids -1, V and 2^31, and the value NaN, beside a request that runs."""
    engine = make_engine()
    driver = Driver(engine, fails=["bad"])
    driver.start("good", prompt(9), GREEDY)
    driver.step(2)
    driver.start("bad", prompt(9), replace(GREEDY, logit_bias=bias))
    driver.finish()
    assert isinstance(driver.errors["bad"], InvalidArgument)
    assert driver.errors["bad"].field == "sampling.logit_bias"
    assert bits(driver.outputs["good"].outputs[0]) == bits(
        run_one(make_engine(), prompt(9), GREEDY)
    )
    engine.execute(GetStats("stats"))
    (reply,) = engine.take_events()
    assert isinstance(reply, Reply)
    assert (reply.value.requests_finished, reply.value.requests_failed) == (1, 1)
