"""Traces arrive at a real OTLP collector: one span a request, its parts inside, forks as links."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from prefixcache_service import Branch
from prefixcache_service.tracing import Tracing, otlp_processor
from tests.service.conftest import RunningServer

PROMPT = list(range(10, 30))


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
    tracing = Tracing(otlp_processor(f"http://127.0.0.1:{collector.port}"))
    running = RunningServer(tiny_config).load()
    running.engine.observers.add(tracing)
    try:
        with running.client() as client:
            client.generate(PROMPT, max_tokens=4, ignore_eos=True, request_id="first")
            parent = client.generate(
                PROMPT, n=2, max_tokens=4, ignore_eos=True, keep_seconds=60, request_id="second"
            )
            branches = [Branch(parent.sequence_id), Branch(parent.sequence_id, position=21)]
            client.fork(branches, max_tokens=2, ignore_eos=True, request_id="branches")
            with pytest.raises(Exception, match="not known"):
                client.fork([Branch("0" * 32)], max_tokens=2, request_id="lost")
        running.check()
        tracing.close()
        yield {attribute(span, "request_id"): span for span in roots(collector)}, collector.spans
    finally:
        running.close()
        collector.close()


def roots(collector):
    return [span for span in collector.spans if not span.parent_span_id]


def attribute(span, name):
    for pair in span.attributes:
        if pair.key == f"prefixcache.{name}":
            return pair.value.string_value or pair.value.int_value
    return None


def test_spans_of_requests(spans):
    by_id, everything = spans
    assert set(by_id) == {"first", "second", "branches", "lost"}
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


def test_a_fork_is_linked_to_what_it_forks(spans):
    by_id, _ = spans
    (link,) = by_id["branches"].links
    assert link.span_id == by_id["second"].span_id
    assert not by_id["second"].links


def test_a_refused_request_is_an_error_without_its_text(spans):
    by_id, _ = spans
    span = by_id["lost"]
    assert (span.name, span.status.code, span.status.message) == ("refused", 2, "NotFound")
