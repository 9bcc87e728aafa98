"""The prefix trie: full, computed blocks by their tokens, path-compressed.

Owns nodes, their holders' counts and their order of eviction. Never allocates or frees a block.

A node is a run of blocks:

    root ── [sys sys sys] ─┬─ [alice alice]        tokens   bytes, 4 a token, little-endian
    (namespace)            └─ [bob] ─┬─ [b1]       digests  bytes, 16 a block, chained
                                     └─ [b2 b2]    blocks   physical ids, one a block

`hard` counts live sequences and pins at the node, plus its children that are in use; `soft` counts
leases likewise. So a node is in use exactly when `hard > 0`, taking or dropping a reference costs
O(1) unless a whole branch falls idle, and no block is counted twice.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from sortedcontainers import SortedList

from prefixcache.cache.digest import DIGEST_BYTES, TOKEN_BYTES, BlockDigest
from prefixcache.cache.eviction import PRUNED, EvictionOrder
from prefixcache.cache.table import Lease


class Node:
    """A run of blocks, or (without blocks) the root of a namespace."""

    __slots__ = (
        "blocks",
        "born",
        "children",
        "digests",
        "end",
        "hard",
        "idle_since",
        "leases",
        "level",
        "parent",
        "queued",
        "siblings",
        "soft",
        "tokens",
        "used",
        "uses",
    )

    def __init__(self, parent: "Node | None", end: int, now: float) -> None:
        self.parent = parent
        self.end = end
        """Blocks from the root to the end of this run."""
        self.tokens = bytearray()
        self.digests = bytearray()
        self.blocks = array("i")
        self.children: dict[bytes, Node] = {}
        self.siblings: SortedList[bytes] | None = None
        """The first blocks' tokens of the children, in order; for the remainder in a block."""
        self.hard = 0
        self.soft = 0
        self.level = PRUNED
        self.queued: int | None = None
        self.leases: set[Lease] | None = None
        self.born = now
        self.idle_since = now
        """When the last holder let go of it; of no meaning while it is in use."""
        self.used = now
        self.uses = 0
        """Requests that began on this run; the one that made it is not counted."""

    @property
    def start(self) -> int:
        """Blocks from the root to the beginning of this run."""
        return self.end - len(self.blocks)

    @property
    def last_digest(self) -> bytes:
        """The digest that the next block chains on."""
        return bytes(self.digests[-DIGEST_BYTES:])

    def digest_of(self, index: int) -> bytes:
        """The digest of the block at this place in the run."""
        return bytes(self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES])

    @property
    def key(self) -> bytes:
        """The digest of the first block, under which the parent knows this node."""
        return bytes(self.digests[:DIGEST_BYTES])


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt the trie holds.

    path: nodes from the first below the root; the last may match in part.
    num_blocks: whole blocks. num_tokens: those, and the remainder inside one more block.
    remainder_block: the physical block that holds the remainder, or -1.
    """

    path: list[Node]
    num_blocks: int
    num_tokens: int
    remainder_block: int

    def whole_blocks(self, block_size: int) -> "Match":
        """The same without the remainder."""
        return Match(self.path, self.num_blocks, self.num_blocks * block_size, -1)


class PrefixTrie:
    """All namespaces of one pool. clock: of the nodes' ages, in seconds; for those who look on."""

    def __init__(
        self, block_size: int, digest: BlockDigest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.block_size = block_size
        self.digest = digest
        self.idle = EvictionOrder()
        self.num_blocks = 0
        self._roots: dict[bytes, Node] = {}
        self._block_bytes = block_size * TOKEN_BYTES

    # ------------------------------------------------------------ namespaces

    def root(self, key: bytes) -> Node:
        """The root of a namespace, made if it is not there. It lasts while anything is below it."""
        node = self._roots.get(key)
        if node is None:
            node = Node(None, 0, self.clock())
            node.digests += self.digest(key)
            node.tokens += key
            self._roots[key] = node
        return node

    def find_root(self, key: bytes) -> Node | None:
        """The root of a namespace, or None where nothing is in it."""
        return self._roots.get(key)

    def roots(self) -> list[Node]:
        """The roots of all namespaces."""
        return list(self._roots.values())

    # ------------------------------------------------------------ lookup

    def child(self, node: Node, digest: bytes, tokens: bytes | bytearray) -> Node | None:
        """The child whose first block has this digest and, which alone counts, these tokens."""
        child = node.children.get(digest)
        if child is not None and child.tokens.startswith(tokens):
            return child
        return None

    def match(self, root: Node, data: bytes) -> Match:
        """Find the longest cached prefix of `data` (token bytes). Changes nothing.

        One digest and one comparison a node, whatever the length of its run.
        """
        size = self._block_bytes
        path: list[Node] = []
        node, at = root, 0
        while at + size <= len(data):
            head = data[at : at + size]
            child = self.child(node, self.digest(node.last_digest + head), head)
            if child is None:
                break
            path.append(child)
            stop = at + len(child.tokens)
            if data[at:stop] != child.tokens:
                return self._match_inside(path, data, at)
            node, at = child, stop
        return self._match_remainder(path, node, data, at)

    def _match_inside(self, path: list[Node], data: bytes, at: int) -> Match:
        """The prompt leaves the run of the last node of `path`, which begins at byte `at`."""
        node = path[-1]
        common = common_tokens(node.tokens, data[at:])
        blocks, rest = divmod(common, self.block_size)
        return Match(
            path,
            node.start + blocks,
            node.start * self.block_size + common,
            node.blocks[blocks] if rest else -1,
        )

    def _match_remainder(self, path: list[Node], node: Node, data: bytes, at: int) -> Match:
        """Whole runs match up to byte `at`; look into the children's first blocks.

        The longest common prefix with any of a sorted list stands beside the insertion point.
        """
        best, source = 0, -1
        rest = data[at : at + self._block_bytes]
        if rest and node.siblings:
            where = node.siblings.bisect_left(rest)
            for sibling in node.siblings[max(where - 1, 0) : where + 1]:
                common = common_tokens(sibling, rest)
                if common > best:
                    best = common
                    source = node.children[self.digest(node.last_digest + sibling)].blocks[0]
        return Match(path, node.end, node.end * self.block_size + best, source)

    # ------------------------------------------------------------ growth

    def add_child(self, node: Node, digest: bytes, tokens: bytes, block: int) -> Node:
        """Put a computed block below `node`, whose hold by the caller passes on to the child."""
        child = Node(node, node.end, self.clock())
        child.hard = 1
        self.extend(child, digest, tokens, block)
        self._adopt(node, child)
        return child

    def extend(self, node: Node, digest: bytes, tokens: bytes, block: int) -> None:
        """Put a computed block behind the run of a leaf that only the caller holds."""
        node.tokens += tokens
        node.digests += digest
        node.blocks.append(block)
        node.end += 1
        self.num_blocks += 1

    def split(self, node: Node, end: int) -> Node:
        """Cut a run so that a node ends at `end` blocks from the root; return that upper node.

        The lower part keeps the identity: its holders do not notice. The caller holds the upper
        part at once; until then it stands in no list.
        """
        assert node.parent is not None
        cut = end - node.start
        token_cut, digest_cut = cut * self._block_bytes, cut * DIGEST_BYTES
        upper = Node(node.parent, end, node.born)
        upper.used, upper.uses, upper.idle_since = node.used, node.uses, node.idle_since
        upper.tokens, node.tokens = node.tokens[:token_cut], node.tokens[token_cut:]
        upper.digests, node.digests = node.digests[:digest_cut], node.digests[digest_cut:]
        upper.blocks, node.blocks = node.blocks[:cut], node.blocks[cut:]
        upper.level = node.level
        upper.hard = 1 if node.hard else 0
        upper.soft = 1 if node.soft else 0
        if node.queued is not None:
            self.idle.num_blocks -= cut
        node.parent.children[upper.key] = upper
        node.parent = upper
        self._adopt(upper, node)
        return upper

    def _adopt(self, parent: Node, child: Node) -> None:
        parent.children[child.key] = child
        if parent.siblings is None:
            parent.siblings = SortedList()
        parent.siblings.add(bytes(child.tokens[: self._block_bytes]))

    # ------------------------------------------------------------ holders

    def node_at(self, node: Node, end: int) -> Node:
        """The node on the way from the root to `node` that ends at `end` blocks; splits a run."""
        while node.start >= end and node.parent is not None:
            node = node.parent
        return node if node.end == end else self.split(node, end)

    def hold(self, node: Node) -> None:
        """Take a hard reference: the node and all above it are in use."""
        up: Node | None = node
        while up is not None:
            up.hard += 1
            if up.hard > 1:
                return
            if up.queued is not None:
                self.idle.remove(up)
            up = up.parent

    def drop(self, node: Node, level: int) -> list[Node]:
        """Give a hard reference back; blocks that nobody uses now stay as cache, at this level.

        Returns their nodes, the deepest first.
        """
        node.level = min(node.level, level)
        fallen: list[Node] = []
        while True:
            node.hard -= 1
            if node.hard:
                return fallen
            up = node.parent
            if up is None:
                self._drop_root_if_empty(node)
                return fallen
            node.idle_since = self.clock()
            self.idle.add(node)
            fallen.append(node)
            up.level = min(up.level, node.level)
            node = up

    def count_use(self, node: Node) -> None:
        """A request began on this node, and so on all above it."""
        now = self.clock()
        up: Node | None = node
        while up is not None:
            up.uses += 1
            up.used = now
            up = up.parent

    def lease(self, node: Node, lease: Lease) -> None:
        """Take a soft reference: the node and all above it go last. To be called while in use."""
        if node.leases is None:
            node.leases = set()
        node.leases.add(lease)
        up: Node | None = node
        while up is not None:
            up.soft += 1
            if up.soft > 1:
                return
            self._requeue(up)
            up = up.parent

    def idle_from(self, node: Node) -> int:
        """Blocks from the root to the first on the way to `node` that nobody uses."""
        first = node.end
        while node.hard == 0 and node.parent is not None:
            first, node = node.start, node.parent
        return first

    def end_lease(self, node: Node, lease: Lease) -> None:
        """Give a soft reference back."""
        assert node.leases is not None
        node.leases.remove(lease)
        self._soften(node)

    def _soften(self, node: Node) -> None:
        """One soft reference less at `node`, and above it where that was the last."""
        up: Node | None = node
        while up is not None:
            up.soft -= 1
            if up.soft:
                return
            self._requeue(up)
            if up.parent is None:
                self._drop_root_if_empty(up)
            up = up.parent

    def _requeue(self, node: Node) -> None:
        if node.queued is not None:
            self.idle.remove(node)
            self.idle.add(node)

    # ------------------------------------------------------------ shrinking

    def pop(self, node: Node) -> tuple[int, bytes]:
        """Take the last block of an idle leaf: (block, digest)."""
        assert not node.children
        if node.leases:
            self._move_leases(node)
        digest = node.last_digest
        key = node.key
        head = bytes(node.tokens[: self._block_bytes])
        if len(node.blocks) == 1:
            self.idle.remove(node)
        else:
            self.idle.num_blocks -= 1
        block = node.blocks.pop()
        del node.digests[-DIGEST_BYTES:]
        del node.tokens[-self._block_bytes :]
        node.end -= 1
        self.num_blocks -= 1
        if not node.blocks:
            self._unlink(node, key, head)
        return block, digest

    def _move_leases(self, node: Node) -> None:
        """The node is about to lose its last block: leases on it fall back to the parent."""
        assert node.parent is not None
        for lease in list(node.leases or ()):
            lost = lease.published_blocks >= node.end
            lease.intact = lease.intact and not lost
            if lost or len(node.blocks) == 1:
                self.lease(node.parent, lease)
                self.end_lease(node, lease)
                lease.node = node.parent

    def _unlink(self, node: Node, key: bytes, head: bytes) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.siblings is not None
        del parent.children[key]
        parent.siblings.remove(head)
        self._drop_root_if_empty(parent)

    def _drop_root_if_empty(self, node: Node) -> None:
        if node.parent is None and not (node.children or node.hard or node.soft):
            self._roots.pop(bytes(node.tokens), None)

    def flush(self, top: Node) -> Iterator[tuple[int, bytes]]:
        """Take every idle block at and below `top`, leaves first: (block, digest) each."""
        stack = [top] if top.blocks else list(top.children.values())
        nodes: list[Node] = []
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
        for node in reversed(nodes):
            if node.hard == 0:
                for _ in range(len(node.blocks)):
                    yield self.pop(node)

    def walk(self, roots: Iterable[Node] | None = None) -> Iterator[Node]:
        """Every node below these roots, by default all, parents first."""
        tops = self._roots.values() if roots is None else roots
        stack = [child for root in tops for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Number of equal tokens at the beginning of two token byte strings."""
    count = min(len(a), len(b)) // TOKEN_BYTES
    equal = np.frombuffer(a, np.uint32, count) == np.frombuffer(b, np.uint32, count)
    return count if equal.all() else int(equal.argmin())
