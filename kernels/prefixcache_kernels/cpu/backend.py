"""The CPU backend: `backend.Kernels` on the compiled kernels, float32 arithmetic throughout.

Owns the packed weights and scratch memory that grows to the largest step; so one thread at a time
may use it (the kernels themselves take torch's number of threads). Rows are independent by
construction: see the C++ files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels import reference
from prefixcache_kernels.backend import Heads, Linear, Weight
from prefixcache_kernels.cpu.library import (
    ITEM_FIELDS,
    AttentionShape,
    AttentionWork,
    Kind,
    Library,
    RopeShape,
)
from prefixcache_kernels.work import SPAN, Int32, Int64, SpanGroups, StepWork

RUN_ROWS = 5
"""A sequence with so many rows is attended row tile by row tile; with fewer, it may share spans."""


class Scratch:
    """Memory that products and partials reuse; it grows to what the largest step needs."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def pointer(self, floats: int) -> int:
        """Address of at least `floats` floats, valid until the next call."""
        if self._memory.numel() < floats:
            self._memory = torch.empty(floats)
        return self._memory.data_ptr()


@dataclass(frozen=True, slots=True)
class _Part:
    """Outputs [offset, offset + outputs) of a layer, packed in one format."""

    kind: Kind
    tiles: Tensor  # uint8
    outputs: int
    offset: int


class CpuLinear:
    """y = x Wᵀ + b, the weights in their own format; each output one chain over k."""

    def __init__(
        self, library: Library, scratch: Scratch, weights: Sequence[Weight], bias: Tensor | None
    ) -> None:
        """weights: matrices with the same input, outputs side by side; bias: float32 [out]."""
        self._library = library
        self._scratch = scratch
        self._bias = bias
        self.in_features = weights[0].shape[1]
        self.out_features = sum(weight.shape[0] for weight in weights)
        parts, offset = [], 0
        for kind, members in groupby(weights, _kind):
            same = list(members)
            outputs = sum(weight.shape[0] for weight in same)
            tiles = _pack(library, kind, same, outputs, self.in_features)
            parts.append(_Part(kind, tiles, outputs, offset))
            offset += outputs
        self._parts = tuple(parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [M, in], contiguous → [M, out]."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x: shape must be [M, {self.in_features}], not {tuple(x.shape)}")
        _require_rows(x, "x")
        rows, threads = x.shape[0], torch.get_num_threads()
        y = torch.empty(rows, self.out_features)
        scratch = self._library.linear_scratch(rows, self.in_features)
        memory = self._scratch.pointer(scratch)
        for part in self._parts:
            self._library.linear(
                part.kind,
                x.data_ptr(),
                rows,
                self.in_features,
                part.tiles.data_ptr(),
                part.outputs,
                None if self._bias is None else self._bias.data_ptr() + 4 * part.offset,
                y.data_ptr() + 4 * part.offset,
                self.out_features,
                memory,
                threads,
            )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W as float32, [n, in], for int64 ids [n]: an embedding look-up.

        Only for a layer of one format.
        """
        (part,) = self._parts
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.in_features)
        self._library.linear_rows(
            part.kind,
            part.tiles.data_ptr(),
            self.in_features,
            ids.data_ptr(),
            len(ids),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@dataclass(frozen=True, slots=True)
class _SpanWork:
    """Attention work for one window: the structure, the arrays it points at, floats of partials."""

    work: AttentionWork
    held: tuple[np.ndarray, ...]
    partials: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step, ready for the kernels. Holds the arrays that they read."""

    heads: Heads
    block_size: int
    positions: Int32
    slots: Int64
    pointers: tuple[int, int]  # of positions and slots: numpy takes a while to tell
    rope_table: Tensor
    spans: dict[int | None, _SpanWork]
    shapes: dict[tuple[object, ...], AttentionShape | RopeShape]


class CpuKernels:
    """Compiled kernels for float32 on the CPU."""

    name = "cpu"
    span = SPAN
    same_bits = True
    run_rows: int | None = RUN_ROWS

    def __init__(self, library: Library) -> None:
        self._library = library
        self._scratch = Scratch()

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> CpuLinear:
        """See `Kernels.linear`."""
        return CpuLinear(self._library, self._scratch, weights, bias)

    def embedding(self, weight: Weight, tied: Linear | None) -> Callable[[Tensor], Tensor]:
        """See `Kernels.embedding`; a tied output layer's packed rows serve both."""
        layer = tied if isinstance(tied, CpuLinear) else self.linear([weight], None)
        return layer.rows

    def prepare(self, work: StepWork, heads: Heads, rope_table: Tensor) -> CpuPlan:
        """See `Kernels.prepare`."""
        _require_rows(rope_table, "rope_table")
        spans = {window: self._span_work(work, g, heads) for window, g in work.groups.items()}
        positions, slots = np.ascontiguousarray(work.positions), np.ascontiguousarray(work.slots)
        at = (positions.ctypes.data, slots.ctypes.data)
        return CpuPlan(heads, work.block_size, positions, slots, at, rope_table, spans, {})

    def _span_work(self, work: StepWork, groups: SpanGroups, heads: Heads) -> _SpanWork:
        items = attention_items(groups, heads.query // heads.kv, self._library.attention_pairs)
        spans = np.where(work.positions >= 0, work.positions // SPAN - groups.first_span + 1, 0)
        grouped = np.zeros(len(work.positions), bool)
        grouped[groups.rows] = True
        slots = np.where(grouped, spans, 0)
        base = np.where(grouped, np.cumsum(slots) - slots, -1).astype(np.int32)
        arrays = (items, groups.rows, work.positions, groups.first_span, base, work.block_table)
        partials = self._library.attention_partials(int(slots.sum()), heads.query, heads.dim)
        at = [array.ctypes.data for array in arrays]
        structure = AttentionWork(
            items=at[0],
            item_count=len(items),
            rows=at[1],
            positions=at[2],
            first_span=at[3],
            partial_base=at[4],
            tokens=len(work.positions),
            block_table=at[5],
            table_width=work.block_table.shape[1],
            threads=torch.get_num_threads(),
        )
        return _SpanWork(structure, arrays, partials)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        if residual.shape != x.shape:
            raise ValueError(f"residual: shape must be {tuple(x.shape)}, as x")
        _require_rows(residual, "residual")
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        _require_rows(x, "x")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight: shape must be [{x.shape[-1]}], not {tuple(weight.shape)}")
        out = torch.empty_like(x)
        self._library.rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            torch.get_num_threads(),
        )
        return out

    def copy_blocks(self, caches: Sequence[Tensor], sources: Int64, targets: Int64) -> None:
        """See `Kernels.copy_blocks`."""
        ids = torch.from_numpy(sources), torch.from_numpy(targets)
        reference.copy_blocks([layer for cache in caches for layer in cache], *ids)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        _require_rows(gate_up, "gate_up")
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width)
        self._library.silu_mul(
            gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()
        )
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        plan: CpuPlan,
        k_cache: Tensor,
        v_cache: Tensor,
        qk_norm: tuple[Tensor, Tensor, float] | None,
    ) -> Tensor:
        """See `Kernels.rope_write_kv`; rotates in place and returns a view of qkv."""
        heads = plan.heads
        width = (heads.query + 2 * heads.kv) * heads.dim
        if qkv.shape != (len(plan.positions), width):
            raise ValueError(f"qkv: shape must be ({len(plan.positions)}, {width})")
        _require_rows(qkv, "qkv")
        strides = _cache_strides(k_cache, v_cache, plan)
        shape = plan.shapes.get(strides)
        if shape is None:
            sizes = (heads.query, heads.kv, heads.dim, plan.block_size)
            shape = plan.shapes[strides] = RopeShape(*sizes, *strides)
        q_norm, k_norm, eps = qk_norm if qk_norm is not None else (None, None, 0.0)
        self._library.rope_write_kv(
            qkv.data_ptr(),
            len(plan.positions),
            *plan.pointers,
            plan.rope_table.data_ptr(),
            shape,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            torch.get_num_threads(),
        )
        return qkv[:, : heads.query * heads.dim]

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuPlan, window: int | None
    ) -> Tensor:
        """See `Kernels.paged_attention`; rows of q may be apart, as in a view of qkv."""
        heads = plan.heads
        width = heads.query * heads.dim
        if q.shape != (len(plan.positions), width) or q.dtype != torch.float32 or q.stride(1) != 1:
            raise ValueError(f"q: float32 ({len(plan.positions)}, {width}) with adjacent columns")
        strides = _cache_strides(k_cache, v_cache, plan)
        key = (window, q.stride(0), *strides)
        shape = plan.shapes.get(key)
        if shape is None:
            sizes = (heads.query, heads.kv, heads.dim, plan.block_size, window or 0)
            shape = AttentionShape(*sizes, heads.dim**-0.5, q.stride(0), *strides)
            plan.shapes[key] = shape
        spans = plan.spans[window]
        spans.work.partials = self._scratch.pointer(spans.partials)
        out = torch.empty(len(plan.positions), width)
        self._library.attention(
            shape, spans.work, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()
        )
        return out


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


def _kind(weight: Weight) -> Kind:
    """Formats that the kernels read stay; any other is expanded to float32 once."""
    native = {kind.name for kind in Kind}
    quantised = weight.raw is not None
    if weight.format in native and (quantised or weight.format in ("F32", "BF16", "F16")):
        return Kind[weight.format]
    return Kind.F32


def _pack(
    library: Library, kind: Kind, weights: Sequence[Weight], outputs: int, inputs: int
) -> Tensor:
    dense = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}
    if kind in dense:  # a 16-bit checkpoint went to float32 and back: the same numbers
        rows = torch.cat([weight.dense().to(dense[kind]) for weight in weights]).contiguous()
        row_bytes = inputs * rows.element_size()
    else:
        raw = [weight.raw for weight in weights if weight.raw is not None]
        rows = torch.from_numpy(np.concatenate(raw))
        row_bytes = rows.shape[1]
    tiles = torch.empty(library.linear_bytes(kind, outputs, inputs), dtype=torch.uint8)
    threads = torch.get_num_threads()
    library.linear_pack(
        kind, rows.data_ptr(), row_bytes, outputs, inputs, tiles.data_ptr(), threads
    )
    return tiles


def _cache_strides(k_cache: Tensor, v_cache: Tensor, plan: CpuPlan) -> tuple[int, ...]:
    """Strides of the first three dimensions, in floats.

    Raises:
        ValueError: wrong shape or dtype, or the last dimension is not contiguous.
    """
    heads, size = plan.heads, plan.block_size
    for name, cache, last in (
        ("k_cache", k_cache, (heads.kv, heads.dim, size)),
        ("v_cache", v_cache, (heads.kv, size, heads.dim)),
    ):
        if cache.dtype != torch.float32 or cache.shape[1:] != last:
            raise ValueError(f"{name}: must be float32 [blocks, {', '.join(map(str, last))}]")
        if cache.stride(3) != 1 and last[2] != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous")
    return (*k_cache.stride()[:3], *v_cache.stride()[:3])


def _require_rows(x: Tensor, name: str) -> None:
    if x.dtype != torch.float32 or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous float32 rows, not {x.dtype} {x.stride()}")
