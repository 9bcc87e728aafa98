"""What the cache tells those who watch it: synchronously, so observers must not block."""

from collections.abc import Sequence


class CacheObserver:
    """Watches the trie from `BlockManager.observers`. Subclasses override what they want."""

    def stored(
        self, parent: bytes, digests: Sequence[bytes], tokens: bytes, namespace: bytes
    ) -> None:
        """Computed blocks entered the trie behind the block `parent`.

        tokens: little-endian uint32, block_size of them for each digest.
        namespace: the digest of its root, which is the parent of first blocks.
        """

    def idled(self, digests: bytes) -> None:
        """A sequence ended and left a run of blocks that nobody uses now, 16 bytes each.

        The runs of one sequence come from the deepest to the root.
        """

    def evicted(self, digest: bytes, idle_since: float) -> None:
        """A block must make room; `removed` follows. idle_since: a time of the trie's clock."""

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks left the trie: evicted or flushed."""

    def cleared(self) -> None:
        """The whole trie was flushed and nothing was left in it."""
