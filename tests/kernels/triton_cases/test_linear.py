"""The batch-invariant linear layer against torch's."""

import pytest
import torch

from prefixcache_kernels import Weight
from prefixcache_kernels.triton_backend import TritonKernels
from prefixcache_kernels.triton_backend.linear import InvariantLinear, tile_of
from tests.kernels.triton_cases.inputs import DEVICE, assert_close, every_dtype, noise


@every_dtype
@pytest.mark.parametrize("rows", [0, 1, 17, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (100, 37)])
def test_values_equal_torch(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    weight, bias = noise(outputs, inputs, dtype=dtype), noise(outputs, dtype=dtype)
    x = noise(rows, inputs, dtype=dtype)
    for offset in (None, bias):
        expected = torch.nn.functional.linear(x.float(), weight.float())
        if offset is not None:
            expected += offset.float()
        scaled = InvariantLinear(weight, offset)(x).float() / inputs**0.5
        assert_close(scaled.to(dtype), (expected / inputs**0.5).to(dtype))


def test_rows_and_weights_may_be_views() -> None:
    wide, weight = noise(9, 128), noise(40, 128)
    layer = InvariantLinear(weight[4:36, 32:96], None)
    assert_close(layer(wide[::2, 64:]), wide[::2, 64:] @ weight[4:36, 32:96].T)


def test_the_backend_joins_matrices_side_by_side() -> None:
    parts = [noise(20, 48), noise(12, 48, seed=1)]
    bias, x = noise(32), noise(5, 48)
    expected = torch.nn.functional.linear(x, torch.cat(parts), bias)
    for invariant in (True, False):
        kernels = TritonKernels(DEVICE, torch.float32, batch_invariant=invariant)
        weights = [Weight(lambda p=p: p, "F32", tuple(p.shape)) for p in parts]  # type: ignore[misc]
        layer = kernels.linear(weights, bias)
        assert (layer.in_features, layer.out_features) == (48, 32)
        assert_close(layer(x), expected)
        table = kernels.embedding(weights[0], layer)
        ids = torch.tensor([3, 0, 3], device=DEVICE)
        assert torch.equal(kernels.embedding(weights[0], None)(ids), parts[0][ids])
        assert torch.equal(table(ids)[:, :48], parts[0][ids])


def test_a_tile_is_chosen_from_the_layer_and_never_from_the_rows() -> None:
    sizes = {n: tile_of(n, torch.bfloat16, 227).block_n for n in (576, 4096, 14336, 128256)}
    assert sizes == {576: 32, 4096: 32, 14336: 64, 128256: 128}


def test_bad_arguments_are_refused_by_name() -> None:
    layer = InvariantLinear(noise(8, 16), None)
    with pytest.raises(ValueError, match=r"x: shape must be \(any, 16\)"):
        layer(noise(3, 15))
    with pytest.raises(ValueError, match="x: dtype"):
        layer(noise(3, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="weight: the last dimension"):
        InvariantLinear(noise(16, 8).T, None)
    with pytest.raises(ValueError, match="bias: shape"):
        InvariantLinear(noise(8, 16), noise(9))
