"""Commands that are answered at once: statistics, views, release, flush, pins, subscriptions.

Owns no state: it reads the engine's parts and asks their owners to change theirs.
"""

import dataclasses
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prefixcache.cache import BlockTable, token_bytes
from prefixcache.cache.table import Holding
from prefixcache.cache.trie import Node
from prefixcache.engine.inspect import MAX_LISTED, Held
from prefixcache.engine.messages import (
    CacheEvent,
    CacheStats,
    Event,
    FlushCache,
    FlushNode,
    GetStats,
    InspectCache,
    Inspection,
    InspectNode,
    ListSequences,
    PinInfo,
    PinNode,
    PinPrefix,
    Release,
    ReleaseReceipt,
    Reply,
    SequenceInfo,
    SubscribeEvents,
    UnpinPrefix,
    UnsubscribeEvents,
)
from prefixcache.engine.registry import Entry
from prefixcache.engine.sequence import Owner, SequenceGroup, State
from prefixcache.engine.views import CacheView, PinView
from prefixcache.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PrefixCacheError,
    ResourceExhausted,
)

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine

logger = logging.getLogger(__name__)

Call = (
    Release
    | ListSequences
    | GetStats
    | FlushCache
    | PinPrefix
    | UnpinPrefix
    | SubscribeEvents
    | UnsubscribeEvents
    | Inspection
)


def answer(engine: "Engine", call: Call) -> list[Event]:
    """Carry out a call; the Reply to it, which bears its error if it fails."""
    if isinstance(call, UnsubscribeEvents):
        engine.event_log.unsubscribe(call.call_id)
        return []
    try:
        return [Reply(call.call_id, _value(engine, call))]
    except PrefixCacheError as error:
        return [Reply(call.call_id, error=error)]
    except Exception as error:
        logger.exception("call %s failed", type(call).__name__)
        return [Reply(call.call_id, error=Internal(f"{type(error).__name__} in the engine"))]


def _value(engine: "Engine", call: Call) -> object:
    match call:
        case Release():
            return _release(engine, call)
        case ListSequences():
            entries = engine.registry.entries(_owner(call))
            return tuple(_describe(engine, entry) for entry in entries)
        case GetStats():
            return _stats(engine) if call.tenant is None else _own_stats(engine, call.tenant)
        case FlushCache():
            return _flush(engine, call)
        case PinPrefix():
            return _pin(engine, call)
        case UnpinPrefix():
            return engine.registry.pin_info(engine.registry.unpin(call.pin_id, _owner(call)))
        case SubscribeEvents():
            return _subscribe(engine, call)
        case InspectCache():
            return _cache_view(engine, call)
        case InspectNode():
            return engine.inspector.detail(call)
        case PinNode():
            return _pin_node(engine, call)
        case FlushNode():
            return engine.inspector.flush(call.digest)
        case _:
            raise Internal(f"no answer is known to {type(call).__name__}")


def _owner(call: Release | ListSequences | UnpinPrefix) -> Owner | None:
    return None if call.cache_salt is None else Owner(call.tenant, call.cache_salt)


def _subscribe(engine: "Engine", call: SubscribeEvents) -> int | tuple[CacheEvent, ...]:
    trie, log = engine.manager.trie, engine.event_log
    roots, namespace = trie.roots(), None
    if call.cache_salt is not None:
        key = engine.requests.namespace(Owner(call.tenant, call.cache_salt))
        roots, namespace = [root for root in roots if root.tokens == key], trie.digest(key)
    after = log.subscribe(call, namespace)
    return log.snapshot(trie.walk(roots), call.with_tokens) if call.snapshot else after


def _flush(engine: "Engine", call: FlushCache) -> int:
    if call.tenant is None:
        return engine.manager.flush()
    if call.cache_salt is None:
        return engine.manager.flush(engine.requests.namespaces(call.tenant))
    return engine.manager.flush(engine.requests.namespace(Owner(call.tenant, call.cache_salt)))


def _release(engine: "Engine", call: Release) -> ReleaseReceipt:
    if call.subtree:
        entries = engine.registry.descendants(call.sequence_id, _owner(call))
    else:
        entries = [engine.registry.get(call.sequence_id, _owner(call))]
    before = engine.manager.num_in_use
    for entry in entries:
        if entry.lease is not None:
            engine.registry.drop(entry)
        else:
            engine.abort([entry.sequence])
    ids = tuple(entry.sequence.id for entry in entries)
    return ReleaseReceipt(ids, before - engine.manager.num_in_use)


def _describe(engine: "Engine", entry: Entry) -> SequenceInfo:
    sequence = entry.sequence
    holding: Holding | None = entry.lease or sequence.table
    own, shared = (0, 0) if holding is None else _own_and_shared(holding)
    kept = entry.lease is not None
    return SequenceInfo(
        sequence_id=sequence.id,
        parent_id=sequence.parent_id,
        request_id=entry.group.request_id,
        state="kept" if kept else "waiting" if sequence.state is State.WAITING else "running",
        num_tokens=len(sequence.tokens),
        fork_position=sequence.fork_position,
        own_blocks=own,
        shared_blocks=shared,
        stream_key=sequence.stream_key,
        kept_seconds=engine.registry.seconds_left(entry.expires) if kept else 0.0,
    )


def _own_and_shared(holding: Holding) -> tuple[int, int]:
    """Blocks that only this sequence uses, and blocks that others use too."""
    mine = 1 if isinstance(holding, BlockTable) else 0
    own = sum(1 for tail in holding.tail if tail.hard <= mine and tail.soft <= 1 - mine)
    node: Node | None = holding.node
    while node is not None and node.hard <= mine and node.soft <= 1 - mine:
        own += min(node.end, holding.node_blocks) - min(node.start, holding.node_blocks)
        node = node.parent
    return own, holding.num_blocks - own


def _pin(engine: "Engine", call: PinPrefix) -> PinInfo:
    _check_pin_seconds(engine, call.seconds)
    data = token_bytes(engine.requests.prompt("prompt", call.token_ids))
    owner = Owner(call.tenant, call.cache_salt)
    pin = engine.manager.pin(engine.requests.namespace(owner), data)
    if pin.num_blocks == 0:
        engine.manager.unpin(pin)
        raise FailedPrecondition(
            "no whole block of this prompt is cached: generate from it with max_tokens = 0 first"
        )
    try:
        engine.quotas.check_pin(call.tenant, pin)
    except ResourceExhausted:
        engine.manager.unpin(pin)
        raise
    return engine.registry.pin_info(engine.registry.pin(pin, owner, call.seconds))


def _pin_node(engine: "Engine", call: PinNode) -> PinInfo:
    _check_pin_seconds(engine, call.seconds)
    pin = engine.inspector.pin(call.digest)
    if pin.num_blocks == 0:
        engine.manager.unpin(pin)
        raise FailedPrecondition("a whole namespace cannot be pinned: pin a prefix in it")
    return engine.registry.pin_info(engine.registry.pin(pin, None, call.seconds))


def _check_pin_seconds(engine: "Engine", seconds: float) -> None:
    longest = engine.config.max_keep_seconds
    if not 0 < seconds <= longest:
        raise InvalidArgument("seconds", f"must be above 0 and at most {longest:g}")


def _cache_view(engine: "Engine", call: InspectCache) -> CacheView:
    inspector, registry = engine.inspector, engine.registry
    held = Held(engine.manager)
    entries, total = inspector.sequences(call.max_sequences)
    pins = [(registry.pin_info(entry), entry.pin.node) for entry in registry.pins()]
    return CacheView(
        stats=_stats(engine),
        blocks=inspector.blocks(held).tobytes(),
        nodes=inspector.nodes(held, call),
        pins=tuple(PinView(info, node.key) for info, node in pins[-MAX_LISTED:]),
        sequences=tuple(_describe(engine, entry) for entry in entries),
        num_sequences=total,
        hypotheses=tuple(entry.sequence.id for entry in entries if entry.is_hypothesis),
    )


def _stats(engine: "Engine") -> CacheStats:
    manager, scheduler, metrics = engine.manager, engine.scheduler, engine.metrics
    counters, held = metrics.counters, Held(manager)
    shared = held.sharers[held.sharers > 1]
    preempted = [group for group in scheduler.waiting if metrics.was_admitted(group)]
    return CacheStats(
        block_size=engine.config.block_size,
        bytes_per_block=engine.bytes_per_block,
        blocks_total=engine.num_blocks,
        blocks_free=manager.num_free,
        blocks_evictable=manager.num_evictable,
        blocks_in_use=manager.num_in_use,
        blocks_pinned=manager.num_pinned(),
        blocks_leased=len(held.leased_blocks()),
        blocks_shared=len(shared),
        blocks_saved=int((shared - 1).sum()),
        sequences_running=_num_live(scheduler.running),
        sequences_waiting=_num_live(scheduler.waiting),
        sequences_preempted=_num_live(preempted),
        sequences_kept=engine.registry.num_kept,
        **dataclasses.asdict(counters),
        forks=manager.num_forks,
        block_copies=manager.num_copies,
        evicted_blocks=manager.num_evicted,
        swapped_out_blocks=scheduler.swap.num_out,
        swapped_in_blocks=scheduler.swap.num_in,
        same_bits=engine.same_bits,
        misses=dict(metrics.cache.misses),
        finish_reasons=dict(metrics.finish_reasons),
        size_curve=metrics.cache.size_curve(),
        histograms=metrics.histograms(),
        tenants=metrics.tenants(),
        extra=engine.observers.figures(),
    )


def _own_stats(engine: "Engine", tenant: str) -> CacheStats:
    """What a tenant may know: its own work, and nothing that others' would change.

    What only another namespace has computed is told as never seen.
    """
    figures = engine.metrics.own(tenant)
    misses = dict(figures.misses)
    misses["never_seen"] += misses.pop("other_namespace")
    pins = [entry.pin for entry in engine.registry.pins() if entry.tenant == tenant]
    scheduler = engine.scheduler
    return CacheStats(
        block_size=engine.config.block_size,
        bytes_per_block=engine.bytes_per_block,
        blocks_total=0,
        blocks_free=0,
        blocks_evictable=0,
        blocks_in_use=0,
        blocks_pinned=sum(pin.num_blocks for pin in pins),
        sequences_running=_num_live(g for g in scheduler.running if g.tenant == tenant),
        sequences_waiting=_num_live(g for g in scheduler.waiting if g.tenant == tenant),
        sequences_kept=len(engine.registry.kept_until(tenant)),
        **dataclasses.asdict(figures.counters),
        forks=0,
        block_copies=0,
        evicted_blocks=0,
        same_bits=engine.same_bits,
        misses=misses,
        finish_reasons=dict(figures.finish_reasons),
    )


def _num_live(groups: Iterable[SequenceGroup]) -> int:
    return sum(len(group.live) for group in groups)
