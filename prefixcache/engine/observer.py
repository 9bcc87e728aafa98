"""What the engine tells those who watch requests: metrics, traces, records.

Watching is wrapped around the engine, not written into it: each watcher is one class, and the
engine does not know what they do. Changes of the cache are told by `cache.events` instead.
"""

from collections.abc import Mapping

from prefixcache.engine.messages import FinishReason
from prefixcache.engine.sequence import Sequence, SequenceGroup
from prefixcache.errors import PrefixCacheError


class EngineObserver:
    """Told on the engine's thread, at the moment; must not block, raise or change anything.

    A request's life, in the order of the calls:

        queued ── admitted ── sampled … ── finished ──┬── ended
                     ↑ │                              │
                     │ └── preempted                  │   one `finished` a sequence
                     └─────────┘                      │
        ended, with an error, at any point ───────────┘   a refused request is only ended

    Subclasses override what they want.
    """

    def queued(self, group: SequenceGroup) -> None:
        """A request was taken in."""

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """A sequence got its blocks: `num_computed` of its tokens need not be run.

        again: it was preempted, or its first admission counted it: what it runs is work done again.
        """

    def preempted(self, group: SequenceGroup) -> None:
        """A running request gave its blocks back and waits again."""

    def sampled(self, sequence: Sequence, group: SequenceGroup) -> None:
        """A sequence has one more token. Not called for a beam search: its tokens may change."""

    def finished(self, sequence: Sequence, group: SequenceGroup, reason: FinishReason) -> None:
        """A sequence has ended: a sample or a branch.

        For each result of a beam search too: there with the sequence that ran the prompt.
        """

    def ended(
        self, request_id: str, group: SequenceGroup | None, error: PrefixCacheError | None
    ) -> None:
        """A request has ended, in an error or not; group: None where it was not taken in."""

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step has been run: its sequences, their tokens, and the wall time it took."""

    def figures(self) -> Mapping[str, float]:
        """What it has to tell of itself, for `CacheStats.extra`."""
        return {}


class Observers(EngineObserver):
    """Several observers as one; they are told in the order in which they were added."""

    def __init__(self) -> None:
        self._members: list[EngineObserver] = []

    def add(self, observer: EngineObserver) -> None:
        """Tell one more observer from now on."""
        self._members.append(observer)

    def queued(self, group: SequenceGroup) -> None:
        """Pass on."""
        for member in self._members:
            member.queued(group)

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """Pass on."""
        for member in self._members:
            member.admitted(sequence, group, again=again)

    def preempted(self, group: SequenceGroup) -> None:
        """Pass on."""
        for member in self._members:
            member.preempted(group)

    def sampled(self, sequence: Sequence, group: SequenceGroup) -> None:
        """Pass on."""
        for member in self._members:
            member.sampled(sequence, group)

    def finished(self, sequence: Sequence, group: SequenceGroup, reason: FinishReason) -> None:
        """Pass on."""
        for member in self._members:
            member.finished(sequence, group, reason)

    def ended(
        self, request_id: str, group: SequenceGroup | None, error: PrefixCacheError | None
    ) -> None:
        """Pass on."""
        for member in self._members:
            member.ended(request_id, group, error)

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Pass on."""
        for member in self._members:
            member.stepped(num_rows, num_tokens, seconds)

    def figures(self) -> Mapping[str, float]:
        """All of theirs."""
        return {name: value for m in self._members for name, value in m.figures().items()}
