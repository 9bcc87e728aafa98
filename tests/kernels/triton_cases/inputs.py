"""What the cases share: the device, pools full of NaN, and steps planned with short spans."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from prefixcache.model.attention import StepInput, plan_step
from prefixcache_kernels import Cache, Heads, QuantizedCache, StepWork, reference
from prefixcache_kernels.triton_backend import TritonKernels
from prefixcache_kernels.triton_backend.twins import dense_attention

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
CLOSE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}

every_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), **CLOSE[actual.dtype])


def quantized(cache: Tensor, token_dim: int) -> tuple[QuantizedCache, Tensor]:
    """A cache in e4m3, and what it stands for, in float32; NaN where nothing was written.

    token_dim: of the cache's dimensions, the one of the tokens in a block.
    """
    codes, scales = reference.quantize(cache.mT if token_dim == 3 else cache)
    values = codes.float() * scales.unsqueeze(-1)
    if token_dim == 3:
        codes, values = codes.view(torch.uint8).mT.contiguous().view(codes.dtype), values.mT
    return QuantizedCache(codes, scales), values


@dataclass
class Pool:
    """K and V caches, NaN wherever no sequence has written."""

    keys: Tensor
    values: Tensor
    heads: Heads

    @classmethod
    def empty(
        cls, blocks: int, heads: Heads, size: int, dtype: torch.dtype = torch.float32
    ) -> "Pool":
        keys = torch.full((blocks, heads.kv, heads.dim, size), torch.nan, dtype=dtype)
        values = torch.full((blocks, heads.kv, size, heads.dim), torch.nan, dtype=dtype)
        return cls(keys.to(DEVICE), values.to(DEVICE), heads)

    @property
    def size(self) -> int:
        return self.keys.shape[-1]

    def write(self, ids: list[int], first: int, end: int, seed: int = 0) -> None:
        """Random K and V for positions [first, end) of a sequence."""
        shape = (end - first, self.heads.kv, self.heads.dim)
        keys, values = (noise(*shape, dtype=self.keys.dtype, seed=seed + i) for i in (0, 1))
        at = torch.arange(first, end, device=DEVICE)
        block, offset = torch.tensor(ids, device=DEVICE)[at // self.size], at % self.size
        self.keys[block, :, :, offset] = keys
        self.values[block, :, offset] = values


def planned(
    step: StepInput, size: int, windows: list[int | None], span: int, run_rows: int | None
) -> StepWork:
    """The planner's work with spans of `span` tokens: short ones make small inputs long."""
    return plan_step(step, size, windows, run_rows, span)


def attend(
    pool: Pool,
    step: StepInput,
    *,
    window: int | None = None,
    span: int = 64,
    run_rows: int | None = 16,
    caches: tuple[Cache, Cache] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of random queries by the kernels, and by the twin from each row's own table."""
    heads, dtype = pool.heads, pool.keys.dtype
    work = planned(step, pool.size, [window], span, run_rows)
    q = noise(len(step.positions), heads.query * heads.dim, dtype=dtype, seed=5)
    kernels = TritonKernels(DEVICE, dtype, span=span)
    plan = kernels.prepare(work, heads, torch.zeros(1, heads.dim, device=DEVICE))
    out = kernels.paged_attention(q, *(caches or (pool.keys, pool.values)), plan, window)
    tables = np.repeat(step.block_table, np.diff(step.query_start_loc), axis=0)
    pools = (pool.keys, pool.values)
    return out, dense_attention(q, pools, work.positions, tables, heads, window)
