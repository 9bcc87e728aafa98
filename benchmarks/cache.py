"""What the cache costs on the host: hashing, re-admission of a cached prompt, fork.

    python -m benchmarks.cache --json

No model: the block manager alone, on real token counts.
"""

import hashlib
import pickle

import numpy as np

from benchmarks._report import Report, compare, median_seconds
from prefixcache.cache import BlockDigest, BlockManager, BlockTable, namespace_key, token_bytes

BLOCK = 16
NAMESPACE = namespace_key(model=b"benchmark")


def main() -> None:
    report = Report("cache", "Host time of hashing, re-admission and fork.")
    options = report.parse()
    rounds = 51 if options.quick else 201
    hashing(report, rounds)
    readmission(report, rounds, 100_000 if options.quick else 1_000_000)
    forking(report, rounds)
    report.finish()


def hashing(report: Report, rounds: int) -> None:
    """The chain of digests over a prompt, against sha256 over pickled tuples of the same blocks."""
    tokens = np.random.default_rng(0).integers(0, 49_152, 2_176).astype(np.uint32)
    ids = tokens.tolist()
    digest = BlockDigest(seed=1)

    def chained_xxh3() -> bytes:
        return digest.chain(b"", token_bytes(tokens), 0, BLOCK * 4)[-1]

    def pickled_sha256() -> bytes:
        parent = b""
        for at in range(0, len(ids), BLOCK):
            block = pickle.dumps((parent, tuple(ids[at : at + BLOCK]), None), protocol=5)
            parent = hashlib.sha256(block).digest()
        return parent

    pair = compare(pickled_sha256, chained_xxh3, rounds=rounds)
    report.add("hash_ns_per_token", pair.second / len(ids) * 1e9, unit="ns")
    report.add("sha256_ns_per_token", pair.first / len(ids) * 1e9, unit="ns")
    report.add("hash_speedup_vs_sha256", pair.ratio, at_least=8)


def readmission(report: Report, rounds: int, many: int) -> None:
    """Look up, admit and release a fully cached prompt of 2,176 tokens over a path of 17 nodes."""
    tokens = np.random.default_rng(1).integers(0, 49_152, 2_176).astype(np.uint32)
    small, large = cached_pool(4_096, tokens), cached_pool(many, tokens)

    def readmit(manager: BlockManager) -> None:
        data = token_bytes(tokens)
        match = manager.match(NAMESPACE, data)
        table = manager.admit(NAMESPACE, data, match)
        assert table.num_filled == len(tokens)
        manager.release(table)

    assert len(small.match(NAMESPACE, token_bytes(tokens)).path) == 17
    pair = compare(lambda: readmit(large), lambda: readmit(small), rounds=rounds, warm_up=5)
    report.add("readmit_us", pair.first * 1e6, unit=f"µs, {many:,} blocks cached", at_most=100)
    report.add("readmit_ratio_1m_vs_4k", pair.ratio, at_most=1.5)


def cached_pool(num_blocks: int, tokens: np.ndarray) -> BlockManager:
    """A pool full of cache, in which `tokens` lie on a path of one node for each 8 blocks."""
    manager = BlockManager(num_blocks + 512, BLOCK, BlockDigest(seed=1))
    random = np.random.default_rng(2)
    while manager.trie.num_blocks < num_blocks - 2 * len(tokens) // BLOCK:
        # Prompts of 64 blocks that share a first block with others, so that the trie is bushy.
        length = 64 * BLOCK
        prompt = random.integers(0, 49_152, length).astype(np.uint32)
        prompt[:BLOCK] = np.arange(BLOCK) + random.integers(0, 1_000)
        cache(manager, prompt)
    cache(manager, tokens)
    for end in range(8 * BLOCK, len(tokens), 8 * BLOCK):
        fork = np.concatenate([tokens[:end], np.full(BLOCK, 7, np.uint32)])
        cache(manager, fork)
    return manager


def cache(manager: BlockManager, tokens: np.ndarray) -> None:
    manager.release(run(manager, tokens))


def run(manager: BlockManager, tokens: np.ndarray) -> BlockTable:
    """A live table with all tokens computed."""
    data = token_bytes(tokens)
    table = manager.admit(NAMESPACE, data, manager.match(NAMESPACE, data))
    manager.grow(table, len(tokens))
    manager.take_copies()
    manager.publish(table, tokens, len(tokens))
    return table


def forking(report: Report, rounds: int) -> None:
    """Fork and release the child, against a loop that counts a reference on each block."""
    manager = BlockManager(8_192, BLOCK, BlockDigest(seed=1))
    random = np.random.default_rng(3)
    short, long = (
        run(manager, random.integers(0, 49_152, n).astype(np.uint32)) for n in (1_024, 32_768)
    )
    counts = [1] * manager.pool.num_blocks
    blocks = long.block_ids().tolist()

    def count_references() -> None:
        for block in blocks:
            counts[block] += 1
        for block in blocks:
            counts[block] -= 1

    def fork(table: BlockTable) -> None:
        manager.release(manager.fork(table))

    sizes = compare(lambda: fork(long), lambda: fork(short), rounds=rounds, inner=20)
    report.add("fork_1k_us", sizes.second * 1e6, unit="µs")
    report.add("fork_32k_us", sizes.first * 1e6, unit="µs")
    report.add("fork_ratio_32k_vs_1k", sizes.ratio, at_most=1.5)
    loop = compare(count_references, lambda: fork(long), rounds=rounds)
    report.add("fork_speedup_vs_refcount_loop", loop.ratio, at_least=20)
    report.add("refcount_loop_us", median_seconds(count_references) * 1e6, unit="µs")


if __name__ == "__main__":
    main()
