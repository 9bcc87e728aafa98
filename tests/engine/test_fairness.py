"""Turns between tenants: shares of the tokens that are run, and who waits for whom.

Deterministic: what is compared are the tokens that each step ran, not times.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from prefixcache import Engine, SamplingParams
from prefixcache.engine.messages import Abort, Event, Generate, SetTenants, Started, TenantPolicy
from prefixcache.engine.scheduler import ScheduledStep
from tests.engine.conftest import MakeEngine
from tests.model.checkpoints import TOKENIZER_SIZE


class Crowd:
    """Tenants that put requests into one engine, and what has been run for each."""

    def __init__(self, engine: Engine, weights: dict[str, float] | None = None) -> None:
        self.engine = engine
        self.ran: Counter[str] = Counter()
        self.started: list[str] = []
        self._names: list[str] = []
        self._random = np.random.default_rng(1)
        policies = [TenantPolicy(name, weight) for name, weight in (weights or {}).items()]
        engine.execute(SetTenants(tuple(policies)))
        plan = engine.scheduler.schedule

        def counted() -> ScheduledStep:
            step = plan()
            for row in step.rows:
                self.ran[row.group.tenant] += row.count
            return step

        engine.scheduler.schedule = counted  # type: ignore[method-assign]

    def ask(
        self, tenant: str, count: int, prompt: Sequence[int], output: int, priority: int = 0
    ) -> None:
        """So many requests, of prompts of these lengths in turn."""
        for at in range(count):
            tokens = self._random.integers(4, TOKENIZER_SIZE, prompt[at % len(prompt)]).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            name = f"{tenant}-{len(self._names)}"
            self._names.append(name)
            self.engine.execute(
                Generate(name, tuple(tokens), params, priority=priority, tenant=tenant)
            )

    def step(self, count: int = 1) -> list[Event]:
        events = [event for _ in range(count) for event in self.engine.step()]
        self.started += [e.request_id for e in events if isinstance(e, Started)]
        return events

    def waits(self, tenant: str) -> bool:
        return any(group.tenant == tenant for group in self.engine.scheduler.waiting)

    def leave(self) -> None:
        for name in self._names:
            self.engine.execute(Abort(name))
        self.engine.step()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(max_num_seqs=8, max_num_batched_tokens=32, max_queue=1000)


@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 3.0}, {"a": 0.5, "b": 0.5, "c": 1.0}]
)
def test_tenants_that_all_wait_get_tokens_by_weight_within_a_tenth(
    weights: dict[str, float], engine: Engine
) -> None:
    """Whatever their requests look like: long prompts, long outputs, or many short ones."""
    crowd = Crowd(engine, weights)
    kinds = {"a": (80, (60, 20), 4), "b": (200, (6,), 6), "c": (60, (4,), 30)}
    for tenant in weights:
        crowd.ask(tenant, *kinds[tenant])
    crowd.step(150)
    assert all(map(crowd.waits, weights))
    total, parts = sum(crowd.ran.values()), sum(weights.values())
    for tenant, weight in weights.items():
        assert crowd.ran[tenant] / total == pytest.approx(weight / parts, rel=0.1)
    crowd.leave()


def test_a_tenant_that_comes_later_has_neither_debt_nor_credit(engine: Engine) -> None:
    crowd = Crowd(engine, {"a": 1.0, "b": 1.0})
    crowd.ask("a", 400, (20,), 5)
    crowd.step(60)
    alone = crowd.ran["a"]
    crowd.ask("b", 300, (20,), 5)
    crowd.step(80)
    assert crowd.waits("a")
    assert crowd.waits("b")
    assert crowd.ran["b"] == pytest.approx(crowd.ran["a"] - alone, rel=0.1)
    crowd.leave()


def test_a_tenant_that_asks_for_little_saves_nothing_up(engine: Engine) -> None:
    """One short request after the other, then many at once: they count from then on."""
    crowd = Crowd(engine, {"a": 1.0, "b": 1.0})
    crowd.ask("a", 500, (20,), 5)
    for _ in range(30):
        crowd.ask("b", 1, (4,), 2)
        crowd.step(3)
    assert not crowd.waits("b")
    before = crowd.ran.copy()
    assert before["b"] < before["a"] / 5
    crowd.ask("b", 300, (20,), 5)
    crowd.step(60)
    assert crowd.waits("a")
    gained = crowd.ran - before
    assert gained["b"] == pytest.approx(gained["a"], rel=0.1)
    crowd.leave()


def test_a_flood_holds_up_nobody_else(engine: Engine) -> None:
    """The next free place is the other tenant's, though hundreds came before."""
    crowd = Crowd(engine, {"a": 1.0, "b": 1.0})
    crowd.ask("a", 300, (4,), 6)
    crowd.step(20)
    crowd.ask("b", 1, (4,), 1)
    crowd.step(6)
    assert "b-300" in crowd.started
    crowd.leave()


def test_a_long_prompt_lets_another_tenant_in(make_engine: MakeEngine) -> None:
    """Prefill that takes whole steps: a short request of another is run in between."""
    engine = make_engine(max_num_batched_tokens=16)
    crowd = Crowd(engine, {"a": 1.0, "b": 1.0})
    crowd.ask("a", 1, (320,), 1)
    crowd.step(4)
    crowd.ask("b", 1, (12,), 1)
    crowd.step(2)
    assert crowd.started[-1] == "b-1"
    assert crowd.ran["b"] == 12
    crowd.step(30)
    assert not engine.has_work


def test_every_request_of_a_mixed_crowd_ends(make_engine: MakeEngine) -> None:
    """Also where the pool is so small that groups are preempted all the time."""
    engine = make_engine(
        num_gpu_blocks_override=24, max_model_len=64, max_num_batched_tokens=16, max_queue=1000
    )
    crowd = Crowd(engine, {"a": 1.0, "b": 9.0})
    crowd.ask("a", 3, (40,), 20)
    crowd.ask("b", 60, (3,), 9)
    steps = 0
    while engine.has_work:
        crowd.step()
        steps += 1
        assert steps < 2000
    assert len(crowd.started) == 63


@pytest.mark.parametrize(("weight", "longest"), [(1.0, 12), (0.1, 100)])
def test_nobody_starves_while_another_keeps_coming(
    weight: float, longest: int, engine: Engine
) -> None:
    """Three requests a step, more than can be run, for as long as one looks; and now and then one
    of somebody else, who waits a bounded time. Those who come first go first."""
    crowd = Crowd(engine, {"a": 1.0, "b": weight})
    came: dict[str, int] = {}
    for step in range(300):
        crowd.ask("a", 3, (8,), 6)
        if step % 20 == 10:
            came[f"b-{len(crowd._names)}"] = step
            crowd.ask("b", 1, (20,), 4)
        crowd.step()
        late = [name for name, at in came.items() if step - at > longest]
        assert set(late) <= set(crowd.started)
    assert crowd.waits("a")
    for tenant in "ab":
        turns = [int(name[2:]) for name in crowd.started if name.startswith(tenant)]
        assert turns == sorted(turns)
    crowd.leave()


def test_a_large_request_does_not_starve_behind_small_ones(make_engine: MakeEngine) -> None:
    """It needs nearly all of the pool, of which there is never so much free by itself."""
    engine = make_engine(
        num_gpu_blocks_override=24, max_model_len=96, max_num_batched_tokens=32, max_queue=10_000
    )
    crowd = Crowd(engine)
    crowd.ask("", 5, (8,), 8)
    crowd.step(3)
    crowd.ask("", 1, (70,), 8)
    for step in range(200):
        crowd.ask("", 2, (8,), 8)
        crowd.step()
        if "-5" in crowd.started:
            assert step < 60
            break
    assert "-5" in crowd.started
    crowd.leave()


def test_priority_goes_before_turns(engine: Engine) -> None:
    crowd = Crowd(engine, {"a": 1.0, "b": 1000.0})
    crowd.ask("b", 20, (4,), 4, priority=1)
    crowd.ask("a", 20, (4,), 4, priority=0)
    crowd.step(40)
    assert [name[0] for name in crowd.started] == ["a"] * 20 + ["b"] * 20
    assert not engine.has_work


def test_without_tenants_requests_go_in_the_order_in_which_they_came(engine: Engine) -> None:
    crowd = Crowd(engine)
    for _ in range(10):
        crowd.ask("a", 3, (20,), 3)
        crowd.ask("b", 1, (4,), 3)
    crowd.step(120)
    assert crowd.started == [f"{'b' if at % 4 == 3 else 'a'}-{at}" for at in range(40)]
    assert not engine.has_work


def test_nothing_is_remembered_once_nothing_waits(engine: Engine) -> None:
    crowd = Crowd(engine, {"a": 1.0, "b": 1.0})
    crowd.ask("a", 20, (20,), 3)
    while engine.has_work:
        crowd.step()
    crowd.step()
    assert not engine.scheduler.turns._used
