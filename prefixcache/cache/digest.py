"""Names for blocks: chained 128-bit digests, and the digest of a namespace.

Owns the byte formats. A digest finds a block; only equal tokens confirm it, so a collision costs a
miss and never a wrong answer. The seed is secret by default, so that nobody can prepare collisions.
"""

import hashlib
import struct
from collections.abc import Callable

import xxhash

DIGEST_BYTES = 16
TOKEN_BYTES = 4

Hash = Callable[[bytes, int], bytes]
"""(data, seed) -> 16 bytes."""


class BlockDigest:
    """Digests of one seed. A block's digest covers its parent's digest and its own token bytes.

    function: xxh3_128; another one only to provoke collisions in tests.
    """

    __slots__ = ("_function", "_seed", "seed_id")

    def __init__(self, seed: int, function: Hash = xxhash.xxh3_128_digest) -> None:
        self._seed = seed
        self.seed_id = hashlib.blake2b(f"digest seed {seed}".encode(), digest_size=8).hexdigest()
        """Names the seed without telling it: digests can be compared where this is equal."""
        self._function = function

    def __call__(self, data: bytes) -> bytes:
        """The digest of a parent's digest + a block's token bytes, or of a namespace's key."""
        return self._function(data, self._seed)

    def chain(self, parent: bytes, data: bytes, start: int, block_bytes: int) -> list[bytes]:
        """Digests of the whole blocks of `data` from byte `start` on, behind `parent`."""
        function, seed = self._function, self._seed
        whole = data[start : len(data) - (len(data) - start) % block_bytes]
        blocks = struct.iter_unpack(f"{block_bytes}s", whole)  # the fastest way to cut bytes up
        return [parent := function(parent + block, seed) for (block,) in blocks]


def namespace_key(
    *,
    model: bytes,
    adapter: str = "",
    tenant: str = "",
    salt: str | None = "",
    private: int | None = None,
) -> bytes:
    """The key of a tree's root. Each field is tagged and length-delimited, so no two can be joined.

    salt: None gives what the keys of all salts of this tenant begin with, and no others.
    private: a number of its own for a request that must match nothing.

    >>> namespace_key(model=b"m", adapter="x") == namespace_key(model=b"m", salt="x")
    False
    """
    fields = [(b"M", model), (b"A", adapter.encode()), (b"T", tenant.encode())]
    if salt is not None:
        fields.append((b"S", salt.encode()))
    if private is not None:
        fields.append((b"P", struct.pack("<Q", private)))
    return b"".join(tag + struct.pack("<Q", len(value)) + value for tag, value in fields)
