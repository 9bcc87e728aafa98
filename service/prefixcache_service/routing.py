"""Where a client sends what: to its own target, or to the server that holds a sequence or a pin.

Owns a client's channels and what it has been told of who holds what, bounded both; may be used by
several threads. Pure bookkeeping: makes no call, so both clients share it.

    Client ──▶ target: a server, or a load balancer before several
       └─────▶ address of the holder, from its own answers, for Fork, Release and UnpinPrefix
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefixcache.errors import InvalidArgument
from prefixcache_service.requests import Branch
from prefixcache_service.results import Delta
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub

MAX_HELD = 65_536
"""Names that a client remembers; the longest unused is forgotten: its calls go to the target."""
MAX_CONNECTIONS = 256
"""To holders; the longest unused is let go, and closes when its calls have ended."""

TARGET = ""
"""The address that stands for the client's own target."""


class _Connection:
    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = PrefixCacheStub(channel)  # type: ignore[no-untyped-call]


class Replicas:
    """The servers that one client talks to. connect: makes a channel to host:port."""

    def __init__(self, target: str, connect: Callable[[str], Any]) -> None:
        self._target = target
        self._connect = connect
        self._lock = threading.Lock()
        self._holders: OrderedDict[str, str] = OrderedDict()
        self._connections: OrderedDict[str, _Connection] = OrderedDict()
        self._own = _Connection(connect(target))

    def stub(self, address: str = TARGET) -> PrefixCacheStub:
        """For calls to an address, connected to when it is first needed."""
        if address in (TARGET, self._target):
            return self._own.stub
        with self._lock:
            found = self._connections.get(address) or _Connection(self._connect(address))
            _put(self._connections, address, found, MAX_CONNECTIONS)
        return found.stub

    def take_channels(self) -> list[Any]:
        """All channels, for their end."""
        with self._lock:
            connections = [self._own, *self._connections.values()]
            self._connections.clear()
        return [connection.channel for connection in connections]

    # ------------------------------------------------------------ who holds what

    def note(self, delta: Delta) -> None:
        """Remember who holds an admitted sequence, until it has ended and is not kept."""
        if delta.finish_reason is not None and not delta.kept_seconds:
            self.forget([delta.sequence_id])
        else:
            self.learn([delta.sequence_id], delta.address)

    def learn(self, names: Iterable[str], address: str) -> None:
        """Remember who holds sequences or pins; an empty address tells nothing."""
        if not address:
            return
        with self._lock:
            for name in names:
                _put(self._holders, name, address, MAX_HELD)

    def forget(self, names: Iterable[str]) -> None:
        """They are no more."""
        with self._lock:
            for name in names:
                self._holders.pop(name, None)

    def by_holder(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The names by the address that holds them; TARGET has those that are not known."""
        split: dict[str, list[str]] = {}
        with self._lock:
            for name in names:
                split.setdefault(self._holders.get(name, TARGET), []).append(name)
        return split or {TARGET: []}

    def holder(self, branches: Sequence[Branch]) -> str:
        """Where to fork; raises InvalidArgument where the parents are on different servers."""
        split = self.by_holder([branch.parent_sequence_id for branch in branches])
        known = [address for address in split if address != TARGET]
        if len(known) > 1:
            raise InvalidArgument(
                "branches",
                f"have parents on different servers ({', '.join(known)}); fork those of each in a "
                "call of its own",
            )
        return known[0] if known else TARGET


def _put(of: "OrderedDict[str, Any]", name: str, value: Any, limit: int) -> None:
    """Make `name` the most lately used; what is one too many leaves."""
    of[name] = value
    of.move_to_end(name)
    if len(of) > limit:
        of.popitem(last=False)
