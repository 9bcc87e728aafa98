"""One look at the cache takes little of the engine's thread, whatever the pool and the tree are."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from prefixcache.cache import BlockDigest, BlockManager
from prefixcache.engine.inspect import Held, Inspector
from prefixcache.engine.messages import InspectCache, InspectNode
from prefixcache.errors import NotFound

BLOCK_SIZE = 16
NAMESPACE = b"namespace"
LOOK = InspectCache("look", max_nodes=200)


def inspector_of(manager):
    """An inspector of a cache without a model."""
    registry = SimpleNamespace(entries=lambda salt: [], pins=list, num_kept=0)
    scheduler = SimpleNamespace(running=[], waiting=[])
    return Inspector(SimpleNamespace(manager=manager, registry=registry, scheduler=scheduler))


def admit(manager, tokens):
    data = tokens.tobytes()
    table = manager.admit(NAMESPACE, data, manager.match(NAMESPACE, data))
    manager.trie.count_use(table.node)
    manager.grow(table, len(tokens))
    manager.take_copies()
    manager.publish(table, tokens, len(tokens))
    return table


def filled(num_blocks, trunk, own):
    """A cache that is nearly full: prompts that leave a trunk anywhere; 256 sequences live."""
    manager = BlockManager(num_blocks, BLOCK_SIZE, BlockDigest(1))
    random = np.random.default_rng(0)
    shared = random.integers(0, 50_000, BLOCK_SIZE * trunk).astype(np.uint32)
    live = []
    while manager.num_free > num_blocks // 20 + trunk + own:
        start = shared[: BLOCK_SIZE * random.integers(0, trunk + 1)]
        rest = random.integers(0, 50_000, BLOCK_SIZE * own).astype(np.uint32)
        table = admit(manager, np.concatenate([start, rest]))
        if len(live) < 256:
            live.append(table)
        else:
            manager.release(table)
    for table in live[:128]:
        manager.lease(table, table.num_filled)
    return manager


def look(inspector, manager):
    held = Held(manager)
    return inspector.blocks(held), inspector.nodes(held, LOOK)


def test_a_look_is_bounded_and_finds_the_most_used():
    manager = filled(2048, trunk=4, own=1)
    inspector = inspector_of(manager)
    states, nodes = look(inspector, manager)
    assert len(states) == 2048
    assert np.count_nonzero(states == 0) == manager.num_free
    assert np.count_nonzero(states & 0x1F) == manager.num_in_use
    assert len(nodes) == LOOK.max_nodes
    assert nodes[0].num_blocks == 0  # the namespace
    by_use = sorted((node.uses for node in manager.trie.walk()), reverse=True)
    assert sorted((node.uses for node in nodes[1:]), reverse=True) == by_use[: LOOK.max_nodes - 1]
    assert all(nodes[node.parent].num_children for node in nodes[1:])


def test_what_was_flushed_is_not_found_any_more():
    manager = filled(2048, trunk=4, own=1)
    inspector = inspector_of(manager)
    nodes = inspector.nodes(Held(manager), InspectCache("look", max_nodes=2000))
    leaf = next(n for n in nodes if not (n.sharers or n.leased or n.num_children))
    assert inspector.detail(InspectNode("detail", leaf.digest)).num_live == 0
    assert inspector.flush(leaf.digest) == 1
    with pytest.raises(NotFound):
        inspector.detail(InspectNode("detail", leaf.digest))
    with pytest.raises(NotFound):
        inspector.find(b"never shown")


@pytest.mark.slow
@pytest.mark.parametrize(("trunk", "own"), [(64, 32), (8, 1), (100, 1), (500, 100)])
def test_a_look_at_65536_blocks_takes_less_than_5_ms(trunk, own):
    manager = filled(65_536, trunk, own)
    inspector = inspector_of(manager)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        look(inspector, manager)
        times.append(time.perf_counter() - began)
    assert min(times) < 5e-3, times
