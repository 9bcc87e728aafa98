"""The engine under injected faults: a seed decides arrivals, aborts, failures and the pool.

Any failure replays from its seed. Whatever fails, no block is lost after any step, and every
request that did not fail itself has the answer of a quiet engine.
"""

import logging
from pathlib import Path

import pytest
import torch

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache.engine.injection import Injection
from prefixcache.engine.messages import Failed, Generate
from prefixcache.errors import Internal, ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits
from tests.engine.seeded import InjectedFault, SeededFaults
from tests.engine.traffic import REFUSALS, Traffic, compare

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
STEPS = 100


class SeededTraffic(SeededFaults):
    """Clients come and go while passes fail: all of it decided by one seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, exceptions=0.06, out_of_memory=0.06)
        self.traffic: Traffic | None = None

    def before_step(self, engine: Engine) -> None:
        engine.check_integrity()
        if self.traffic is not None and self.random.random() < 0.5:
            self.traffic.act()

    def config(self, traffic_model: Path) -> EngineConfig:
        return EngineConfig(
            model=str(traffic_model),
            block_size=4,
            num_gpu_blocks_override=self.random.choice((12, 16, 24, 40)),
            max_model_len=40,
            max_num_seqs=self.random.choice((3, 6)),
            max_num_batched_tokens=self.random.choice((6, 9, 64)),
            enable_prefix_caching=self.random.random() < 0.85,
            wait_for_inflight=self.random.random() < 0.7,
            max_queue=self.random.choice((4, 1024)),
            digest_seed=1,
            seed=1,
        )


def run_seed(traffic_model: Path, seed: int) -> tuple[SeededTraffic, Traffic]:
    chance = SeededTraffic(seed)
    engine = Engine(chance.config(traffic_model), injection=chance)
    chance.traffic = traffic = Traffic(engine, seed)
    traffic.allowed = (*REFUSALS, Internal)
    for _ in range(STEPS):
        traffic.step()
    chance.traffic = None  # nobody comes any more
    traffic.drain()
    return chance, traffic


def check_seed(traffic_model: Path, quiet: Engine, seed: int) -> None:
    chance, traffic = run_seed(traffic_model, seed)
    assert compare(traffic, quiet) > 30
    assert chance.num_raised >= len(chance.failed) > 0
    for name, raised in chance.failed.items():
        error = traffic.failed[name].error
        assert isinstance(error, Internal if raised is InjectedFault else ResourceExhausted)
    internal = {n for n, failed in traffic.failed.items() if isinstance(failed.error, Internal)}
    assert internal <= chance.failed.keys()
    assert traffic.engine.manager.num_in_use == traffic.engine.manager.num_pinned()


@pytest.fixture(autouse=True)
def few_words(caplog: pytest.LogCaptureFixture) -> None:
    """Each injected failure logs its traceback."""
    caplog.set_level(logging.CRITICAL, "prefixcache.engine.engine")


@pytest.mark.parametrize("seed", range(6))
def test_the_others_do_not_notice_a_failure(traffic_model: Path, quiet: Engine, seed: int) -> None:
    check_seed(traffic_model, quiet, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_the_others_never_notice_a_failure(traffic_model: Path, quiet: Engine, seed: int) -> None:
    check_seed(traffic_model, quiet, seed)


def test_a_failure_replays_from_its_seed(traffic_model: Path) -> None:
    (first, one), (second, two) = (run_seed(traffic_model, 7) for _ in range(2))
    assert list(first.failed) == list(second.failed)
    assert [str(e.error) for e in one.failed.values()] == [
        str(e.error) for e in two.failed.values()
    ]
    outcomes = [
        [(key, a.token_ids, a.stream_key, a.finished and a.finished.reason)
         for key, a in traffic.answers.items()]
        for traffic in (one, two)
    ]  # fmt: skip
    assert outcomes[0] == outcomes[1]


class Raises(Injection):
    """Fails the passes that `when` picks."""

    def __init__(self, error: Exception, when: object) -> None:
        self.error, self.when = error, when

    def before_forward(self, rows: object) -> None:
        names = {row.group.request_id for row in rows}  # type: ignore[attr-defined]
        if self.when(names):  # type: ignore[operator]
            raise self.error


OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_is_too_little_for_all_is_enough_for_each(
    error: Exception, make_engine: MakeEngine
) -> None:
    """A step that does not fit is run a request at a time: slower, and nobody fails."""
    engine, calm = make_engine(), make_engine()
    engine._injection = Raises(error, lambda names: len(names) > 1)
    driver = Driver(engine)
    for name in ("a", "b", "c"):
        driver.start(name, [5, 6, ord(name)], GREEDY)
    for name, output in driver.finish().items():
        expected = calm.generate([[5, 6, ord(name)]], GREEDY)[0].outputs[0]
        assert bits(output.outputs[0]) == bits(expected)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_request_that_never_fits_into_memory_is_shed(
    error: Exception, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    engine._injection = Raises(error, lambda names: "large" in names)
    driver = Driver(engine, fails=["large"])
    driver.start("large", range(5, 100), GREEDY)
    driver.start("small", [5, 6, 7], GREEDY)
    outputs = driver.finish()
    assert isinstance(driver.errors["large"], ResourceExhausted)
    assert "memory" in str(driver.errors["large"])
    assert len(outputs["small"].outputs[0].token_ids) == 8


def test_a_pass_that_failed_holds_no_memory_while_it_is_tried_again(
    make_engine: MakeEngine,
) -> None:
    """An error that is being handled keeps alive all that its pass had allocated."""
    engine = make_engine()
    alive: list[int] = []

    class Large:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    class Fails(Injection):
        def before_forward(self, rows: object) -> None:
            assert not alive
            if len({row.group.request_id for row in rows}) > 1:  # type: ignore[attr-defined]
                held = Large()
                raise MemoryError(f"beside {type(held)}")

    engine._injection = Fails()
    driver = Driver(engine)
    driver.start("a", [5, 6], GREEDY)
    driver.start("b", [7, 8], GREEDY)
    driver.finish()


def test_a_lost_device_stops_the_engine(make_engine: MakeEngine) -> None:
    """Every later pass would fail too: a server must be restarted, not answer INTERNAL for ever."""
    engine = make_engine()
    engine._injection = Raises(torch.AcceleratorError("an illegal memory access"), bool)
    engine.execute(Generate("a", (5, 6), GREEDY))
    with pytest.raises(torch.AcceleratorError):
        engine.step()
    engine._injection = Injection()
    while engine.has_work:
        engine.step()


class BrokenDetokenizer:
    def push(self, *_: object) -> str:
        raise KeyError("no such piece")


@pytest.mark.parametrize("place", ["detokenizer", "search"])
def test_output_that_cannot_be_made_fails_one_request(
    place: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes behind the forward pass is a request's own too."""
    engine = make_engine()
    driver = Driver(engine, fails=["bad"])
    params = BeamSearchParams(num_beams=3) if place == "search" else GREEDY
    driver.start("bad", [5, 6, 7], params)  # type: ignore[arg-type]
    driver.start("good", [8, 9], GREEDY)
    driver.step()
    bad = driver.group("bad")

    if place == "search":
        assert bad.beam is not None
        monkeypatch.setattr(bad.beam, "step", BrokenDetokenizer().push)
    else:
        bad.first.detokenizer = BrokenDetokenizer()  # type: ignore[assignment]
    driver.finish()
    assert isinstance(driver.errors["bad"], Internal)
    assert len(driver.outputs["good"].outputs[0].token_ids) == 8
    assert not [e for e in engine.take_events() if isinstance(e, Failed)]
