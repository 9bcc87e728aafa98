"""Counter-based random numbers: owns stream keys and uniforms; keeps no state and touches none.

A uniform is a pure function of (stream key, absolute token position), so a token's draw does not
depend on what ran before, beside it, or how often it was preempted (design.md §5.2).
"""

import struct

import numpy as np
import numpy.typing as npt
import xxhash

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

# Distinct seeds of the hash keep roots and children apart: no seed's root is a branch of another.
_ROOT_HASH_SEED = 0x70726663_726F6F74
_CHILD_HASH_SEED = 0x70726663_6368696C

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def root_key(seed: int) -> int:
    """Key of the stream that a request's seed starts; any unsigned 64-bit seed, wrap-free."""
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", seed), seed=_ROOT_HASH_SEED)


def derive_key(key: int, branch: int) -> int:
    """Key of branch number `branch` of the stream `key`: xxh3_64 over both as little-endian u64."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", key, branch), seed=_CHILD_HASH_SEED)


def philox4x32(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array],
    key: tuple[UInt64Array, UInt64Array],
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    counter, key: words of 32 bits held in uint64 arrays of one shape [R]. Returns four more.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 fits 64 bits
        round0 = k0 + np.uint64(round_ * _WEYL[0])  # the high half is masked off below
        round1 = k1 + np.uint64(round_ * _WEYL[1])
        c0 = ((product1 >> _32) ^ c1 ^ round0) & _LOW
        c2 = ((product0 >> _32) ^ c3 ^ round1) & _LOW
        c1, c3 = product1 & _LOW, product0 & _LOW
    return c0, c1, c2, c3


def uniform(keys: UInt64Array, positions: Int64Array) -> Float64Array:
    """One uniform number a row, 53 random bits in [0, 1).

    keys: uint64 [R], stream keys. positions: int64 [R], absolute positions, the Philox counters.

    >>> uniform(np.array([7, 7], np.uint64), np.array([0, 1])).round(6).tolist()
    [0.954597, 0.40696]
    """
    count = positions.astype(np.uint64)
    zero = np.zeros_like(count)
    words = philox4x32((count & _LOW, count >> _32, zero, zero), (keys & _LOW, keys >> _32))
    bits = (words[0] << _32) | words[1]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
