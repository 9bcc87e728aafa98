"""The page at `/` as it is sent: its files, and the figures for browsers without scripts.

Owns nothing that changes: it fills one file in from a snapshot of the engine's figures.
"""

from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files

from prefixcache.engine.messages import CacheStats

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_MARK = "<!-- figures -->"

CAUSES = {
    "never_seen": "Never seen before",
    "evicted": "Seen, but evicted",
    "other_namespace": "Seen under another cache salt only",
    "bypassed": "Cache off or bypassed",
    "remainder": "Rest that cannot be shared",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """The files of the page by their names."""
    return {
        file.name: Asset(file.read_bytes(), _TYPES["." + file.name.rpartition(".")[2]])
        for file in files("prefixcache_service").joinpath("dashboard").iterdir()
        if file.is_file()
    }


def index(model: str, stats: CacheStats | None, refusal: str = "") -> str:
    """The page. stats: None where the engine has none, and then `refusal` says why."""
    page = assets()["index.html"].content.decode()
    figures = f"<p>{escape(refusal)}</p>" if stats is None else _figures(model, stats)
    return page.replace(_MARK, figures)


def _figures(model: str, stats: CacheStats) -> str:
    rate = "no lookup yet" if stats.hit_rate is None else f"{stats.hit_rate:.1%}"
    saved = stats.cached_tokens + stats.forked_tokens
    used = stats.blocks_in_use / stats.blocks_total
    rows = {
        "Model": model,
        "Hit rate": rate,
        "Prompt tokens saved": f"{saved:,} of {stats.prompt_tokens:,}",
        "Tokens cached": f"{stats.cached_tokens:,}",
        "Tokens forked": f"{stats.forked_tokens:,}",
        "Tokens computed": f"{stats.computed_tokens:,}",
        "Pool in use": f"{stats.blocks_in_use:,} of {stats.blocks_total:,} blocks ({used:.0%})",
        "Pool cached": f"{stats.blocks_evictable:,} blocks",
        "Pool free": f"{stats.blocks_free:,} blocks",
        "Sequences": f"{stats.sequences_running:,} running, {stats.sequences_waiting:,} waiting, "
        f"{stats.sequences_kept:,} kept",
    }
    misses = {name: f"{stats.misses.get(key, 0):,} tokens" for key, name in CAUSES.items()}
    curve = {
        f"{point.scale:g} x today ({point.blocks:,} blocks)": "not known yet"
        if point.hit_rate is None
        else f"{point.hit_rate:.1%}"
        for point in stats.size_curve
    }
    return (
        _table("At this moment", rows)
        + _table("Misses by cause", misses)
        + (_table("Hit rate of other pool sizes", curve) if curve else "")
    )


def _table(caption: str, rows: dict[str, str]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(caption)}</caption><tbody>{lines}</tbody></table>"
