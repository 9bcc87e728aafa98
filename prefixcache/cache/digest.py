"""Names for blocks: chained 128-bit digests, and the digest of a namespace.

Owns the byte formats. A digest finds a block; only equal tokens confirm it, so a collision costs a
miss and never a wrong answer. The seed is secret by default, so that nobody can prepare collisions.
"""

import struct
from collections.abc import Callable

import xxhash

DIGEST_BYTES = 16
TOKEN_BYTES = 4

DigestFunction = Callable[[bytes, bytes], bytes]
"""(digest of the parent block, token bytes of the block) -> digest of the block."""


def block_digest(seed: int) -> DigestFunction:
    """The digest function of one seed: xxh3_128 over the parent's digest and the block's tokens."""
    xxh3 = xxhash.xxh3_128_digest

    def digest(parent: bytes, tokens: bytes) -> bytes:
        return xxh3(parent + tokens, seed)

    return digest


def namespace_key(
    *, model: bytes, adapter: str = "", salt: str = "", private: int | None = None
) -> bytes:
    """The key of a tree's root. Each field is tagged and length-delimited, so no two can be joined.

    private: a number of its own for a request that must match nothing.

    >>> namespace_key(model=b"m", adapter="x") == namespace_key(model=b"m", salt="x")
    False
    """
    fields = [(b"M", model), (b"A", adapter.encode()), (b"S", salt.encode())]
    if private is not None:
        fields.append((b"P", struct.pack("<Q", private)))
    return b"".join(tag + struct.pack("<Q", len(value)) + value for tag, value in fields)
