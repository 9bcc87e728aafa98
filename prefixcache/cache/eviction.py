"""The order in which idle nodes go: one least-recently-used list a level, leaves first.

Owns the lists and the count of idle blocks; never frees anything itself.

Why the oldest node of a list is always a leaf: a node becomes idle after all its children have, so
it stands behind them in a list; and it is at least as valuable as each child (its level is never
above theirs), so it never stands in a list that goes earlier. No heap, no scan: O(1) a block.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from prefixcache.cache.trie import Node

PRUNED = 2**63
"""Level of blocks that only pruned branches have used: they go first."""

LEASED = -(2**63)
"""Level of blocks under a lease: they go last. Between the two stands the requests' priority, which
has 32 bits and so meets neither: were a level both, a node whose lease ends would be put behind its
parent in the same list."""


class EvictionOrder:
    """Idle nodes, from the first to go to the last. Levels: larger goes earlier."""

    def __init__(self) -> None:
        self._lists: SortedDict[int, OrderedDict[Node, None]] = SortedDict()
        self.num_blocks = 0

    def add(self, node: "Node") -> None:
        """Put an idle node at the recently-used end of its level's list."""
        level = LEASED if node.soft else node.level
        if level not in self._lists:
            self._lists[level] = OrderedDict()
        self._lists[level][node] = None
        node.queued = level
        self.num_blocks += len(node.blocks)

    def remove(self, node: "Node") -> None:
        """Take a node out: it is in use again, or gone."""
        assert node.queued is not None
        nodes = self._lists[node.queued]
        del nodes[node]
        if not nodes:
            del self._lists[node.queued]
        node.queued = None
        self.num_blocks -= len(node.blocks)

    def first(self) -> "Node | None":
        """The next node to go, always a leaf; None where nothing is idle."""
        if not self._lists:
            return None
        oldest: Node = next(iter(self._lists.peekitem(-1)[1]))
        return oldest

    def nodes(self) -> "list[Node]":
        """All idle nodes, first to go first; for integrity checks."""
        return [node for level in reversed(self._lists) for node in self._lists[level]]
