"""Counters and times of requests: an observer around the engine, which does not know of it.

Owns every counter since the start. What the cache gave, and why not more, is `cache_metrics`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from prefixcache.engine import messages
from prefixcache.engine.cache_metrics import CacheMetrics
from prefixcache.engine.histogram import LONG_SECONDS, SECONDS, STEP_SECONDS, Histogram
from prefixcache.engine.messages import FinishReason, MissCause, TenantStats
from prefixcache.engine.observer import EngineObserver
from prefixcache.engine.sequence import Owner, Sequence, SequenceGroup
from prefixcache.errors import PrefixCacheError

HIT_RATE_BANDS = ("0", "0-50", "50-90", "90-100")
"""Percent: above the first number, up to the second."""

OTHER_TENANTS = "other"


@dataclass(slots=True)
class Counters:
    """Since the start. Prompt tokens are counted at first admission: each once.

    Every admitted request ends in exactly one of finished, aborted, failed; refused ones failed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    forked_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0


@dataclass(slots=True)
class Figures:
    """What is counted of all requests, or of those of one tenant."""

    counters: Counters = field(default_factory=Counters)
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(MissCause), 0))
    finish_reasons: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0)
    )


@dataclass(slots=True)
class _Request:
    """A request that has not ended. Times are of the engine's clock.

    given_tokens: of prompt_tokens, those cached or forked. num_results: of a search, so far.
    own: the figures of its tenant, where there are tenants.
    """

    arrived: float
    tenant: Counters | None
    own: Figures | None = None
    admitted: float | None = None
    has_token: bool = False
    prompt_tokens: int = 0
    given_tokens: int = 0
    num_results: int = 0
    last_reason: FinishReason | None = None


class EngineMetrics(EngineObserver):
    """Figures of one engine. clock: seconds. max_tenants: salts that get figures of their own."""

    def __init__(
        self, cache: CacheMetrics, clock: Callable[[], float], *, max_tenants: int = 0
    ) -> None:
        self.cache = cache
        self.counters = Counters()
        self.finish_reasons: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._clock = clock
        self._max_tenants = max_tenants
        self._tenants: dict[str, Counters] = {}
        self._own: dict[str, Figures] = {}
        self._requests: dict[SequenceGroup, _Request] = {}
        self._last_token: dict[Sequence, float] = {}
        self._queue_time = Histogram(SECONDS)
        self._prefill_time = Histogram(SECONDS)
        self._first_token = {band: Histogram(SECONDS) for band in HIT_RATE_BANDS}
        self._between_tokens = Histogram(STEP_SECONDS)
        self._duration = Histogram(LONG_SECONDS)
        self._step = Histogram(STEP_SECONDS)

    # ------------------------------------------------------------ a request's life

    def queued(self, group: SequenceGroup) -> None:
        """Its time begins."""
        own = self.own(group.tenant) if group.tenant else None
        self._requests[group] = _Request(self._clock(), self._tenant(group.first.owner), own)

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """Account for a prompt: by source the first time, as recomputed after that."""
        computed = len(sequence.tokens) - sequence.num_computed
        if again:
            self.counters.recomputed_tokens += computed
            return
        request = self._requests[group]
        before = dict(self.cache.misses)
        self.cache.admitted(sequence)
        if request.own is not None:
            _count_sources(request.own.counters, sequence, computed)
            for cause, count in self.cache.misses.items():
                request.own.misses[cause] += count - before[cause]
        _count_sources(self.counters, sequence, computed)
        if request.tenant is not None:
            _count_sources(request.tenant, sequence, computed)
        request.prompt_tokens += len(sequence.tokens)
        request.given_tokens += sequence.num_computed
        if request.admitted is None:
            request.admitted = self._clock()
            self._queue_time.observe(request.admitted - request.arrived)

    def preempted(self, group: SequenceGroup) -> None:
        """Count it."""
        self.counters.preemptions += 1

    def sampled(self, sequence: Sequence, group: SequenceGroup) -> None:
        """One more token: the request's first, or so long after the sequence's last."""
        now, request = self._clock(), self._requests[group]
        self._count_completion(request, 1)
        last = self._last_token.get(sequence)
        if last is not None:
            self._between_tokens.observe(now - last)
        elif not request.has_token:
            self._count_first_token(request, now)
        self._last_token[sequence] = now

    def _count_first_token(self, request: _Request, now: float) -> None:
        assert request.admitted is not None
        request.has_token = True
        self._prefill_time.observe(now - request.admitted)
        given = request.given_tokens / request.prompt_tokens
        band = (given > 0) + (given > 0.5) + (given > 0.9)
        self._first_token[HIT_RATE_BANDS[band]].observe(now - request.arrived)

    def _count_completion(self, request: _Request, num_tokens: int) -> None:
        self.counters.completion_tokens += num_tokens
        if request.tenant is not None:
            request.tenant.completion_tokens += num_tokens
        if request.own is not None:
            request.own.counters.completion_tokens += num_tokens

    def finished(self, sequence: Sequence, group: SequenceGroup, reason: FinishReason) -> None:
        """Count its reason; of a search, the tokens of the result too, in their order."""
        self.finish_reasons[reason] += 1
        request = self._requests[group]
        request.last_reason = reason
        if request.own is not None:
            request.own.finish_reasons[reason] += 1
        if group.beam is not None and reason != "abort":
            tokens = group.beam.finished[request.num_results].ending.tokens
            request.num_results += 1
            self._count_completion(request, len(tokens))

    def ended(
        self, request_id: str, group: SequenceGroup | None, error: PrefixCacheError | None
    ) -> None:
        """Count how; an admitted one for its time too."""
        request = None if group is None else self._requests.pop(group)
        own = None if request is None else request.own
        for counters in (self.counters, *(() if own is None else (own.counters,))):
            if error is not None:
                counters.requests_failed += 1
            elif request is not None and request.last_reason == "abort":
                counters.requests_aborted += 1
            else:
                counters.requests_finished += 1
        if request is not None and request.admitted is not None:
            self._duration.observe(self._clock() - request.arrived)
        for sequence in group.sequences if group is not None else ():
            self._last_token.pop(sequence, None)

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Count its time, if it ran anything."""
        if num_rows:
            self._step.observe(seconds)

    # ------------------------------------------------------------ figures

    def own(self, tenant: str) -> Figures:
        """The figures of one tenant."""
        return self._own.setdefault(tenant, Figures())

    def was_admitted(self, group: SequenceGroup) -> bool:
        """Whether a request that waits has run before."""
        return self._requests[group].admitted is not None

    def histograms(self) -> tuple[messages.Histogram, ...]:
        """All of them, as docs/metrics.md names them."""
        first = [
            histogram.snapshot("time_to_first_token_seconds", {"hit_rate": band})
            for band, histogram in self._first_token.items()
        ]
        return (
            *self.cache.histograms(),
            self._queue_time.snapshot("queue_time_seconds"),
            self._prefill_time.snapshot("prefill_time_seconds"),
            *first,
            self._between_tokens.snapshot("time_between_tokens_seconds"),
            self._duration.snapshot("request_duration_seconds"),
            self._step.snapshot("step_duration_seconds"),
        )

    def tenants(self) -> tuple[TenantStats, ...]:
        """Tokens by tenant, where asked for."""
        return tuple(
            TenantStats(
                label,
                tenant.cached_tokens,
                tenant.forked_tokens,
                tenant.computed_tokens,
                tenant.completion_tokens,
            )
            for label, tenant in self._tenants.items()
        )

    def _tenant(self, owner: Owner) -> Counters | None:
        if not self._max_tenants:
            return None
        label = tenant_label(owner)
        if label not in self._tenants and len(self._tenants) >= self._max_tenants:
            label = OTHER_TENANTS
        return self._tenants.setdefault(label, Counters())


def _count_sources(counters: Counters, sequence: Sequence, computed: int) -> None:
    counters.prompt_tokens += len(sequence.tokens)
    counters.cached_tokens += sequence.num_cached_tokens
    counters.forked_tokens += sequence.num_forked_tokens
    counters.computed_tokens += computed


def tenant_label(owner: Owner) -> str:
    """How a tenant is called in figures: its name, or the first 12 digits of its salt's SHA-256."""
    return owner.tenant or hashlib.sha256(owner.salt.encode()).hexdigest()[:12]
