"""All that is asked of one trace, in the order in which it is printed: one call, one result.

Owns which pool sizes are looked at, and the list of assumptions that goes with every figure.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prefixcache.errors import ConfigurationError, TraceError
from prefixcache.simulate.bounds import BlockNumbers, belady, plain_lru
from prefixcache.simulate.cost import Hardware, ModelCost, StepCost
from prefixcache.simulate.memory import Scheme, compare_schemes
from prefixcache.simulate.replay import Replay, enough, room_of
from prefixcache.simulate.serving import Limits, Served, Serving
from prefixcache.simulate.trace import Trace, distinct_blocks, with_block_size

Progress = Callable[[str, int, int], None]

DEFAULT_BLOCK = 16
"""Tokens in a block where the trace has lengths only."""

_HALVINGS = 7


@dataclass(frozen=True, slots=True)
class SizePoint:
    """Hit rates of one pool size, as shares of the whole blocks that prompts ask for."""

    blocks: int
    lru: float
    ours: float
    bound: float
    ours_tokens: float
    refused: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one accelerator gives: the pool that fits, and the trace served on it."""

    model: ModelCost
    hardware: Hardware
    limits: Limits
    served: Served
    mean_tokens: float

    @property
    def sequences_that_fit(self) -> float:
        """Mean sequences of the trace, at their full length, that the pool holds; none shared."""
        return self.limits.num_blocks * self.limits.block_size / self.mean_tokens


@dataclass(frozen=True, slots=True)
class Study:
    """A trace and what was found. curve: empty where the trace names no blocks."""

    trace: Trace
    distinct: int
    curve: list[SizePoint]
    schemes: list[Scheme]
    plan: Plan | None
    assumptions: list[str] = field(default_factory=list)


def default_sizes(trace: Trace, block_size: int) -> list[int]:
    """From what holds everything down to 1/128 of it by halves, where the longest request fits."""
    everything = distinct_blocks(trace.requests)
    least = max(room_of(request, block_size) for request in trace.requests)
    sizes = {max(everything >> power, least) for power in range(_HALVINGS + 1)}
    if trace.pool_blocks is not None:
        sizes.add(trace.pool_blocks)
    return sorted(sizes)


def study(
    trace: Trace,
    *,
    sizes: Sequence[int] = (),
    block_size: int | None = None,
    model: ModelCost | None = None,
    hardware: Hardware | None = None,
    max_num_seqs: int = 256,
    token_budget: int = 8192,
    progress: Progress | None = None,
) -> Study:
    """Replay, compare and plan. sizes: pools in blocks; a range that the trace suggests if empty.

    model and hardware: both, or no plan is made. Raises ConfigurationError or TraceError.
    """
    report = progress or (lambda step, done, total: None)
    if block_size is not None:
        try:
            trace = with_block_size(trace, block_size)
        except ValueError as error:
            raise ConfigurationError(f"block_size: {error}") from None
    size = trace.block_size or block_size or DEFAULT_BLOCK
    curve = _curve(trace, list(sizes) or default_sizes(trace, size), size, report)
    try:
        schemes = compare_schemes(trace.sequences)
    except TraceError:
        schemes = []  # prompts alone: nothing runs, so nothing is reserved for what will run
    plan = None
    if model is not None and hardware is not None:
        plan = _plan(trace, model, hardware, (size, max_num_seqs, token_budget), report)
    distinct = distinct_blocks(trace.requests)
    return Study(trace, distinct, curve, schemes, plan, _assumptions(trace, plan))


def _curve(trace: Trace, sizes: list[int], block_size: int, report: Progress) -> list[SizePoint]:
    if not trace.has_blocks:
        return []
    numbers = BlockNumbers(trace.requests, block_size)
    most = enough(trace.requests, block_size)
    points = []
    for index, size in enumerate(sorted(set(sizes))):
        report("replay", index, len(sizes))
        built = min(size, most)
        ours = Replay(built, block_size).run(trace.requests)
        lru, bound = plain_lru(numbers, built), belady(numbers, built)
        rates = lru.block_rate, ours.block_rate, bound.block_rate, ours.token_rate
        points.append(SizePoint(size, *rates, ours.refused))
    report("replay", len(sizes), len(sizes))
    return points


def _plan(
    trace: Trace,
    model: ModelCost,
    hardware: Hardware,
    settings: tuple[int, int, int],
    report: Progress,
) -> Plan:
    block_size, max_num_seqs, token_budget = settings
    room = int(hardware.memory * hardware.utilization) - model.weight_bytes
    num_blocks = room // (model.bytes_per_token * block_size)
    if num_blocks < 1:
        raise ConfigurationError(
            f"{hardware.memory * hardware.utilization / 2**30:.1f} GiB of memory leave no block "
            f"of {block_size} tokens beside {model.weight_bytes / 2**30:.1f} GiB of weights"
        )
    limits = Limits(num_blocks, block_size, max_num_seqs, token_budget)
    most = 2 * enough(trace.requests, block_size)  # twice: nor does it come near the watermark
    built = replace(limits, num_blocks=min(num_blocks, most))
    served = Serving(built, StepCost(model, hardware)).run(trace.requests, report)
    lengths = [s.prompt_tokens + s.output_tokens for s in trace.sequences]
    return Plan(model, hardware, limits, served, sum(lengths) / len(lengths))


def _assumptions(trace: Trace, plan: Plan | None) -> list[str]:
    """What the figures take for granted, a sentence each."""
    said = []
    if trace.has_blocks:
        said += [
            "Hit rates: requests follow one another in the order of their admission; each ends "
            "before the next begins, so all that it does not use can be evicted.",
            "Hit rates count whole blocks; a block that a trace names counts as full.",
            "Plain LRU evicts the block touched longest ago, whatever hangs on it.",
            "Offline bound: Belady's MIN on the prefix tree (Belady 1966; Mattson et al. 1970); "
            "no order of eviction has more hits.",
        ]
        if trace.format == "mooncake":
            said.append(
                "Generated tokens leave nothing in the cache: the trace does not name them."
            )
    else:
        said.append("The trace has lengths only: no hits can be told.")
    said.append(
        "Memory: no prefix is shared; 'at the end' counts requests, 'running' counts their steps."
    )
    return said + ([] if plan is None else _plan_assumptions(plan))


def _plan_assumptions(plan: Plan) -> list[str]:
    hardware, model = plan.hardware, plan.model
    said = [
        f"Memory: {hardware.memory / 2**30:.1f} GiB, of which {hardware.utilization:.0%} hold "
        f"{model.weight_bytes / 2**30:.2f} GiB of weights and the pool; activations take the rest.",
        f"A token takes {model.bytes_per_token:,} bytes of KV.",
        f"At most {plan.limits.max_num_seqs} sequences and {plan.limits.token_budget} tokens a "
        "step; a prompt's room is taken at admission; the youngest is preempted.",
        "A prompt waits for blocks that another one is computing; kept sequences are not held.",
    ]
    if not model.known:
        return [*said, "The model's size is not known: all requests are there from the start, and "
                "time is counted in steps."]  # fmt: skip
    return [
        *said,
        f"Time: roofline of {model.parameters / 1e9:.2f} G parameters at {hardware.tflops:g} "
        f"TFLOP/s and {hardware.bandwidth:g} GB/s, of which kernels reach "
        f"{hardware.efficiency:.0%}; a shared prefix is read once for each sequence.",
        "Requests arrive when the trace says.",
    ]


def as_json(found: Study) -> dict[str, Any]:
    """Plain values, for programs."""
    trace = found.trace
    return {
        "trace": {
            "path": trace.path,
            "format": trace.format,
            "requests": len(trace.requests),
            "skipped_lines": trace.skipped,
            "seconds": trace.seconds,
            "block_size": trace.block_size,
            "distinct_blocks": found.distinct,
            "recorded_pool_blocks": trace.pool_blocks,
        },
        "hit_rate": [asdict(point) for point in found.curve],
        "memory": [asdict(scheme) for scheme in found.schemes],
        "plan": None if found.plan is None else plan_figures(found.plan),
        "assumptions": found.assumptions,
    }


def plan_figures(plan: Plan) -> dict[str, float | int | str | None]:
    """A plan's figures by name; those of time are None where the model's size is not known."""
    served, known = plan.served, plan.model.known
    seconds = served.seconds if known and served.seconds else None
    first = served.first_token
    return {
        "model": plan.model.name,
        "pool_blocks": plan.limits.num_blocks,
        "block_size": plan.limits.block_size,
        "pool_tokens": plan.limits.num_blocks * plan.limits.block_size,
        "sequences_that_fit": plan.sequences_that_fit,
        "mean_running": served.mean_running,
        "most_running": served.most_running,
        "most_blocks_in_use": served.most_blocks,
        "refused": served.hits.refused,
        "preemptions": served.preemptions,
        "hit_rate_tokens": served.hits.token_rate,
        "recomputed_tokens": served.recomputed_tokens,
        "seconds": seconds,
        "busy_share": served.busy / seconds if seconds else None,
        "prompt_tokens_per_second": served.hits.asked_tokens / seconds if seconds else None,
        "output_tokens_per_second": served.output_tokens / seconds if seconds else None,
        "mean_seconds_to_first_token": sum(first) / len(first) if first and known else None,
    }
