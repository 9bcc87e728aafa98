"""One picture of a server's figures for a terminal; `top` shows one after the other.

Pure: figures in, something that rich can print out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefixcache.engine.messages import CacheStats, Histogram, SequenceInfo

WIDEST_BAR = 24
TWO_PANELS = 84  # columns; with fewer they stand one below the other
BARS = 44  # columns; with fewer there are numbers only
MIN_SEQUENCES = 3

_CAUSES = {
    "never_seen": "never seen",
    "evicted": "evicted",
    "other_namespace": "another salt",
    "bypassed": "bypassed",
    "remainder": "remainder",
}
_ORDER = {"running": 0, "waiting": 1, "kept": 2}
_STYLES = {"running": "bold", "waiting": "yellow", "kept": "dim"}


@dataclass(frozen=True, slots=True)
class Moment:
    """The figures of one moment, and where they are from.

    recent: hit rate of the last minute, None where nothing was looked up.
    columns, lines: of the terminal.
    """

    server: str
    clock: str
    stats: CacheStats
    sequences: Sequence[SequenceInfo]
    recent: float | None
    columns: int
    lines: int

    @property
    def longest_bar(self) -> int:
        """Characters of a panel's bar of 100 %; 0 where there is no room for any."""
        return 0 if self.columns < BARS else max(4, min(WIDEST_BAR, self.columns // 2 - 36))


def frame(moment: Moment) -> RenderableType:
    """The picture."""
    stats = moment.stats
    upper: list[RenderableType] = [
        Text.assemble(("prefixcache top", "bold"), f"   {moment.server}   {moment.clock}"),
        _key_figures(moment),
        _pool(stats, moment.columns),
        _panels(moment, _sources(moment), _misses(moment)),
        _panels(moment, _curve(moment), _first_tokens(stats, moment.longest_bar)),
    ]
    rows = len(_CAUSES) + max(len(stats.size_curve), 4) + 14
    return Group(*upper, _sequences(moment.sequences, max(MIN_SEQUENCES, moment.lines - rows)))


def no_answer(server: str, reason: str) -> RenderableType:
    """What is shown while the server is away."""
    return Text.assemble(
        ("prefixcache top", "bold"), f"   {server}\n\n", (f"{reason}\n", "red"), "trying again …"
    )


def _key_figures(moment: Moment) -> Table:
    stats = moment.stats
    used = stats.blocks_in_use / stats.blocks_total
    saved = stats.cached_tokens + stats.forked_tokens
    figures = {
        "Hit rate": percent(stats.hit_rate),
        "last minute": percent(moment.recent),
        "Tokens saved": f"{compact(saved)} of {compact(stats.prompt_tokens)}",
        "Pool in use": percent(used),
        "Sequences": f"{stats.sequences_running} running, {stats.sequences_waiting} waiting, "
        f"{stats.sequences_kept} kept",
    }
    if moment.columns < TWO_PANELS:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for name, value in figures.items():
            grid.add_row(Text(name, "dim"), Text(value, "bold"))
        return grid
    table = Table(box=None, padding=(0, 3, 0, 0))
    for name in figures:
        table.add_column(name, header_style="dim")
    table.add_row(*(Text(value, "bold") for value in figures.values()))
    return table


def _pool(stats: CacheStats, columns: int) -> Text:
    parts = (
        ("█", "blue", stats.blocks_in_use, "in use"),
        ("▒", "cyan", stats.blocks_evictable, "cached"),
        ("·", "dim", stats.blocks_free, "free"),
    )
    width = min(columns, 110) - 8
    line = Text("\nPool ")
    for mark, style, blocks, _ in parts:
        line.append(mark * round(width * blocks / stats.blocks_total), style)
    line.append("\n     ")
    for mark, style, blocks, name in parts:
        line.append(f"{mark} ", style)
        line.append(f"{blocks:,} {name}   ")
    line.append(
        f"of {stats.blocks_total:,} blocks\n     {stats.blocks_shared:,} shared   "
        f"{stats.blocks_pinned:,} pinned   {stats.blocks_leased:,} leased\n"
    )
    return line


# ---------------------------------------------------------------- panels


def _sources(moment: Moment) -> Table:
    stats = moment.stats
    sources = {
        "cached": stats.cached_tokens,
        "forked": stats.forked_tokens,
        "computed": stats.computed_tokens,
    }
    return _bars("Prompt tokens by source", sources, stats.prompt_tokens, moment.longest_bar)


def _misses(moment: Moment) -> Table:
    stats = moment.stats
    misses = {name: stats.misses.get(cause, 0) for cause, name in _CAUSES.items()}
    return _bars("Misses by cause", misses, stats.computed_tokens, moment.longest_bar)


def _bars(title: str, values: Mapping[str, int], total: int, longest: int) -> Table:
    table = _panel(title, longest)
    for name, value in values.items():
        share = value / total if total else 0.0
        table.add_row(name, compact(value), f"{share:.0%}", _bar(share, longest))
    return table


def _curve(moment: Moment) -> Table:
    longest = moment.longest_bar
    table = _panel("Hit rate by pool size", longest)
    for point in moment.stats.size_curve:
        size = Text(f"{point.scale:g} x", "bold" if point.scale == 1 else "")
        rate = point.hit_rate
        table.add_row(size, compact(point.blocks), percent(rate), _bar(rate or 0.0, longest))
    if not moment.stats.size_curve:
        table.add_row("not known yet", "", "", "")
    return table


def _first_tokens(stats: CacheStats, longest: int) -> Table:
    table = _panel("First token by hit rate: median, 95 %", min(longest, 4))
    bands = [one for one in stats.histograms if "hit_rate" in one.labels and any(one.counts)]
    for one in bands:
        half, most = quantile(one, 0.5), quantile(one, 0.95)
        table.add_row(f"{one.labels['hit_rate']} %", duration(half), duration(most), "")
    if not bands:
        table.add_row("no answer yet", "", "", "")
    return table


def _panel(title: str, bar: int) -> Table:
    table = Table(
        box=None, title=title, title_justify="left", title_style="bold", show_header=False
    )
    wide = bool(bar)
    table.add_column(min_width=13 * wide)
    table.add_column(justify="right", min_width=7 * wide)
    table.add_column(justify="right", min_width=7 * wide)
    if wide:
        table.add_column(min_width=bar)
    return table


def _bar(share: float, longest: int) -> Text:
    return Text("█" * round(longest * share), "blue")


def _panels(moment: Moment, left: Table, right: Table) -> Table:
    grid = Table.grid(padding=(0, 4, 1, 0))
    if moment.columns < TWO_PANELS:
        grid.add_row(left)
        grid.add_row(right)
    else:
        grid.add_row(left, right)
    return grid


# ---------------------------------------------------------------- sequences


def _sequences(infos: Sequence[SequenceInfo], limit: int) -> RenderableType:
    if not infos:
        return Text("No sequence runs, waits or is kept", "dim")
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("Sequence", no_wrap=True)
    table.add_column("State")
    for name in ("Tokens", "Forked at", "Own blocks", "Shared", "Kept for"):
        table.add_column(name, justify="right")
    rows = _in_order(infos)
    for level, info in rows[:limit]:
        table.add_row(
            "  " * level + ("└ " if level else "") + info.sequence_id[:8],
            info.state,
            f"{info.num_tokens:,}",
            f"{info.fork_position:,}" if info.parent_id else "",
            f"{info.own_blocks:,}",
            f"{info.shared_blocks:,}",
            duration(info.kept_seconds) if info.state == "kept" else "",
            style=_STYLES[info.state],
        )
    left_out = len(rows) - limit
    return Group(table, Text(f"and {left_out} more", "dim")) if left_out > 0 else table


def _in_order(infos: Sequence[SequenceInfo]) -> list[tuple[int, SequenceInfo]]:
    """(level, sequence): each behind the one it was forked from; running ones first."""
    known = {info.sequence_id for info in infos}
    below: dict[str, list[SequenceInfo]] = {}
    for info in sorted(infos, key=lambda one: _ORDER[one.state]):
        below.setdefault(info.parent_id if info.parent_id in known else "", []).append(info)
    rows: list[tuple[int, SequenceInfo]] = []
    stack = [(0, info) for info in reversed(below.get("", []))]
    while stack:
        level, info = stack.pop()
        rows.append((level, info))
        stack += [(level + 1, child) for child in reversed(below.get(info.sequence_id, []))]
    return rows


# ---------------------------------------------------------------- figures as text


def percent(share: float | None) -> str:
    """0.734 as 73.4 %; nothing yet as a dash."""
    return "-" if share is None else f"{100 * share:.1f} %"


def compact(number: float) -> str:
    """12345678 as 12.3M; small numbers in full."""
    if number < 10_000:
        return f"{number:,.0f}"
    for unit in ("K", "M", "G"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f}{unit}"
    return f"{number / 1000:,.1f}T"


def duration(seconds: float) -> str:
    """0.04 as 40 ms, 240 as 4 min."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def quantile(histogram: Histogram, share: float) -> float:
    """The value below which a share lies, by interpolation in its bucket; 0 without values."""
    left = share * sum(histogram.counts)
    below = 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count and left <= count:
            return below + (bound - below) * left / count
        left -= count
        below = bound
    return below
