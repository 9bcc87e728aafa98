"""The HTTP side: liveness and metrics, on a port of its own.

Owns the names and help texts of the metrics. Knows the engine only as a snapshot of its figures.
"""

from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prefixcache.engine.messages import CacheStats
from prefixcache.errors import PrefixCacheError

_BLOCKS = ("free", "evictable", "in_use")
_SEQUENCES = ("running", "waiting", "kept")
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests; cached + forked + computed",
    "cached_tokens": "Prompt tokens that came from the cache",
    "forked_tokens": "Prompt tokens that a fork took over from its parent",
    "computed_tokens": "Prompt tokens that were computed",
    "recomputed_tokens": "Tokens computed again after preemption or eviction; in no other sum",
    "completion_tokens": "Tokens generated",
    "preemptions": "Sequences that had to give way",
    "forks": "Branches forked",
    "block_copies": "Blocks copied on first write",
    "evicted_blocks": "Cached blocks that made room",
    "requests_finished": "Requests that ended by themselves",
    "requests_aborted": "Requests that their callers ended",
    "requests_failed": "Requests that ended in an error",
}


def make_app(
    is_serving: Callable[[], bool], stats: Callable[[], Awaitable[CacheStats]]
) -> Starlette:
    """The application: /healthz answers 200 while the service is SERVING, else 503; /metrics."""

    async def healthz(request: Request) -> Response:
        ok = is_serving()
        return PlainTextResponse("ok\n" if ok else "not serving\n", 200 if ok else 503)

    async def metrics(request: Request) -> Response:
        try:
            page = render_metrics(await stats())
        except PrefixCacheError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/metrics", metrics)])


def render_metrics(stats: CacheStats) -> bytes:
    """A snapshot in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(stats))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, stats: CacheStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All metrics of one moment."""
        stats = self._stats
        blocks = GaugeMetricFamily(
            "prefixcache_blocks", "Blocks of the pool by state; they add up to it", labels=["state"]
        )
        for state in _BLOCKS:
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        pinned = "Blocks held by a pin; they are among those in use"
        yield GaugeMetricFamily("prefixcache_blocks_pinned", pinned, value=stats.blocks_pinned)
        size = "Tokens in a block"
        yield GaugeMetricFamily("prefixcache_block_size_tokens", size, value=stats.block_size)
        sequences = GaugeMetricFamily(
            "prefixcache_sequences", "Sequences by state", labels=["state"]
        )
        for state in _SEQUENCES:
            sequences.add_metric([state], getattr(stats, f"sequences_{state}"))
        yield sequences
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"prefixcache_{name}", text, value=getattr(stats, name))
