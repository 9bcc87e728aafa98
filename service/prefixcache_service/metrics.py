"""Figures of the engine as Prometheus' text, under our names and, on request, under vLLM's.

Owns the names and help texts; docs/metrics.md defines each. Knows the engine only as a snapshot.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from prefixcache.engine.messages import CacheStats, Histogram

Compat = Literal["none", "vllm"]
Value = Callable[[CacheStats], float]
Values = Callable[[CacheStats], Mapping[str, float]]

_GAUGES: dict[str, tuple[str, Value]] = {
    "blocks_shared": ("Blocks that several running sequences use", lambda s: s.blocks_shared),
    "blocks_saved": ("Blocks that sharing saves now", lambda s: s.blocks_saved),
    "saved_bytes": ("Memory that sharing saves now", lambda s: s.bytes_saved),
    "blocks_pinned": ("Blocks under a pin; among those in use", lambda s: s.blocks_pinned),
    "blocks_leased": ("Blocks held for kept sequences and queued forks", lambda s: s.blocks_leased),
    "block_size_tokens": ("Tokens in a block", lambda s: s.block_size),
    "block_size_bytes": ("Memory of a block", lambda s: s.bytes_per_block),
    "sequences_preempted": ("Waiting sequences that gave way", lambda s: s.sequences_preempted),
    "same_bits": ("1 where results depend on nothing else, to the bit", lambda s: s.same_bits),
    "recording_failed": (
        "1 where the file of --record could not be written",
        lambda s: s.extra.get("recording_failed", 0),
    ),
}

_LABELLED_GAUGES: dict[str, tuple[str, str, Values]] = {
    "blocks": (
        "Blocks of the pool; the states add up to it",
        "state",
        lambda s: {
            "free": s.blocks_free,
            "evictable": s.blocks_evictable,
            "in_use": s.blocks_in_use,
        },
    ),
    "sequences": (
        "Sequences by state",
        "state",
        lambda s: {
            "running": s.sequences_running,
            "waiting": s.sequences_waiting,
            "kept": s.sequences_kept,
        },
    ),
    "size_curve_hit_ratio": (
        "Hit rate that a pool of scale times today's size would have had",
        "scale",
        lambda s: {f"{p.scale:g}": p.hit_rate for p in s.size_curve if p.hit_rate is not None},
    ),
    "size_curve_blocks": (
        "The size of that pool",
        "scale",
        lambda s: {f"{p.scale:g}": p.blocks for p in s.size_curve},
    ),
}

_COUNTERS: dict[str, tuple[str, Value]] = {
    "recomputed_tokens": ("Tokens run again after a preemption", lambda s: s.recomputed_tokens),
    "completion_tokens": ("Tokens generated", lambda s: s.completion_tokens),
    "forks": ("Branches forked", lambda s: s.forks),
    "block_copies": ("Blocks copied on first write", lambda s: s.block_copies),
    "evicted_blocks": ("Blocks that made room", lambda s: s.evicted_blocks),
    "swapped_out_blocks": ("Preempted blocks moved to the host", lambda s: s.swapped_out_blocks),
    "swapped_in_blocks": ("Blocks moved back from the host", lambda s: s.swapped_in_blocks),
    "preemptions": ("Times that a request gave its blocks back", lambda s: s.preemptions),
}

_LABELLED_COUNTERS: dict[str, tuple[str, str, Values]] = {
    "prompt_tokens": (
        "Prompt tokens of admitted requests, each once",
        "source",
        lambda s: {
            "cached": s.cached_tokens,
            "forked": s.forked_tokens,
            "computed": s.computed_tokens,
        },
    ),
    "missed_tokens": ("Computed prompt tokens by cause", "cause", lambda s: s.misses),
    "requests": (
        "Requests that ended",
        "outcome",
        lambda s: {
            "finished": s.requests_finished,
            "aborted": s.requests_aborted,
            "failed": s.requests_failed,
        },
    ),
    "finished_sequences": ("Sequences that ended", "reason", lambda s: s.finish_reasons),
}

_HISTOGRAMS = {
    "eviction_age_seconds": "Time in the cache of blocks that were evicted",
    "eviction_idle_seconds": "Time since the last use of blocks that were evicted",
    "reuse_gap_seconds": "Time without use of blocks that a prompt was served from",
    "queue_time_seconds": "From a request's arrival to its first admission",
    "prefill_time_seconds": "From its first admission to its first token",
    "time_to_first_token_seconds": "From its arrival to its first token, by hit rate in percent",
    "time_between_tokens_seconds": "From a sequence's token to its next",
    "request_duration_seconds": "From a request's arrival to its end",
    "step_duration_seconds": "Time of a step",
}

_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "time_between_tokens_seconds",
    "time_per_output_token_seconds": "time_between_tokens_seconds",  # before vLLM 0.11
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "request_prefill_time_seconds": "prefill_time_seconds",
}


def render_metrics(stats: CacheStats, *, compat: Compat = "none", model_name: str = "") -> bytes:
    """A snapshot in the text format of Prometheus.

    compat: whose names to add to ours. model_name: a label of vLLM's.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(_ours(stats)))
    if compat == "vllm":
        registry.register(_Snapshot(_vllm(stats, model_name)))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All metrics of one moment."""
        return self._metrics


def _ours(stats: CacheStats) -> Iterator[Metric]:
    for name, (text, value) in _GAUGES.items():
        yield GaugeMetricFamily(f"prefixcache_{name}", text, value=value(stats))
    for name, (text, label, values) in _LABELLED_GAUGES.items():
        gauge = GaugeMetricFamily(f"prefixcache_{name}", text, labels=[label])
        for key, amount in values(stats).items():
            gauge.add_metric([key], amount)
        yield gauge
    for name, (text, value) in _COUNTERS.items():
        yield CounterMetricFamily(f"prefixcache_{name}", text, value=value(stats))
    for name, (text, label, values) in _LABELLED_COUNTERS.items():
        counter = CounterMetricFamily(f"prefixcache_{name}", text, labels=[label])
        for key, amount in values(stats).items():
            counter.add_metric([key], amount)
        yield counter
    for name, text in _HISTOGRAMS.items():
        series = [histogram for histogram in stats.histograms if histogram.name == name]
        yield _histogram(f"prefixcache_{name}", text, series)
    if stats.tenants:
        yield from _tenants(stats)


def _histogram(name: str, text: str, series: Iterable[Histogram]) -> HistogramMetricFamily:
    series = list(series)
    labels = list(series[0].labels) if series else []
    family = HistogramMetricFamily(name, text, labels=labels)
    for one in series:
        family.add_metric(list(one.labels.values()), _buckets(one), one.sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds with cumulative counts, as Prometheus has them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _tenants(stats: CacheStats) -> Iterator[Metric]:
    prompt = CounterMetricFamily(
        "prefixcache_tenant_prompt_tokens", "As prompt_tokens", labels=["tenant", "source"]
    )
    completion = CounterMetricFamily(
        "prefixcache_tenant_completion_tokens", "As completion_tokens", labels=["tenant"]
    )
    for one in stats.tenants:
        for source in ("cached", "forked", "computed"):
            prompt.add_metric([one.tenant, source], getattr(one, f"{source}_tokens"))
        completion.add_metric([one.tenant], one.completion_tokens)
    yield prompt
    yield completion


# ---------------------------------------------------------------- vLLM's names


def _vllm(stats: CacheStats, model_name: str) -> Iterator[Metric]:
    labels = {"model_name": model_name, "engine": "0"}
    counters = {
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.completion_tokens,
        "prefix_cache_queries": stats.cached_tokens + stats.computed_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "num_preemptions": stats.preemptions,
    }
    gauges = {
        "kv_cache_usage_perc": stats.blocks_in_use / stats.blocks_total,
        "num_requests_running": stats.sequences_running,
        "num_requests_waiting": stats.sequences_waiting,
    }
    for name, count in counters.items():
        counter = CounterMetricFamily(f"vllm:{name}", "As vLLM's", labels=list(labels))
        counter.add_metric(list(labels.values()), count)
        yield counter
    for name, value in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", "As vLLM's", labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        yield gauge
    ended = CounterMetricFamily(
        "vllm:request_success", "As vLLM's", labels=[*labels, "finished_reason"]
    )
    for reason, count in stats.finish_reasons.items():
        ended.add_metric([*labels.values(), reason], count)
    yield ended
    for name, ours in _VLLM_HISTOGRAMS.items():
        merged = _merged([h for h in stats.histograms if h.name == ours], labels)
        yield _histogram(f"vllm:{name}", "As vLLM's", merged)


def _merged(series: list[Histogram], labels: dict[str, str]) -> list[Histogram]:
    """Series of one name as one, under other labels."""
    if not series:
        return []
    counts = tuple(map(sum, zip(*(one.counts for one in series), strict=True)))
    total = sum(one.sum for one in series)
    return [Histogram(series[0].name, labels, series[0].bounds, counts, total)]
