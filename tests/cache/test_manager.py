"""The block manager, one behaviour a test. Block size 4, token ids small, no model."""

import ast
import itertools
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from prefixcache.cache import (
    BlockCopy,
    BlockDigest,
    BlockManager,
    BlockTable,
    CacheObserver,
    NoFreeBlocks,
    check_integrity,
    digest,
    namespace_key,
    token_bytes,
)
from prefixcache.errors import ResourceExhausted

BLOCK = 4
NAMESPACE = namespace_key(model=b"m")


def array(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.uint32)


def admit(manager: BlockManager, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> BlockTable:
    data = token_bytes(array(tokens))
    return manager.admit(namespace, data, manager.match(namespace, data))


def compute(manager: BlockManager, table: BlockTable, tokens: Sequence[int]) -> list[BlockCopy]:
    """Grow, "run" and publish up to the end of `tokens`; the copies made for it."""
    manager.grow(table, len(tokens))
    copies = manager.take_copies()
    manager.publish(table, array(tokens), len(tokens))
    return copies


def run(manager: BlockManager, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> BlockTable:
    table = admit(manager, tokens, namespace)
    manager.take_copies()
    compute(manager, table, tokens)
    return table


def cached(manager: BlockManager, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> int:
    return manager.match(namespace, token_bytes(array(tokens))).num_tokens


@pytest.fixture
def manager() -> Iterator[BlockManager]:
    manager = BlockManager(32, BLOCK, BlockDigest(seed=1))
    yield manager
    check_integrity(manager)


def first(count: int) -> list[int]:
    return list(range(1, count + 1))


# ---------------------------------------------------------------- matching


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (first(3), 3),  # inside the first block
        (first(4), 4),
        (first(10), 10),  # inside the run of one node
        (first(12), 12),
        ([*first(12), 99, 98], 12),  # beyond what is cached
        ([*first(5), 99, 7, 8], 5),  # leaves in the middle of a block
        ([1, 2, 99], 2),
        ([99, 2, 3, 4], 0),  # a later block without its first one is nothing
    ],
)
def test_hits_are_counted_to_the_token(
    manager: BlockManager, prompt: list[int], expected: int
) -> None:
    manager.release(run(manager, [*first(12), 50]))  # the 13th token's block is not full
    assert cached(manager, prompt) == expected


def test_the_best_of_many_siblings_gives_the_remainder(manager: BlockManager) -> None:
    for last in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [9, 9, 9, 9]):
        manager.release(run(manager, [1, 2, 3, 4, *last]))
    assert cached(manager, [1, 2, 3, 4, 5, 6, 9, 1]) == 7
    assert cached(manager, [1, 2, 3, 4, 5, 2]) == 5
    assert cached(manager, [1, 2, 3, 4, 7]) == 4


def test_a_remainder_is_copied_and_whole_blocks_are_shared(manager: BlockManager) -> None:
    table = run(manager, first(8))
    other = admit(manager, [*first(6), 77])
    source, shared = table.row[1], table.row[0]
    assert manager.take_copies() == [BlockCopy(source, other.row[1])]
    assert other.row[0] == shared
    assert other.num_filled == 6


def test_a_prompt_is_one_node_until_another_diverges(manager: BlockManager) -> None:
    manager.release(run(manager, first(12)))
    assert len(list(manager.trie.walk())) == 1
    manager.release(run(manager, [*first(4), 9, 9, 9, 9]))
    assert sorted(len(node.blocks) for node in manager.trie.walk()) == [1, 1, 2]


def test_nothing_is_matched_before_it_is_computed(manager: BlockManager) -> None:
    table = admit(manager, first(8))
    manager.grow(table, 8)
    assert cached(manager, first(8)) == 0
    manager.publish(table, array(first(8)), 6)  # a chunk that ends inside the second block
    assert cached(manager, first(8)) == 4


def test_namespaces_share_nothing(manager: BlockManager) -> None:
    """PC-03, PC-05: adapter and salt cannot stand for one another, nor run together."""
    keys = [
        namespace_key(model=b"m"),
        namespace_key(model=b"m", adapter="x"),
        namespace_key(model=b"m", salt="x"),
        namespace_key(model=b"m", adapter="ab", salt="c"),
        namespace_key(model=b"m", adapter="a", salt="bc"),
        namespace_key(model=b"mA"),
        namespace_key(model=b"m", private=1),
        # Each pair would be the same bytes but for the lengths: tags alone do not part fields.
        namespace_key(model=b"m", adapter="aTb"),
        namespace_key(model=b"m", adapter="a", tenant="bT"),
        namespace_key(model=b"m", tenant="aSx"),
        namespace_key(model=b"m", tenant="a", salt="xS"),
    ]
    for key in keys:
        assert cached(manager, first(8), key) == 0
        manager.release(run(manager, first(8), key))
        assert cached(manager, first(8), key) == 8
    blocks = [block for node in manager.trie.walk() for block in node.blocks]
    assert len(blocks) == 2 * len(keys)


def test_one_adapters_blocks_never_serve_another(manager: BlockManager) -> None:
    """PC-03: the same 9 tokens under adapter 'a', 'b', none, and 'a' again."""
    names = ["a", "b", "", "a"]
    tables, found = [], []
    for name in names:
        namespace = namespace_key(model=b"m", adapter=name)
        found.append(cached(manager, first(9), namespace))
        tables.append(run(manager, first(9), namespace))
    assert found == [0, 0, 0, 8]
    own, again = ({int(block) for block in tables[at].row[:2]} for at in (0, 3))
    assert own == again
    others = {int(block) for table in tables[1:3] for block in table.row[:2]}
    assert len(own | others) == 6
    for table in tables:
        manager.release(table)


def test_a_digest_collision_is_a_miss_and_never_a_wrong_block() -> None:
    """SE-02: with a digest that is the same for all blocks, only tokens decide."""
    manager = BlockManager(16, BLOCK, BlockDigest(0, lambda data, seed: b"0" * 16))
    one, two = run(manager, [1, 1, 1, 1]), run(manager, [2, 2, 2, 2])
    assert cached(manager, [1, 1, 1, 1]) == 4
    assert cached(manager, [2, 2, 2, 2]) == 0
    assert one.row[0] != two.row[0]
    compute(manager, two, [2, 2, 2, 2, 3, 3, 3, 3])  # goes on, private
    manager.release(two)
    manager.release(one)
    assert manager.num_in_use == 0


def colliding_blocks() -> tuple[list[int], list[int]]:
    """Two blocks of 4 tokens with one xxh3_128 digest for seed 0, behind any parent.

    Of 32 bytes, the last 16 are multiplied half by half, each xored with a public secret: a half
    that equals its secret makes the product 0, whatever the other one is; and both halves' sum,
    which enters too, is the same for (secret, other + d) and (secret + d, other).
    """
    secret = bytes.fromhex("ded46de9839097db7240a4a4b7b3671f")  # bytes 16 to 31 of XXH3's own
    low, high = struct.unpack("<QQ", secret)
    pair = ((low, high + 5), (low + 5, high))
    one, two = (list(struct.unpack("<4I", struct.pack("<QQ", *halves))) for halves in pair)
    return one, two


def test_a_prepared_collision_needs_the_seed_and_costs_a_miss() -> None:
    """SE-02: a real colliding pair of the hash, for the seed that would be public."""
    one, two = colliding_blocks()
    assert one != two
    for seed, collide in ((0, True), (1, False), (2**64 - 1, False)):
        manager = BlockManager(16, BLOCK, BlockDigest(seed))
        parent = manager.trie.digest(NAMESPACE)
        names = {manager.trie.digest(parent + token_bytes(array(block))) for block in (one, two)}
        assert (len(names) == 1) is collide
        mine, other = run(manager, one), run(manager, two)
        assert mine.row[0] != other.row[0]
        assert cached(manager, one) == 4
        assert cached(manager, two) == (0 if collide else 4)
        check_integrity(manager)


KEYS = """
import runpy, sys
digest = runpy.run_path(sys.argv[1])
keys = digest["BlockDigest"](7)
root = keys(digest["namespace_key"](model=b"m"))
tokens = b"".join(token.to_bytes(4, "little") for token in range(1, 9))
print([key.hex() for key in keys.chain(root, tokens, 0, 16)])
"""


def succeeds(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_keys_are_the_same_bytes_in_every_process() -> None:
    """PC-18: of [1..8], twice with PYTHONHASHSEED=0 and once without; SE-02: by the seed alone.

    In this Python, and in others that are here and have xxhash.
    """
    root = BlockDigest(7)(NAMESPACE)
    tokens = token_bytes(array(first(8)))
    here = [key.hex() for key in BlockDigest(7).chain(root, tokens, 0, 16)]
    others = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    able = "import sys, xxhash; assert sys.version_info >= (3, 11)"
    pythons = [other for other in others if other and succeeds(other, "-c", able)]
    fixed = {"PYTHONHASHSEED": "0"}
    runs = [(sys.executable, fixed), (sys.executable, {}), *((name, fixed) for name in pythons)]
    for python, environment in runs:
        done = subprocess.run(
            [python, "-c", KEYS, digest.__file__],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"{here}\n", python
    assert here[0] != BlockDigest(8).chain(root, tokens, 0, 16)[0].hex()


def test_no_key_is_made_with_the_built_in_hash() -> None:
    """PC-18: it differs from process to process, for tuples that hold None even with a seed."""
    for file in Path(digest.__file__).parent.glob("*.py"):
        calls = (node for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "func"))
        assert not [call for call in calls if getattr(call.func, "id", "") == "hash"], file.name


# ---------------------------------------------------------------- sharing


def test_equal_blocks_are_adopted(manager: BlockManager) -> None:
    """PC-13: two that compute the same at once end up on one copy, and no block is lost."""
    one, two = admit(manager, first(8)), admit(manager, first(8))
    compute(manager, one, first(8))
    compute(manager, two, first(8))
    assert one.block_ids().tolist() == two.block_ids().tolist()
    assert manager.num_in_use == 2
    assert manager.num_free == 30
    manager.release(one)  # one holder of the key goes, the other's is still found
    assert cached(manager, first(8)) == 8
    manager.release(two)
    assert cached(manager, first(8)) == manager.num_evictable * BLOCK == 8


def test_the_last_holder_of_a_tail_writes_in_place(manager: BlockManager) -> None:
    """FK-02: three sequences on one tail make exactly two copies."""
    parent = run(manager, first(6))
    children = [manager.fork(parent), manager.fork(parent)]
    assert manager.num_in_use == 2
    copies = [
        copy
        for index, table in enumerate([parent, *children])
        for copy in compute(manager, table, [*first(6), 50 + index])
    ]
    assert len(copies) == 2
    assert len({int(table.row[1]) for table in [parent, *children]}) == 3
    assert manager.num_in_use == 4
    for index, table in enumerate([parent, *children]):
        assert not compute(manager, table, [*first(6), 50 + index, 9])


def test_slots_leave_alone_what_is_filled(manager: BlockManager) -> None:
    manager.release(run(manager, first(8)))
    table = admit(manager, [*first(8), 9])
    manager.grow(table, 9)
    row = table.row
    assert table.slots(6, 9, BLOCK).tolist() == [-1, -1, int(row[2]) * BLOCK]


def test_a_failed_growth_changes_nothing() -> None:
    manager = BlockManager(3, BLOCK, BlockDigest(seed=1))
    table = run(manager, first(8))
    fork = manager.fork(table)
    with pytest.raises(NoFreeBlocks):
        manager.grow(fork, 16)
    assert manager.num_free == 1
    assert fork.num_blocks == 2
    check_integrity(manager)


def test_a_copy_into_a_block_that_is_freed_before_it_runs_is_dropped(manager: BlockManager) -> None:
    parent = run(manager, first(6))
    child = manager.fork(parent)
    manager.grow(child, 7)
    assert len(manager.copies) == 1
    manager.release(child)
    assert manager.take_copies() == []


# ---------------------------------------------------------------- in flight


def test_blocks_in_flight_are_found_until_they_are_computed_or_given_up(
    manager: BlockManager,
) -> None:
    data = token_bytes(array(first(9)))

    def in_flight() -> bool:
        match = manager.match(NAMESPACE, data)
        return manager.in_flight.next_block(NAMESPACE, data, match) is not None

    producer = admit(manager, first(8))
    assert in_flight()
    manager.grow(producer, 4)
    manager.publish(producer, array(first(8)), 4)
    assert in_flight()  # the second block still is
    manager.release(producer)
    assert not in_flight()
    assert len(manager.in_flight) == 0


# ---------------------------------------------------------------- eviction


def evict(manager: BlockManager, count: int) -> None:
    """Take so many blocks more than are free, and give them back."""
    table = admit(manager, [10_000 + i for i in range(BLOCK * (manager.num_free + count))])
    manager.grow(table, BLOCK * (manager.num_free + count))
    manager.release(table)


def test_the_least_recently_used_leaf_goes_first(manager: BlockManager) -> None:
    """PC-14: a prefix never loses a block before those behind it."""
    manager.release(run(manager, first(12)))
    manager.release(run(manager, [9] * 8))
    for left in (8, 4, 0):
        evict(manager, 1)
        assert cached(manager, first(12)) == left
        assert cached(manager, [9] * 8) == 8


def test_pruned_branches_go_before_all_and_urgent_prompts_last(manager: BlockManager) -> None:
    manager.release(run(manager, [1] * 4), priority=-1)
    manager.release(run(manager, [2] * 4), priority=5)
    manager.release(run(manager, [3] * 4), priority=0)
    manager.release(run(manager, [4] * 4), pruned=True)
    order = []
    for _ in range(4):
        before = {t for t in (1, 2, 3, 4) if cached(manager, [t] * 4)}
        evict(manager, 1)
        order += before - {t for t in (1, 2, 3, 4) if cached(manager, [t] * 4)}
    assert order == [4, 2, 3, 1]


def test_a_parent_is_as_urgent_as_its_most_urgent_child(manager: BlockManager) -> None:
    manager.release(run(manager, [*first(4), 5, 5, 5, 5]), priority=-1)
    manager.release(run(manager, [*first(4), 6, 6, 6, 6]), priority=7)
    evict(manager, 1)
    assert cached(manager, [*first(4), 6, 6, 6, 6]) == 4
    evict(manager, 1)
    assert cached(manager, [*first(4), 5, 5, 5, 5]) == 4


def test_live_blocks_are_never_evicted() -> None:
    manager = BlockManager(4, BLOCK, BlockDigest(seed=1))
    run(manager, first(8))
    other = admit(manager, [9] * 12)
    with pytest.raises(NoFreeBlocks):
        manager.grow(other, 12)
    manager.grow(other, 8)
    check_integrity(manager)


# ---------------------------------------------------------------- leases, pins, flush


def keep(manager: BlockManager, tokens: Sequence[int]):
    table = run(manager, tokens)
    lease = manager.lease(table, len(tokens))
    manager.release(table)
    return lease


def test_leased_blocks_go_last_tail_first(manager: BlockManager) -> None:
    lease = keep(manager, first(6))
    manager.release(run(manager, [9] * 8))
    assert manager.num_in_use == 0
    evict(manager, 2)
    assert cached(manager, [9] * 8) == 0
    assert manager.resume(lease).num_filled == 6


def test_a_lease_that_lost_blocks_falls_back_to_tokens(manager: BlockManager) -> None:
    lease = keep(manager, first(6))
    evict(manager, 1)  # the tail
    assert manager.resume(lease) is None
    assert cached(manager, first(6)) == 4
    evict(manager, 1)
    assert manager.resume(lease) is None
    manager.end_lease(lease)
    assert manager.num_free == 32


@pytest.mark.parametrize("position", [1, 3, 4, 5, 8, 9, 10])
def test_a_lease_may_name_an_earlier_position(manager: BlockManager, position: int) -> None:
    table = run(manager, first(10))
    lease = manager.lease(table, position)
    branch = manager.resume(lease)
    manager.end_lease(lease)
    assert branch.num_filled == position
    assert branch.num_blocks == manager.blocks_for(position)
    shared = min(position // BLOCK, 2)
    assert branch.row[:shared].tolist() == table.row[:shared].tolist()
    compute(manager, branch, [*first(position), 70])
    compute(manager, table, [*first(10), 80])
    assert branch.row[position // BLOCK] != table.row[position // BLOCK]


def test_pins_hold_blocks_and_have_a_limit() -> None:
    manager = BlockManager(8, BLOCK, BlockDigest(seed=1), max_pinned_blocks=3)
    manager.release(run(manager, first(8)))
    manager.release(run(manager, [*first(4), 9, 9, 9, 9, 8, 8, 8, 8]))
    pin = manager.pin(NAMESPACE, token_bytes(array(first(8))))
    assert manager.num_pinned() == manager.num_in_use == 2
    with pytest.raises(ResourceExhausted, match="at most 3 of the pool's 8"):
        manager.pin(NAMESPACE, token_bytes(array([*first(4), 9, 9, 9, 9, 8, 8, 8, 8])))
    assert manager.flush() == 2
    assert cached(manager, first(8)) == 8
    manager.unpin(pin)
    assert manager.flush(NAMESPACE) == 2
    check_integrity(manager)


class Log(CacheObserver):
    """A cache observer."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []
        self.known: set[bytes] = set()

    def stored(
        self, parent: bytes, digests: Sequence[bytes], tokens: bytes, namespace: bytes
    ) -> None:
        assert len(tokens) == len(digests) * BLOCK * 4
        assert parent not in digests
        self.known |= set(digests)
        self.lines.append(("stored", len(digests)))

    def removed(self, digests: Sequence[bytes]) -> None:
        assert self.known >= set(digests)
        self.known -= set(digests)
        self.lines.append(("removed", len(digests)))

    def cleared(self) -> None:
        assert not self.known
        self.lines.append(("cleared", 0))


def test_observers_hear_of_every_block(manager: BlockManager) -> None:
    log = Log()
    manager.observers.append(log)
    manager.release(run(manager, first(12)))
    manager.release(run(manager, [*first(8), 9, 9, 9, 9]))
    evict(manager, 1)
    manager.flush()
    assert log.lines == [
        ("stored", 3),
        ("stored", 1),
        ("removed", 1),
        ("removed", 3),
        ("cleared", 0),
    ]


def test_a_block_has_one_state_at_a_time(manager: BlockManager) -> None:
    """RC-10: three forks share two blocks and own one each; idle blocks are counted once."""
    parent = run(manager, first(8))
    forks = [parent, manager.fork(parent), manager.fork(parent)]
    for index, table in enumerate(forks):
        compute(manager, table, [*first(8), 20 + index])
        counts = manager.num_free + manager.num_evictable + manager.num_in_use
        assert counts == 32
    assert manager.num_in_use == 5
    leases = [manager.lease(table, 9) for table in forks]
    for table in forks:
        manager.release(table)
        assert manager.num_free + manager.num_evictable + manager.num_in_use == 32
        check_integrity(manager)
    assert (manager.num_evictable, manager.num_in_use) == (5, 0)
    for lease in leases:
        manager.end_lease(lease)
        check_integrity(manager)
    assert (manager.num_free, manager.num_evictable, manager.num_in_use) == (30, 2, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("parted", [False, True])
def test_parent_and_forks_may_end_in_any_order(
    manager: BlockManager, order: tuple[int, ...], parted: bool
) -> None:
    """RC-04: a parent and two children, before and behind the point where they copy its tail."""
    parent = run(manager, first(6))
    tables = [parent, manager.fork(parent), manager.fork(parent)]
    for index, table in enumerate(tables if parted else []):
        compute(manager, table, [*first(6), 20 + index, 5, 6, 7])
    assert manager.num_in_use == (1 + 3 * 2 if parted else 2)
    for index in order:
        assert len(set(tables[index].block_ids().tolist())) == tables[index].num_blocks
        manager.release(tables[index])
        check_integrity(manager)
    assert manager.num_in_use == 0
    manager.flush()
    assert manager.num_free == 32
