"""Traces arrive at a real OTLP collector: one span a request, its parts inside, forks as links."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import SpanProcessor

from prefixcache_service import Branch, tracing
from prefixcache_service.tracing import Tracing, otlp_processor
from prefixcache_service.v1 import prefixcache_pb2 as pb
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub
from tests.service.conftest import RunningServer

PROMPT = list(range(10, 30))
CALLERS_SPAN = "00-0123456789abcdef0123456789abcdef-fedcba9876543210-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported to it."""

    def __init__(self):
        self.spans = []
        self._threads = ThreadPoolExecutor(1)
        self._server = grpc.server(self._threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request, context):  # noqa: N802 (the method's name on the wire)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self):
        self._server.stop(0).wait()
        self._threads.shutdown()


@pytest.fixture
def spans(tiny_config):
    """What a collector got of a generation, a repeat of it, a fork, and a refused request."""
    collector = Collector()
    watcher = Tracing(otlp_processor(f"http://127.0.0.1:{collector.port}"))
    running = RunningServer(tiny_config).load()
    running.engine.observers.add(watcher)
    try:
        with running.client() as client:
            client.generate(PROMPT, max_tokens=4, ignore_eos=True, request_id="first")
            parent = client.generate(
                PROMPT, n=2, max_tokens=4, ignore_eos=True, keep_seconds=60, request_id="second"
            )
            call_within(running.target, CALLERS_SPAN, "within")
            call_within(running.target, CALLERS_SPAN.removesuffix("1") + "0", "unsampled")
            call_within(running.target, "00-nonsense", "alone")
            branches = [Branch(parent.sequence_id), Branch(parent.sequence_id, position=21)]
            client.fork(branches, max_tokens=2, ignore_eos=True, request_id="branches")
            with pytest.raises(Exception, match="not known"):
                client.fork([Branch("0" * 32)], max_tokens=2, request_id="lost")
        running.check()
        watcher.close()
        yield {attribute(span, "request_id"): span for span in roots(collector)}, collector.spans
    finally:
        running.close()
        collector.close()


def call_within(target, trace_parent, request_id):
    """Generate as an instrumented client does, which sends the context of its own span."""
    request = pb.GenerateRequest(request_id=request_id)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.max_tokens = 1
    with grpc.insecure_channel(target) as channel:
        call = PrefixCacheStub(channel).Generate(request, metadata=(("traceparent", trace_parent),))
        assert list(call)


def roots(collector):
    return [span for span in collector.spans if span.name in {"generate", "fork", "refused"}]


def attribute(span, name):
    for pair in span.attributes:
        if pair.key == f"prefixcache.{name}":
            return pair.value.string_value or pair.value.int_value
    return None


def test_spans_of_requests(spans):
    by_id, everything = spans
    assert set(by_id) == {"first", "second", "within", "alone", "branches", "lost"}
    assert attribute(by_id["first"], "cached_tokens") == 0
    assert attribute(by_id["second"], "cached_tokens") == 19
    assert attribute(by_id["second"], "prompt_tokens") == 20  # counted once for both samples
    assert attribute(by_id["second"], "completion_tokens") == 8
    assert attribute(by_id["branches"], "sequences") == 2
    assert attribute(by_id["branches"], "forked_tokens") == 23 + 20
    parts = {}
    for span in everything:
        parts.setdefault(span.parent_span_id, []).append(span)
    for name in ("first", "second", "branches"):
        span = by_id[name]
        children = sorted(parts[span.span_id], key=lambda part: part.start_time_unix_nano)
        assert [child.name for child in children] == ["queue", "prefill", "decode"]
        times = [(c.start_time_unix_nano, c.end_time_unix_nano) for c in children]
        assert times[0][0] == span.start_time_unix_nano
        assert times[-1][1] == span.end_time_unix_nano
        assert all(before[1] == after[0] for before, after in pairwise(times))


def test_a_span_belongs_to_that_of_the_caller(spans):
    by_id, everything = spans
    trace, parent = by_id["within"].trace_id, by_id["within"].parent_span_id
    assert f"00-{trace.hex()}-{parent.hex()}-01" == CALLERS_SPAN
    parts = {span.name for span in everything if span.trace_id == trace}
    assert parts == {"generate", "queue", "prefill", "decode"}
    assert not by_id["alone"].parent_span_id


def test_a_collector_that_takes_nothing_does_not_hold_the_end_up(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSING_SECONDS", 0.01)
    collector_is_back = threading.Event()
    processor = SpanProcessor()
    processor.shutdown = collector_is_back.wait
    Tracing(processor).close()  # comes back
    collector_is_back.set()
    for thread in threading.enumerate():
        if thread.name == "last spans":
            thread.join()


def test_a_fork_is_linked_to_what_it_forks(spans):
    by_id, _ = spans
    (link,) = by_id["branches"].links
    assert link.span_id == by_id["second"].span_id
    assert not by_id["second"].links


def test_a_refused_request_is_an_error_without_its_text(spans):
    by_id, _ = spans
    span = by_id["lost"]
    assert (span.name, span.status.code, span.status.message) == ("refused", 2, "NotFound")
