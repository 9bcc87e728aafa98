"""A step as the CPU kernels read it: work items, and addresses of arrays that it keeps alive.

Owns the cutting of groups into items. Made once a step, for all layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels.backend import Heads
from prefixcache_kernels.checks import Reach, check, check_work
from prefixcache_kernels.cpu.library import ITEM_FIELDS, AttentionWork, CacheShape, Library, Rope
from prefixcache_kernels.cpu.linear import require_rows
from prefixcache_kernels.work import SPAN, Int32, SpanGroups, StepWork


@dataclass(frozen=True, slots=True)
class SpanWork:
    """Attention work for one window: the structure, the arrays it points at, floats of partials."""

    work: AttentionWork
    held: tuple[np.ndarray, ...]
    partials: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step of T tokens, ready for the kernels. `held` are arrays whose addresses `rope` has."""

    heads: Heads
    block_size: int
    tokens: int
    rope: Rope
    angles: Tensor
    reach: Reach
    spans: dict[int | None, SpanWork]
    held: tuple[object, ...]

    def cache_shape(self, k_cache: Tensor, v_cache: Tensor) -> CacheShape:
        """Heads, and the strides of the caches in floats.

        Raises:
            ValueError: wrong shape, dtype or device, or the last dimension is not contiguous.
        """
        heads, size = self.heads, self.block_size
        for name, cache, last in (
            ("k_cache", k_cache, (heads.kv, heads.dim, size)),
            ("v_cache", v_cache, (heads.kv, size, heads.dim)),
        ):
            check(cache, name, (k_cache.shape[0], *last), (torch.float32,), torch.device("cpu"))
        sizes = (heads.query, heads.kv, heads.dim, size)
        return CacheShape(*sizes, *k_cache.stride()[:3], *v_cache.stride()[:3])


def make_plan(library: Library, work: StepWork, heads: Heads, rope_table: Tensor) -> CpuPlan:
    """Plan a step; rope_table as in `Kernels.prepare`, contiguous.

    Raises:
        ValueError: naming the argument or the field of `work`.
    """
    reach = check_work(work, SPAN)
    require_rows(rope_table, "rope_table", heads.dim)
    positions, slots = np.ascontiguousarray(work.positions), np.ascontiguousarray(work.slots)
    rope = Rope(positions.ctypes.data, slots.ctypes.data, rope_table.data_ptr())
    spans = {window: _span_work(library, work, g, heads) for window, g in work.groups.items()}
    held = (positions, slots)
    size, tokens = work.block_size, len(positions)
    return CpuPlan(heads, size, tokens, rope, rope_table, reach, spans, held)


def _span_work(library: Library, work: StepWork, groups: SpanGroups, heads: Heads) -> SpanWork:
    items = attention_items(groups, heads.query // heads.kv, library.attention_pairs)
    spans = np.where(work.positions >= 0, work.positions // SPAN - groups.first_span + 1, 0)
    grouped = np.zeros(len(work.positions), bool)
    grouped[groups.rows] = True
    slots = np.where(grouped, spans, 0)
    base = np.where(grouped, np.cumsum(slots) - slots, -1).astype(np.int32)
    arrays = (items, groups.rows, work.positions, groups.first_span, base, work.block_table)
    partials = library.attention_partials(int(slots.sum()), heads.query, heads.dim)
    at = [array.ctypes.data for array in arrays]
    structure = AttentionWork(
        window=groups.window or 0,
        items=at[0],
        item_count=len(items),
        rows=at[1],
        positions=at[2],
        first_span=at[3],
        partial_base=at[4],
        tokens=len(work.positions),
        block_table=at[5],
        table_width=work.block_table.shape[1],
    )
    return SpanWork(structure, arrays, partials)


def attention_items(groups: SpanGroups, group: int, most: int) -> Int32:
    """Cut groups and runs into items of at most `most` (row, head) pairs, int32 [n, 5].

    Runs come first and from their end, where rows see most keys, so that threads end together.
    """
    runs = groups.runs[::-1]
    tiles = [
        _tiles(np.full(len(runs), -1), runs[:, 0], runs[:, 1], runs[:, 2] * group, most)[::-1],
        _tiles(
            groups.span, groups.table_row, groups.start[:-1], np.diff(groups.start) * group, most
        ),
    ]
    return np.ascontiguousarray(np.concatenate(tiles), np.int32)


def _tiles(
    span: np.ndarray, table_row: np.ndarray, first: np.ndarray, pairs: np.ndarray, most: int
) -> np.ndarray:
    counts = -(-pairs // most)
    of = np.repeat(np.arange(len(pairs)), counts)
    begin = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    size = np.minimum(pairs[of] - begin, most)
    return np.stack((span[of], table_row[of], first[of], begin, size), 1).reshape(-1, ITEM_FIELDS)
