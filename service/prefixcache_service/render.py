"""Events and replies of the engine to messages of the wire: the other direction of `convert`.

Pure: touches neither network nor engine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prefixcache.engine import messages as engine
from prefixcache_service.v1 import prefixcache_pb2 as pb

MAX_POSITIONS = 1024  # a chunk with more, each with 65 log-probabilities, would near the size limit
MAX_EVENT_ITEMS = 65_536  # events, digests and tokens of a message: 20 bytes at most for each

TokenBytes = Callable[[int], bytes]

_REASON = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
_STATE = {
    "waiting": pb.SEQUENCE_STATE_WAITING,
    "running": pb.SEQUENCE_STATE_RUNNING,
    "kept": pb.SEQUENCE_STATE_KEPT,
}
_KIND = {
    "stored": pb.CacheEvent.KIND_STORED,
    "removed": pb.CacheEvent.KIND_REMOVED,
    "cleared": pb.CacheEvent.KIND_CLEARED,
}


def responses(
    event: engine.Started | engine.Output | engine.Finished,
    token_bytes: TokenBytes,
    address: str = "",
) -> Iterator[pb.GenerateResponse]:
    """The messages of one event: one, or several where an Output is long.

    address: under which this server, which holds the sequence, can be reached.
    """
    if isinstance(event, engine.Started):
        yield pb.GenerateResponse(chunk=_admission(event, address))
    elif isinstance(event, engine.Finished):
        yield pb.GenerateResponse(complete=_complete(event, token_bytes))
    else:
        for chunk in _chunks(event, token_bytes):
            yield pb.GenerateResponse(chunk=chunk)


def _admission(event: engine.Started, address: str) -> pb.Chunk:
    return pb.Chunk(
        index=event.index,
        sequence_id=event.sequence_id,
        stream_key=event.stream_key,
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        num_forked_tokens=event.num_forked_tokens,
        address=address,
    )


def _chunks(event: engine.Output, token_bytes: TokenBytes) -> Iterator[pb.Chunk]:
    prompt = event.prompt_logprobs
    for at in range(0, len(prompt), MAX_POSITIONS):
        some = prompt[at : at + MAX_POSITIONS]
        entries = [logprobs(entry, token_bytes) for entry in some]
        yield pb.Chunk(index=event.index, prompt_logprobs=entries)
    if event.token_ids or event.text:
        entries = [logprobs(entry, token_bytes) for entry in event.logprobs]
        yield pb.Chunk(
            index=event.index, token_ids=event.token_ids, text=event.text, logprobs=entries
        )


def _complete(event: engine.Finished, token_bytes: TokenBytes) -> pb.Complete:
    complete = pb.Complete(
        index=event.index,
        finish_reason=_REASON[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            cached_tokens=event.usage.cached_tokens,
            forked_tokens=event.usage.forked_tokens,
            computed_tokens=event.usage.computed_tokens,
            completion_tokens=event.usage.completion_tokens,
        ),
        kept_seconds=event.kept_seconds,
        score=event.score,
    )
    if isinstance(event.stop_reason, str):
        complete.stop = event.stop_reason
    elif event.stop_reason is not None:
        complete.stop_token_id = event.stop_reason
    if event.next_token is not None:
        complete.next_token.CopyFrom(logprobs(event.next_token, token_bytes))
    return complete


def logprobs(entry: engine.TokenLogprobs | None, token_bytes: TokenBytes) -> pb.TokenLogprobs:
    """The log-probabilities at one position; None, for a first prompt token, gives an empty one."""
    if entry is None:
        return pb.TokenLogprobs()

    def one(token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, token=token_bytes(token_id))

    return pb.TokenLogprobs(
        chosen=one(entry.token_id, entry.logprob),
        top=[one(token_id, logprob) for token_id, logprob in entry.top],
    )


def score(
    command: engine.Score,
    entries: Sequence[Sequence[engine.TokenLogprobs]],
    cached: int,
    token_bytes: TokenBytes,
) -> pb.ScoreResponse:
    """A whole Score: `entries[index]` are those of one continuation."""
    response = pb.ScoreResponse(
        num_prefix_tokens=len(command.prefix_token_ids), num_cached_tokens=cached
    )
    for token_ids, positions in zip(command.continuations, entries, strict=True):
        response.scores.add(
            token_ids=token_ids,
            logprobs=[logprobs(entry, token_bytes) for entry in positions],
            sum_logprob=sum(entry.logprob for entry in positions),
        )
    return response


def sequences(infos: Iterable[engine.SequenceInfo], address: str) -> pb.ListSequencesResponse:
    """The live tree. Request ids are given back as the caller gave them."""
    return pb.ListSequencesResponse(
        address=address,
        sequences=[
            pb.SequenceInfo(
                sequence_id=info.sequence_id,
                parent_sequence_id=info.parent_id,
                request_id=caller_request_id(info.request_id),
                state=_STATE[info.state],
                num_tokens=info.num_tokens,
                fork_position=info.fork_position,
                own_blocks=info.own_blocks,
                shared_blocks=info.shared_blocks,
                stream_key=info.stream_key,
                kept_seconds=info.kept_seconds,
            )
            for info in infos
        ],
    )


def caller_request_id(request_id: str) -> str:
    """The caller's part of the engine's "tenant/name/number"."""
    return request_id.partition("/")[2].rpartition("/")[0]


def receipt(values: Sequence[engine.ReleaseReceipt]) -> pb.ReleaseResponse:
    """What the parts of a Release did."""
    return pb.ReleaseResponse(
        sequence_ids=[sequence_id for value in values for sequence_id in value.sequence_ids],
        blocks_freed=sum(value.blocks_freed for value in values),
    )


def pin(value: engine.PinInfo) -> pb.Pin:
    """A pin."""
    return pb.Pin(
        pin_id=value.pin_id,
        num_tokens=value.num_tokens,
        num_blocks=value.num_blocks,
        seconds=value.seconds,
    )


def stats(value: engine.CacheStats) -> pb.GetCacheStatsResponse:
    """Pool and counters: the fields have the same names on both sides."""
    parts: dict[str, Callable[[Any], Any]] = {
        "size_curve": _size_point,
        "histograms": _histogram,
        "tenants": _tenant,
    }
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    for name, convert in parts.items():
        fields[name] = [convert(one) for one in fields[name]]
    return pb.GetCacheStatsResponse(**fields)


def _size_point(point: engine.SizePoint) -> pb.SizePoint:
    return pb.SizePoint(scale=point.scale, blocks=point.blocks, hit_rate=point.hit_rate)


def _histogram(histogram: engine.Histogram) -> pb.Histogram:
    return pb.Histogram(
        name=histogram.name,
        labels=histogram.labels,
        bounds=histogram.bounds,
        counts=histogram.counts,
        sum=histogram.sum,
    )


def _tenant(tenant: engine.TenantStats) -> pb.TenantStats:
    return pb.TenantStats(
        tenant=tenant.tenant,
        cached_tokens=tenant.cached_tokens,
        forked_tokens=tenant.forked_tokens,
        computed_tokens=tenant.computed_tokens,
        completion_tokens=tenant.completion_tokens,
    )


def cache_events(
    events: Sequence[engine.CacheEvent],
) -> Iterator[pb.WatchCacheEventsResponse]:
    """Changes of the cache, in messages of bounded size: an event may be a whole prompt's."""
    seed_id = events[0].seed_id if events else ""
    response, size = pb.WatchCacheEventsResponse(seed_id=seed_id), 0
    for event in events:
        more = 1 + len(event.digests) + len(event.token_ids)
        if response.events and size + more > MAX_EVENT_ITEMS:
            yield response
            response, size = pb.WatchCacheEventsResponse(seed_id=seed_id), 0
        response.events.append(_cache_event(event))
        size += more
    if response.events:
        yield response


def _cache_event(event: engine.CacheEvent) -> pb.CacheEvent:
    return pb.CacheEvent(
        number=event.number,
        kind=_KIND[event.kind],
        parent=event.parent,
        digests=event.digests,
        block_size=event.block_size,
        token_ids=event.token_ids,
    )
