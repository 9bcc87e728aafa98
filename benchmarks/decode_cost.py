"""How a decode step's time grows with the batch and the context, behind a shared prompt or not.

    python -m benchmarks.kernels --plot docs/decode_cost.svg

The default model on the CPU, whole steps. K and V are noise, and where all layers' would not fit in
memory some layers read the same ones: what a step costs depends on neither. Owns the chart too.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks._report import Report
from prefixcache.model.attention import StepInput
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache
from prefixcache.model.loader import load_checkpoint

BLOCK = 16
BATCHES = (1, 4, 16, 64)
CONTEXTS = (256, 512, 1_024, 2_048, 4_096, 8_192)
OWN = 16
"""Tokens of each sequence's own behind a shared prompt."""
_MEMORY = 3 << 30
_CPU = torch.device("cpu")

Costs = dict[tuple[str, int, int], float]
"""Seconds of a step: ("shared" or "own", batch, context)."""


def decode_cost(report: Report, rounds: int, contexts: Sequence[int] = CONTEXTS) -> Costs:
    """Time every size; figures in milliseconds go to the report."""
    checkpoint = load_checkpoint("smollm2")
    decoder = Decoder.from_checkpoint(
        checkpoint, device=_CPU, dtype=torch.float32, max_model_len=max(contexts)
    )
    costs: Costs = {}
    for kind in ("shared", "own"):
        for batch in BATCHES:
            for context in contexts:
                step = _step(kind, batch, context)
                cache = _Noise(decoder, 1 + int(step.block_table.max()))
                seconds = _seconds(decoder, step, cache, rounds)
                costs[kind, batch, context] = seconds
                report.add(f"step_{kind}_b{batch}_l{context}_ms", seconds * 1e3, unit="ms a step")
    return costs


def _step(kind: str, batch: int, context: int) -> StepInput:
    """One row for each sequence; all but the last block are shared, or none is."""
    width = context // BLOCK
    own = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    if kind == "shared":
        prompt = np.arange(width - OWN // BLOCK, dtype=np.int32)
        last = len(prompt) + np.arange(batch, dtype=np.int32)[:, None]
        own = np.concatenate((np.tile(prompt, (batch, 1)), last), 1)
    return StepInput(
        token_ids=np.arange(batch, dtype=np.int32),
        positions=np.full(batch, context - 1, np.int32),
        slot_mapping=own[:, -1].astype(np.int64) * BLOCK + BLOCK - 1,
        query_start_loc=np.arange(batch + 1, dtype=np.int32),
        seq_lens=np.full(batch, context, np.int32),
        block_table=own,
        logits_rows=np.arange(batch, dtype=np.int32),
    )


class _Noise(SimpleNamespace):
    """A KV cache of noise; as many layers of it as fit in memory, in turn."""

    def __init__(self, decoder: Decoder, blocks: int) -> None:
        config = decoder.config
        one = KVCache.bytes_per_block(config, BLOCK, torch.float32) * blocks // config.num_layers
        count = max(1, min(config.num_layers, _MEMORY // one))
        shape = (blocks, config.num_kv_heads, config.head_dim, BLOCK)
        keys = torch.randn(shape)
        values = keys.transpose(2, 3).contiguous()
        own = [(keys.clone(), values.clone()) for _ in range(count)]
        layers = [own[i % count] for i in range(config.num_layers)]
        super().__init__(layers=layers, num_blocks=blocks, block_size=BLOCK)


def _seconds(decoder: Decoder, step: StepInput, cache: _Noise, rounds: int) -> float:
    decoder.forward(step, cache)  # type: ignore[arg-type]
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        decoder.forward(step, cache)  # type: ignore[arg-type]
        times.append(time.perf_counter() - begin)
    return min(times)  # growth is what is shown; a busy machine only adds


# --- the chart ------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 400, 60, 40, 90, 50
_COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728")


def chart(costs: Costs) -> str:
    """An SVG with both axes logarithmic: dashed lines share a prompt, whole ones do not."""
    contexts = sorted({context for _, _, context in costs})
    batches = sorted({batch for _, batch, _ in costs})
    milliseconds = {key: 1e3 * seconds for key, seconds in costs.items()}
    low = 10 ** math.floor(math.log10(min(milliseconds.values())))
    high = 10 ** math.ceil(math.log10(max(milliseconds.values())))

    def x(context: int) -> float:
        span = math.log(contexts[-1] / contexts[0]) or 1.0
        share = math.log(context / contexts[0]) / span
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, "ms a decode step; dashed: all but the last 16 tokens shared"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "tokens of context", "middle"),
    ]
    for context in contexts:
        parts.append(_line(x(context), _TOP, x(context), _HEIGHT - _BOTTOM, "#ddd"))
        parts.append(_text(x(context), _HEIGHT - _BOTTOM + 18, f"{context:,}", "middle"))
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        at = y(10.0**power)
        parts.append(_line(_LEFT, at, _WIDTH - _RIGHT, at, "#ddd"))
        parts.append(_text(_LEFT - 8, at + 4, f"{10**power:,}", "end"))
    for batch, colour in zip(batches, _COLOURS, strict=False):
        for kind, dash in (("own", ""), ("shared", ' stroke-dasharray="6 4"')):
            points = [(x(c), y(milliseconds[kind, batch, c])) for c in contexts]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            style = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
            parts.append(f'<polyline points="{path}" {style}/>')
        label = y(milliseconds["own", batch, contexts[-1]]) + 4
        parts.append(_text(_WIDTH - _RIGHT + 8, label, f"batch {batch}", colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#333") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {where} text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def write_chart(costs: Mapping[tuple[str, int, int], float], path: Path) -> None:
    """Draw the chart into an SVG file."""
    path.write_text(chart(dict(costs)))
