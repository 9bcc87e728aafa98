"""What the cache gave to prompts and why not more; what pools of other sizes would have given.

Owns the causes of misses, the histograms of blocks' times and the curve of sizes. An observer: it
looks at sequences at their first admission, and at blocks that come and go.
"""

from collections.abc import Sequence as Seq
from typing import get_args

from prefixcache.cache import BlockManager, CacheObserver, token_bytes
from prefixcache.cache.digest import DIGEST_BYTES, TOKEN_BYTES
from prefixcache.cache.ghosts import BlockHistory
from prefixcache.cache.reuse import ReuseCurve
from prefixcache.cache.trie import Node
from prefixcache.engine import messages
from prefixcache.engine.histogram import CACHE_SECONDS, Histogram
from prefixcache.engine.messages import MissCause, SizePoint
from prefixcache.engine.sequence import Sequence

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of the curve, times the pool."""


class CacheMetrics(CacheObserver):
    """Of one block manager, whose clock it uses. Where nothing is cached it only counts bypasses.

    seed: of digests that never leave the engine.
    """

    def __init__(self, manager: BlockManager, *, enabled: bool, seed: int) -> None:
        self.misses: dict[str, int] = dict.fromkeys(get_args(MissCause), 0)
        self._manager = manager
        self._clock = manager.trie.clock
        self._size = manager.block_size
        self._enabled = enabled
        num_blocks = manager.pool.num_blocks
        self._history = BlockHistory(num_blocks, self._size, seed, self._clock)
        self._curve = ReuseCurve(num_blocks, int(num_blocks * SCALES[-1]))
        self._age = Histogram(CACHE_SECONDS)
        self._idle = Histogram(CACHE_SECONDS)
        self._reuse_gap = Histogram(CACHE_SECONDS)
        if enabled:
            manager.observers.append(self)

    # ------------------------------------------------------------ blocks

    def stored(self, parent: bytes, digests: Seq[bytes], tokens: bytes, namespace: bytes) -> None:
        """Blocks came in."""
        self._history.stored(parent, digests, tokens, namespace)

    def idled(self, digests: bytes) -> None:
        """Blocks fell idle: the order of eviction goes by that."""
        self._curve.touch(digests)

    def evicted(self, digest: bytes, idle_since: float) -> None:
        """A block goes for lack of room."""
        self._age.observe(self._history.age(digest))
        self._idle.observe(self._clock() - idle_since)

    def removed(self, digests: Seq[bytes]) -> None:
        """Blocks went."""
        self._history.removed(digests)

    # ------------------------------------------------------------ prompts

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has just got its table, for the first time."""
        if not self._enabled:
            self.misses["bypassed"] += len(sequence.tokens) - sequence.num_computed
            return
        self._count_misses(sequence)
        self._follow(sequence)
        if sequence.num_cached_tokens and not sequence.fork_position:
            self._count_gaps(sequence)

    def _count_misses(self, sequence: Sequence) -> None:
        """Every computed token has one cause."""
        start, length = sequence.num_computed, len(sequence.tokens)
        limit = sequence.last_useful_cached
        wanted = sequence.next_logprob_position is not None
        self.misses["bypassed" if wanted else "remainder"] += length - limit
        whole = length - length % self._size
        self.misses["remainder"] += max(limit - max(start, whole), 0)
        if start < min(limit, whole):
            self._count_absences(sequence, start, min(limit, whole))

    def _count_absences(self, sequence: Sequence, start: int, stop: int) -> None:
        """Tokens start to stop - 1 lie in whole blocks, none of which was found."""
        size, table = self._size, sequence.table
        assert table is not None
        data = token_bytes(sequence.tokens.view())
        data = data[: len(data) - len(data) % (size * TOKEN_BYTES)]
        at, parent = table.node_blocks * size, table.node.last_digest
        digests = table.pending[::-1] or self._manager.trie.digest.chain(
            parent, data, at * TOKEN_BYTES, size * TOKEN_BYTES
        )
        for cause in self._history.absences(parent, digests, data[at * TOKEN_BYTES :]):
            self.misses[cause] += max(min(at + size, stop) - max(at, start), 0)
            at += size

    def _follow(self, sequence: Sequence) -> None:
        """Enter a prompt in the curve. What a fork was given does not depend on the pool's size."""
        assert sequence.table is not None
        digests, size, cached = b"", self._size, sequence.num_cached_tokens
        if not sequence.fork_position:
            path = _path_digests(sequence.table.node) + b"".join(sequence.table.pending[::-1])
            looked_up = (sequence.last_useful_cached + 1) // size
            digests = path[: looked_up * DIGEST_BYTES]
        asked = len(sequence.tokens) - sequence.num_forked_tokens
        whole = min((cached + 1) // size, len(digests) // DIGEST_BYTES)
        self._curve.access(digests, asked / size, whole, cached / size - whole)

    def _count_gaps(self, sequence: Sequence) -> None:
        """How long the blocks that this prompt was served from had been idle.

        Where one holder is at a node, it is this sequence: nobody was there before.
        """
        assert sequence.table is not None
        served = -(-sequence.num_computed // self._size)
        now, node = self._clock(), sequence.table.node
        while node.parent is not None and node.hard == 1:
            blocks = max(min(node.end, served) - node.start, 0)
            self._reuse_gap.observe(now - node.idle_since, blocks)
            node = node.parent
        self._reuse_gap.observe(0.0, min(node.end, served))

    # ------------------------------------------------------------ figures

    def size_curve(self) -> tuple[SizePoint, ...]:
        """Hit rates of smaller and larger pools."""
        sizes = [max(int(self._manager.pool.num_blocks * scale), 1) for scale in SCALES]
        rates = self._curve.hit_rates(sizes)
        return tuple(map(SizePoint, SCALES, sizes, rates))

    def histograms(self) -> tuple[messages.Histogram, ...]:
        """Times of blocks."""
        return (
            self._age.snapshot("eviction_age_seconds"),
            self._idle.snapshot("eviction_idle_seconds"),
            self._reuse_gap.snapshot("reuse_gap_seconds"),
        )


def _path_digests(node: Node) -> bytes:
    """Digests of all blocks from the root to the end of a node."""
    runs = []
    while node.parent is not None:
        runs.append(node.digests)
        node = node.parent
    return b"".join(reversed(runs))
