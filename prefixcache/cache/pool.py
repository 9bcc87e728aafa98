"""The physical blocks: which ids are free. Knows nothing of what blocks hold or who holds them."""

from prefixcache.errors import PrefixCacheError


class NoFreeBlocks(PrefixCacheError):
    """More blocks were asked for than are free or can be evicted. The scheduler preempts on it."""


class BlockPool:
    """Block ids 0 to num_blocks - 1, handed out last-freed first: those are warm in caches."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    def take(self) -> int:
        """Hand out one block. Raises NoFreeBlocks."""
        if not self._free:
            raise NoFreeBlocks("no free block is left")
        return self._free.pop()

    def give(self, block: int) -> None:
        """Take one block back."""
        self._free.append(block)

    def free_ids(self) -> list[int]:
        """A copy of the free ids, for integrity checks."""
        return list(self._free)
