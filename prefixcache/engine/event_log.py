"""Cache events, numbered and kept for a while, and who is subscribed to them.

A cache observer that only appends; events are put into messages when somebody gets them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from prefixcache.cache import CacheObserver
from prefixcache.cache.digest import DIGEST_BYTES
from prefixcache.cache.trie import Node
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
    namespace: bytes = b""


@dataclass(slots=True)
class _Subscription:
    """after: the last number it has had. namespace: the digest of the only one it is told of."""

    after: int
    with_tokens: bool
    namespace: bytes | None


class EventLog(CacheObserver):
    """Numbers begin at 1 and have no gaps."""

    def __init__(self, block_size: int, seed_id: str = "") -> None:
        self._block_size = block_size
        self._seed_id = seed_id
        self._backlog: deque[_Record] = deque(maxlen=BACKLOG)
        self._last = 0
        self._subscriptions: dict[str, _Subscription] = {}

    def stored(
        self, parent: bytes, digests: Sequence[bytes], tokens: bytes, namespace: bytes
    ) -> None:
        """Blocks entered the trie."""
        parent = b"" if parent == namespace else parent
        self._append(_Record(self._last + 1, "stored", parent, digests, tokens, namespace))

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks left the trie."""
        self._append(_Record(self._last + 1, "removed", digests=digests))

    def cleared(self) -> None:
        """All blocks left the trie."""
        self._append(_Record(self._last + 1, "cleared"))

    def _append(self, record: _Record) -> None:
        self._last = record.number
        self._backlog.append(record)

    def subscribe(self, command: SubscribeEvents, namespace: bytes | None = None) -> int:
        """Begin a subscription; returns the number of the last event that it will not get.

        namespace: the digest of the only one to tell of; None tells of all.
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
        self._subscriptions[command.call_id] = _Subscription(after, command.with_tokens, namespace)
        return after

    def unsubscribe(self, call_id: str) -> None:
        """End a subscription; unknown ones are ignored."""
        self._subscriptions.pop(call_id, None)

    def batches(self) -> list[CacheEvents]:
        """What each subscriber has not had yet."""
        batches = []
        for call_id, subscription in self._subscriptions.items():
            if subscription.after == self._last:
                continue
            newest_first = list(islice(reversed(self._backlog), self._last - subscription.after))
            events = tuple(self._event(one, subscription) for one in reversed(newest_first))
            batches.append(CacheEvents(call_id, events))
            subscription.after = self._last
        return batches

    def _event(self, record: _Record, subscription: _Subscription) -> CacheEvent:
        if record.kind == "stored" and subscription.namespace not in (None, record.namespace):
            return CacheEvent(record.number, "stored", seed_id=self._seed_id)
        tokens = record.tokens if subscription.with_tokens else b""
        return self._make(record.number, record.kind, record.parent, record.digests, tokens)

    def snapshot(self, nodes: Iterable[Node], with_tokens: bool) -> tuple[CacheEvent, ...]:
        """What stores these nodes, parents first, behind one event that clears everything.

        All have the number of the last event.
        """
        events = [self._make(self._last, "cleared")]
        for node in nodes:
            assert node.parent is not None
            parent = node.parent.last_digest if node.parent.blocks else b""
            count = len(node.digests) // DIGEST_BYTES
            digests = [node.digest_of(index) for index in range(count)]
            tokens = bytes(node.tokens) if with_tokens else b""
            events.append(self._make(self._last, "stored", parent, digests, tokens))
        return tuple(events)

    def _make(
        self,
        number: int,
        kind: Literal["stored", "removed", "cleared"],
        parent: bytes = b"",
        digests: Sequence[bytes] = (),
        tokens: bytes = b"",
    ) -> CacheEvent:
        ids = tuple(np.frombuffer(tokens, np.uint32).tolist())
        return CacheEvent(
            number, kind, parent, tuple(digests), self._block_size, ids, self._seed_id
        )
