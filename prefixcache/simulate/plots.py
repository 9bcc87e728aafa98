"""The figures of a study as pictures: PNG, and one self-contained page. Needs matplotlib."""

import base64
import html
import io
from pathlib import Path
from typing import Any

from prefixcache.errors import ConfigurationError
from prefixcache.simulate.study import Study, plan_figures

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
h1 { overflow-wrap: anywhere; }
@media (max-width: 30rem) {
  body { font-size: 14px; margin-top: 1rem; }
  th, td { padding: .2rem .3rem; }
}
img { max-width: 100%; background: #fff; }
"""


def png(found: Study) -> bytes:
    """All pictures below one another, as a PNG. Raises ConfigurationError without matplotlib."""
    figure = _figure(found)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def page(found: Study) -> str:
    """One HTML file with pictures, tables and assumptions; it loads nothing."""
    name = html.escape(Path(found.trace.path).name)
    blocks = f", {found.distinct:,} distinct blocks of {found.trace.block_size} tokens"
    picture = base64.b64encode(png(found)).decode()
    assumptions = "".join(f"<li>{html.escape(text)}</li>" for text in found.assumptions)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{name}</h1><p>{len(found.trace.requests):,} requests"
        f"{blocks if found.curve else ''}.</p>"
        f'<img alt="The figures of the tables below" src="data:image/png;base64,{picture}">'
        f"{''.join(_tables(found))}<h2>Assumptions</h2><ul>{assumptions}</ul></html>\n"
    )


def _tables(found: Study) -> list[str]:
    parts = []
    if found.curve:
        rows = [
            [f"{p.blocks:,}", f"{p.lru:.1%}", f"{p.ours:.1%}", f"{p.bound:.1%}", str(p.refused)]
            for p in found.curve
        ]
        head = ["pool, blocks", "plain LRU", "prefixcache", "offline bound", "refused"]
        parts.append("<h2>Hit rate</h2>" + _table(head, rows))
    if found.schemes:
        rows = [
            [s.name, f"{s.unused_at_end:.1%}", f"{s.unused_running:.1%}", f"{s.batch:.2f} x"]
            for s in found.schemes
        ]
        head = ["reserved", "unused at the end", "unused, running", "batch"]
        parts.append("<h2>Memory</h2>" + _table(head, rows))
    if found.plan is not None:
        rows = [[name.replace("_", " "), shown(v)] for name, v in plan_figures(found.plan).items()]
        parts.append("<h2>Plan</h2>" + _table(["", ""], rows))
    return parts


def shown(value: float | int | str | None) -> str:
    """A figure as people read it."""
    if value is None:
        return "unknown"
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else _long(value)


def _long(value: float | int | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _figure(found: Study) -> Any:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 (an optional extra)
    except ImportError:
        raise ConfigurationError(
            "plots need matplotlib: pip install 'prefixcache[plots]'"
        ) from None
    drawings = [
        draw
        for draw, there in ((_draw_curve, found.curve), (_draw_memory, found.schemes),
                            (_draw_course, found.plan and found.plan.served.course))
        if there
    ]  # fmt: skip
    figure = Figure(figsize=(9, 4.2 * max(len(drawings), 1)), layout="constrained")
    for index, draw in enumerate(drawings, start=1):
        draw(found, figure.add_subplot(len(drawings), 1, index))
    return figure


def _draw_curve(found: Study, axes: Any) -> None:
    sizes = [point.blocks for point in found.curve]
    for label, style, values in (
        ("offline bound (Belady)", "k--", [100 * p.bound for p in found.curve]),
        ("prefixcache", "C0o-", [100 * p.ours for p in found.curve]),
        ("plain LRU", "C1x:", [100 * p.lru for p in found.curve]),
    ):
        axes.plot(sizes, values, style, label=label)
    axes.set(xscale="log", xlabel="pool, blocks", ylabel="blocks hit, %", title="Hit rate")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(found: Study, axes: Any) -> None:
    names = [scheme.name for scheme in found.schemes]
    unused = [100 * scheme.unused_running for scheme in found.schemes]
    bars = axes.barh(names, unused, color="C3")
    labels = [
        f"{u:.1f} %, batch {s.batch:.1f} x" for u, s in zip(unused, found.schemes, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4)
    axes.invert_yaxis()
    axes.set(xlabel="reserved and unused while running, %", title="Memory", xlim=(0, 125))
    axes.set_xticks(range(0, 101, 20))


def _draw_course(found: Study, axes: Any) -> None:
    assert found.plan is not None
    course = found.plan.served.course
    times = [point[0] for point in course]
    axes.plot(times, [point[1] for point in course], "C0", label="running")
    queue = axes.twinx()  # a queue is longer than a batch
    queue.plot(times, [point[2] for point in course], "C1:")
    queue.set_ylabel("waiting (dotted)")
    queue.set_ylim(0, 1.05 * max(1, *(point[2] for point in course)))
    unit = "seconds" if found.plan.model.known else "steps"
    axes.set(xlabel=unit, ylabel="sequences running", title=f"Served on {found.plan.model.name}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
