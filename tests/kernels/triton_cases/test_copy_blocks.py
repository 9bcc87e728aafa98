"""Blocks copied within a pool, and batches in which a target is also a source."""

import numpy as np
import pytest
import torch
from torch import Tensor

from prefixcache_kernels import reference
from prefixcache_kernels.triton_backend.copy_blocks import copy_blocks
from tests.kernels.triton_cases.inputs import DEVICE, every_dtype, noise

BATCHES = {
    "fan": [(3, 0), (3, 1), (3, 6)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "swap": [(4, 5), (5, 4)],
    "FK-04, chain": [(3, 5), (5, 7)],
    "FK-04, swap": [(2, 4), (4, 2)],
    "cycle beside a move": [(0, 1), (1, 2), (2, 0), (5, 6), (1, 4)],
    "onto itself": [(2, 2), (2, 3)],
    "none": [],
}


def _pairs(copies: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(copies, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _twin(cache: Tensor, copies: list[tuple[int, int]]) -> Tensor:
    expected = cache.clone()
    sources, targets = (torch.from_numpy(ids).to(DEVICE) for ids in _pairs(copies))
    reference.copy_blocks(list(expected.unbind(0)), sources, targets)
    return expected


@every_dtype
@pytest.mark.parametrize("name", BATCHES)
def test_every_block_gets_what_was_there_before(dtype: torch.dtype, name: str) -> None:
    """FK-04: in every layer, whole blocks, K and V."""
    keys, values = noise(2, 8, 3, 20, 8, dtype=dtype), noise(2, 8, 3, 8, 20, dtype=dtype)
    expected = [_twin(cache, BATCHES[name]) for cache in (keys, values)]
    copy_blocks([keys, values], *_pairs(BATCHES[name]))
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_caches_may_be_views_with_any_strides() -> None:
    """KN-08: K and V are views of one pool, block by block."""
    both = noise(2, 7, 2, 8, 3, 24)
    keys = both[:, :, 0].permute(0, 1, 3, 4, 2)  # [layers, blocks, heads, dim, size]
    values, expected = both[:, :, 1].clone(), _twin(keys, BATCHES["swap"])
    copy_blocks([keys], *_pairs(BATCHES["swap"]))
    assert torch.equal(keys, expected)
    assert torch.equal(both[:, :, 1], values)


def test_block_ids_are_widened_before_they_meet_the_stride() -> None:
    """KN-01: blocks on both sides of 2^31 elements; pages that nobody touches cost nothing."""
    blocks = 2**31 // 256 + 3
    cache = torch.empty(1, blocks, 1, 16, 16, dtype=torch.float16, device=DEVICE)
    cache[0, -1], cache[0, 1] = 3.0, 5.0
    copy_blocks([cache], np.array([blocks - 1, 1]), np.array([0, blocks - 2]))
    assert cache[0, 0].eq(3.0).all()
    assert cache[0, -2].eq(5.0).all()


def test_bad_arguments_are_refused_by_name() -> None:
    cache = noise(1, 4, 1, 8, 8)
    before = cache.clone()
    for copies, message in (
        ([(4, 0)], r"sources: block ids must be in \[0, 4\)"),
        ([(0, -1)], "targets: block ids"),
        ([(0, 1), (2, 1)], "targets: one occurs twice"),
    ):
        with pytest.raises(ValueError, match=message):
            copy_blocks([cache], *_pairs(copies))
    with pytest.raises(ValueError, match="targets: one for each source"):
        copy_blocks([cache], np.array([0, 1]), np.array([2]))
    with pytest.raises(ValueError, match="caches: need 5 dimensions"):
        copy_blocks([cache[0]], *_pairs([(0, 1)]))
    assert torch.equal(cache, before)
