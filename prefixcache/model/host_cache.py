"""Blocks of KV in host memory, for what is moved out of the pool for a while.

Owns the memory, pinned where the pool is on a GPU, so that moves run in the order of the device's
work and the host waits for none of them. Which block is whose is the cache's business.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from prefixcache.model.kv_cache import KVCache
from prefixcache_kernels.transfer import upload

_AT_ONCE = 32
"""Blocks that are gathered on the device before they are copied: bounds the memory for it."""

Moves = Sequence[tuple[int, int]]


class HostCache:
    """`num_blocks` blocks in host memory, each in one piece over all layers."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._device = kv_cache.keys.device
        on_gpu = self._device.type == "cuda"
        self._parts = [
            (part, torch.empty(_by_block(part, num_blocks), dtype=part.dtype, pin_memory=on_gpu))
            for part in kv_cache.parts
        ]
        self._num_blocks = min(num_blocks, kv_cache.num_blocks)

    def move_out(self, moves: Moves) -> None:
        """Copy blocks of the pool to host blocks, (source, target) each."""
        for some in _pieces(moves):
            sources = upload(np.array([source for source, _ in some], np.int64), self._device)
            for pool, host in self._parts:  # [layers, blocks, ...], [host blocks, layers, ...]
                gathered = pool.index_select(1, sources).transpose(0, 1).contiguous()
                for block, (_, target) in zip(gathered, some, strict=True):
                    host[target].copy_(block, non_blocking=True)

    def move_in(self, moves: Moves) -> None:
        """Copy host blocks to blocks of the pool, (source, target) each."""
        for some in _pieces(moves):
            targets = upload(np.array([target for _, target in some], np.int64), self._device)
            for pool, host in self._parts:
                shape = _by_block(pool, len(some))
                gathered = torch.empty(shape, dtype=pool.dtype, device=self._device)
                for block, (source, _) in zip(gathered, some, strict=True):
                    block.copy_(host[source], non_blocking=True)
                pool.index_copy_(1, targets, gathered.transpose(0, 1))

    def seconds_per_block(self) -> float:
        """Time to move a block out and in again, measured on blocks that hold nothing yet."""
        moves = [(block, block) for block in range(min(self._num_blocks, _AT_ONCE))]
        for _ in range(2):  # the first one touches the memory
            began = time.perf_counter()
            self.move_out(moves)
            self.move_in(moves)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
        return seconds / len(moves)


def _by_block(part: torch.Tensor, blocks: int) -> tuple[int, ...]:
    """The shape of so many blocks of a part of the pool, [layers, blocks, ...], block by block."""
    return (blocks, part.shape[0], *part.shape[2:])


def _pieces(moves: Moves) -> Iterator[Moves]:
    for first in range(0, len(moves), _AT_ONCE):
        yield moves[first : first + _AT_ONCE]
