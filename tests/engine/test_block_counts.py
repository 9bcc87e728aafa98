"""How many blocks are in use, at every step: shared prompts once, one partial block a sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from prefixcache import Engine, SamplingParams
from prefixcache.engine.messages import ForkBranch
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver
from tests.model.checkpoints import TOKENIZER_SIZE

SAMPLED = SamplingParams(temperature=1.5, ignore_eos=True, seed=3)  # so that branches differ


@dataclass
class Watch:
    """Blocks in use and copies made, noted when each step's forward pass is about to run."""

    in_use: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.in_use)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], Watch]:
    def begin(engine: Engine) -> Watch:
        notes = Watch()
        schedule = engine.scheduler.schedule

        def noted() -> Any:
            step = schedule()
            notes.in_use.append(engine.manager.num_in_use)
            notes.copies.append(len(step.copies))
            return step

        monkeypatch.setattr(engine.scheduler, "schedule", noted)
        return notes

    return begin


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, TOKENIZER_SIZE, count).tolist()


def blocks(tokens: int, size: int = 16) -> int:
    return -(-tokens // size)


# ----------------------------------------------------------------- many samples, one prompt


@pytest.fixture
def long_engine(make_engine: MakeEngine) -> Engine:
    """Blocks of 16, and room for 1,030 tokens and what comes behind."""
    return make_engine(
        model={"max_position_embeddings": 2048},
        block_size=16,
        max_model_len=1200,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=256,
    )


@pytest.mark.parametrize("generated", [1, 2, 16, 17, 18, 33, 34])
def test_16_samples_hold_a_prompt_of_1024_once(
    generated: int, long_engine: Engine, watch: Callable[[Engine], Watch]
) -> None:
    """Peak = 64 + 16 ceil((g - 1) / 16): the last token's KV is never written."""
    notes = watch(long_engine)
    params = replace(SAMPLED, n=16, max_tokens=generated)
    output = long_engine.generate([prompt(1024)], params)[0]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 10
    assert [len(sample.token_ids) for sample in output.outputs] == [generated] * 16
    assert notes.peak == 64 + 16 * blocks(generated - 1)
    assert long_engine.manager.num_copies == 0


@pytest.mark.parametrize("generated", [1, 2, 11, 12, 27, 28])
def test_16_samples_behind_1030_tokens_copy_the_tail_15_times(
    generated: int, long_engine: Engine, watch: Callable[[Engine], Watch]
) -> None:
    """Six tokens are in the last block: 15 samples copy it, the last writer keeps it."""
    notes = watch(long_engine)
    params = replace(SAMPLED, n=16, max_tokens=generated)
    long_engine.generate([prompt(1030)], params)
    shared, own = (65, 0) if generated == 1 else (64, blocks(6 + generated - 1))
    assert notes.peak == shared + 16 * own
    # The prompt takes three steps; the copies come with the first token behind it.
    copies = [0, 0, 0] if generated == 1 else [0, 0, 0, 15]
    assert notes.copies[:4] == copies
    assert sum(notes.copies) == long_engine.manager.num_copies == sum(copies)


def test_a_second_group_shares_the_first_ones_prompt(
    long_engine: Engine, watch: Callable[[Engine], Watch]
) -> None:
    notes = watch(long_engine)
    driver = Driver(long_engine)
    driver.start("first", prompt(1024), replace(SAMPLED, n=8, max_tokens=12))
    driver.step(4)
    driver.start("second", prompt(1024), replace(SAMPLED, n=8, max_tokens=12, seed=4))
    driver.finish()
    assert driver.outputs["second"].num_cached_tokens == 1023
    assert notes.peak == 64 + 16
    assert long_engine.manager.num_copies == 0


def test_fk_02_three_samples_of_six_tokens(
    make_engine: MakeEngine, watch: Callable[[Engine], Watch]
) -> None:
    """FK-02: blocks of 4. Two copies when they part, none later; one shared block, three own."""
    engine = make_engine()
    notes = watch(engine)
    engine.generate([prompt(6)], replace(SAMPLED, n=3, max_tokens=9))
    # Step 1 runs the prompt; in step 2 each sample writes its first token's KV.
    assert notes.copies == [0, 2, 0, 0, 0, 0, 0, 0, 0]
    # Tokens 7 and 8 fill the own blocks, 9 to 12 and 13, 14 take one more each.
    assert notes.in_use == [2, 4, 4, 7, 7, 7, 7, 10, 10]
    assert engine.manager.num_copies == 2


@pytest.mark.parametrize("children", [1, 2, 5])
def test_forks_share_every_block_until_they_write(
    children: int, make_engine: MakeEngine, watch: Callable[[Engine], Watch]
) -> None:
    """Of a kept parent: its full blocks are shared; its partly filled one is copied by each.

    The parent's lease keeps the tail's own block, so that every child writes to a copy.
    """
    engine = make_engine()
    # 20 tokens with KV, and two more in a block of their own: 5 full blocks and a tail.
    parent = engine.generate([prompt(20)], replace(SAMPLED, max_tokens=3), keep_seconds=60)[0]
    notes = watch(engine)
    branch = ForkBranch(parent.outputs[0].sequence_id, replace(SAMPLED, seed=None, max_tokens=3))
    driver = Driver(engine)
    driver.fork("forks", *[branch] * children)
    driver.finish()
    assert notes.copies[0] == children
    assert sum(notes.copies) == children
    # 22 of 23 tokens are there; tokens 23 and 24 fill the copies, 25 takes a block more.
    assert notes.in_use[:3] == [5 + children, 5 + children, 5 + 2 * children]


# ----------------------------------------------------------------- waste


@pytest.mark.parametrize("caching", [True, False])
def test_waste_is_one_partial_block_a_sequence_at_every_step(
    caching: bool, make_engine: MakeEngine
) -> None:
    """Prompts in chunks, samples, forks and preemptions: no table ever holds a block ahead."""
    engine = make_engine(
        num_gpu_blocks_override=48,
        max_model_len=120,
        max_num_batched_tokens=23,
        enable_prefix_caching=caching,
    )
    driver = Driver(engine)
    steps = 0

    def step() -> None:
        nonlocal steps
        driver.step()
        steps += 1
        held: set[int] = set()
        for table in engine.manager.tables:
            assert table.num_blocks == blocks(table.num_filled, 4)
            held |= set(table.block_ids().tolist())
        assert engine.manager.num_in_use == len(held)
        engine.check_integrity()

    shared = prompt(33, seed=9)
    for index in range(10):
        tokens = [*shared[: 7 * index], *prompt(5 + 3 * index, seed=index)][:60]
        count = 1 + index % 3
        params = replace(SAMPLED, n=count, max_tokens=10 + index, seed=index)
        output = driver.start(f"{index}", tokens, params)
        for _ in range(3):
            step()
        if output.outputs and not output.finished:
            branch = ForkBranch(output.outputs[0].sequence_id, replace(SAMPLED, max_tokens=6))
            driver.fork(f"fork of {index}", branch, branch)
    while engine.has_work:
        step()
    assert engine.metrics.counters.preemptions > 0
    assert steps > 50
    assert all(output.finished for output in driver.outputs.values())
