"""The tensors behind the block pool: K and V of every layer, block by block.

Owns the memory and its layout. Which block belongs to whom is the cache's business; what is written
where, the kernels'. Slots that were never written hold anything, NaN included: no reader may look.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.config import ModelConfig
from prefixcache_kernels import Cache, Kernels, QuantizedCache

FP8 = torch.float8_e4m3fn

_FP8_CAPABILITY = (8, 9)
"""Compute capability from which on a GPU converts e4m3."""


class KVCache:
    """K and V of `num_blocks` blocks of `block_size` tokens, in all layers.

    keys:   [layers, blocks, kv_heads, head_dim, block_size], so that one load takes a run of tokens
    values: [layers, blocks, kv_heads, block_size, head_dim]
    scales: float32 [2 (K, V), layers, blocks, kv_heads, 1, block_size] where the dtype is e4m3, a
        scale for each token and head; else None
    parts: all of these as tensors [layers, blocks, a, b, c], for what moves whole blocks
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: Kernels,
    ) -> None:
        """Allocate the pool; pages are touched when first written. `kernels` copy its blocks.

        dtype: the model's, or `FP8` for quantised keys and values.

        Raises:
            ValueError: num_blocks below 1, block_size not a power of two from 1 to 128, or a dtype
                that the kernels or the device do not serve.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks: at least 1, not {num_blocks}")
        if not 1 <= block_size <= 128 or block_size & (block_size - 1):
            raise ValueError(f"block_size: a power of two from 1 to 128, not {block_size}")
        check_dtype(dtype, kernels, device)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kernels = kernels
        heads = (config.num_layers, num_blocks, config.num_kv_heads)
        self.keys = torch.empty(*heads, config.head_dim, block_size, dtype=dtype, device=device)
        self.values = torch.empty(*heads, block_size, config.head_dim, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        self.layers: tuple[tuple[Cache, Cache], ...]
        self.parts: tuple[Tensor, ...]
        if dtype == FP8:
            self.scales = torch.empty(2, *heads, 1, block_size, device=device)
            k_scales, v_scales = self.scales.squeeze(-2)  # [layers, blocks, kv_heads, block_size]
            keys = map(QuantizedCache, self.keys, k_scales)
            values = map(QuantizedCache, self.values, v_scales)
            self.layers = tuple(zip(keys, values, strict=True))
            # Copied as bytes: torch and Triton need not know the type to move it.
            self.parts = (self.keys.view(torch.uint8), self.values.view(torch.uint8), *self.scales)
        else:
            self.parts = (self.keys, self.values)
            self.layers = tuple(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of one block in all layers, scales included."""
        head = config.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0)
        return 2 * config.num_layers * config.num_kv_heads * block_size * head

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in all layers.

        A target that is also a source gives what was there before the batch.

        Raises:
            ValueError: a block id out of range, or one target twice.
        """
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        if min(sources + targets) < 0 or max(sources + targets) >= self.num_blocks:
            raise ValueError(f"copies: block ids must be in [0, {self.num_blocks}): {copies}")
        if len(set(targets)) != len(targets):
            raise ValueError(f"copies: a target occurs twice: {copies}")
        self._kernels.copy_blocks(
            self.parts, np.array(sources, np.int64), np.array(targets, np.int64)
        )


def check_dtype(dtype: torch.dtype, kernels: Kernels, device: torch.device) -> None:
    """Check that keys and values can be kept in this type. Raises ValueError."""
    if dtype != FP8:
        return
    if kernels.name == "cpu":
        raise ValueError(
            "fp8 is not served by the compiled kernels of the CPU, which keep float32: "
            "choose attention_backend torch"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise ValueError(
            f"fp8 needs a GPU of compute capability 8.9 or newer; this one has {found}"
        )
