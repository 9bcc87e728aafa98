"""Linear layers: values against float64, and bits of a row whatever the other rows."""

import pytest
import torch

from prefixcache_kernels import Linear, Weight
from prefixcache_kernels.reference import TiledLinear
from tests.kernels.backends import every_backend, kernels_of

SHAPES = [(576, 960), (1536, 576), (64, 96), (100, 37)]


def _dense(inputs: int, outputs: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, torch.randn(outputs, generator=generator) if bias else None


def _layer(backend: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    outputs = weight.shape[0]
    parts = [weight[: outputs // 3], weight[outputs // 3 :]]
    matrices = [Weight(lambda part=part: part, "F32", tuple(part.shape)) for part in parts]  # type: ignore[misc]
    return kernels_of(backend).linear(matrices, bias)


@every_backend
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_values_equal_float64(backend: str, shape: tuple[int, int], bias: bool) -> None:
    weight, offset = _dense(*shape, bias)
    x = torch.randn(70, shape[0], generator=torch.Generator().manual_seed(5))
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    layer = _layer(backend, weight, offset)
    assert (layer.in_features, layer.out_features) == shape
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(
        TiledLinear(weight, offset)(x).double(), expected, rtol=1e-5, atol=2e-4
    )


@every_backend
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_the_threads(
    backend: str, shape: tuple[int, int]
) -> None:
    weight, bias = _dense(*shape, True)
    layer = _layer(backend, weight, bias)
    x = torch.randn(1100, shape[0], generator=torch.Generator().manual_seed(6))
    try:
        torch.set_num_threads(2)
        whole = layer(x)
        for workers in (1, 2, 3):
            torch.set_num_threads(workers)
            for rows in (*range(1, 36), 63, 64, 65, 100, 128, 257, 513, 1056):
                for first in (0, 44):
                    some = layer(x[first : first + rows])
                    assert torch.equal(some, whole[first : first + rows]), (workers, rows, first)
    finally:
        torch.set_num_threads(1)


@every_backend
def test_no_rows_give_no_rows(backend: str) -> None:
    weight, _ = _dense(64, 96, False)
    assert _layer(backend, weight, None)(torch.zeros(0, 64)).shape == (0, 96)
