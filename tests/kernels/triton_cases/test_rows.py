"""RMSNorm, residual and SiLU · up against their twins."""

import pytest
import torch

from prefixcache_kernels import reference
from prefixcache_kernels.triton_backend import rows
from tests.kernels.triton_cases.inputs import assert_close, every_dtype, noise

SHAPES = [(1, 16), (3, 100), (5, 576), (2, 1025), (0, 64)]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_its_twin(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[1], dtype=dtype)
    assert_close(rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_in_place_and_equals_its_twin(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
    weight, theirs = noise(shape[1], dtype=dtype), residual.clone()
    out = rows.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(out, reference.add_rms_norm(x, theirs, weight, 1e-5))
    assert_close(residual, theirs)  # the interpreter rounds bfloat16 towards zero


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul_equals_its_twin(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = noise(shape[0], 2 * shape[1], dtype=dtype) * 4
    assert_close(rows.silu_mul(x), reference.silu_mul(x))


def test_rows_may_be_apart() -> None:
    wide, weight = noise(4, 96), noise(32)
    view = wide[:, 32:64]
    assert_close(rows.rms_norm(view, weight, 1e-5), reference.rms_norm(view, weight, 1e-5))
    assert_close(rows.silu_mul(wide[:, :64]), reference.silu_mul(wide[:, :64].contiguous()))


def test_bad_arguments_are_refused_by_name() -> None:
    x = noise(4, 32)
    with pytest.raises(ValueError, match=r"weight: shape must be \(32\)"):
        rows.rms_norm(x, noise(31), 1e-5)
    with pytest.raises(ValueError, match="weight: dtype"):
        rows.rms_norm(x, noise(32, dtype=torch.float16), 1e-5)
    with pytest.raises(ValueError, match="weight: must be on"):
        rows.rms_norm(x, torch.zeros(32, device="meta"), 1e-5)
    with pytest.raises(ValueError, match="x: the last dimension"):
        rows.rms_norm(noise(32, 4).T, noise(32), 1e-5)
    with pytest.raises(ValueError, match="residual: shape"):
        rows.add_rms_norm(x, noise(3, 32), noise(32), 1e-5)
    with pytest.raises(ValueError, match="gate_up: width must be even"):
        rows.silu_mul(noise(2, 33))
    with pytest.raises(ValueError, match="gate_up: dtype"):
        rows.silu_mul(torch.zeros(2, 32, dtype=torch.float64))
