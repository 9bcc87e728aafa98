"""The pool and the tree as an operator sees them: bounded work, whatever their size.

Owns nothing but the names of the nodes that it has shown, by which they can be asked for again.
It runs on the engine's thread between two steps, so whatever grows with the pool is done by numpy,
and whatever grows with the tree stops at a limit.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixcache.cache import BlockManager, BlockTable, Pin
from prefixcache.cache.digest import TOKEN_BYTES
from prefixcache.cache.table import Holding, TailBlock
from prefixcache.cache.trie import Node
from prefixcache.engine.messages import InspectCache, InspectNode, TokenIds
from prefixcache.engine.observer import EngineObserver
from prefixcache.engine.registry import Entry
from prefixcache.engine.sequence import Sequence, SequenceGroup
from prefixcache.engine.views import (
    CACHED,
    LEASED,
    PINNED,
    SHARERS,
    NodeDetail,
    NodeView,
)
from prefixcache.errors import NotFound

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine

MAX_LOOKED_AT = 2048
"""Nodes that one look at the tree touches."""

MAX_OF_ONE = 512
"""Children of one node that a look touches: the oldest half, which most requests can have met, and
the newest half."""

MAX_REMEMBERED = 4096
MAX_LISTED = 64

Blocks = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class Inspector(EngineObserver):
    """Looks at an engine's cache; counts, as an observer, which nodes requests begin on."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._shown: OrderedDict[bytes, Node] = OrderedDict()

    def admitted(self, sequence: Sequence, group: SequenceGroup, *, again: bool) -> None:
        """Count a use; a request that was preempted has had its own."""
        if not again and sequence.table is not None:
            self._engine.manager.trie.count_use(sequence.table.node)

    # ------------------------------------------------------------ the whole

    def sequences(self, limit: int) -> tuple[list[Entry], int]:
        """The first sequences of all salts, beams of searches included, and the number of all."""
        scheduler = self._engine.scheduler
        beams = [
            Entry(sequence, group)
            for group in (*scheduler.running, *scheduler.waiting)
            if group.beam is not None
            for sequence in group.live
        ]
        entries = [*beams, *self._engine.registry.entries(None)]
        entries.sort(key=lambda e: 2 if e.lease else 1 if e.sequence.table is None else 0)
        return entries[:limit], len(entries)

    def blocks(self, held: "Held") -> Bytes:
        """The state of each block: `views.CACHED` and so on; uint8 [num_blocks]."""
        manager = self._engine.manager
        states = np.full(manager.pool.num_blocks, CACHED, np.uint8)
        states[np.array(manager.pool.free_ids(), np.int32)] = 0
        states[held.sharers > 0] = CACHED
        states += np.minimum(held.sharers, SHARERS).astype(np.uint8)
        states[held.leased_blocks()] |= LEASED
        states[_blocks_of(held.pinned)] |= PINNED
        return states

    def nodes(self, held: "Held", call: InspectCache) -> tuple[NodeView, ...]:
        """The most used nodes, parents first, at most `max_nodes`.

        A child is never used more than its parent, so the best of those that can be reached now is
        the best of all that are left.
        """
        views: list[NodeView] = []
        budget, ties = MAX_LOOKED_AT, count()
        heap: list[tuple[tuple[int, ...], int, Node, int]] = []
        children: Iterable[Node] = _ends(self._engine.manager.trie.roots())
        parent = -1
        while True:
            for node in islice(children, budget):
                budget -= 1
                heapq.heappush(heap, (_rank(node), next(ties), node, parent))
            if not heap or len(views) == call.max_nodes:
                return tuple(views)
            *_, node, above = heapq.heappop(heap)
            parent = len(views)
            views.append(self.view(node, held, above, call.label_tokens))
            children = _children(node)

    # ------------------------------------------------------------ one node

    def find(self, digest: bytes) -> Node:
        """A node that was shown. Raises NotFound where it was not, or is gone.

        A run that was split in the meantime is found by its lower part, which has the same holders.
        """
        node = self._shown.get(digest)
        if node is None or not self._is_there(node):
            raise NotFound("this part of the tree is no longer cached: it was evicted or flushed")
        return node

    def _is_there(self, node: Node) -> bool:
        trie = self._engine.manager.trie
        return bool(node.blocks) or trie.find_root(bytes(node.tokens)) is node

    def view(self, node: Node, held: "Held", parent: int, max_tokens: int) -> NodeView:
        """A node as it is shown; it can be found by its digest from now on."""
        self._remember(node)
        now = self._engine.manager.trie.clock()
        return NodeView(
            digest=node.key,
            parent=parent,
            start=node.start,
            num_blocks=len(node.blocks),
            num_children=len(node.children),
            uses=node.uses,
            sharers=held.sharers_of(node),
            leased=node.soft > 0,
            pinned=node in held.pinned,
            age=now - node.born,
            idle=0.0 if node.hard else now - node.used,
            token_ids=_tokens(node, max_tokens),
        )

    def _remember(self, node: Node) -> None:
        self._shown[node.key] = node
        self._shown.move_to_end(node.key)
        if len(self._shown) > MAX_REMEMBERED:
            self._shown.popitem(last=False)

    def detail(self, call: InspectNode) -> NodeDetail:
        """Who uses a node, its path and what is below it. Raises NotFound."""
        node = self.find(call.digest)
        held = Held(self._engine.manager)
        live: list[str] = []
        kept: list[str] = []
        entries, _ = self.sequences(2**31)
        for entry in entries:
            holding = entry.lease or entry.sequence.table or entry.sequence.lease
            if holding is not None and _is_above(node, holding):
                (live if entry.lease is None else kept).append(entry.sequence.id)
        children = heapq.nsmallest(MAX_LISTED, _children(node), key=_rank)
        return NodeDetail(
            node=self.view(node, held, -1, 0),
            live=tuple(live[:MAX_LISTED]),
            num_live=len(live),
            kept=tuple(kept[:MAX_LISTED]),
            num_kept=len(kept),
            pins=tuple(
                self._engine.registry.pin_info(entry)
                for entry in self._engine.registry.pins()
                if _path_has(entry.pin.node, node)
            ),
            children=tuple(self.view(child, held, -1, call.label_tokens) for child in children),
            token_ids=_tokens(node, call.max_tokens),
        )

    def pin(self, digest: bytes) -> Pin:
        """Pin a node and all above it. Raises NotFound, ResourceExhausted."""
        node = self.find(digest)
        tokens = bytearray()
        while node.parent is not None:
            tokens[:0] = node.tokens
            node = node.parent
        return self._engine.manager.pin(bytes(node.tokens), bytes(tokens))

    def flush(self, digest: bytes) -> int:
        """Drop what is not in use at and below a node; blocks freed. Raises NotFound."""
        return self._engine.manager.flush_below(self.find(digest))


class Held:
    """Who holds what at this moment. sharers: live sequences of each block, int64 [num_blocks]."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        rows = [table.block_ids() for table in manager.tables]
        taken = np.concatenate(rows) if rows else np.empty(0, np.int32)
        self.sharers = np.bincount(taken, minlength=manager.pool.num_blocks)
        self.pinned = _with_ancestors(pin.node for pin in manager.pins)
        self._of_roots = Counter(table.root for table in manager.tables)

    def sharers_of(self, node: Node) -> int:
        """Live sequences that use a node: all of its run, since none ends inside one."""
        return int(self.sharers[node.blocks[0]]) if node.blocks else self._of_roots[node]

    def leased_blocks(self) -> Blocks:
        """Blocks under leases, in the tree and in tails."""
        leases = self._manager.leases
        tails: set[TailBlock] = {tail for lease in leases for tail in lease.tail if tail.block >= 0}
        private = np.array([tail.block for tail in tails], np.int32)
        return np.append(_blocks_of(_with_ancestors(lease.node for lease in leases)), private)


def _rank(node: Node) -> tuple[int, bool, bool, int]:
    """Order of interest, smallest first: often used, in use, kept, long."""
    return (-node.uses, node.hard == 0, node.soft == 0, -len(node.blocks))


def _children(node: Node) -> Iterator[Node]:
    return _ends(node.children.values()) if node.children else iter(())


def _ends(nodes: Iterable[Node]) -> Iterator[Node]:
    """All of a few, the oldest and the newest of many."""
    ordered = list(nodes)
    if len(ordered) <= MAX_OF_ONE:
        return iter(ordered)
    return iter(ordered[: MAX_OF_ONE // 2] + ordered[-MAX_OF_ONE // 2 :])


def _with_ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in nodes:
        up: Node | None = node
        while up is not None and up not in found:
            found.add(up)
            up = up.parent
    return found


def _blocks_of(nodes: Iterable[Node]) -> Blocks:
    runs = b"".join(node.blocks.tobytes() for node in nodes)
    return np.frombuffer(runs, np.int32)


def _tokens(node: Node, limit: int) -> TokenIds:
    if not node.blocks or not limit:
        return ()
    return tuple(np.frombuffer(bytes(node.tokens[: limit * TOKEN_BYTES]), np.uint32).tolist())


def _is_above(node: Node, holding: Holding) -> bool:
    """Whether a sequence's tokens begin with all that leads to the end of this node."""
    if not node.blocks:
        return holding.root is node
    if isinstance(holding, BlockTable):  # its row names its blocks, and a block is in one node
        end = node.end
        return holding.node_blocks >= end and int(holding.row[end - 1]) == node.blocks[-1]
    return _path_has(holding.node, node)


def _path_has(below: Node, node: Node) -> bool:
    up: Node | None = below
    while up is not None and up is not node:
        up = up.parent
    return up is node
