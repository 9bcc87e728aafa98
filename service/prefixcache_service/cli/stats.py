"""`prefixcache stats`: the figures of a server as tables. docs/metrics.md defines each."""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.table import Table

from prefixcache.engine.messages import CacheStats, Histogram, MissCause

_BLOCKS = {
    "free": "blocks_free",
    "evictable": "blocks_evictable",
    "in use": "blocks_in_use",
    "of them shared": "blocks_shared",
    "of them pinned": "blocks_pinned",
    "leased": "blocks_leased",
    "saved by sharing": "blocks_saved",
}
_COUNTS = {
    "sequences running": "sequences_running",
    "sequences waiting": "sequences_waiting",
    "of them preempted": "sequences_preempted",
    "sequences kept": "sequences_kept",
    "requests finished": "requests_finished",
    "requests aborted": "requests_aborted",
    "requests failed": "requests_failed",
    "preemptions": "preemptions",
    "forks": "forks",
    "block copies": "block_copies",
    "evicted blocks": "evicted_blocks",
    "tokens generated": "completion_tokens",
    "tokens computed again": "recomputed_tokens",
}


def as_plain(stats: CacheStats) -> dict[str, Any]:
    """Everything, for JSON."""
    figures = dataclasses.asdict(stats)
    return {**figures, "hit_rate": stats.hit_rate, "bytes_saved": stats.bytes_saved}


def as_tables(stats: CacheStats) -> RenderableType:
    """What an operator looks at first comes first."""
    tables = [
        _prompt_tokens(stats),
        _counts("blocks", stats, _BLOCKS, stats.blocks_total),
        _counts("requests", stats, _COUNTS),
    ]
    if any(sum(one.counts) for one in stats.histograms):
        tables.append(_times(stats.histograms))
    if any(point.hit_rate is not None for point in stats.size_curve):
        tables.insert(1, _size_curve(stats))
    if stats.tenants:
        tables.append(_tenants(stats))
    return Group(*tables)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=any(columns),
    )
    table.add_column(min_width=26)
    for name in columns:
        table.add_column(name, justify="right", min_width=10)
    return table


def _prompt_tokens(stats: CacheStats) -> Table:
    table = _table(f"prompt tokens, hit rate {_percent(stats.hit_rate)}", "", "")
    rows = [("cached", stats.cached_tokens), ("forked", stats.forked_tokens)]
    rows += [("computed", stats.computed_tokens)]
    rows += [
        (f"  {cause.replace('_', ' ')}", stats.misses.get(cause, 0))
        for cause in get_args(MissCause)
    ]
    for name, count in rows:
        share = count / stats.prompt_tokens if stats.prompt_tokens else None
        table.add_row(name, f"{count:,}", _percent(share))
    table.add_row("all", f"{stats.prompt_tokens:,}")
    return table


def _size_curve(stats: CacheStats) -> Table:
    table = _table("hit rate at other sizes of the pool", "blocks", "hit rate")
    for point in stats.size_curve:
        table.add_row(f"{point.scale:g} times", f"{point.blocks:,}", _percent(point.hit_rate))
    return table


def _counts(
    title: str, stats: CacheStats, names: dict[str, str], total: int | None = None
) -> Table:
    table = _table(title, "")
    for name, attribute in names.items():
        table.add_row(name, f"{getattr(stats, attribute):,}")
    if total is not None:
        size = f"{stats.block_size} tokens, {stats.bytes_per_block:,} bytes each"
        table.add_row(f"all, {size}", f"{total:,}")
    return table


def _times(histograms: Iterable[Histogram]) -> Table:
    table = _table("seconds", "count", "mean", "half ≤", "9 of 10 ≤")
    for one in histograms:
        count = sum(one.counts)
        if count:
            name = one.name.removesuffix("_seconds").replace("_", " ")
            labels = "".join(f", {key.replace('_', ' ')} {v} %" for key, v in one.labels.items())
            bounds = [_quantile(one, share) for share in (0.5, 0.9)]
            table.add_row(name + labels, f"{count:,}", f"{one.sum / count:.3g}", *bounds)
    return table


def _quantile(histogram: Histogram, share: float) -> str:
    """The bound below which this share of the values lies."""
    wanted = share * sum(histogram.counts)
    return next(
        f"{bound:g}"
        for bound, below in zip(_bounds(histogram), accumulate(histogram.counts), strict=True)
        if below >= wanted
    )


def _bounds(histogram: Histogram) -> Iterator[float]:
    yield from histogram.bounds
    yield float("inf")


def _tenants(stats: CacheStats) -> Table:
    table = _table("tenants, in tokens", "cached", "forked", "computed", "generated")
    for one in stats.tenants:
        counts = (
            one.cached_tokens,
            one.forked_tokens,
            one.computed_tokens,
            one.completion_tokens,
        )
        table.add_row(one.tenant, *(f"{count:,}" for count in counts))
    return table


def _percent(share: float | None) -> str:
    return "unknown yet" if share is None else f"{100 * share:.1f} %"
