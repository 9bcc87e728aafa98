"""What is refused before a kernel runs, on every backend: by the argument's name, nothing written.

`triton_cases` has the same of Triton's kernels.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixcache.model.attention import plan_step
from prefixcache_kernels import Heads, StepWork, Weight
from prefixcache_kernels.cpu.backend import CpuLinear
from tests.kernels.backends import every_backend, kernels_of, rows_step

HEADS, SIZE, ROWS, BLOCKS = Heads(4, 2, 8), 16, 3, 2
TABLE = torch.zeros(8, HEADS.dim)
KEYS, VALUES = torch.zeros(BLOCKS, 2, 8, SIZE), torch.zeros(BLOCKS, 2, SIZE, 8)
QKV, Q = torch.zeros(ROWS, 64), torch.zeros(ROWS, 32)

Cases = tuple[tuple[Callable[[], object], str], ...]


def _work(block: int = 0, slots: int | None = None) -> StepWork:
    work = plan_step(rows_step([(ROWS, ROWS)], [[block]], SIZE), SIZE, [None])
    return work if slots is None else replace(work, slots=np.full(ROWS, slots, np.int64))


def _refused(cases: Cases) -> None:
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert not KEYS.any()
    assert not VALUES.any()


@every_backend
def test_operations_on_rows(backend: str) -> None:
    run, weight = kernels_of(backend), torch.ones(64)
    norm = (torch.ones(8), torch.ones(9), 1e-5)
    plan = run.prepare(_work(), HEADS, TABLE)
    _refused(
        (
            (lambda: run.rms_norm(QKV, torch.ones(63), 1e-5), r"weight: shape must be \(64\)"),
            (lambda: run.rms_norm(QKV, weight.double(), 1e-5), "weight: dtype"),
            (lambda: run.rms_norm(QKV, torch.ones(64, 2)[:, 0], 1e-5), "weight: the last dim"),
            (lambda: run.rms_norm(QKV, weight.to("meta"), 1e-5), "weight: must be on cpu"),
            (lambda: run.add_rms_norm(QKV, QKV[:2], weight, 1e-5), "residual: shape"),
            (lambda: run.add_rms_norm(QKV, QKV.double(), weight, 1e-5), "residual: dtype"),
            (lambda: run.silu_mul(torch.zeros(2, 7)), "gate_up: width must be even"),
            (lambda: run.rope_write_kv(QKV[:2], plan, KEYS, VALUES, None), "qkv: shape"),
            (lambda: run.rope_write_kv(QKV.mT, plan, KEYS, VALUES, None), "qkv: shape"),
            (lambda: run.rope_write_kv(QKV, plan, KEYS, VALUES, norm), "qk_norm: shape"),
        )
    )


@every_backend
def test_caches_and_what_a_step_reaches(backend: str) -> None:
    run = kernels_of(backend)
    plan = run.prepare(_work(), HEADS, TABLE)
    far = run.prepare(_work(block=BLOCKS, slots=0), HEADS, TABLE)
    beyond = run.prepare(_work(slots=BLOCKS * SIZE), HEADS, TABLE)
    _refused(
        (
            (lambda: run.paged_attention(QKV, KEYS, VALUES, plan, None), "q: shape"),
            (lambda: run.paged_attention(Q.double(), KEYS, VALUES, plan, None), "q: dtype"),
            (lambda: run.paged_attention(Q, KEYS[:, :1], VALUES, plan, None), "k_cache: shape"),
            (lambda: run.paged_attention(Q, KEYS, VALUES.mT, plan, None), "v_cache: shape"),
            (lambda: run.paged_attention(Q, KEYS, VALUES[:1], plan, None), "v_cache: shape"),
            (lambda: run.paged_attention(Q, KEYS.to("meta"), VALUES, plan, None), "k_cache: must"),
            (lambda: run.paged_attention(Q, KEYS, VALUES, plan, 8), "window: 8 was not planned"),
            (
                lambda: run.paged_attention(Q, KEYS, VALUES, far, None),
                "block_table: block id 2 of a pool of 2 blocks",
            ),
            (
                lambda: run.rope_write_kv(QKV, beyond, KEYS, VALUES, None),
                "slots: 32 in a cache of 32",
            ),
        )
    )


@every_backend
def test_steps_whose_arrays_do_not_hold_together(backend: str) -> None:
    run, work = kernels_of(backend), _work()

    def prepare(table: torch.Tensor = TABLE, **fields: object) -> object:
        return run.prepare(replace(work, **fields), HEADS, table)  # type: ignore[arg-type]

    negative = np.array(work.block_table)
    negative[0, 0] = -1
    _refused(
        (
            (
                lambda: prepare(positions=work.positions.astype(np.int64)),
                "positions: must be int32",
            ),
            (lambda: prepare(slots=work.slots[:2]), "slots: one for each of 3"),
            (lambda: prepare(slots=work.slots.astype(np.int32)), "slots: must be int64"),
            (lambda: prepare(block_table=work.block_table[0]), "block_table: must be int32"),
            (lambda: prepare(block_table=work.block_table[:, :3]), "block_table: 3 blocks are not"),
            (lambda: prepare(block_table=negative), "block_table: block id -1"),
            (lambda: prepare(block_size=12), "block_size: 12 must divide the span"),
            (lambda: prepare(torch.zeros(8, 6)), "rope_table: shape"),
            (lambda: prepare(TABLE.double()), "rope_table: dtype"),
        )
    )


@every_backend
def test_positions_beyond_the_rope_table(backend: str) -> None:
    run = kernels_of(backend)
    with pytest.raises(ValueError, match="positions: 2 in a rope table of 2"):
        run.rope_write_kv(QKV, run.prepare(_work(), HEADS, TABLE[:2]), KEYS, VALUES, None)


@every_backend
def test_copies(backend: str) -> None:
    run, pool = kernels_of(backend), torch.arange(4.0).view(1, 4, 1, 1, 1)

    def copy(sources: list[int], targets: list[int]) -> None:
        run.copy_blocks([pool], np.array(sources, np.int64), np.array(targets, np.int64))

    _refused(
        (
            (lambda: copy([4], [0]), r"sources: block ids must be in \[0, 4\)"),
            (lambda: copy([0], [-1]), "targets: block ids"),
            (lambda: copy([0, 1], [2, 2]), "targets: one occurs twice"),
            (lambda: copy([0, 1], [2]), "targets: one for each source"),
        )
    )
    assert pool.flatten().tolist() == [0, 1, 2, 3]


def test_linear_layers_of_the_compiled_kernels() -> None:
    run, dense = kernels_of("cpu"), torch.ones(32, 64)
    weight = Weight(lambda: dense, "F32", (32, 64))
    narrow = Weight(dense[:, :48].contiguous, "F32", (32, 48))
    cut = Weight(lambda: dense, "Q8_0", (32, 64), np.zeros((32, 67), np.uint8))
    layer = run.linear([weight], None)
    assert isinstance(layer, CpuLinear)
    _refused(
        (
            (lambda: layer(torch.zeros(3, 63)), "x: shape"),
            (lambda: layer(torch.zeros(64)), "x: shape"),
            (lambda: layer(torch.zeros(3, 64, dtype=torch.float64)), "x: dtype"),
            (lambda: layer(torch.zeros(64, 3).T), "x: the last dimension must be contiguous"),
            (lambda: layer(torch.zeros(3, 128)[:, :64]), "x: must be contiguous"),
            (lambda: layer(torch.zeros(3, 64, device="meta")), "x: must be on cpu"),
            (lambda: layer.rows(torch.tensor([32])), r"ids: must be in \[0, 32\)"),
            (lambda: layer.rows(torch.tensor([-1])), "ids: must be in"),
            (lambda: layer.rows(torch.zeros(1)), "ids: dtype"),
            (lambda: run.linear([weight], torch.ones(31)), "bias: shape"),
            (lambda: run.linear([weight], torch.ones(32).double()), "bias: dtype"),
            (lambda: run.linear([weight, narrow], None), "weights: 64 inputs each, not 48"),
            (lambda: run.linear([cut], None), "weights: 67 bytes are no Q8_0 rows of 64 inputs"),
        )
    )
    assert layer.rows(torch.zeros(0, dtype=torch.int64)).shape == (0, 64)
