"""The floor under each row: bytes over measured bandwidth, operations over measured peak.

A floor is what this machine could do at best with the weights in their own format and a prefix
that is read once a step for all its sharers, in float32. No figure can be beyond it, ours or
theirs, unless the arithmetic is narrower than float32 (OpenVINO multiplies int8 by default).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks._report import median_seconds

STREAM_BYTES = 1 << 29  # well beyond any cache
MATRIX = 1536
BATCH, CHANNELS, SIDE = 8, 256, 56


@dataclass(frozen=True)
class Machine:
    """bandwidth in bytes a second (reading), peak in float32 operations a second."""

    bandwidth: float
    peak: float


def measure() -> Machine:
    """About a second of work on all cores."""
    stream = torch.ones(STREAM_BYTES // 4)
    seconds = median_seconds(stream.sum, rounds=5)
    left, right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    product = median_seconds(lambda: left @ right, rounds=7, warm_up=2)
    # Another library than the product's: on some processors that one stays at half the peak.
    image, filters = torch.rand(BATCH, CHANNELS, SIDE, SIDE), torch.rand(CHANNELS, CHANNELS, 3, 3)
    image = image.contiguous(memory_format=torch.channels_last)
    convolution = median_seconds(lambda: torch.conv2d(image, filters), rounds=7, warm_up=2)
    operations = 2 * BATCH * CHANNELS * CHANNELS * 9 * (SIDE - 2) ** 2
    return Machine(STREAM_BYTES / seconds, max(2 * MATRIX**3 / product, operations / convolution))


def best(machines: Sequence[Machine]) -> Machine:
    """The fastest that was seen: a limit must not fall with a neighbour's load."""
    return Machine(max(m.bandwidth for m in machines), max(m.peak for m in machines))


@dataclass(frozen=True)
class Shape:
    """What a token costs: of one model, whose weights are `weight_bytes` in their own format."""

    weight_bytes: int
    layer_flops: int
    head_flops: int
    attention_flops: int
    kv_bytes: int

    @classmethod
    def of(cls, facts: Mapping[str, int], weight_bytes: int) -> "Shape":
        """facts: the names of ModelConfig. A tied output layer is among the weights."""
        hidden, layers = facts["hidden_size"], facts["num_layers"]
        queries = facts["num_heads"] * facts["head_dim"]
        keys = facts["num_kv_heads"] * facts["head_dim"]
        layer = 2 * hidden * (queries + keys) + 3 * hidden * facts["intermediate_size"]
        return cls(
            weight_bytes,
            layer_flops=2 * layers * layer,
            head_flops=2 * facts["vocab_size"] * hidden,
            attention_flops=4 * layers * queries,
            kv_bytes=2 * layers * keys * 4,
        )


def floor_seconds(
    shape: Shape, machine: Machine, *, sequences: int, behind: int, computed: int, steps: int
) -> float:
    """The least time of a row.

    sequences: that decode together. behind: tokens of the prefix that they share.
    computed: prompt tokens that are not cached, over all prompts. steps: tokens of each sequence.
    """
    per_key = shape.attention_flops * behind
    prompt = computed * (shape.layer_flops + (per_key if computed < behind else per_key // 2))
    first = max(
        (prompt + sequences * shape.head_flops) / machine.peak,
        shape.weight_bytes / machine.bandwidth,
    )
    own = steps // 2  # tokens of its own that a sequence sees, on average
    flops = sequences * (
        shape.layer_flops + shape.head_flops + shape.attention_flops * (behind + own)
    )
    read = shape.weight_bytes + shape.kv_bytes * (behind + sequences * own)
    return first + (steps - 1) * max(flops / machine.peak, read / machine.bandwidth)
