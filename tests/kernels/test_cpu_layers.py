"""All layers in one call against the same operations one by one: the same bits."""

from dataclasses import replace

import pytest
import torch

from prefixcache.model.attention import plan_step
from prefixcache_kernels import Heads, Layer, Linear, Weight
from prefixcache_kernels.cpu.layers import CpuLayers
from prefixcache_kernels.layers import LayerByLayer
from tests.kernels.backends import kernels_of, rows_step

HEADS, HIDDEN, INNER, BLOCK, EPS = Heads(query=4, kv=2, dim=24), 48, 80, 16, 1e-5
LENGTHS, TABLES = [(40, 150), (1, 140), (2, 30)], [list(range(10)), list(range(9)), [11, 12]]


def _layers(qk_norm: bool, windows: list[int | None]) -> tuple[list[Layer], torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    kernels = kernels_of("cpu")

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width, generator=generator) + 0.5

    def linear(inputs: int, outputs: int) -> Linear:
        dense = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return kernels.linear([Weight(lambda: dense, "F32", (outputs, inputs))], norm(outputs))

    width = HEADS.query * HEADS.dim
    layers = [
        Layer(
            input_norm=norm(HIDDEN),
            qkv=linear(HIDDEN, width + 2 * HEADS.kv * HEADS.dim),
            qk_norm=(norm(HEADS.dim), norm(HEADS.dim), EPS) if qk_norm else None,
            output=linear(width, HIDDEN),
            post_norm=norm(HIDDEN),
            gate_up=linear(HIDDEN, 2 * INNER),
            down=linear(INNER, HIDDEN),
            window=window,
        )
        for window in windows
    ]
    return layers, norm(HIDDEN)


def _caches(count: int, fill: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape = (14, HEADS.kv, HEADS.dim, BLOCK)
    return [
        (torch.full(shape, fill), torch.full(shape, fill).mT.contiguous()) for _ in range(count)
    ]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wanted", [None, [], [42], [39, 0, 41]])
def test_one_call_gives_the_bits_of_operations_one_by_one(
    qk_norm: bool, threads: int, wanted: list[int] | None
) -> None:
    torch.set_num_threads(threads)
    kernels, windows = kernels_of("cpu"), [None, 50, None]
    layers, final_norm = _layers(qk_norm, windows)
    step = rows_step(LENGTHS, TABLES, BLOCK)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(150, HEADS.dim, generator=generator)
    x = torch.randn(43, HIDDEN, generator=generator)
    rows = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
    results, pools = [], []
    for make in (kernels.layers, lambda *parts: LayerByLayer(kernels, *parts)):
        plan = kernels.prepare(plan_step(step, BLOCK, windows, kernels.run_rows), HEADS, table)
        pools.append(_caches(3))
        results.append(make(layers, final_norm, EPS)(x.clone(), plan, pools[-1], rows))
    assert torch.equal(*results)
    assert results[0].shape == (43 if wanted is None else len(wanted), HIDDEN)
    for (k, v), (k_twin, v_twin) in zip(*pools, strict=True):
        assert torch.equal(k, k_twin)
        assert torch.equal(v, v_twin)


def test_another_pool_is_met_with_its_own_addresses() -> None:
    kernels = kernels_of("cpu")
    layers, final_norm = _layers(False, [None])
    run = kernels.layers(layers, final_norm, EPS)
    work = plan_step(rows_step([(3, 3)], [[0]], BLOCK), BLOCK, [None], kernels.run_rows)
    first, second = _caches(1), _caches(1)
    for caches in (first, second, first):
        run(torch.ones(3, HIDDEN), kernels.prepare(work, HEADS, torch.ones(8, 24)), caches, None)
    assert torch.equal(first[0][0], second[0][0])
    assert not torch.equal(first[0][0], _caches(1)[0][0])


def test_wrong_inputs_are_refused_by_name() -> None:
    kernels = kernels_of("cpu")
    layers, final_norm = _layers(False, [None, None])
    run = kernels.layers(layers, final_norm, EPS)
    assert isinstance(run, CpuLayers)
    work = plan_step(rows_step([(3, 3)], [[0]], BLOCK), BLOCK, [None], kernels.run_rows)
    plan = kernels.prepare(work, HEADS, torch.zeros(8, HEADS.dim))
    x, caches = torch.zeros(3, HIDDEN), _caches(2)
    apart = torch.zeros(14, HEADS.kv + 1, HEADS.dim, BLOCK)[:, : HEADS.kv]
    others = kernels.prepare(replace(work, groups={50: work.groups[None]}), HEADS, plan.angles)
    far = plan_step(rows_step([(3, 3)], [[14]], BLOCK), BLOCK, [None], kernels.run_rows)
    unread = replace(far, slots=work.slots)
    for arguments, message in (
        ((x[:2], plan, caches, None), "residual: shape"),
        ((x.double(), plan, caches, None), "residual: dtype"),
        ((torch.zeros(HIDDEN, 3).T, plan, caches, None), "residual: the last dimension"),
        ((x.to("meta"), plan, caches, None), "residual: must be on cpu"),
        ((x, plan, caches[:1], None), "caches: 2 layers needed"),
        ((x, plan, [caches[0], (caches[1][0].half(), caches[1][1])], None), "k_cache: dtype"),
        ((x, plan, [caches[0], (apart, caches[1][1])], None), "caches: strides must be the same"),
        ((x, plan, caches, torch.zeros(1)), "rows: dtype"),
        ((x, plan, caches, torch.tensor([3])), r"rows: must be in \[0, 3\)"),
        ((x, plan, caches, torch.tensor([-1])), "rows: must be in"),
        ((x, others, caches, None), r"plan: made without the windows \{None\}"),
        (
            (x, kernels.prepare(far, HEADS, plan.angles), caches, None),
            "slots: 226 in a cache of 224",
        ),
        (
            (x, kernels.prepare(unread, HEADS, plan.angles), caches, None),
            "block_table: block id 14",
        ),
        (
            (x, kernels.prepare(work, HEADS, plan.angles[:2]), caches, None),
            "positions: 2 in a rope",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    with pytest.raises(ValueError, match=r"norms: shape must be \(48\)"):
        kernels.layers(layers, torch.ones(HIDDEN)[:, None], EPS)
    with pytest.raises(ValueError, match="norms: dtype"):
        kernels.layers(layers, final_norm.double(), EPS)
