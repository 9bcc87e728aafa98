"""Cache events, numbered and kept for a while, and who is subscribed to them.

A cache observer that only appends; batches go out once a step.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from prefixcache.cache.digest import TOKEN_BYTES
from prefixcache.engine.messages import CacheEvent, CacheEvents, SubscribeEvents
from prefixcache.errors import FailedPrecondition

BACKLOG = 10_000
"""Events that a subscriber can resume behind."""


class EventLog:
    """Implements CacheObserver. Numbers begin at 1 and have no gaps."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._backlog: deque[CacheEvent] = deque(maxlen=BACKLOG)
        self._last = 0
        self._subscribers: dict[str, tuple[int, bool]] = {}

    def stored(self, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> None:
        """Blocks entered the trie."""
        self._append(
            CacheEvent(
                self._last + 1,
                "stored",
                parent,
                tuple(digests),
                self._block_size,
                tuple(np.frombuffer(tokens, np.uint32, len(tokens) // TOKEN_BYTES).tolist()),
            )
        )

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks left the trie."""
        self._append(CacheEvent(self._last + 1, "removed", b"", tuple(digests)))

    def cleared(self) -> None:
        """All blocks left the trie."""
        self._append(CacheEvent(self._last + 1, "cleared"))

    def _append(self, event: CacheEvent) -> None:
        self._last += 1
        self._backlog.append(event)

    def subscribe(self, command: SubscribeEvents) -> int:
        """Begin a subscription; returns the number of the last event that it will not get.

        Raises FailedPrecondition where the backlog no longer reaches back to `after`.
        """
        after = self._last if command.after is None else command.after
        oldest = self._last - len(self._backlog)
        if not oldest <= after <= self._last:
            raise FailedPrecondition(
                f"events after number {after} are gone: the backlog holds {oldest + 1} to "
                f"{self._last}; subscribe anew and rebuild from the present"
            )
        self._subscribers[command.call_id] = (after, command.with_tokens)
        return after

    def unsubscribe(self, call_id: str) -> None:
        """End a subscription; unknown ones are ignored."""
        self._subscribers.pop(call_id, None)

    def batches(self) -> list[CacheEvents]:
        """What each subscriber has not had yet."""
        batches = []
        for call_id, (after, with_tokens) in self._subscribers.items():
            if after == self._last:
                continue
            first = self._last - len(self._backlog)
            events = list(self._backlog)[max(after - first, 0) :]
            if not with_tokens:
                events = [_without_tokens(event) for event in events]
            batches.append(CacheEvents(call_id, tuple(events)))
            self._subscribers[call_id] = (self._last, with_tokens)
        return batches


def _without_tokens(event: CacheEvent) -> CacheEvent:
    return CacheEvent(event.number, event.kind, event.parent, event.digests, event.block_size)
