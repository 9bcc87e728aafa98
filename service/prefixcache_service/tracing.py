"""OpenTelemetry: one span a request, with its queueing, prefill and decoding as children.

An observer of the engine. Where the caller sent the context of a trace (W3C `traceparent`), the
span is part of that, and is sampled where that is. A span is open while its request lives, so that
forks of it can be linked to it; ended ones are sent by the exporter's own thread. Needs the extra
`prefixcache[tracing]`. Prompts and texts are never in a span.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prefixcache.engine.observer import EngineObserver
from prefixcache.engine.sequence import Sequence, SequenceGroup
from prefixcache.errors import PrefixCacheError

CLOSING_SECONDS = 2.0

MAX_PARENTS = 65_536
"""Sequences that a later fork's span can be linked to; the oldest are forgotten."""


_W3C = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Request:
    """A span that is open, and moments on its way in nanoseconds of the wall clock."""

    span: Span
    queued: int
    admitted: int | None = None
    first_token: int | None = None
    preemptions: int = 0
    sequences: dict[str, Sequence] = field(default_factory=dict)


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans in batches to a collector, such as "http://localhost:4317" (OTLP over gRPC)."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://")))


class Tracing(EngineObserver):
    """Makes the spans of one engine's requests."""

    def __init__(self, processor: SpanProcessor, service_name: str = "prefixcache") -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("prefixcache")
        self._requests: dict[str, _Request] = {}
        self._parents: OrderedDict[str, SpanContext] = OrderedDict()

    def close(self) -> None:
        """Send what is left. A collector that does not take it must not hold the server up."""
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(CLOSING_SECONDS)

    def queued(self, group: SequenceGroup) -> None:
        """A request was taken in: its span begins."""
        now = time.time_ns()
        name = "fork" if group.is_fork else "generate"
        links = self._links(group.sequences)
        span = self._start(name, group.request_id, now, links, group.trace_parent)
        self._requests[group.request_id] = _Request(span, now)

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """A sequence got its blocks."""
        request = self._requests[group.request_id]
        self._note(request, sequence)
        request.admitted = request.admitted or time.time_ns()

    def preempted(self, group: SequenceGroup) -> None:
        """A running request gave its blocks back."""
        self._requests[group.request_id].preemptions += 1

    def sampled(self, sequence: Sequence, group: SequenceGroup) -> None:
        """A sequence has one more token."""
        request = self._requests[group.request_id]
        self._note(request, sequence)
        request.first_token = request.first_token or time.time_ns()

    def ended(
        self, request_id: str, group: SequenceGroup | None, error: PrefixCacheError | None
    ) -> None:
        """A request has ended: so do its span and those of its parts."""
        now = time.time_ns()
        request = self._requests.pop(request_id, None) if group is not None else None
        if request is None:  # it was refused, perhaps for the name of one that goes on
            request = _Request(self._start("refused", request_id, now, []), now)
        sequences = list(request.sequences.values())
        request.span.set_attributes(
            {
                "prefixcache.sequences": len(sequences),
                "prefixcache.prompt_tokens": sum(s.usage.prompt_tokens for s in sequences),
                "prefixcache.cached_tokens": sum(s.num_cached_tokens for s in sequences),
                "prefixcache.forked_tokens": sum(s.num_forked_tokens for s in sequences),
                "prefixcache.completion_tokens": sum(s.num_generated for s in sequences),
                "prefixcache.preemptions": request.preemptions,
            }
        )
        if error is not None:
            request.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        context = set_span_in_context(request.span)
        for name, start, end in (
            ("queue", request.queued, request.admitted),
            ("prefill", request.admitted, request.first_token),
            ("decode", request.first_token, now),
        ):
            if start is not None:
                self._tracer.start_span(name, context, start_time=start).end(end or now)
        request.span.end(now)

    def _start(
        self, name: str, request_id: str, now: int, links: list[Link], trace_parent: str = ""
    ) -> Span:
        return self._tracer.start_span(
            name,
            _W3C.extract({"traceparent": trace_parent}),
            kind=SpanKind.SERVER,
            start_time=now,
            links=links,
            attributes={"prefixcache.request_id": _own_id(request_id)},
        )

    def _links(self, branches: list[Sequence]) -> list[Link]:
        """To the requests whose sequences these are forked from."""
        parents = dict.fromkeys(branch.parent_id for branch in branches)
        known = [self._parents[parent] for parent in parents if parent in self._parents]
        return [Link(context) for context in known]

    def _note(self, request: _Request, sequence: Sequence) -> None:
        if sequence.id in request.sequences:
            return
        request.sequences[sequence.id] = sequence
        self._parents[sequence.id] = request.span.get_span_context()
        if len(self._parents) > MAX_PARENTS:
            self._parents.popitem(last=False)


def _own_id(request_id: str) -> str:
    """The id that the client gave: the service puts a scope before and a number behind it."""
    return request_id.partition("/")[2].rpartition("/")[0] or request_id
