"""Products in int8: bit for bit those of the twin, and the same for a row whatever is beside it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache_kernels import Weight, select_kernels
from prefixcache_kernels.cpu.backend import CpuKernels
from prefixcache_kernels.cpu.build import build
from prefixcache_kernels.cpu.library import Library
from prefixcache_kernels.cpu.linear import CpuLinear
from prefixcache_kernels.reference_int8 import Int8Weight, linear_int8, quantise_rows, unpack_blocks
from tests.kernels.backends import CPU

KINDS = ("Q8_0", "Q4_0", "Q4_1")
every_kind = pytest.mark.parametrize("kind", KINDS)


def _kernels() -> CpuKernels:
    kernels = select_kernels("auto", CPU, torch.float32, activation_quantization="int8")
    assert isinstance(kernels, CpuKernels)
    return kernels


def _weight(kind: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    """A matrix as a loader would hand it over, quantised by gguf."""
    values = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    dense = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    return Weight(lambda: dense, kind, (outputs, inputs), raw)


def _parts(weight: Weight) -> Int8Weight:
    assert weight.raw is not None
    return unpack_blocks(weight.format, torch.from_numpy(weight.raw))


def _rows(count: int, width: int, seed: int = 1) -> torch.Tensor:
    """Rows whose groups differ in size by orders of magnitude, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    x *= torch.randn(count, 1, generator=generator).exp()
    x[:, :32] *= 1e-3
    if count > 1:
        x[1, -32:] = 0.0
    return x


@every_kind
def test_a_twins_parts_are_the_dequantised_matrix(kind: str) -> None:
    weight = _weight(kind, 37, 96)
    parts = _parts(weight)
    dense = parts.q * parts.scale[..., None]
    if parts.minimum is not None:
        dense += parts.minimum[..., None]
    torch.testing.assert_close(dense.flatten(1), weight.dense())


@every_kind
@pytest.mark.parametrize("shape", [(32, 1), (64, 96), (160, 37), (576, 130), (1536, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_bits_equal_the_twins(kind: str, shape: tuple[int, int], bias: bool) -> None:
    inputs, outputs = shape
    weight = _weight(kind, outputs, inputs)
    offset = torch.randn(outputs, generator=torch.Generator().manual_seed(2)) if bias else None
    layer = _kernels().linear([weight], offset)
    x = _rows(17, inputs)
    expected = linear_int8(x, _parts(weight), offset)
    for rows in (1, 2, 5, 6, 7, 13, 17):
        assert torch.equal(layer(x[:rows]), expected[:rows]), rows


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.tuples(st.integers(0, 20), st.integers(1, 5), st.integers(1, 70)),
    st.integers(0, 2**31 - 1),
    st.floats(1e-30, 1e30),
)
def test_bits_equal_the_twins_for_any_shape_and_scale(
    kind: str, shape: tuple[int, int, int], seed: int, scale: float
) -> None:
    rows, groups, outputs = shape
    weight = _weight(kind, outputs, 32 * groups, seed)
    x = _rows(rows, 32 * groups, seed) * scale
    assert torch.equal(_kernels().linear([weight], None)(x), linear_int8(x, _parts(weight), None))


@every_kind
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_the_threads(kind: str) -> None:
    layer = _kernels().linear([_weight(kind, 100, 160), _weight(kind, 37, 160, 1)], None)
    x = _rows(700, 160)
    whole = layer(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (*range(1, 26), 63, 64, 65, 239, 240, 241, 513):
            for first in (0, 44):
                assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows])


@every_kind
def test_values_are_close_to_those_of_float32(kind: str) -> None:
    weight = _weight(kind, 96, 576)
    x = _rows(40, 576)
    exact = x.double() @ weight.dense().double().T
    error = (_kernels().linear([weight], None)(x) - exact).norm() / exact.norm()
    assert error < 0.01


def test_quantised_rows_are_within_half_a_step_and_use_all_of_it() -> None:
    x = _rows(50, 320)
    q, scale = quantise_rows(x)
    assert q.abs().amax() == 127
    assert ((q * scale[..., None] - x.view_as(q)).abs() <= 0.5001 * scale[..., None]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_only(bad: float) -> None:
    layer = _kernels().linear([_weight("Q4_1", 64, 96)], None)
    x = _rows(9, 96)
    good = layer(x)
    x[4, 50] = bad
    y = layer(x)
    assert not y[4].isfinite().any()
    keep = torch.arange(9) != 4
    assert torch.equal(y[keep], good[keep])


def test_other_formats_keep_float32_beside_quantised_ones() -> None:
    dense = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    weights = [_weight("Q4_1", 32, 64), Weight(lambda: dense, "F32", (40, 64))]
    x = _rows(20, 64)
    y = _kernels().linear(weights, None)(x)
    assert torch.equal(y[:, :32], linear_int8(x, _parts(weights[0]), None))
    plain = select_kernels("cpu", CPU, torch.float32).linear(weights[1:], None)
    assert torch.equal(y[:, 32:], plain(x))


@every_kind
def test_an_embedding_is_the_dequantised_row_in_the_memory_of_the_format(kind: str) -> None:
    weight = _weight(kind, 75, 96)
    layer = _kernels().linear([weight], None)
    assert isinstance(layer, CpuLinear)
    ids = torch.tensor([0, 74, 5, 5, 31, 32])
    assert torch.equal(layer.rows(ids), weight.dense()[ids])
    assert weight.raw is not None
    assert sum(tiles.nbytes for tiles in layer.tiles) == weight.raw.nbytes // 75 * 96


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["-mno-avx512vnni"],
        ["-mno-avx512f"],
        ["-mno-avx512f", "-mno-avxvnni"],
        ["-mno-avx512f", "-mno-avx2", "-mno-avxvnni"],
    ],
)
def test_every_processor_computes_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    narrow = CpuKernels(Library(build(tmp_path, flags)), int8=True)
    x = _rows(30, 320)
    for kind in KINDS:
        weight = _weight(kind, 75, 320)
        assert torch.equal(narrow.linear([weight], None)(x), _kernels().linear([weight], None)(x))


@pytest.mark.parametrize(
    ("name", "device", "dtype", "mode", "message"),
    [
        (
            "torch",
            "cpu",
            torch.float32,
            "int8",
            "served by attention_backend 'cpu' in float32, not by 'torch'",
        ),
        ("auto", "cpu", torch.bfloat16, "int8", "not by 'auto' in bfloat16 on cpu; choose"),
        ("auto", "cuda", torch.float32, "int8", "on cuda"),
        ("auto", "cpu", torch.float32, "int4", "activation_quantization 'int4': None or 'int8'"),
    ],
)
def test_where_it_is_not_served_it_is_refused(
    name: str, device: str, dtype: torch.dtype, mode: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select_kernels(name, torch.device(device), dtype, activation_quantization=mode)


@every_kind
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_shows_in_its_own_row_alone(kind: str, value: float) -> None:
    layer = _kernels().linear([_weight(kind, 40, 96)], None)
    x = _rows(9, 96)
    expected = layer(x)
    x[3, 50] = value
    out = layer(x)
    assert not out[3].isfinite().any()
    others = [row for row in range(9) if row != 3]
    assert torch.equal(out[others], expected[others])
