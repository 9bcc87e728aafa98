"""Cache events, numbered and kept for a while, and who is subscribed to them.

A cache observer that only appends; events are put into messages when somebody gets them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from prefixcache.cache import CacheObserver
from prefixcache.engine.messages import CacheEvent, CacheEvents, SubscribeEvents
from prefixcache.errors import FailedPrecondition

BACKLOG = 10_000
"""Events that a subscriber can resume behind."""


@dataclass(frozen=True, slots=True)
class _Record:
    number: int
    kind: Literal["stored", "removed", "cleared"]
    parent: bytes = b""
    digests: Sequence[bytes] = ()
    tokens: bytes = b""

    def event(self, block_size: int, seed_id: str, *, with_tokens: bool) -> CacheEvent:
        tokens = np.frombuffer(self.tokens, np.uint32).tolist() if with_tokens else ()
        return CacheEvent(
            self.number,
            self.kind,
            self.parent,
            tuple(self.digests),
            block_size,
            tuple(tokens),
            seed_id,
        )


class EventLog(CacheObserver):
    """Numbers begin at 1 and have no gaps."""

    def __init__(self, block_size: int, seed_id: str = "") -> None:
        self._block_size = block_size
        self._seed_id = seed_id
        self._backlog: deque[_Record] = deque(maxlen=BACKLOG)
        self._last = 0
        self._subscribers: dict[str, tuple[int, bool]] = {}

    def stored(self, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> None:
        """Blocks entered the trie."""
        self._append(_Record(self._last + 1, "stored", parent, digests, tokens))

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks left the trie."""
        self._append(_Record(self._last + 1, "removed", digests=digests))

    def cleared(self) -> None:
        """All blocks left the trie."""
        self._append(_Record(self._last + 1, "cleared"))

    def _append(self, record: _Record) -> None:
        self._last = record.number
        self._backlog.append(record)

    def subscribe(self, command: SubscribeEvents) -> int:
        """Begin a subscription; returns the number of the last event that it will not get.

        Raises FailedPrecondition where the backlog no longer reaches back to `after`.
        """
        after = self._last if command.after is None else command.after
        oldest = self._last - len(self._backlog)
        if after > self._last:
            raise FailedPrecondition(
                f"event {after} is still to come: the last one was {self._last}; was the server "
                "started anew? Subscribe from its beginning"
            )
        if after < oldest:
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
            newest_first = list(islice(reversed(self._backlog), self._last - after))
            events = [
                record.event(self._block_size, self._seed_id, with_tokens=with_tokens)
                for record in reversed(newest_first)
            ]
            batches.append(CacheEvents(call_id, tuple(events)))
            self._subscribers[call_id] = (self._last, with_tokens)
        return batches
