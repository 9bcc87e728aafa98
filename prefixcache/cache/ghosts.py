"""Why a block is not in the cache: was it ever, and did another namespace have it?

Owns digests of blocks that are gone (ghosts) and of contents that have been seen, both bounded by
the size of the pool. Listens to the cache and changes nothing in it.

A digest is chained on that of its namespace, so a ghost belongs to one namespace. To compare across
namespaces, each block also has a content digest: chained on its parent's content alone. These never
leave this module: from outside, no namespace can be asked about another.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import xxhash

from prefixcache.cache.digest import TOKEN_BYTES
from prefixcache.cache.events import CacheObserver

Absence = Literal["never_seen", "evicted", "other_namespace"]

REMEMBERED = 4
"""Blocks remembered when they are gone, times the pool: at least so many, at most twice that."""


class _Resident(NamedTuple):
    content: int
    namespace: bytes
    since: float


class BlockHistory(CacheObserver):
    """What is remembered of the blocks of one pool.

    num_blocks: of the pool. seed: of the content digests; secret, as that of the others is.
    clock: seconds.
    """

    def __init__(
        self, num_blocks: int, block_size: int, seed: int, clock: Callable[[], float]
    ) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._capacity = REMEMBERED * num_blocks
        self._seed = seed
        self._clock = clock
        self._residents: dict[bytes, _Resident] = {}
        self._ghosts: set[bytes] = set()
        self._old_ghosts: set[bytes] = set()
        self._seen: dict[int, bytes | None] = {}
        """Content -> the one namespace that had it; None: several had. Holds all residents."""
        self._old_seen: dict[int, bytes | None] = {}

    # ------------------------------------------------------------ what the cache tells

    def stored(
        self, parent: bytes, digests: Sequence[bytes], tokens: bytes, namespace: bytes
    ) -> None:
        """Blocks came in: they are no ghosts any more."""
        content, _ = self._content_of(parent)
        now = self._clock()
        for digest, data in zip(digests, self._cut(tokens), strict=True):
            content = self._chain(content, data)
            self._residents[digest] = _Resident(content, namespace, now)
            self._ghosts.discard(digest)
            self._old_ghosts.discard(digest)
            self._see(content, namespace)

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks went: they are ghosts from now on."""
        for digest in digests:
            self._residents.pop(digest, None)  # two blocks may have one digest, once in 2**64
            self._ghosts.add(digest)
            if len(self._ghosts) >= self._capacity:
                self._old_ghosts, self._ghosts = self._ghosts, set()

    # ------------------------------------------------------------ what can be asked

    def age(self, digest: bytes) -> float:
        """Seconds since a block that is in the cache came in."""
        resident = self._residents.get(digest)
        return 0.0 if resident is None else self._clock() - resident.since

    def absences(self, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> Iterator[Absence]:
        """For each of the blocks behind `parent`, none of which is cached: why not.

        parent: the digest of a cached block or of a namespace. tokens: as in `stored`.
        """
        content, namespace = self._content_of(parent)
        for digest, data in zip(digests, self._cut(tokens), strict=True):
            content = self._chain(content, data)
            if digest in self._ghosts or digest in self._old_ghosts:
                yield "evicted"
            elif self._namespace_that_saw(content, namespace) != namespace:
                yield "other_namespace"
            else:
                yield "never_seen"

    # ------------------------------------------------------------ contents

    def _content_of(self, digest: bytes) -> tuple[int, bytes]:
        """Content and namespace of a cached block; a namespace itself has content 0."""
        resident = self._residents.get(digest)
        return (0, digest) if resident is None else (resident.content, resident.namespace)

    def _chain(self, content: int, data: bytes) -> int:
        return xxhash.xxh3_64_intdigest(content.to_bytes(8, "little") + data, self._seed)

    def _cut(self, tokens: bytes) -> Iterator[bytes]:
        size = self._block_bytes
        return (tokens[at : at + size] for at in range(0, len(tokens), size))

    def _namespace_that_saw(self, content: int, default: bytes) -> bytes | None:
        if content in self._seen:
            return self._seen[content]
        return self._old_seen.get(content, default)

    def _see(self, content: int, namespace: bytes) -> None:
        same = self._namespace_that_saw(content, namespace) == namespace
        self._seen[content] = namespace if same else None
        if len(self._seen) >= self._capacity:
            self._old_seen = self._seen
            contents = {resident.content for resident in self._residents.values()}
            self._seen = {content: self._old_seen[content] for content in contents}
