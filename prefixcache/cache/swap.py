"""Host blocks that keep the KV of preempted sequences, so that it need not be computed again.

Owns which host block holds what, and for whom; the blocks' data is the model runner's. What must be
moved is left in `take_moves` for the caller: out before anything of the step is written, in before
its forward pass.

    preempted ── save (if worth it) ──> saved ──┬─ move_in ─> the rest of its table, as computed
                                                └─ drop       it ended, or the trie still had all
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from prefixcache.cache.pool import BlockPool
from prefixcache.cache.table import BlockCopy, BlockTable


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A table as it was when its sequence was preempted.

    first: of its blocks, the first that no other sequence used. blocks: where the content of those
    from `first` on can be read. num_tokens: tokens with KV, those before `first` included.
    """

    owner: Hashable
    first: int
    blocks: tuple[int, ...]
    num_tokens: int


class SwapSpace:
    """Blocks in host memory; none with num_blocks = 0.

    worth: whether so many blocks should be moved out and in again rather than computed again.
    num_out, num_in: blocks moved since the start.
    """

    def __init__(self, num_blocks: int, worth: Callable[[int], bool]) -> None:
        self.worth = worth
        self.num_out = 0
        self.num_in = 0
        self._pool = BlockPool(num_blocks)
        self._saved: dict[Hashable, Snapshot] = {}
        self._holders: Counter[int] = Counter()
        self._out: list[BlockCopy] = []
        self._in: list[BlockCopy] = []

    @property
    def enabled(self) -> bool:
        """Whether there are any blocks."""
        return self._pool.num_blocks > 0

    def save(self, snapshots: Sequence[Snapshot]) -> None:
        """Keep what a preempted group had, each block once; all of it, or nothing."""
        blocks = list(dict.fromkeys(block for s in snapshots for block in s.blocks))
        if not blocks or len(blocks) > self._pool.num_free or not self.worth(len(blocks)):
            return
        host_of = {block: self._pool.take() for block in blocks}
        for s in snapshots:
            if not s.blocks:
                continue
            host = tuple(host_of[block] for block in s.blocks)
            self._saved[s.owner] = Snapshot(s.owner, s.first, host, s.num_tokens)
            self._holders.update(host)
        self._out += [BlockCopy(block, host) for block, host in host_of.items()]
        self.num_out += len(blocks)

    def find(self, owner: Hashable) -> Snapshot | None:
        """What is kept for a sequence; its blocks are host blocks."""
        return self._saved.get(owner)

    def move_in(self, saved: Snapshot, table: BlockTable) -> None:
        """Fill the table's private blocks, up to `num_tokens`, from what was saved."""
        host = saved.blocks[table.node_blocks - saved.first :]
        targets = table.block_ids()[table.node_blocks :].tolist()
        self._in += [BlockCopy(*pair) for pair in zip(host, targets, strict=True)]
        self.num_in += len(host)

    def drop(self, owner: Hashable) -> None:
        """Nothing is kept for a sequence any more.

        A block that was still to be moved out is not moved, unless it is to be moved in again in
        the same step: moves out come first, so it is read before it can be written for another.
        """
        saved = self._saved.pop(owner, None)
        if saved is None:
            return
        self._holders.subtract(saved.blocks)
        free = {block for block in saved.blocks if not self._holders[block]}
        for block in free:
            del self._holders[block]
            self._pool.give(block)
        unread = free - {move.src for move in self._in}
        self._out = [move for move in self._out if move.dst not in unread]

    def take_moves(self) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Moves to host blocks, and from them, for this step; the lists are handed over."""
        moves, self._out, self._in = (self._out, self._in), [], []
        return moves

    def check_integrity(self, waiting: Sequence[Hashable]) -> None:
        """Verify that no host block is lost. waiting: sequences that may have something saved.

        Raises AssertionError.
        """
        held = Counter(block for saved in self._saved.values() for block in saved.blocks)
        assert held == self._holders, "a host block's holders are miscounted"
        free = self._pool.free_ids()
        assert sorted([*free, *held]) == list(range(self._pool.num_blocks)), "a host block is lost"
        strangers = self._saved.keys() - set(waiting)
        assert not strangers, "host blocks are kept for a sequence that does not wait for them"
