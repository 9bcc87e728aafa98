"""Whose turn it is: fair sharing of the work between tenants within one priority.

Deficit round robin (Shreedhar and Varghese, SIGCOMM '95) on tokens, prompt and output, charged in
the step that runs them. In theory each round adds a quantum to a tenant's deficit and what it runs
is taken off; the tenant whose deficit is largest is in turn. The quantum here is one token times
the weight, so that no tenant ever gets two long prompts in a row because its quantum was large.
Rounds so short need not be walked: kept is how many rounds each tenant's tokens have used up, and
who has used up the fewest is in turn (the virtual token counters of Sheng et al., OSDI '24).

Nothing can be hoarded. A tenant that comes back finds itself beside the one of those waiting that
has used up the fewest; and where nothing waits any more, nobody was owed anything, and all begin
anew.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from prefixcache.engine.sequence import SequenceGroup


class Turns:
    """Puts groups in order. Without tenants (`weights` empty) the order is the one given."""

    def __init__(self) -> None:
        self.weights: Mapping[str, float] = {}
        self._used: dict[int, dict[str, float]] = {}
        """Rounds used up, by priority and tenant."""

    def joins(self, group: SequenceGroup, contending: Iterable[SequenceGroup]) -> None:
        """A group begins to wait. contending: those that wait, or have prompt left to run."""
        if not self.weights:
            return
        used = self._used.setdefault(group.priority, {})
        rivals = {other.tenant for other in contending if other.priority == group.priority}
        if rivals and group.tenant not in rivals:
            least = min(used.get(tenant, 0.0) for tenant in rivals)
            used[group.tenant] = max(used.get(group.tenant, 0.0), least)

    def order(self, groups: Iterable[SequenceGroup]) -> Iterator[SequenceGroup]:
        """Groups that come by priority and arrival, with tenants taking turns in each priority.

        Lazy: a tenant that is charged for one of its groups stands behind for the next.
        """
        if not self.weights:
            yield from groups
            return
        for priority, level in groupby(groups, key=lambda group: group.priority):
            used = self._used.get(priority, {})
            queues: dict[str, deque[SequenceGroup]] = {}
            for group in level:
                queues.setdefault(group.tenant, deque()).append(group)
            yield from _take_turns(queues, used)

    def gives_way(self, group: SequenceGroup, waiting: Iterable[SequenceGroup]) -> bool:
        """Whether another tenant that waits, at the same priority, is in turn before this one."""
        if not self.weights:
            return False
        used = self._used.get(group.priority, {})
        own = used.get(group.tenant, 0.0)
        return any(
            other.priority == group.priority and used.get(other.tenant, 0.0) < own
            for other in waiting
        )

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        """Tokens of a group are run; negative ones will not be after all."""
        used = self._used.get(group.priority)
        if used is not None:
            rounds = num_tokens / self.weights.get(group.tenant, 1.0)
            used[group.tenant] = used.get(group.tenant, 0.0) + rounds

    def settle(self, contending: Iterable[SequenceGroup]) -> None:
        """A step is planned. contending: groups that still wait, or had prompt left to run."""
        if self._used:
            levels = {group.priority for group in contending}
            self._used = {level: used for level, used in self._used.items() if level in levels}


def _take_turns(
    queues: dict[str, deque[SequenceGroup]], used: Mapping[str, float]
) -> Iterator[SequenceGroup]:
    while queues:
        tenant = min(queues, key=lambda name: used.get(name, 0.0))
        yield queues[tenant].popleft()
        if not queues[tenant]:
            del queues[tenant]
