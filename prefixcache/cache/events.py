"""What the cache tells those who watch it: synchronously, so observers must not block."""

from collections.abc import Sequence
from typing import Protocol


class CacheObserver(Protocol):
    """Subscribes to changes of the trie through `BlockManager.observers`."""

    def stored(self, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> None:
        """Computed blocks entered the trie behind the block (or namespace) `parent`.

        tokens: little-endian uint32, block_size of them for each digest.
        """

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks left the trie: evicted or flushed."""

    def cleared(self) -> None:
        """The whole trie was flushed and nothing was left in it."""
