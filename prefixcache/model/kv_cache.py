"""The tensors behind the block pool: K and V of every layer, block by block.

Owns the memory and its layout. Which block belongs to whom is the cache's business; what is written
where, the kernels'. Slots that were never written hold anything, NaN included: no reader may look.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.config import ModelConfig
from prefixcache_kernels import Kernels


class KVCache:
    """K and V of `num_blocks` blocks of `block_size` tokens, in all layers.

    keys:   [layers, blocks, kv_heads, head_dim, block_size], so that one load takes a run of tokens
    values: [layers, blocks, kv_heads, block_size, head_dim]
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

        Raises:
            ValueError: num_blocks below 1, or block_size not a power of two from 1 to 128.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks: at least 1, not {num_blocks}")
        if not 1 <= block_size <= 128 or block_size & (block_size - 1):
            raise ValueError(f"block_size: a power of two from 1 to 128, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kernels = kernels
        heads = (config.num_layers, num_blocks, config.num_kv_heads)
        self.keys = torch.empty(*heads, config.head_dim, block_size, dtype=dtype, device=device)
        self.values = torch.empty(*heads, block_size, config.head_dim, dtype=dtype, device=device)
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            zip(self.keys.unbind(0), self.values.unbind(0), strict=True)
        )

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of one block in all layers."""
        row = config.num_layers * config.num_kv_heads * config.head_dim
        return 2 * row * block_size * dtype.itemsize

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
            (self.keys, self.values), np.array(sources, np.int64), np.array(targets, np.int64)
        )
