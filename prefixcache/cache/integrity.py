"""Proof that no block is lost, counted twice, or under a wrong name. For tests and idle time."""

from collections import Counter

from prefixcache.cache.eviction import LEASED
from prefixcache.cache.manager import BlockManager
from prefixcache.cache.table import BlockTable, TailBlock
from prefixcache.cache.trie import Node


class IntegrityError(AssertionError):
    """The cache's structure contradicts itself; the message says where."""


def check_integrity(manager: BlockManager) -> None:
    """Verify every invariant of the pool, the trie, the tables and the leases.

    Raises IntegrityError at the first that does not hold.
    """
    _check_blocks(manager)
    _check_holders(manager)
    _check_idle_order(manager)
    for root in manager.trie.roots():
        _check_node(manager, root)
    for node in manager.trie.walk():
        _check_node(manager, node)
    for table in manager.tables:
        _check_table(manager, table)
    strangers = manager.in_flight.tables() - manager.tables
    _require(not strangers, "the in-flight index names a table that is not live")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise IntegrityError(message)


def _tails(manager: BlockManager) -> set[TailBlock]:
    live = {tail for table in manager.tables for tail in table.tail}
    leased = {tail for lease in manager.leases for tail in lease.tail if tail.block >= 0}
    return live | leased


def _check_blocks(manager: BlockManager) -> None:
    """free + evictable + in use = pool, each block in exactly one place."""
    free = manager.pool.free_ids()
    cached = [block for node in manager.trie.walk() for block in node.blocks]
    private = [tail.block for tail in _tails(manager)]
    counts = Counter(free + cached + private)
    twice = [block for block, count in counts.items() if count > 1]
    _require(not twice, f"blocks {twice[:5]} are in more than one place")
    lost = set(range(manager.pool.num_blocks)) - set(counts)
    _require(not lost, f"blocks {sorted(lost)[:5]} are in no place")
    _require(len(counts) == manager.pool.num_blocks, "a block id is outside the pool")
    _require(manager.trie.num_blocks == len(cached), "the trie miscounts its blocks")
    in_use = sum(len(node.blocks) for node in manager.trie.walk() if node.hard)
    in_use += sum(1 for tail in _tails(manager) if tail.hard)
    _require(manager.num_in_use == in_use, f"{manager.num_in_use} in use, counted {in_use}")
    idle_tails = {tail for tail in _tails(manager) if not tail.hard}
    _require(set(manager.idle_tails) == idle_tails, "the idle tails are not those without holders")


def _check_holders(manager: BlockManager) -> None:
    """Each count equals the holders that can be found."""
    hard: Counter[Node] = Counter(table.node for table in manager.tables)
    hard.update(pin.node for pin in manager.pins)
    soft: Counter[Node] = Counter(lease.node for lease in manager.leases)
    nodes = [*manager.trie.roots(), *manager.trie.walk()]
    for node in nodes:
        for child in node.children.values():
            hard[node] += child.hard > 0
            soft[node] += child.soft > 0
    for node in nodes:
        _require(node.hard == hard[node], f"hard count {node.hard}, found {hard[node]}")
        _require(node.soft == soft[node], f"soft count {node.soft}, found {soft[node]}")
    _require(set(hard) | set(soft) <= set(nodes), "a holder's node is not in the trie")
    tail_hard = Counter(tail for table in manager.tables for tail in table.tail)
    tail_soft = Counter(tail for lease in manager.leases for tail in lease.tail)
    for tail in _tails(manager):
        _require(tail.hard == tail_hard[tail], f"tail {tail.block}: hard count {tail.hard}")
        _require(tail.soft == tail_soft[tail], f"tail {tail.block}: soft count {tail.soft}")


def _check_idle_order(manager: BlockManager) -> None:
    """Idle nodes and no others are queued, each behind its children."""
    order = manager.trie.idle.nodes()
    place = {node: index for index, node in enumerate(order)}
    _require(len(place) == len(order), "a node is queued twice")
    _require(
        manager.trie.idle.num_blocks == sum(len(node.blocks) for node in order),
        "the idle blocks are miscounted",
    )
    for node in manager.trie.walk():
        _require((node in place) == (node.hard == 0), "queued is not the same as idle")
        if node.hard:
            continue
        _require(node.queued == (LEASED if node.soft else node.level), "queued at a wrong level")
        for child in node.children.values():
            _require(place[child] < place[node], "a parent would go before its child")


def _check_node(manager: BlockManager, node: Node) -> None:
    """Tokens, digests and blocks agree; the children are found where they belong."""
    trie, size = manager.trie, manager.block_size * 4
    if node.parent is not None:
        _require(len(node.blocks) > 0, "a node without blocks")
        _require(node.parent.children.get(node.key) is node, "a child under a wrong key")
        _require(node.start == node.parent.end, "a run does not begin where its parent ends")
        _require(len(node.tokens) == len(node.blocks) * size, "tokens and blocks differ in number")
        digest = node.parent.last_digest
        for index in range(len(node.blocks)):
            digest = trie.digest(digest + node.tokens[index * size : (index + 1) * size])
            _require(node.digest_of(index) == digest, "a stored digest is not that of its tokens")
        _require(len(node.digests) == len(node.blocks) * 16, "digests and blocks differ in number")
    else:
        occupied = bool(node.children or node.hard or node.soft)
        _require(occupied, "an empty namespace was left behind")
    heads = sorted(bytes(child.tokens[:size]) for child in node.children.values())
    _require(list(node.siblings or []) == heads, "the sorted siblings are not the children")


def _check_table(manager: BlockManager, table: BlockTable) -> None:
    """The row names the blocks of the path and of the tail."""
    blocks: list[int] = []
    node: Node | None = table.node
    _require(table.node.end == table.node_blocks, "a table stands inside a run")
    while node is not None and node.parent is not None:
        blocks = [*node.blocks, *blocks]
        node = node.parent
    _require(node is table.root, "a table's path ends in another namespace")
    blocks += [tail.block for tail in table.tail]
    _require(table.block_ids().tolist() == blocks, "a row differs from path and tail")
    capacity = table.num_blocks * manager.block_size
    _require(table.num_filled <= capacity, "more tokens filled than there are blocks for")
