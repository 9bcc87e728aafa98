"""Decode attention of one layer, 32 query heads over 8 of 128: time, bytes, and what sharing buys.

A figure in percent is of the copy bandwidth of the same run: K and V that must be read at least
once, queries and results, over the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks._report import Report, median_seconds
from benchmarks.gpu_check.device import BLOCK, Row, Target, make_step
from prefixcache.model.attention import StepInput, plan_step
from prefixcache_kernels import Heads, StepWork, select_kernels
from prefixcache_kernels.backend import Kernels
from prefixcache_kernels.triton_backend import TritonKernels
from prefixcache_kernels.triton_backend.attention_work import attention_work

HEADS = Heads(32, 8, 128)
TOY_HEADS = Heads(4, 2, 16)


@dataclass(frozen=True)
class Sequences:
    """Block ids and length of each sequence of a decode step."""

    tables: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return 1 + max(max(table) for table in self.tables)

    @property
    def unique_tokens(self) -> int:
        """Tokens of KV that must be read once at least."""
        full = {block for table in self.tables for block in table}
        return len(full) * BLOCK  # lengths are whole blocks

    def step(self) -> StepInput:
        rows = zip(self.tables, self.lengths, strict=True)
        return make_step([Row([0], length - 1, table, writes=False) for table, length in rows])


def unshared(batch: int, context: int) -> Sequences:
    each = context // BLOCK
    tables = tuple(tuple(range(i * each, (i + 1) * each)) for i in range(batch))
    return Sequences(tables, (context,) * batch)


def shared(batch: int, prefix: int, suffix: int) -> Sequences:
    return tree([1, batch], [prefix, suffix])


def tree(branching: Sequence[int], tokens: Sequence[int]) -> Sequences:
    """Every path of a tree: level i has branching[i] children a node, each of tokens[i] tokens."""
    free = count()
    paths: list[tuple[int, ...]] = [()]
    for children, length in zip(branching, tokens, strict=True):
        paths = [
            (*path, *(next(free) for _ in range(length // BLOCK)))
            for path in paths
            for _ in range(children)
        ]
    return Sequences(tuple(paths), (sum(tokens),) * len(paths))


class Bench:
    """Random K and V in one arena, of which every case takes what it needs."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.heads = TOY_HEADS if target.toy else HEADS
        self.kernels: Kernels = select_kernels("triton", target.device, target.dtype)
        self.bandwidth = 0.0
        self.block_elements = self.heads.kv * self.heads.dim * BLOCK
        size = target.free_bytes() * 4 // 10 // 2 // target.dtype.itemsize
        size = min(size, 5 << 30)  # elements of K, as many of V
        size = size // self.block_elements * self.block_elements
        where = {"device": target.device, "dtype": target.dtype}
        self.keys, self.values = (torch.randn(size, **where) for _ in range(2))
        self.angles = torch.zeros(1, self.heads.dim, device=target.device)

    def fits(self, sequences: Sequences) -> bool:
        return sequences.blocks * self.block_elements <= self.keys.numel()

    def plan(self, step: StepInput) -> StepWork:
        return plan_step(step, BLOCK, [None], self.kernels.run_rows, self.kernels.span)

    def caches(self, sequences: Sequences) -> list[tuple[Tensor, Tensor]]:
        """K and V of as many layers as keep them out of the last-level cache."""
        blocks, heads = sequences.blocks, self.heads
        each = blocks * self.block_elements
        bytes_each = 2 * each * self.target.dtype.itemsize
        layers = max(
            1, min(8, self.keys.numel() // each, 1 + 2 * self.target.l2_bytes() // bytes_each)
        )
        shape = (layers, blocks, heads.kv)
        keys = self.keys[: layers * each].view(*shape, heads.dim, BLOCK)
        values = self.values[: layers * each].view(*shape, BLOCK, heads.dim)
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def query(self, rows: int) -> Tensor:
        shape = rows, self.heads.query * self.heads.dim
        return torch.randn(shape, device=self.target.device, dtype=self.target.dtype)

    def seconds(self, sequences: Sequences) -> float:
        """Time of one layer; the step's plan is made beforehand."""
        caches, q = self.caches(sequences), self.query(len(sequences.tables))
        plan = self.kernels.prepare(self.plan(sequences.step()), self.heads, self.angles)

        def layers() -> None:
            for keys, values in caches:
                self.kernels.paged_attention(q, keys, values, plan, None)

        return self.target.seconds(layers) / len(caches)

    def ideal_bytes(self, sequences: Sequences) -> int:
        """K and V once, queries and results."""
        heads, rows = self.heads, len(sequences.tables)
        elements = 2 * sequences.unique_tokens * heads.kv * heads.dim
        elements += 2 * rows * heads.query * heads.dim
        return elements * self.target.dtype.itemsize

    def read_bytes(self, sequences: Sequences) -> int:
        """What the items of the plan touch: K and V a tile, partials twice, queries and results."""
        assert isinstance(self.kernels, TritonKernels)
        heads, span = self.heads, self.kernels.span
        work = self.plan(sequences.step())
        lists = attention_work(work.groups[None], work.positions, span, self.kernels.policy(heads))
        tokens = 0
        for entry, entry_end, group, group_end in lists.items.tolist():
            highest = int(work.positions[lists.entry_rows[entry:entry_end]].max())
            begin = lists.group_spans[group:group_end].astype(np.int64) * span
            tokens += int(np.clip(highest + 1 - begin, 0, span).sum())
        rows = len(sequences.tables)
        kv = 2 * tokens * heads.kv * heads.dim * self.target.dtype.itemsize
        partials = 2 * lists.slots * heads.query * (heads.dim + 2) * 4
        return kv + partials + 2 * rows * heads.query * heads.dim * self.target.dtype.itemsize

    def percent(self, sequences: Sequences, seconds: float) -> float:
        return 100 * self.ideal_bytes(sequences) / seconds / self.bandwidth

    def sdpa_seconds(self, batch: int, context: int) -> float:
        """torch's attention over contiguous K and V, [B, heads, L, D], heads shared as ours."""
        heads, size = self.heads, batch * self.heads.kv * context * self.heads.dim
        shape = (batch, heads.kv, context, heads.dim)
        keys, values = self.keys[:size].view(shape), self.values[:size].view(shape)
        q = self.query(batch).view(batch, heads.query, 1, heads.dim)
        return self.target.seconds(
            lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        )


def attention(report: Report, target: Target) -> None:
    """Plain decode, one shared prefix, trees, nothing shared, and the host's share."""
    bench = Bench(target)
    _check_against_sdpa(bench)
    _plain(report, bench)
    _shared(report, bench)
    _trees(report, bench)
    _planning(report, bench)


def _check_against_sdpa(bench: Bench) -> None:
    batch, context = (2, 32) if bench.target.toy else (4, 1_024)
    sequences = unshared(batch, context)
    (keys, values), *_ = bench.caches(sequences)
    q = bench.query(batch)
    plan = bench.kernels.prepare(bench.plan(sequences.step()), bench.heads, bench.angles)
    ours = bench.kernels.paged_attention(q, keys, values, plan, None)
    table = torch.tensor(sequences.tables, device=q.device)
    k = keys[table].permute(0, 2, 1, 4, 3).flatten(2, 3).float()
    v = values[table].permute(0, 2, 1, 3, 4).flatten(2, 3).float()
    wide = q.view(batch, bench.heads.query, 1, bench.heads.dim).float()
    theirs = F.scaled_dot_product_attention(wide, k, v, enable_gqa=True)
    torch.testing.assert_close(ours.float(), theirs.reshape(ours.shape), rtol=2e-2, atol=2e-3)


def _plain(report: Report, bench: Bench) -> None:
    bench.bandwidth = copy_rate = _copy_rate(bench)
    report.add("copy_gb_s", copy_rate / 1e9, unit="GB/s, read and written")
    toy = bench.target.toy
    batches, contexts = ((1, 2), (32, 64)) if toy else ((1, 8, 32, 128), (1_024, 8_192, 32_768))
    for batch in batches:
        for context in contexts:
            sequences, name = unshared(batch, context), f"decode_b{batch}_l{context}"
            if not bench.fits(sequences):
                report.add(f"{name}_percent", None, unit="does not fit")
                continue
            seconds = bench.seconds(sequences)
            report.add(f"{name}_us", seconds * 1e6, unit="µs a layer")
            report.add(f"{name}_percent", bench.percent(sequences, seconds), unit="% of copying")
    batch, context = (2, 64) if toy else (32, 1_024)
    ours, theirs = bench.seconds(unshared(batch, context)), bench.sdpa_seconds(batch, context)
    report.add("unshared_vs_sdpa", theirs / ours, unit="times as fast")


def _copy_rate(bench: Bench) -> float:
    half = bench.keys.numel() // 2
    half = min(half, (2 << 30) // bench.target.dtype.itemsize)
    source, copy = bench.keys[:half], torch.empty_like(bench.keys[:half])
    seconds = bench.target.seconds(lambda: copy.copy_(source))
    return 2 * half * bench.target.dtype.itemsize / seconds


def _shared(report: Report, bench: Bench) -> None:
    batch, prefix, suffix = (4, 128, 16) if bench.target.toy else (64, 8_192, 256)
    _against_unshared(report, bench, "shared_prefix", shared(batch, prefix, suffix))


def _trees(report: Report, bench: Bench) -> None:
    length = 128 if bench.target.toy else 1_024
    for depth, children in ((3, 4), (4, 3), (5, 2)):
        below = (2 if depth < 4 else 1) if bench.target.toy else children
        branching = [1, *[below] * (depth - 1)]
        _against_unshared(report, bench, f"tree_depth{depth}", tree(branching, [length] * depth))


def _against_unshared(report: Report, bench: Bench, name: str, sequences: Sequences) -> None:
    """The same sequences with blocks of their own, timed after them."""
    own = unshared(len(sequences.tables), sequences.lengths[0])
    seconds = bench.seconds(sequences)
    read, ideal = bench.read_bytes(sequences), bench.ideal_bytes(sequences)
    report.add(f"{name}_us", seconds * 1e6, unit="µs a layer")
    report.add(f"{name}_percent", bench.percent(sequences, seconds), unit="% of copying")
    report.add(f"{name}_bytes_vs_ideal", read / ideal, unit="times the least")
    if bench.fits(own):
        report.add(f"{name}_vs_unshared", bench.seconds(own) / seconds, unit="times as fast")


def _planning(report: Report, bench: Bench) -> None:
    """Host time of a step's plan: work lists in numpy, and their way to the device."""
    batch, context = (4, 64) if bench.target.toy else (128, 8_192)
    for name, sequences in (
        ("unshared", unshared(batch, context)),
        ("shared", shared(batch, context // 2, context // 2)),
    ):
        step = sequences.step()
        seconds = median_seconds(
            lambda step=step: bench.kernels.prepare(bench.plan(step), bench.heads, bench.angles)  # type: ignore[misc]
        )
        report.add(f"plan_{name}_b{batch}_us", seconds * 1e6, unit="µs of the host a step")
