"""Sequences by id, live and kept, and pins: everything that clients hold a handle to.

Owns expiry. Times are of a monotonic clock, so a jump of the wall clock ends nothing.
"""

import heapq
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixcache.cache import BlockManager, BlockTable, Lease, Pin
from prefixcache.engine.messages import PinInfo
from prefixcache.engine.sequence import Owner, Sequence, SequenceGroup
from prefixcache.errors import NotFound


@dataclass(eq=False, slots=True)
class Entry:
    """One sequence that a client may fork. lease and expires are set once it is only kept."""

    sequence: Sequence
    group: SequenceGroup
    lease: Lease | None = None
    expires: float = 0.0

    @property
    def is_hypothesis(self) -> bool:
        """Whether it is a beam of a search that still runs; nobody has a handle to it."""
        return self.group.beam is not None and self.lease is None


@dataclass(eq=False, slots=True)
class PinEntry:
    """One pin of a client; owner is None for the operator's, which no client can end."""

    id: str
    owner: Owner | None
    pin: Pin
    expires: float

    @property
    def tenant(self) -> str | None:
        """Whose it is; None: the operator's."""
        return None if self.owner is None else self.owner.tenant


class Registry:
    """Handles of clients. A handle of another owner is as good as none.

    Where an owner is asked for, None is the operator, who may name the handles of all.
    """

    def __init__(self, manager: BlockManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._pins: dict[str, PinEntry] = {}
        self._deadlines: list[tuple[float, str]] = []
        self.num_kept = 0

    def add(self, sequence: Sequence, group: SequenceGroup) -> None:
        """Enter a live sequence."""
        self._entries[sequence.id] = Entry(sequence, group)

    def get(self, sequence_id: str, owner: Owner | None) -> Entry:
        """The entry of a live or kept sequence. Raises NotFound."""
        entry = self._entries.get(sequence_id)
        if entry is None or owner not in {None, entry.sequence.owner}:
            raise NotFound(
                f"sequence {sequence_id!r} is not known: it was never started, was not kept at its "
                "end, was released, or its lease has expired"
            )
        return entry

    def entries(self, owner: Owner | None) -> Iterator[Entry]:
        """All entries of one owner."""
        entries = self._entries.values()
        return (entry for entry in entries if owner in {None, entry.sequence.owner})

    def descendants(self, sequence_id: str, owner: Owner | None) -> list[Entry]:
        """A sequence and all that were forked from it, parents first. Raises NotFound."""
        children: dict[str, list[Entry]] = {}
        for entry in self.entries(owner):
            children.setdefault(entry.sequence.parent_id, []).append(entry)
        found = [self.get(sequence_id, owner)]
        for entry in found:  # grows while it is walked
            found += children.get(entry.sequence.id, [])
        return found

    def end(self, sequence: Sequence) -> None:
        """A live sequence ended and is not kept."""
        self._entries.pop(sequence.id, None)

    # ------------------------------------------------------------ kept sequences

    def keep(self, sequence: Sequence, group: SequenceGroup, table: BlockTable) -> None:
        """A sequence is about to end: hold its blocks softly for its keep_seconds."""
        entry = self._entries.setdefault(sequence.id, Entry(sequence, group))
        entry.lease = self._manager.lease(table, len(sequence.tokens))
        self.num_kept += 1
        self.renew(entry)

    def renew(self, entry: Entry) -> None:
        """A kept sequence was used: its time begins anew."""
        if entry.lease is not None:
            entry.expires = self._clock() + entry.sequence.keep_seconds
            heapq.heappush(self._deadlines, (entry.expires, entry.sequence.id))

    def kept_until(self, tenant: str) -> list[float]:
        """When the kept sequences of a tenant expire, of all its salts."""
        entries = self._entries.values()
        return [e.expires for e in entries if e.lease and e.sequence.owner.tenant == tenant]

    def drop(self, entry: Entry) -> None:
        """A kept sequence is released or expired."""
        assert entry.lease is not None
        self._manager.end_lease(entry.lease)
        del self._entries[entry.sequence.id]
        self.num_kept -= 1

    # ------------------------------------------------------------ pins

    def pins(self) -> list[PinEntry]:
        """All pins."""
        return list(self._pins.values())

    def pin(self, pin: Pin, owner: Owner | None, seconds: float) -> PinEntry:
        """Enter a pin."""
        entry = PinEntry(secrets.token_hex(16), owner, pin, self._clock() + seconds)
        self._pins[entry.id] = entry
        heapq.heappush(self._deadlines, (entry.expires, entry.id))
        return entry

    def unpin(self, pin_id: str, owner: Owner | None) -> PinEntry:
        """End a pin. Raises NotFound."""
        entry = self._pins.get(pin_id)
        if entry is None or owner not in {None, entry.owner}:
            raise NotFound(f"pin {pin_id!r} is not known, or has expired")
        self._manager.unpin(entry.pin)
        return self._pins.pop(pin_id)

    def pin_info(self, entry: PinEntry) -> PinInfo:
        """A pin as its owner sees it."""
        blocks = entry.pin.num_blocks
        tokens = blocks * self._manager.block_size
        return PinInfo(entry.id, tokens, blocks, self.seconds_left(entry.expires))

    # ------------------------------------------------------------ time

    def seconds_left(self, expires: float) -> float:
        """Until a time of this registry's clock; not negative."""
        return max(expires - self._clock(), 0.0)

    @property
    def next_deadline(self) -> float | None:
        """Seconds until something may expire, or None."""
        return self.seconds_left(self._deadlines[0][0]) if self._deadlines else None

    def expire(self) -> None:
        """End what is past its time."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            kept, pinned = self._entries.get(name), self._pins.get(name)
            if kept is not None and kept.lease is not None and kept.expires <= now:
                self.drop(kept)
            elif pinned is not None:
                self.unpin(name, pinned.owner)
