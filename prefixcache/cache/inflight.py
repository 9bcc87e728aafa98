"""Prompt blocks that admitted requests are computing just now, by digest; outside the trie.

A request that would match one of them can wait for it instead of computing it twice. Entries go
when the block is computed, or when its producer ends: then the first waiter takes over by itself.
"""

from prefixcache.cache.digest import TOKEN_BYTES
from prefixcache.cache.table import BlockTable
from prefixcache.cache.trie import Match, PrefixTrie


class InFlightIndex:
    """Digest of a block -> the table that will fill it, and where it begins in its prompt."""

    def __init__(self, trie: PrefixTrie, block_size: int) -> None:
        self._trie = trie
        self._block_bytes = block_size * TOKEN_BYTES
        self._producers: dict[bytes, tuple[BlockTable, int]] = {}

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._producers

    def register(self, table: BlockTable, data: bytes) -> None:
        """Enter the full blocks of a prompt (token bytes) behind the table's published ones."""
        size = self._block_bytes
        table.prompt = data
        start = table.node_blocks * size
        table.pending = self._trie.digest.chain(table.node.last_digest, data, start, size)
        for index, digest in enumerate(table.pending):
            self._producers.setdefault(digest, (table, start + index * size))
        table.pending.reverse()

    def next_digest(self, table: BlockTable) -> bytes | None:
        """The digest of the table's next block to be published, where the prompt gave it."""
        return table.pending[-1] if table.pending else None

    def computed(self, table: BlockTable) -> None:
        """The table's next block has been published."""
        if table.pending:
            self._forget(table, table.pending.pop())

    def remove(self, table: BlockTable) -> None:
        """The table goes: nobody computes its remaining blocks for others any more."""
        for digest in table.pending:
            self._forget(table, digest)
        table.pending.clear()

    def _forget(self, table: BlockTable, digest: bytes) -> None:
        producer = self._producers.get(digest)
        if producer is not None and producer[0] is table:
            del self._producers[digest]

    def next_block(
        self, namespace: bytes, data: bytes, match: Match
    ) -> tuple[bytes, BlockTable] | None:
        """Digest and producer of the block behind a match, if a table is computing just that.

        The digest finds it; that namespace and tokens are equal, this block's and all before it,
        confirms it.
        """
        if not self._producers:
            return None
        at = match.num_blocks * self._block_bytes
        head = data[at : at + self._block_bytes]
        if len(head) < self._block_bytes:
            return None
        digest = self._trie.digest(self._last_digest(namespace, match) + head)
        producer = self._producers.get(digest)
        if producer is None:
            return None
        table, where = producer
        same = table.root is self._trie.find_root(namespace) and where == at
        same = same and table.prompt.startswith(data[: at + self._block_bytes])
        return (digest, table) if same else None

    def _last_digest(self, namespace: bytes, match: Match) -> bytes:
        if not match.path:
            root = self._trie.find_root(namespace)
            return b"" if root is None else root.last_digest
        node = match.path[-1]
        return node.digest_of(match.num_blocks - 1 - node.start)

    def tables(self) -> set[BlockTable]:
        """Producers, for integrity checks."""
        return {table for table, _ in self._producers.values()}
