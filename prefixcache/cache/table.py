"""What a sequence holds of the cache: its node, its private tail, and its row of block ids.

Plain records; `BlockManager` is the only one that changes them.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from prefixcache.cache.trie import Node

Row = npt.NDArray[np.int32]


class BlockCopy(NamedTuple):
    """Copy a whole block, all layers, K and V, before the next forward pass writes anything.

    A batch of copies reads what was there before the batch, even where a target is also a source.
    """

    src: int
    dst: int


class TailBlock:
    """A private block: partly filled, or not yet published. Forks share it until one writes.

    hard: live sequences that hold it. soft: leases that do. block: -1 once it was evicted.
    """

    __slots__ = ("block", "hard", "soft")

    def __init__(self, block: int) -> None:
        self.block = block
        self.hard = 1
        self.soft = 0


class Holding:
    """Blocks of one sequence, in order.

        row      [ 3  7  9 | 4  8 ]
                  published  tail
        node ─────────────^

    root: its namespace. node: stands for row[:node_blocks], which are published, and is the one
    reference held to all of them. tail: the blocks behind them. num_filled: tokens with KV.
    """

    __slots__ = ("node", "node_blocks", "num_filled", "root", "row", "tail")

    def __init__(self, root: "Node", node: "Node", node_blocks: int, row: Row) -> None:
        self.root = root
        self.node = node
        self.node_blocks = node_blocks
        self.row = row
        self.tail: list[TailBlock] = []
        self.num_filled = 0

    @property
    def num_blocks(self) -> int:
        """Blocks, published and private."""
        return self.node_blocks + len(self.tail)


class BlockTable(Holding):
    """A live sequence's blocks, held hard. The node ends exactly at `node_blocks`.

    row grows at the end; only the adoption of an equal block changes an entry. pending: digests of
    the prompt's full blocks that are still to be computed, in order, the first for block
    `node_blocks`; they stand in the in-flight index under `prompt`, the prompt's token bytes.
    """

    __slots__ = ("pending", "prompt")

    def __init__(self, root: "Node", node: "Node", row: Row) -> None:
        super().__init__(root, node, node.end, row)
        self.pending: list[bytes] = []
        self.prompt = b""

    def block_ids(self) -> Row:
        """The row, [num_blocks], a view."""
        return self.row[: self.num_blocks]

    def append(self, block: TailBlock) -> None:
        """Put a private block behind the others."""
        at = self.num_blocks
        if at == len(self.row):
            self.row = np.concatenate([self.row, np.empty(max(8, at // 2), np.int32)])
        self.row[at] = block.block
        self.tail.append(block)

    def slots(self, start: int, stop: int, block_size: int) -> npt.NDArray[np.int64]:
        """Slots of positions start to stop - 1; -1 (write nothing) where KV is there already."""
        positions = np.arange(start, stop)
        slots = self.row[positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        slots[: max(self.num_filled - start, 0)] = -1
        return slots


class Lease(Holding):
    """A soft hold for a sequence that does not run: kept after its end, or a fork that queues.

    Its blocks count as evictable and go last. While `intact` and its tail is there, `resume` takes
    them as they are; otherwise what is left is found by tokens and the rest computed again.

    partial: a published block whose beginning is the remainder behind `node_blocks`, or -1.
    The node covers that block too, so it may reach beyond `node_blocks`.
    """

    __slots__ = ("intact", "partial")

    def __init__(self, root: "Node", node: "Node", node_blocks: int, row: Row) -> None:
        super().__init__(root, node, node_blocks, row)
        self.partial = -1
        self.intact = True

    @property
    def published_blocks(self) -> int:
        """Blocks of the trie that it needs, the partial one included."""
        return self.node_blocks + (self.partial >= 0)


class Pin:
    """A hard hold on cached blocks, without a sequence."""

    __slots__ = ("node", "num_blocks")

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.num_blocks = node.end
