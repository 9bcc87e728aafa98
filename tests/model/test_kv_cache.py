"""The pool's tensors."""

import pytest
import torch

from prefixcache.model.config import ModelConfig
from prefixcache.model.kv_cache import FP8, KVCache
from prefixcache_kernels import QuantizedCache
from tests.kernels.backends import CPU, every_backend, kernels_of

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


def _cache(blocks: int = 5, backend: str = "torch") -> KVCache:
    cache = KVCache(CONFIG, blocks, 4, torch.float32, CPU, kernels=kernels_of(backend))
    cache.keys.copy_(torch.arange(blocks)[None, :, None, None, None].expand_as(cache.keys))
    cache.values.copy_(-cache.keys.transpose(-1, -2))
    return cache


def test_bytes_per_block_is_what_a_block_takes() -> None:
    cache = _cache(7)
    held = cache.keys.nbytes + cache.values.nbytes
    assert KVCache.bytes_per_block(CONFIG, 4, torch.float32) * 7 == held
    assert KVCache.bytes_per_block(CONFIG, 4, torch.bfloat16) * 14 == held


def test_quantised_blocks_are_copied_with_their_scales_and_counted_with_them() -> None:
    cache = KVCache(CONFIG, 5, 4, FP8, CPU, kernels=kernels_of("torch"))
    assert cache.scales is not None
    held = cache.keys.nbytes + cache.values.nbytes + cache.scales.nbytes
    assert KVCache.bytes_per_block(CONFIG, 4, FP8) * 5 == held
    for tensor in (cache.keys, cache.values, *cache.scales):
        numbers = torch.arange(1.0, 6.0)[None, :, None, None, None]
        tensor.copy_(numbers.expand(tensor.shape))
    cache.copy_blocks([(0, 1), (1, 4), (4, 0)])
    for keys, values in cache.layers:
        assert isinstance(keys, QuantizedCache)
        for part in (keys.data, keys.scales, values.data, values.scales):
            assert part.float().flatten(1)[:, 0].tolist() == [5, 1, 3, 4, 2]


def test_the_compiled_kernels_of_the_cpu_refuse_fp8() -> None:
    if kernels_of("cpu").name == "cpu":
        with pytest.raises(ValueError, match="choose attention_backend torch"):
            KVCache(CONFIG, 5, 4, FP8, CPU, kernels=kernels_of("cpu"))


@every_backend
def test_copies_read_before_they_write_in_all_layers(backend: str) -> None:
    cache = _cache(backend=backend)
    cache.copy_blocks([(0, 1), (1, 4), (4, 0)])
    expected = torch.tensor([4.0, 0.0, 2.0, 3.0, 1.0])
    assert torch.equal(cache.keys, expected[None, :, None, None, None].expand_as(cache.keys))
    assert torch.equal(cache.values, -expected[None, :, None, None, None].expand_as(cache.values))


@every_backend
@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([(3, 5), (5, 7)], [0, 1, 2, 3, 4, 3, 6, 5]),
        ([(2, 4), (4, 2)], [0, 1, 4, 3, 2, 5, 6, 7]),
    ],
    ids=str,
)
def test_a_target_that_is_also_a_source_gives_what_it_held_before(
    copies: list[tuple[int, int]], expected: list[int], backend: str
) -> None:
    """FK-04: blocks filled with their own ids; whole blocks, all layers, K and V."""
    cache = _cache(8, backend)
    cache.copy_blocks(copies)
    wanted = torch.tensor(expected, dtype=torch.float32)[None, :, None, None, None]
    assert torch.equal(cache.keys, wanted.expand_as(cache.keys))
    assert torch.equal(cache.values, -wanted.expand_as(cache.values))


def test_no_copies_are_no_work() -> None:
    cache = _cache()
    cache.copy_blocks([])
    assert torch.equal(cache.keys, _cache().keys)


@pytest.mark.parametrize("copies", [[(0, 5)], [(-1, 0)], [(0, 1), (2, 1)]])
def test_wrong_copies_are_refused_before_any_is_made(copies: list[tuple[int, int]]) -> None:
    cache = _cache()
    with pytest.raises(ValueError, match="copies"):
        cache.copy_blocks(copies)
    assert torch.equal(cache.keys, _cache().keys)


@pytest.mark.parametrize(("blocks", "size", "name"), [(0, 16, "num_blocks"), (4, 24, "block_size")])
def test_wrong_sizes_are_refused(blocks: int, size: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVCache(CONFIG, blocks, size, torch.float32, CPU, kernels=kernels_of("torch"))
