"""A step's work on the device, in buffers of fixed capacity.

Owns these buffers and how a `StepWork` is put into them. Everything that the kernels of a step read
is in one int32 array on the device, which the host has a copy of. A plan made for one step is as
large as that step and is sent in one piece. One made by `TritonKernels.reserve` holds any step up
to its capacity and keeps its addresses, so that a captured graph can be replayed over it; only what
differs from the step before is sent. Plans that take turns share one `PlanBuffers`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prefixcache_kernels.backend import Heads
from prefixcache_kernels.checks import Reach, require
from prefixcache_kernels.transfer import fill, upload
from prefixcache_kernels.triton_backend.attention_work import (
    AttentionWork,
    Policy,
    attention_work,
)
from prefixcache_kernels.triton_backend.paged_attention import AttentionBuffers, AttentionInput
from prefixcache_kernels.work import Int32, Int64, StepWork

_ALIGN = 16
"""int32s between two arrays' beginnings: 64 bytes, so that each may be loaded in vectors."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes that a step must not pass.

    rows: query rows, exactly. table: sequences, blocks of each. entries, groups, items, slots: of
    `AttentionWork`, for each window.
    """

    rows: int
    table: tuple[int, int]
    entries: int
    groups: int
    items: int
    slots: int

    @staticmethod
    def of(work: StepWork, attention: Iterable[AttentionWork]) -> "Capacity":
        """As large as one step."""
        works = list(attention)
        return Capacity(
            len(work.positions),
            work.block_table.shape,
            max((len(w.entry_rows) for w in works), default=0),
            max((len(w.group_spans) for w in works), default=0),
            max((len(w.items) for w in works), default=0),
            max((w.slots for w in works), default=0),
        )

    @staticmethod
    def decode(rows: int, blocks: int, block_size: int, span: int) -> "Capacity":
        """Room for any decode step of one row for each of `rows` sequences of `blocks` blocks."""
        each = -(-blocks * block_size // span)
        spans, width = rows * each, each * (span // block_size)  # tables are whole spans wide
        return Capacity(rows, (rows, width), spans, spans, spans, spans)


class PlanBuffers:
    """Memory for a plan, or for several that take turns: work lists, and partials of attention.

    host is what the device's array holds, or will once the copies under way are done.
    """

    def __init__(
        self, capacity: Capacity, *, heads: Heads, windows: int, device: torch.device
    ) -> None:
        """Empty buffers for plans up to this capacity, with so many windows."""
        _, length = _layout(capacity, windows)
        self.host = np.zeros(length, np.int32)
        self.device = torch.zeros(length, dtype=torch.int32, device=device)
        partials = (max(1, capacity.slots), heads.query)
        self.part_values = torch.empty(*partials, heads.dim, device=device)
        self.part_maxima, self.part_sums = torch.empty(2, *partials, device=device).unbind(0)

    @staticmethod
    def bytes_of(capacity: Capacity, *, heads: Heads, windows: int) -> int:
        """Device memory that such buffers take."""
        _, length = _layout(capacity, windows)
        return 4 * (length + max(1, capacity.slots) * heads.query * (heads.dim + 2))

    def send(self, changed: Int64) -> None:
        """Copy these elements of the host's array: one by one where they are few, else all."""
        if not len(changed):
            return
        if 3 * len(changed) > len(self.host):  # a changed element takes an index and a value
            fill(self.device, self.host)
            return
        pairs = upload(np.stack((changed, self.host[changed])), self.device.device)
        self.device.index_copy_(0, pairs[0], pairs[1].to(torch.int32))


class TritonPlan:
    """A step, ready for the kernels: see the module's docstring."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        heads: Heads,
        angles: Tensor,
        windows: Iterable[int | None],
        block_size: int,
        span: int,
        policy: Policy,
        buffers: PlanBuffers | None = None,
    ) -> None:
        """Make an empty plan on the device of `angles`, float32 [positions, D] of the rope table.

        Args:
            capacity: what fits in.
            heads: of the model.
            windows: of the layers, None for full attention.
            block_size, span: in tokens.
            policy: of `attention_work`.
            buffers: of at least this capacity, shared with plans that are not in use meanwhile;
                None makes some.
        """
        self.heads = heads
        self.angles = angles
        self.block_size = block_size
        self.reach = Reach(-1, -1, -1)
        self._capacity = capacity
        self._span = span
        self._policy = policy
        self._windows = tuple(windows)
        self._places, _ = _layout(capacity, len(self._windows))
        self._memory = buffers or PlanBuffers(
            capacity, heads=heads, windows=len(self._windows), device=angles.device
        )
        self.positions = self._array("positions")
        self.slots = self._array("slots").view(torch.int64)
        self._table = self._array("table")
        # Layers run one after another, so the partials of all windows share their place.
        memory = self._memory
        self._buffers = {
            window: AttentionBuffers(
                *self._lists(i), memory.part_values, memory.part_maxima, memory.part_sums
            )
            for i, window in enumerate(self._windows)
        }

    @classmethod
    def of(  # one step's own plan
        cls, work: StepWork, *, heads: Heads, angles: Tensor, span: int, policy: Policy
    ) -> "TritonPlan":
        """Return a plan as large as one step, loaded with it.

        Raises:
            ValueError: see `load`.
        """
        lists = _attention(work, span, policy)
        plan = cls(
            Capacity.of(work, lists.values()),
            heads=heads,
            angles=angles,
            windows=lists,
            block_size=work.block_size,
            span=span,
            policy=policy,
        )
        plan._fill(work, lists)
        return plan

    def load(self, work: StepWork) -> None:
        """Replace the step by another one, in place.

        Raises:
            ValueError: the step has other rows, windows or blocks than the plan was made for, more
                work than fits, or a negative block id. Nothing was changed.
        """
        require(len(work.positions) == self._capacity.rows, "positions", "another number of rows")
        require(work.block_size == self.block_size, "block_size", f"must be {self.block_size}")
        require(set(work.groups) == set(self._windows), "groups", "other windows than planned for")
        lists = _attention(work, self._span, self._policy)
        needed, capacity = Capacity.of(work, lists.values()), self._capacity
        for name in ("entries", "groups", "items", "slots"):
            need, room = getattr(needed, name), getattr(capacity, name)
            require(need <= room, "groups", f"{need} {name} in a plan with room for {room}")
        fits = all(n <= room for n, room in zip(needed.table, capacity.table, strict=True))
        require(fits, "block_table", f"{needed.table} in a plan with room for {capacity.table}")
        self._fill(work, lists)

    def attention(self, window: int | None) -> AttentionInput:
        """Return what the attention of a layer with this window reads.

        Raises:
            ValueError: the step was planned for other windows.
        """
        require(window in self._buffers, "window", f"{window} was not planned for")
        return AttentionInput(
            self.heads,
            self.positions,
            self._table,
            self._span,
            window,
            self.reach.block,
            self._buffers[window],
        )

    def _array(self, name: str) -> Tensor:
        first, shape = self._places[name]
        return self._memory.device[first : first + math.prod(shape)].view(shape)

    def _lists(self, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        counts, items, rows, slots, spans, tables, merges = (
            self._array(f"{name}{window}") for name in _LISTS
        )
        return counts, items, rows, slots, spans, tables, merges

    def _fill(self, work: StepWork, lists: dict[int | None, AttentionWork]) -> None:
        reach = Reach.of(work)
        changed = [
            self._put("positions", work.positions),
            self._put("slots", work.slots.astype(np.int64, copy=False).view(np.int32)),
        ]
        for i, window in enumerate(self._windows):
            w = lists[window]
            counts = np.array([len(w.items), len(w.merges)], np.int32)
            arrays = (counts, w.items, w.entry_rows, w.entry_slots, w.group_spans, w.group_tables)
            for name, values in zip(_LISTS, (*arrays, w.merges), strict=True):
                changed.append(self._put(f"{name}{i}", values))
        changed.append(self._put_table(work.block_table))
        self._memory.send(np.concatenate(changed))
        self.reach = reach

    def _put(self, name: str, values: Int32) -> Int64:
        """Put a list at its place in the host's array; which elements that changed."""
        first, _ = self._places[name]
        values = values.reshape(-1)
        there = self._memory.host[first : first + values.size]
        changed = np.flatnonzero(there != values)
        there[changed] = values[changed]
        return changed + first

    def _put_table(self, table: Int32) -> Int64:
        """Likewise for the block table, of which each row is longer than what is used."""
        first, shape = self._places["table"]
        sequences, blocks = table.shape
        whole = self._memory.host[first : first + math.prod(shape)].reshape(shape)
        there = whole[:sequences, :blocks]
        differs = there != table
        grown = np.flatnonzero(differs.any(1))  # few rows get a block in a step
        row, column = np.nonzero(differs[grown])
        there[grown[row], column] = table[grown[row], column]
        return first + grown[row] * shape[1] + column


_LISTS = (
    "counts",
    "items",
    "entry_rows",
    "entry_slots",
    "group_spans",
    "group_tables",
    "merges",
)


def _attention(work: StepWork, span: int, policy: Policy) -> dict[int | None, AttentionWork]:
    return {
        window: attention_work(groups, work.positions, span, policy)
        for window, groups in work.groups.items()
    }


def _layout(capacity: Capacity, windows: int) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Return each array's first element and shape in the int32 buffer, and the buffer's length."""
    shapes: dict[str, tuple[int, ...]] = {
        "positions": (capacity.rows,),
        "slots": (2 * capacity.rows,),  # int64
    }
    entries, groups = (capacity.entries,), (capacity.groups,)
    lists = ((2,), (capacity.items, 4), entries, entries, groups, groups, (capacity.rows, 3))
    for window in range(windows):
        shapes |= {f"{name}{window}": shape for name, shape in zip(_LISTS, lists, strict=True)}
    shapes["table"] = capacity.table
    places, length = {}, 0
    for name, shape in shapes.items():
        places[name] = (length, shape)
        length += -(-max(1, math.prod(shape)) // _ALIGN) * _ALIGN
    return places, length
