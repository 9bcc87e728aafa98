"""The tables of `benchmarks.peers` in `docs/performance.md`, between their two markers."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from benchmarks._report import Value

BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
TITLES = {
    "prefill": "prefill: 1,024 cold tokens",
    "warm_ttft": "first token behind 1,024 warm",
    "single": "one stream, 64 tokens behind 1,024 warm",
    "n16": "n = 16, 64 tokens each, behind 1,024 warm",
    "shared16": "16 requests, one system prompt of 1,024, 32 own, 64 out; the prompt seen before",
    "shared16_cold": "the same, all at once on an empty cache",
    "beam4": "beam 4, 32 steps behind 1,024 warm",
    "beam16": "beam 16, likewise",
    "beam64": "beam 64, likewise",
}
HEADINGS = {
    "ours": "prefixcache",
    "ours_int8": "prefixcache, int8",
    "openvino": "OpenVINO, default",
    "openvino_f32": "OpenVINO, f32",
    "vllm": "vLLM",
    "transformers": "transformers",
    "llamacpp": "llama.cpp",
}
Figures = Mapping[str, Value]


def write(
    page: Path, figures: Figures, bounds: Mapping[str, float | None], units: Mapping[str, str]
) -> None:
    """Put new tables between the markers; the rest of the page stays.

    bounds: of each ratio, None where none is wanted. units: of each row.

    Raises ValueError where a marker is not there.
    """
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page}: has no lines {BEGIN} and {END}")
    parts = (_facts(figures), _rates(figures, units), _ratios(figures, bounds), _rounds(figures))
    page.write_text("\n\n".join((before + BEGIN, *parts, END + after)))


def _facts(figures: Figures) -> str:
    """What was measured on, and with what."""
    versions = [
        f"{HEADINGS[name]} {figures[f'{name}_version']}"
        for name in HEADINGS
        if name not in ("ours_int8", "openvino_f32") and figures.get(f"{name}_version")
    ]
    lines = [
        f"Machine: {_processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory, "
        f"{platform.system()} {platform.machine()}; it reads {figures['bandwidth_gb_s']:.1f} GB/s "
        f"and multiplies {figures['peak_gflop_s']:.0f} GFLOP/s in float32 (both measured in the "
        "run).",
        f"Versions: {', '.join(versions)}.",
    ]
    if figures.get("missing_peers"):
        lines.append(f"**Not compared:** {figures['missing_peers']}.")
    return "\n\n".join(lines)


def _processor() -> str:
    """Its name and the instruction sets that matter here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    present = [name for name in wanted if name in facts.get("flags", "").split()]
    return f"{facts.get('model name', platform.machine())} ({', '.join(present)})"


def _rates(figures: Figures, units: Mapping[str, str]) -> str:
    servers = [name for name in HEADINGS if any(f"{name}_{row}" in figures for row in TITLES)]
    lines = [_line("row", "unit", "limit", *(HEADINGS[name] for name in servers))]
    lines.append(_rule(2, 1 + len(servers)))
    for row, title in TITLES.items():
        if f"ours_{row}" in figures:
            cells = (_number(figures.get(f"{name}_{row}")) for name in servers)
            lines.append(_line(title, units[row], _number(figures.get(f"floor_{row}")), *cells))
    return "\n".join(lines)


def _ratios(figures: Figures, bounds: Mapping[str, float | None]) -> str:
    lines = [_line("ours ÷ theirs", "measured", "wanted", ""), _rule(1, 2) + "---|"]
    for key, bound in bounds.items():
        value = figures.get(key)
        verdict = "not measured"
        if bound is None:
            lines.append(_line(f"`{key}`", _number(value), "-", ""))
            continue
        if isinstance(value, float):
            verdict = "" if value >= bound else f"**missed** by {(1 - value / bound) * 100:.0f} %"
        lines.append(_line(f"`{key}`", _number(value), f"≥ {bound:g}", verdict))
    return "\n".join(lines)


def _rounds(figures: Figures) -> str:
    """Each round's figure, and how much of a warm prefix the server had."""
    lines = [_line("row", "server", "rounds", "prefix in the cache"), _rule(4, 0)]
    for row in TITLES:
        for name, heading in HEADINGS.items():
            if rounds := figures.get(f"{name}_{row}_rounds"):
                cached = figures.get(f"{name}_{row}_cached") or "cold"
                lines.append(_line(row, heading, str(rounds), str(cached)))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(left: int, right: int) -> str:
    return "|" + "---|" * left + "---:|" * right


def _number(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) and value < 100 else _whole(value)


def _whole(value: Value) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else "-"
