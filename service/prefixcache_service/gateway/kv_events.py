"""Cache events as a gateway takes them, and their numbers.

A gateway asks for events behind a number, 0 for what is cached now, and takes numbers that follow
one another. Ours start at the nanosecond at which the server started, so that a number of another
server, or of this one before a restart, is never taken for one of this.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common

from prefixcache.engine.messages import CacheEvent
from prefixcache.errors import OutOfRange

MAX_ITEMS = 65_536
"""Events, blocks and tokens in a chunk of a snapshot: 20 bytes at most for each."""


class Numbering:
    """The numbers of one server."""

    def __init__(self) -> None:
        self._first = time.time_ns()
        self._newest_snapshot = 0

    def after(self, start: int) -> int | None:
        """The engine's number behind which to resume; None for a snapshot. Raises OutOfRange.

        Not behind a number that is older than the newest snapshot: it may be one that was broken
        off, whose messages end at the number of the last event.
        """
        if start == 0:
            return None
        if start < self._first + self._newest_snapshot:
            raise OutOfRange(
                f"event {start} is of before the newest snapshot, or of before this server "
                "started: subscribe from 0"
            )
        return start - self._first

    def batches(self, events: Sequence[CacheEvent]) -> Iterator[Any]:
        """A message for each event."""
        for event in events:
            yield self._batch(event.number, [event])

    def snapshot(self, events: Sequence[CacheEvent]) -> Iterator[Any]:
        """Few messages for events that all have one number, which is that of the last message."""
        last = self._newest_snapshot = events[0].number
        parts = list(_parts(events))
        blocks = sum(len(event.digests) for event in events)
        for index, part in enumerate(parts):
            batch = self._batch(last - len(parts) + 1 + index, part)
            batch.snapshot.index, batch.snapshot.count = index, len(parts)
            batch.snapshot.blocks = blocks
            yield batch

    def _batch(self, number: int, events: Sequence[CacheEvent]) -> Any:
        return common.KvEventBatch(
            sequence_number=self._first + number,
            timestamp=time.time(),
            events=[_event(event) for event in events],
        )


def _parts(events: Sequence[CacheEvent]) -> Iterator[list[CacheEvent]]:
    part: list[CacheEvent] = []
    size = 0
    for event in events:
        more = 1 + len(event.digests) + len(event.token_ids)
        if part and size + more > MAX_ITEMS:
            yield part
            part, size = [], 0
        part.append(event)
        size += more
    yield part


def _event(event: CacheEvent) -> Any:
    message = common.KvCacheEvent(event_id=event.number)
    if event.kind == "cleared":
        message.cleared.SetInParent()
    elif event.kind == "removed":
        message.removed.block_hashes.extend(map(_hash, event.digests))
    else:
        message.stored.SetInParent()
        if event.parent:
            message.stored.parent_block_hash = _hash(event.parent)
        size = event.block_size
        for index, digest in enumerate(event.digests):
            message.stored.blocks.add(
                block_hash=_hash(digest),
                token_ids=event.token_ids[index * size : (index + 1) * size],
                block_size=size,
            )
    return message


def _hash(digest: bytes) -> int:
    """A name of 64 bits for a block."""
    return int.from_bytes(digest[:8], "little", signed=True)
