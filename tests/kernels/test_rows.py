"""Norms, SiLU, rotation, KV writes and block copies: values, and bits of a row."""

import numpy as np
import pytest
import torch

from prefixcache.model.attention import plan_step
from prefixcache_kernels import Heads
from prefixcache_kernels.reference import copy_blocks
from tests.kernels.backends import every_backend, kernels_of, rows_step

COUNTS = (*range(1, 36), 63, 64, 65, 171, 300)


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@every_backend
@pytest.mark.parametrize("width", [576, 64, 100, 37])
def test_norms_equal_their_formula(backend: str, width: int) -> None:
    kernels = kernels_of(backend)
    x, residual, weight = _noise(9, width), _noise(9, width, seed=1), _noise(width, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    both = residual.clone()
    out = kernels.add_rms_norm(x, both, weight, 1e-5)
    assert torch.equal(both, x + residual)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kernels.rms_norm(x + residual, weight, 1e-5), out)


@every_backend
@pytest.mark.parametrize("width", [1536, 96, 37])
def test_silu_mul_equals_its_formula_also_where_exp_overflows(backend: str, width: int) -> None:
    x = _noise(5, 2 * width)
    x[0, :4] = torch.tensor([-200.0, 200.0, -88.5, 0.0])
    gate, up = x.double().chunk(2, -1)
    out = kernels_of(backend).silu_mul(x)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@every_backend
@pytest.mark.parametrize("width", [576, 1536, 37])
def test_bits_of_row_operations_do_not_depend_on_the_batch(backend: str, width: int) -> None:
    kernels = kernels_of(backend)
    x, residual, weight = _noise(300, width), _noise(300, width, seed=1), _noise(width, seed=2)
    gate_up = _noise(300, 2 * width, seed=3)
    try:
        torch.set_num_threads(1)
        norm = kernels.add_rms_norm(x, residual.clone(), weight, 1e-5)
        silu = kernels.silu_mul(gate_up)
        for workers in (1, 2, 3):
            torch.set_num_threads(workers)
            for rows in COUNTS:
                for first in {0, 300 - rows}:
                    cut = slice(first, first + rows)
                    some = kernels.add_rms_norm(x[cut], residual[cut].clone(), weight, 1e-5)
                    assert torch.equal(some, norm[cut]), (workers, rows)
                    assert torch.equal(kernels.silu_mul(gate_up[cut]), silu[cut]), (workers, rows)
    finally:
        torch.set_num_threads(1)


@every_backend
@pytest.mark.parametrize(("heads", "size"), [(Heads(9, 3, 64), 16), (Heads(4, 2, 20), 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_kv_rotates_and_stores_in_the_slots(
    backend: str, heads: Heads, size: int, normed: bool
) -> None:
    kernels = kernels_of(backend)
    rows, width = 21, (heads.query + 2 * heads.kv) * heads.dim
    qkv = _noise(rows, width)
    step = rows_step([(1, 40), (20, 25)], [[5, 4, 3, 9, 8], [2, 1, 0, 7]], size)
    step.slot_mapping[3] = -1
    angles = torch.arange(64.0)[:, None] * (0.5 ** torch.arange(heads.dim // 2))
    plan = kernels.prepare(
        plan_step(step, size, [None]), heads, torch.cat((angles.cos(), angles.sin()), -1)
    )
    keys = torch.full((10, heads.kv, heads.dim, size), 7.0)
    values = torch.full((10, heads.kv, size, heads.dim), 7.0)
    weights = (_noise(heads.dim, seed=4), _noise(heads.dim, seed=5), 1e-6) if normed else None
    q = kernels.rope_write_kv(qkv.clone(), plan, keys, values, weights)

    x = qkv.double().view(rows, -1, heads.dim)
    q64, k64, v64 = x.split([heads.query, heads.kv, heads.kv], 1)
    if weights is not None:
        scale = [(y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for y in (q64, k64)]
        q64, k64 = q64 * scale[0] * weights[0].double(), k64 * scale[1] * weights[1].double()
    angle = torch.from_numpy(step.positions)[:, None, None].double() * (
        0.5 ** torch.arange(heads.dim // 2)
    )

    def rotated(y: torch.Tensor) -> torch.Tensor:
        low, high = y.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    torch.testing.assert_close(
        q.view(rows, heads.query, heads.dim).double(), rotated(q64), rtol=1e-4, atol=1e-4
    )
    expected_k, expected_v = torch.full_like(keys, 7.0), torch.full_like(values, 7.0)
    for row, slot in enumerate(step.slot_mapping):
        if slot >= 0:
            expected_k[slot // size, :, :, slot % size] = rotated(k64)[row].float()
            expected_v[slot // size, :, slot % size] = v64[row].float()
    torch.testing.assert_close(keys, expected_k, rtol=1e-4, atol=1e-4)
    assert torch.equal(values, expected_v)


def test_copies_read_every_source_before_a_target_is_written() -> None:
    cache = torch.arange(5.0)[:, None].repeat(1, 3)
    copy_blocks([cache], torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert cache[:, 0].tolist() == [2.0, 0.0, 1.0, 3.0, 4.0]


def test_positions_of_the_table_are_looked_up_per_row() -> None:
    kernels = kernels_of("torch")
    heads = Heads(1, 1, 2)
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # a quarter turn at position 1
    plan = kernels.prepare(plan_step(rows_step([(2, 2)], [[0]], 16), 16, [None]), heads, table)
    qkv = torch.tensor([[1.0, 2.0] * 3, [1.0, 2.0] * 3])
    caches = torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 16, 2)
    q = kernels.rope_write_kv(qkv, plan, *caches, None)
    assert np.array_equal(q.numpy(), [[1.0, 2.0], [-2.0, 1.0]])
