"""The cache's one front: admit, grow, publish, fork, lease, release, pin, flush, evict.

Owns every block of the pool: each is free, in the trie, or in one private tail. Never touches KV
data; what must be copied is left in `copies` for the caller to run before the next forward pass.

The life of a sequence's blocks:

    match ─ admit ─┬─ grow ─ (forward pass) ─ publish ─┬─ release      blocks stay as cache
                   └──────────────<────────────────────┤
                                               fork ───┤               another table, same blocks
                                               lease ──┘─ resume       soft hold, then a table
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from prefixcache.cache.digest import BlockDigest
from prefixcache.cache.events import CacheObserver
from prefixcache.cache.eviction import LEASED, PRUNED
from prefixcache.cache.inflight import InFlightIndex
from prefixcache.cache.pool import BlockPool, NoFreeBlocks
from prefixcache.cache.table import BlockCopy, BlockTable, Lease, Pin, Row, TailBlock
from prefixcache.cache.trie import Match, Node, PrefixTrie
from prefixcache.errors import ResourceExhausted

Tokens = npt.NDArray[np.uint32]


class BlockManager:
    """Blocks for sequences, shared by prefix, copied on write.

    num_blocks: size of the pool. block_size: tokens a block.
    digest: names blocks; its seed should be secret.
    enable_caching: when off, blocks of ended sequences are the first to be reused; give each
    request a namespace of its own, so that nothing matches.
    max_pinned_blocks: what all pins together may hold. clock: of ages and idle times, seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        digest: BlockDigest,
        *,
        enable_caching: bool = True,
        max_pinned_blocks: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.trie = PrefixTrie(block_size, digest, clock)
        self.in_flight = InFlightIndex(self.trie, block_size)
        self.tables: set[BlockTable] = set()
        self.leases: set[Lease] = set()
        self.pins: set[Pin] = set()
        self.idle_tails: OrderedDict[TailBlock, None] = OrderedDict()
        self.copies: list[BlockCopy] = []
        self.observers: list[CacheObserver] = []
        self.num_copies = 0
        self.num_evicted = 0
        self.num_forks = 0
        self._enable_caching = enable_caching
        self._max_pinned = num_blocks // 2 if max_pinned_blocks is None else max_pinned_blocks

    # ------------------------------------------------------------ counts

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_evictable(self) -> int:
        """Blocks that hold cache or a lease's tail, and that no live sequence uses."""
        return self.trie.idle.num_blocks + len(self.idle_tails)

    @property
    def num_available(self) -> int:
        """Blocks that a sequence could get now."""
        return self.num_free + self.num_evictable

    @property
    def num_in_use(self) -> int:
        """Blocks of live sequences and pins."""
        return self.pool.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ admission

    def match(self, namespace: bytes, data: bytes) -> Match:
        """Find the longest cached prefix of a prompt (token bytes). Changes nothing."""
        root = self.trie.find_root(namespace)
        return Match([], 0, 0, -1) if root is None else self.trie.match(root, data)

    def room_after(self, match: Match, num_blocks: int) -> int:
        """Blocks still available if sequences of num_blocks in all were admitted on this match.

        Negative where it does not fit. Idle blocks of the match stop being available.
        """
        idle = sum(len(node.blocks) for node in match.path if node.hard == 0)
        if match.path and match.path[-1].hard == 0:
            idle -= match.path[-1].end - match.num_blocks
        return self.num_available - idle - (num_blocks - match.num_blocks)

    def admit(self, namespace: bytes, data: bytes, match: Match) -> BlockTable:
        """A table for a prompt (token bytes), on the match just found for it.

        Its whole blocks are shared; a remainder is copied into a block of its own. Blocks to be
        computed enter the in-flight index. Raises nothing: without a block for the remainder, the
        remainder is computed.
        """
        root = self.trie.root(namespace)
        row = _row_of(match)
        table = self._attach(root, match.path[-1] if match.path else root, match.num_blocks, row)
        table.num_filled = match.num_blocks * self.block_size
        if match.remainder_block >= 0 and self.num_available:
            self._copy_remainder(table, match.remainder_block, match.num_tokens)
        self.in_flight.register(table, data)
        return table

    def resume(self, lease: Lease) -> BlockTable | None:
        """A table on a lease's own blocks; None where some are lost: then match by tokens.

        The lease stays; end it when it has served.
        """
        if not lease.intact or any(tail.block < 0 for tail in lease.tail):
            return None
        if lease.partial >= 0 and not self.num_available:
            return None
        table = self._attach(lease.root, lease.node, lease.node_blocks, lease.row)
        table.num_filled = min(lease.num_filled, table.node_blocks * self.block_size)
        self._share_tail(table, lease.tail, lease.num_filled)
        if lease.partial >= 0:
            self._copy_remainder(table, lease.partial, lease.num_filled)
        return table

    def _attach(self, root: Node, node: Node, blocks: int, row: Row) -> BlockTable:
        node = self.trie.node_at(node, blocks)
        self.trie.hold(node)
        capacity = np.empty(blocks + 8, np.int32)
        capacity[:blocks] = row[:blocks]
        table = BlockTable(root, node, capacity)
        self.tables.add(table)
        return table

    def _copy_remainder(self, table: BlockTable, source: int, num_tokens: int) -> None:
        block = self._take()
        self._copy(source, block)
        table.append(TailBlock(block))
        table.num_filled = num_tokens

    def _share_tail(self, table: BlockTable, tail: Iterable[TailBlock], num_filled: int) -> None:
        for block in tail:
            block.hard += 1
            self.idle_tails.pop(block, None)
            table.append(block)
            table.num_filled = num_filled

    # ------------------------------------------------------------ running

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Make room to write KV up to `num_tokens`; a shared tail block is copied first.

        Raises NoFreeBlocks, and then has changed nothing.
        """
        new = self.blocks_for(num_tokens) - table.num_blocks
        shared = self._shared_write_block(table, num_tokens)
        if max(new, 0) + (shared is not None) > self.num_available:
            raise NoFreeBlocks(f"{new} blocks are needed and {self.num_available} available")
        if shared is not None:
            self._copy_on_write(table, shared)
        for _ in range(new):
            table.append(TailBlock(self._take()))

    def _shared_write_block(self, table: BlockTable, num_tokens: int) -> int | None:
        """Index in the tail of the block that is written next, where others hold it too."""
        index, offset = divmod(table.num_filled, self.block_size)
        if offset == 0 or num_tokens <= table.num_filled:
            return None
        tail = table.tail[index - table.node_blocks]
        return index - table.node_blocks if tail.hard + tail.soft > 1 else None

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        shared = table.tail[index]
        own = TailBlock(self._take())
        self._copy(shared.block, own.block)
        table.tail[index] = own
        table.row[table.node_blocks + index] = own.block
        self._drop_tail(shared)

    def _copy(self, src: int, dst: int) -> None:
        # A batch reads what was there before it: of a block that waits for its own copy, that is
        # not its content yet, so take it from where that one does.
        src = next((copy.src for copy in self.copies if copy.dst == src), src)
        if src != dst:
            self.copies.append(BlockCopy(src, dst))
            self.num_copies += 1

    def take_copies(self) -> list[BlockCopy]:
        """The copies to run before the next forward pass; the list is handed over."""
        copies, self.copies = self.copies, []
        return copies

    def publish(self, table: BlockTable, tokens: Tokens, num_filled: int) -> None:
        """The forward pass has filled KV up to `num_filled`: full blocks enter the trie.

        tokens: the sequence's tokens, at least num_filled. A block extends the node where this
        sequence alone uses it and it is a leaf; else it becomes a child; where an equal block is
        there already, that one is adopted and the own one freed.
        """
        table.num_filled = max(table.num_filled, num_filled)
        size = self.block_size
        parent = table.node.last_digest
        digests: list[bytes] = []
        stored = bytearray()
        while (table.node_blocks + 1) * size <= table.num_filled:
            start = table.node_blocks * size
            data = tokens[start : start + size].tobytes()
            digest = self.in_flight.next_digest(table)
            if digest is None:
                digest = self.trie.digest(table.node.last_digest + data)
            outcome = self._publish_block(table, digest, data)
            if outcome is None:
                break
            if outcome:
                digests.append(digest)
                stored += data
            elif digests:
                self._notify_stored(table, parent, digests, stored)
                digests, stored = [], bytearray()
            if not digests:
                parent = digest
        if digests:
            self._notify_stored(table, parent, digests, stored)

    def _publish_block(self, table: BlockTable, digest: bytes, data: bytes) -> bool | None:
        """True: the own block entered. False: an equal one was adopted. None: digests collide."""
        node, tail = table.node, table.tail[0]
        equal = self.trie.child(node, digest, data)
        if equal is not None:
            self._adopt(table, equal)
        elif digest in node.children or tail.hard + tail.soft > 1:
            return None
        else:
            if node.hard == 1 and not node.children and node.parent is not None:
                self.trie.extend(node, digest, data, tail.block)
            else:
                table.node = self.trie.add_child(node, digest, data, tail.block)
            table.tail.pop(0)
            table.node_blocks += 1
        self.in_flight.computed(table)
        return equal is None

    def _adopt(self, table: BlockTable, equal: Node) -> None:
        node = self.trie.node_at(equal, table.node_blocks + 1)
        self.trie.hold(node)
        self.trie.drop(table.node, PRUNED)
        table.node = node
        table.row[table.node_blocks] = node.blocks[0]
        table.node_blocks += 1
        self._drop_tail(table.tail.pop(0))

    # ------------------------------------------------------------ fork, lease, release

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table on the same blocks. No KV is copied, and no per-block work is done."""
        child = self._attach(table.root, table.node, table.node_blocks, table.row)
        child.num_filled = table.num_filled
        self._share_tail(child, table.tail, table.num_filled)
        self.num_forks += 1
        return child

    def lease(self, source: BlockTable | Lease, num_tokens: int) -> Lease:
        """A soft hold on the first `num_tokens` tokens of a live or kept sequence."""
        size = self.block_size
        filled = min(num_tokens, source.num_filled)
        blocks = min(filled // size, source.node_blocks)
        rest = filled > blocks * size
        partial = -1
        if rest and blocks < source.node_blocks:
            partial = int(source.row[blocks])
        elif rest and isinstance(source, Lease):
            partial = source.partial
        node = _covering(source.node, blocks + (partial >= 0))
        lease = Lease(source.root, node, blocks, source.row)
        lease.num_filled, lease.partial = filled, partial
        lease.intact = not isinstance(source, Lease) or source.intact
        if rest and partial < 0:
            lease.tail = source.tail[: self.blocks_for(filled) - blocks]
            for tail in lease.tail:
                tail.soft += 1
        self.trie.lease(lease.node, lease)
        self.leases.add(lease)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """The soft hold ends; its blocks stay as cache, its tail is freed if it is the last."""
        self.leases.remove(lease)
        self.trie.end_lease(lease.node, lease)
        for tail in lease.tail:
            tail.soft -= 1
            if tail.soft == 0 and tail.hard == 0 and tail.block >= 0:
                del self.idle_tails[tail]
                self._free_tail(tail)

    def release(self, table: BlockTable, priority: int = 0, *, pruned: bool = False) -> None:
        """A sequence ends: one decrement. Its blocks stay as cache until room is needed.

        pruned: of a branch that was given up: blocks that only such branches used go first.
        """
        self.tables.remove(table)
        self.in_flight.remove(table)
        for tail in table.tail:
            self._drop_tail(tail)
        level = PRUNED if pruned or not self._enable_caching else priority
        for node in self.trie.drop(table.node, level):
            for observer in self.observers:
                observer.idled(bytes(node.digests))

    def readable(self, table: BlockTable) -> list[int]:
        """Blocks where a table's content can be read before the copies that wait are made."""
        source = {copy.dst: copy.src for copy in self.copies}
        return [source.get(block, block) for block in table.block_ids().tolist()]

    def restore(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for KV up to `num_tokens` that the caller brings before the next forward pass.

        It counts as filled from now on. False, and nothing was changed, where there is no room.
        """
        try:
            self.grow(table, num_tokens)
        except NoFreeBlocks:
            return False
        table.num_filled = num_tokens
        return True

    def _drop_tail(self, tail: TailBlock) -> None:
        tail.hard -= 1
        if tail.hard == 0:
            if tail.soft:
                self.idle_tails[tail] = None
            else:
                self._free_tail(tail)

    def _free_tail(self, tail: TailBlock) -> None:
        """Back to the pool; a copy into it that has not run yet must not reach its next owner."""
        self.copies = [copy for copy in self.copies if copy.dst != tail.block]
        self.pool.give(tail.block)

    # ------------------------------------------------------------ pins, flush, eviction

    def pin(self, namespace: bytes, data: bytes) -> Pin:
        """Keep the cached whole blocks of a prompt from eviction.

        Raises ResourceExhausted where all pins together would hold too much of the pool.
        """
        root = self.trie.root(namespace)
        match = self.trie.match(root, data)
        node = match.path[-1] if match.path else root
        pin = Pin(self.trie.node_at(node, match.num_blocks))
        self.trie.hold(pin.node)
        self.pins.add(pin)
        if self.num_pinned() > self._max_pinned:
            self.unpin(pin)
            raise ResourceExhausted(
                f"{pin.num_blocks} blocks cannot be pinned now: all pins together may hold at most "
                f"{self._max_pinned} of the pool's {self.pool.num_blocks}"
            )
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let pinned blocks be evicted again."""
        self.pins.remove(pin)
        self.trie.drop(pin.node, 0)

    def num_pinned(self) -> int:
        """Distinct blocks under pins."""
        nodes: set[Node] = set()
        for pin in self.pins:
            node: Node | None = pin.node
            while node is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        return sum(len(node.blocks) for node in nodes)

    def flush(self, namespaces: bytes = b"") -> int:
        """Drop every cached block that is not in use; how many.

        namespaces: a namespace's key, or what the keys of several begin with; empty is all.
        """
        roots = [root for root in self.trie.roots() if root.tokens.startswith(namespaces)]
        removed = self.flush_below(*roots)
        if not namespaces and self.trie.num_blocks == 0:
            for observer in self.observers:
                observer.cleared()
        return removed

    def flush_below(self, *nodes: Node) -> int:
        """Drop every cached block at and below these nodes that is not in use; how many."""
        removed: list[bytes] = []
        for node in nodes:
            for block, digest in self.trie.flush(node):
                self.pool.give(block)
                removed.append(digest)
        if removed:
            self._notify_removed(removed)
        return len(removed)

    def _take(self) -> int:
        """A block: a free one, else the least valuable of those that nobody uses."""
        if not self.pool.num_free:
            self._evict()
        return self.pool.take()

    def _evict(self) -> None:
        node = self.trie.idle.first()
        if self.idle_tails and (node is None or node.queued == LEASED):
            tail, _ = self.idle_tails.popitem(last=False)
            self._free_tail(tail)
            tail.block = -1
            self.num_evicted += 1
        elif node is not None:
            idle_since = node.idle_since
            block, digest = self.trie.pop(node)
            self.pool.give(block)
            self.num_evicted += 1
            for observer in self.observers:
                observer.evicted(digest, idle_since)
            self._notify_removed([digest])

    def _notify_stored(
        self, table: BlockTable, parent: bytes, digests: list[bytes], tokens: bytearray
    ) -> None:
        for observer in self.observers:
            observer.stored(parent, digests, bytes(tokens), table.root.last_digest)

    def _notify_removed(self, digests: list[bytes]) -> None:
        for observer in self.observers:
            observer.removed(digests)


def _row_of(match: Match) -> Row:
    row = np.empty(match.num_blocks, np.int32)
    for node in match.path:
        stop = min(node.end, match.num_blocks)
        row[node.start : stop] = np.frombuffer(node.blocks, np.int32, stop - node.start)
    return row


def _covering(node: Node, blocks: int) -> Node:
    """The node on the way to the root in whose run the block number `blocks` (from 1) lies."""
    while node.start >= blocks and node.parent is not None:
        node = node.parent
    return node


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as the cache compares them: little-endian uint32."""
    assert tokens.dtype == np.uint32
    return tokens.tobytes()
