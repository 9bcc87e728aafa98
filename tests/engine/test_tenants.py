"""Tenants in one engine: nothing is shared or seen across them, and each keeps to its quotas."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache.engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Finished,
    FlushCache,
    Fork,
    ForkBranch,
    Generate,
    ListSequences,
    PinPrefix,
    Release,
    Reply,
    Score,
    SetTenants,
    Started,
    TenantPolicy,
    UnpinPrefix,
)
from prefixcache.errors import NotFound, PrefixCacheError, ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.model.checkpoints import TOKENIZER_SIZE

PROMPT = tuple(np.random.default_rng(3).integers(4, TOKENIZER_SIZE, 24).tolist())
TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def clocked(find: Callable[..., Any], engines: list[Engine], clock: Clock) -> Engine:
    config = EngineConfig(model=str(find()), block_size=4, num_gpu_blocks_override=256)
    engines.append(Engine(config, clock=clock))
    return engines[-1]


class Asks:
    """Runs commands on an engine, each to its end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, command: Command) -> list[Event]:
        self.engine.execute(command)
        events = self.engine.step()
        while self.engine.has_work:
            events += self.engine.step()
        return events

    def generate(self, name: str, tenant: str, **fields: Any) -> Started:
        command = Generate(name, PROMPT, TWO, tenant=tenant, **fields)
        return next(e for e in self.run(command) if isinstance(e, Started))

    def value(self, command: Command) -> Any:
        reply = next(e for e in self.run(command) if isinstance(e, Reply))
        if reply.error is not None:
            raise reply.error
        return reply.value

    def error(self, command: Command) -> PrefixCacheError:
        """What a request is refused with at once; None of it is queued."""
        self.engine.execute(command)
        failures = [e for e in self.engine.take_events() if isinstance(e, Failed)]
        assert len(failures) == 1
        return failures[0].error

    def refusal(self, command: Command) -> ResourceExhausted:
        error = self.error(command)
        assert isinstance(error, ResourceExhausted)
        return error


@pytest.fixture
def asks(make_engine: MakeEngine) -> Asks:
    return Asks(make_engine())


def limit(engine: Engine, **limits: Any) -> None:
    engine.execute(SetTenants((TenantPolicy("a", **limits), TenantPolicy("b"))))


# -------------------------------------------------------------------------------- isolation


def test_what_one_tenant_has_cached_no_other_finds(asks: Asks) -> None:
    assert asks.generate("r", "a").num_cached_tokens == 0
    assert asks.generate("r", "b").num_cached_tokens == 0
    assert asks.generate("r", "").num_cached_tokens == 0
    assert asks.generate("r", "a").num_cached_tokens == 23


def test_tenant_and_salt_cannot_be_joined_into_one_another(asks: Asks) -> None:
    asks.generate("r", "ab", cache_salt="c")
    assert asks.generate("r", "a", cache_salt="bc").num_cached_tokens == 0
    assert asks.generate("r", "abc").num_cached_tokens == 0
    assert asks.generate("r", "", cache_salt="abc").num_cached_tokens == 0
    assert asks.generate("r", "ab", cache_salt="c").num_cached_tokens == 23
    asks.generate("r", "aSx")  # a tag in a name parts nothing
    assert asks.generate("r", "a", cache_salt="xS").num_cached_tokens == 0


def test_a_request_does_not_wait_for_another_tenants_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    for tenant in ("a", "b", "a"):
        name = f"{tenant}{engine.scheduler.has_work}"
        engine.execute(Generate(f"{name}-{len(engine._groups)}", PROMPT, TWO, tenant=tenant))
    engine.step()
    engine.step()
    assert [group.tenant for group in engine.scheduler.running] == ["a", "b"]
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("salt", ["", "s"])
@pytest.mark.parametrize("other", ["b", ""])
def test_another_tenants_handles_are_not_found(other: str, salt: str, asks: Asks) -> None:
    kept = asks.generate("kept", "a", cache_salt=salt, keep_seconds=60).sequence_id
    pin = asks.value(PinPrefix("p", PROMPT, 60.0, salt, "a")).pin_id
    fork = Fork("fork", (ForkBranch(kept, TWO),), salt, tenant=other)
    assert isinstance(asks.error(fork), NotFound)
    for command in (
        Release("c", kept, cache_salt=salt, tenant=other),
        Release("c", kept, subtree=True, cache_salt=salt, tenant=other),
        UnpinPrefix("c", pin, salt, other),
    ):
        with pytest.raises(NotFound):
            asks.value(command)
    assert asks.value(ListSequences("c", salt, other)) == ()
    assert [info.sequence_id for info in asks.value(ListSequences("c", salt, "a"))] == [kept]
    assert asks.value(UnpinPrefix("c", pin, salt, "a")).num_blocks == 6
    assert asks.value(Release("c", kept, cache_salt=salt, tenant="a")).sequence_ids == (kept,)


def test_a_flush_reaches_the_tenants_own_blocks_only(asks: Asks) -> None:
    for tenant in ("a", "b"):
        for salt in ("", "x"):
            asks.generate("r", tenant, cache_salt=salt)
    assert asks.value(FlushCache("f", "x", "a")) == 6
    assert asks.value(FlushCache("f", None, "a")) == 6
    assert asks.generate("r", "a").num_cached_tokens == 0
    assert asks.generate("r", "b").num_cached_tokens == 23
    assert asks.value(FlushCache("f", None, None)) == 18


# -------------------------------------------------------------------------------- quotas


def test_sequences_at_once(asks: Asks) -> None:
    engine = asks.engine
    limit(engine, max_sequences=4)
    three = SamplingParams(n=3, max_tokens=8, ignore_eos=True)
    engine.execute(Generate("first", PROMPT, three, tenant="a"))
    for steps in (0, 3):  # queued, running
        for _ in range(steps):
            engine.step()
        error = asks.refusal(Generate("second", PROMPT, three, tenant="a"))
        assert "3 of your sequences" in str(error)
        assert "asks for 3 more; you may have 4" in str(error)
        assert error.retry_after == 1.0
    engine.execute(Generate("other", PROMPT, three, tenant="b"))
    engine.execute(Generate("fits", PROMPT, TWO, tenant="a"))
    while engine.has_work:
        engine.step()
    beams = BeamSearchParams(num_beams=5, max_tokens=2)
    assert asks.refusal(Generate("never", PROMPT, beams, tenant="a")).retry_after is None
    assert any(isinstance(e, Finished) for e in asks.run(Generate("r", PROMPT, three, tenant="a")))


def test_kept_leases(checkpoint_of: Callable[..., Any], engines: list[Engine]) -> None:
    clock = Clock()
    asks = Asks(clocked(checkpoint_of, engines, clock))
    engine = asks.engine
    limit(engine, max_leases=2)
    asks.generate("one", "a", keep_seconds=30)
    clock.now += 10
    two = asks.generate("two", "a", keep_seconds=30, cache_salt="other").sequence_id
    error = asks.refusal(Generate("three", PROMPT, TWO, tenant="a", keep_seconds=5))
    assert "2 of your sequences are kept or will be" in str(error)
    assert error.retry_after == pytest.approx(20)
    asks.generate("not kept", "a")
    asks.generate("of another", "b", keep_seconds=30)
    asks.value(Release("c", two, cache_salt="other", tenant="a"))
    asks.generate("three", "a", keep_seconds=5)
    asks.refusal(Generate("four", PROMPT, TWO, tenant="a", keep_seconds=5))
    clock.now += 21
    asks.generate("four", "a", keep_seconds=5)


def test_pool_share(asks: Asks) -> None:
    """512 blocks of 4 tokens: a tenth is 51."""
    engine = asks.engine
    limit(engine, pool_share=0.1)
    long = SamplingParams(max_tokens=72, ignore_eos=True)  # 24 + 71 tokens: 24 blocks
    engine.execute(Generate("one", PROMPT, long, tenant="a"))
    engine.execute(Generate("two", PROMPT[::-1], long, tenant="a"))
    error = asks.refusal(Generate("three", PROMPT, long, tenant="a"))
    assert "holds 24 blocks, and your live requests and pins up to 48; you may hold 51" in str(
        error
    )
    assert error.retry_after == 1.0
    engine.execute(Generate("other", PROMPT, long, tenant="b"))
    unbounded = SamplingParams(max_tokens=None)
    assert asks.refusal(Generate("r", PROMPT, unbounded, tenant="a")).retry_after is None
    engine.execute(Abort("one"))
    asks.generate("three", "a")
    pin = asks.value(PinPrefix("p", PROMPT, 60.0, tenant="a"))
    fits = SamplingParams(max_tokens=4 * (51 - pin.num_blocks) - 23, ignore_eos=True)
    larger = SamplingParams(max_tokens=fits.max_tokens + 1, ignore_eos=True)  # type: ignore[operator]
    asks.refusal(Generate("r", PROMPT, larger, tenant="a"))
    assert asks.run(Generate("r", PROMPT, fits, tenant="a"))
    asks.value(UnpinPrefix("p", pin.pin_id, tenant="a"))


def test_a_pin_counts_towards_the_share(asks: Asks) -> None:
    engine = asks.engine
    limit(engine, pool_share=9 / 512)
    asks.generate("r", "a")
    pin = asks.value(PinPrefix("p", PROMPT, 60.0, tenant="a"))
    with pytest.raises(ResourceExhausted, match="this pin holds 6 blocks") as caught:
        asks.value(PinPrefix("p", PROMPT, 60.0, tenant="a"))
    assert caught.value.retry_after == 1.0
    asks.value(UnpinPrefix("p", pin.pin_id, tenant="a"))


def test_tokens_a_minute(checkpoint_of: Callable[..., Any], engines: list[Engine]) -> None:
    """Prompt and output count, cached or not; after the time that was told there is one more."""
    clock = Clock()
    asks = Asks(clocked(checkpoint_of, engines, clock))
    engine = asks.engine
    limit(engine, tokens_per_minute=60)
    for _ in range(3):
        asks.generate("r", "a")
    error = asks.refusal(Generate("r", PROMPT, TWO, tenant="a"))
    assert "used 78 tokens of the 60" in str(error)
    assert error.retry_after == 19.0
    asks.generate("r", "b")
    clock.now += 18.9
    assert asks.refusal(Generate("r", PROMPT, TWO, tenant="a")).retry_after == pytest.approx(0.1)
    clock.now += 0.1
    asks.generate("r", "a")
    clock.now += 3600
    search = BeamSearchParams(num_beams=2, max_tokens=2)
    asks.run(Generate("beam", PROMPT, search, tenant="a"))
    asks.run(Score("score", PROMPT, (PROMPT[:4], PROMPT[:4]), tenant="a"))
    # 60 - (24 + 1 for the prompt's row + 2 beams) - (24 + 4 + 4) = 1
    kept = asks.generate("kept", "a", keep_seconds=60).sequence_id
    clock.now += 26
    branch = ForkBranch(kept, TWO, token_ids=PROMPT[:3])
    asks.run(Fork("fork", (branch, branch), tenant="a"))
    assert "used 69 tokens" in str(asks.refusal(Generate("r", PROMPT, TWO, tenant="a")))


def test_each_tenant_has_the_queue_for_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(max_queue=3)
    asks = Asks(engine)
    limit(engine)
    for at in range(3):
        engine.execute(Generate(f"a{at}", PROMPT, TWO, tenant="a"))
    error = asks.refusal(Generate("a3", PROMPT, TWO, tenant="a"))
    assert "3 requests wait already" in str(error)
    assert error.retry_after == 1.0
    asks.generate("b", "b")


def test_new_policies_hold_at_once(asks: Asks) -> None:
    limit(asks.engine, max_sequences=1)
    two = SamplingParams(n=2, max_tokens=2)
    asks.refusal(Generate("r", PROMPT, two, tenant="a"))
    limit(asks.engine, max_sequences=2)
    assert asks.run(Generate("r", PROMPT, two, tenant="a"))


# -------------------------------------------------------------------------------- what is told


def test_limits_that_all_share_tell_no_ones_use(make_engine: MakeEngine) -> None:
    """Other tenants fill leases and pins: the sentence is the same whatever they hold."""
    told = set()
    for others in (1, 2):
        engine = make_engine(max_leases=2, num_gpu_blocks_override=32, max_model_len=64)
        asks = Asks(engine)
        for at in range(others):
            asks.generate("r", "b", keep_seconds=60, cache_salt=str(at))
        two = SamplingParams(n=2, max_tokens=2)
        told.add(str(asks.refusal(Generate("r", PROMPT, two, tenant="a", keep_seconds=9))))
        held = []
        for prompt in (PROMPT, PROMPT[::-1])[:others]:
            asks.run(Generate("r", prompt, TWO, tenant="b"))
            held.append(asks.value(PinPrefix("p", prompt, 60.0, tenant="b")).pin_id)
        third = tuple(range(4, 50))
        asks.run(Generate("r", third, TWO, tenant="a"))
        with pytest.raises(ResourceExhausted) as caught:
            asks.value(PinPrefix("p", third, 60.0, tenant="a"))
        told.add(str(caught.value))
        for pin_id in held:
            asks.value(UnpinPrefix("p", pin_id, tenant="b"))
    assert len(told) == 2


def test_when_to_retry_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ResourceExhausted("full", 1.5)))
    assert (str(error), error.retry_after) == ("full", 1.5)
