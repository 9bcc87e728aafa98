"""The whole cache against a plain dictionary model, driven by hypothesis.

KV memory is simulated: what is written to a slot is the whole token prefix that it stands for. So
any block that is shared, copied, evicted or rewritten wrongly shows as a slot that holds another
prefix. The trie is modelled as the set of prefixes that its events say are stored.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixcache.cache import (
    BlockDigest,
    BlockManager,
    BlockTable,
    CacheObserver,
    Lease,
    NoFreeBlocks,
    Pin,
    check_integrity,
    namespace_key,
    token_bytes,
)
from prefixcache.errors import ResourceExhausted

BLOCK = 4
NAMESPACES = [namespace_key(model=b"m", salt=salt) for salt in ("", "tenant")]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=18)
namespaces = st.sampled_from(NAMESPACES)


class LiveSequence:
    """A live sequence as the engine keeps it."""

    def __init__(self, namespace: bytes, tokens: list[int], table: BlockTable) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.table = table


class StoredPrefixes(CacheObserver):
    """Follows cache events: which token prefixes the trie holds, by digest."""

    def __init__(self, digest: object) -> None:
        self.prefixes: dict[bytes, tuple[int, ...]] = {}
        self.roots: dict[bytes, bytes] = {}
        self.namespace: dict[bytes, bytes] = {}

    def stored(
        self, parent: bytes, digests: Sequence[bytes], tokens: bytes, namespace: bytes
    ) -> None:
        ids = tuple(np.frombuffer(tokens, np.uint32).tolist())
        for index, digest in enumerate(digests):
            before = self.prefixes.get(parent, ())
            assert digest not in self.prefixes
            self.prefixes[digest] = before + ids[index * BLOCK : (index + 1) * BLOCK]
            self.namespace[digest] = self.roots[namespace]
            assert parent == namespace or self.namespace[parent] == self.roots[namespace]
            parent = digest

    def removed(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            del self.prefixes[digest], self.namespace[digest]

    def cleared(self) -> None:
        assert not self.prefixes

    def longest_match(self, namespace: bytes, tokens: list[int]) -> int:
        """Whole blocks first, then the best remainder in a block behind them."""
        mine = [p for d, p in self.prefixes.items() if self.namespace[d] == namespace]
        whole = 0
        while tuple(tokens[: whole + BLOCK]) in mine and whole + BLOCK <= len(tokens):
            whole += BLOCK
        rest = tokens[whole:]
        best = 0
        for prefix in mine:
            if len(prefix) == whole + BLOCK and list(prefix[:whole]) == tokens[:whole]:
                common = 0
                while (
                    common < len(rest) and common < BLOCK and rest[common] == prefix[whole:][common]
                ):
                    common += 1
                best = max(best, common)
        return whole + best


class CacheMachine(RuleBasedStateMachine):
    sequences: Bundle[LiveSequence] = Bundle("sequences")
    leases: Bundle[tuple[bytes, list[int], Lease]] = Bundle("leases")
    pins: Bundle[Pin] = Bundle("pins")

    @initialize(num_blocks=st.integers(6, 40))
    def start(self, num_blocks: int) -> None:
        digest = BlockDigest(seed=1)
        self.manager = BlockManager(num_blocks, BLOCK, digest)
        self.stored = StoredPrefixes(digest)
        for namespace in NAMESPACES:
            self.stored.roots[digest(namespace)] = namespace
        self.manager.observers.append(self.stored)
        self.memory: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.live: list[LiveSequence] = []

    # ------------------------------------------------------------ the life of a sequence

    @rule(target=sequences, namespace=namespaces, tokens=prompts)
    def admit(self, namespace: bytes, tokens: list[int]) -> object:
        return self._admit(namespace, tokens)

    def _admit(self, namespace: bytes, tokens: list[int]) -> object:
        sequence = self._taken_in(namespace, tokens)
        return multiple() if sequence is None else self._started(sequence)

    def _taken_in(self, namespace: bytes, tokens: list[int]) -> LiveSequence | None:
        """A new sequence whose copies are still to be run; None where there is no room."""
        data = token_bytes(np.array(tokens, np.uint32))
        match = self.manager.match(namespace, data)
        self.check_match(match.num_tokens, namespace, tokens)
        if self.manager.room_after(match, self.manager.blocks_for(len(tokens))) < 0:
            return None
        table = self.manager.admit(namespace, data, match)
        assert table.num_filled == match.num_tokens
        return LiveSequence(namespace, list(tokens), table)

    def check_match(self, found: int, namespace: bytes, tokens: list[int]) -> None:
        assert found == self.stored.longest_match(namespace, tokens)

    def _started(self, sequence: LiveSequence) -> LiveSequence:
        self._run_copies()
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def append_and_run(self, sequence: LiveSequence, more: list[int]) -> None:
        if sequence in self.live and self._grow(sequence, more):
            self._run_copies()
            self._write(sequence)
            self._publish(sequence)

    def _grow(self, sequence: LiveSequence, more: list[int]) -> bool:
        sequence.tokens += more
        before = self.manager.num_available
        try:
            self.manager.grow(sequence.table, len(sequence.tokens))
        except NoFreeBlocks:
            assert self.manager.num_available == before
            del sequence.tokens[-len(more) :]
            return False
        return True

    def _write(self, sequence: LiveSequence) -> None:
        start, stop = sequence.table.num_filled, len(sequence.tokens)
        slots = sequence.table.slots(0, stop, BLOCK)
        assert (slots[:start] == -1).all()
        for position in range(start, stop):
            prefix = tuple(sequence.tokens[: position + 1])
            self.memory[int(slots[position])] = (sequence.namespace, prefix)

    def _publish(self, sequence: LiveSequence) -> None:
        tokens = np.array(sequence.tokens, np.uint32)
        self.manager.publish(sequence.table, tokens, len(tokens))

    @rule(
        target=sequences,
        chosen=st.lists(sequences, max_size=3, unique=True),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        arrivals=st.lists(st.tuples(namespaces, prompts), max_size=2),
        preempt=st.booleans(),
    )
    def one_step(
        self,
        chosen: list[LiveSequence],
        more: list[int],
        arrivals: list[tuple[bytes, list[int]]],
        preempt: bool,
    ) -> object:
        """As the engine does: room for all of a step, then all its copies, all writes, all blocks.

        Where there is no room, another sequence, of this step or not, gives its blocks back: copies
        for it that wait are not run then.
        """
        rows = [sequence for sequence in chosen if sequence in self.live]
        new = [s for s in (self._taken_in(*arrival) for arrival in arrivals) if s is not None]
        self.live += new
        grown: list[LiveSequence] = []
        for sequence in [*rows, *new]:
            if sequence not in self.live:
                continue
            fits = self._grow(sequence, more)
            victim = next((s for s in reversed(self.live) if s is not sequence), None)
            if not fits and preempt and victim is not None:
                self.release(victim, 0, False)
                fits = self._grow(sequence, more)
            if fits:
                grown.append(sequence)
        grown = [sequence for sequence in grown if sequence in self.live]
        self._run_copies()
        for sequence in grown:
            self._write(sequence)
        for sequence in grown:
            self._publish(sequence)
        return multiple(*(sequence for sequence in new if sequence in self.live))

    @rule(sequence=sequences)
    def preempt_to_host_and_back(self, sequence: LiveSequence) -> None:
        """Its own blocks are read, given back, and brought into whatever it gets then."""
        if sequence not in self.live:
            return
        held, blocks = sequence.table.num_filled, self.manager.readable(sequence.table)
        host = [[self.memory.get(block * BLOCK + at) for at in range(BLOCK)] for block in blocks]
        self.release(sequence, 0, False)
        back = self._taken_in(sequence.namespace, sequence.tokens)
        if back is None:
            return
        sequence.table = back.table
        restored = back.table.num_filled < held and self.manager.restore(back.table, held)
        self._run_copies()
        self.live.append(sequence)
        if not restored:
            return
        row = back.table.block_ids().tolist()
        for index in range(back.table.node_blocks, len(row)):
            for at, content in enumerate(host[index] if index < len(host) else ()):
                if content is not None:
                    self.memory[row[index] * BLOCK + at] = content

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: LiveSequence) -> object:
        if sequence not in self.live:
            return multiple()
        available = self.manager.num_available
        child = self.manager.fork(sequence.table)
        assert self.manager.num_available == available
        return self._started(LiveSequence(sequence.namespace, list(sequence.tokens), child))

    @rule(target=sequences, sequence=sequences, length=st.integers(1, 6))
    def fork_and_diverge(self, sequence: LiveSequence, length: int) -> object:
        """Parent and child write other tokens behind the tail that they share."""
        if sequence not in self.live:
            return multiple()
        child = self.fork(sequence)
        assert isinstance(child, LiveSequence)
        self.append_and_run(sequence, [0] * length)
        self.append_and_run(child, [1] * length)
        return child

    @rule(sequence=consumes(sequences), priority=st.integers(-1, 1), pruned=st.booleans())
    def release(self, sequence: LiveSequence, priority: int, pruned: bool) -> None:
        if sequence in self.live:
            self.live.remove(sequence)
            self.manager.release(sequence.table, priority, pruned=pruned)

    # ------------------------------------------------------------ leases and rewinds

    @rule(target=leases, sequence=sequences, data=st.data())
    def lease(self, sequence: LiveSequence, data: st.DataObject) -> object:
        if sequence not in self.live:
            return multiple()
        position = data.draw(st.integers(1, len(sequence.tokens)))
        lease = self.manager.lease(sequence.table, position)
        return (sequence.namespace, sequence.tokens[:position], lease)

    @rule(target=leases, sequence=consumes(sequences))
    def keep(self, sequence: LiveSequence) -> object:
        if sequence not in self.live:
            return multiple()
        lease = self.manager.lease(sequence.table, len(sequence.tokens))
        self.live.remove(sequence)
        self.manager.release(sequence.table)
        return (sequence.namespace, sequence.tokens, lease)

    @rule(target=leases, kept=leases, data=st.data())
    def lease_of_lease(self, kept: tuple[bytes, list[int], Lease], data: st.DataObject) -> object:
        namespace, tokens, lease = kept
        if lease not in self.manager.leases:
            return multiple()
        position = data.draw(st.integers(1, len(tokens)))
        return (namespace, tokens[:position], self.manager.lease(lease, position))

    @rule(target=sequences, kept=leases)
    def resume(self, kept: tuple[bytes, list[int], Lease]) -> object:
        namespace, tokens, lease = kept
        if lease not in self.manager.leases:
            return multiple()
        table = self.manager.resume(lease)
        if table is None:
            return self._admit(namespace, tokens)
        assert table.num_filled == lease.num_filled
        return self._started(LiveSequence(namespace, list(tokens), table))

    @rule(kept=consumes(leases))
    def end_lease(self, kept: tuple[bytes, list[int], Lease]) -> None:
        if kept[2] in self.manager.leases:
            self.manager.end_lease(kept[2])

    # ------------------------------------------------------------ pins, flush

    @rule(target=pins, namespace=namespaces, tokens=prompts)
    def pin(self, namespace: bytes, tokens: list[int]) -> object:
        try:
            return self.manager.pin(namespace, token_bytes(np.array(tokens, np.uint32)))
        except ResourceExhausted:
            return multiple()

    @rule(pin=consumes(pins))
    def unpin(self, pin: Pin) -> None:
        self.manager.unpin(pin)

    @rule(namespace=st.one_of(st.none(), namespaces))
    def flush(self, namespace: bytes | None) -> None:
        idle = self.manager.trie.idle.num_blocks
        freed = self.manager.flush(namespace or b"")
        if namespace is None:
            assert freed == idle
            assert self.manager.trie.idle.num_blocks == 0

    @rule(data=st.data())
    def flush_below(self, data: st.DataObject) -> None:
        """A node of the tree and all behind it, as the page does."""
        nodes = list(self.manager.trie.walk())
        if nodes:
            before = self.manager.trie.num_blocks
            freed = self.manager.flush_below(data.draw(st.sampled_from(nodes)))
            assert self.manager.trie.num_blocks == before - freed

    @rule(namespace=namespaces, tokens=prompts)
    def wait_for_in_flight(self, namespace: bytes, tokens: list[int]) -> None:
        """Whoever is waited for is alive, and computes just that block."""
        data = token_bytes(np.array(tokens, np.uint32))
        match = self.manager.match(namespace, data).whole_blocks(BLOCK)
        found = self.manager.in_flight.next_block(namespace, data, match)
        if found is not None:
            (owner,) = (s for s in self.live if s.table is found[1])
            end = (match.num_blocks + 1) * BLOCK
            assert owner.namespace == namespace
            assert owner.tokens[:end] == tokens[:end]

    @precondition(lambda self: not self.live and self.manager.trie.idle.num_blocks)
    @rule()
    def evict_all(self) -> None:
        """Leaves go first: no prefix is ever left behind a gap."""
        while self.manager.trie.idle.num_blocks:
            self.manager._evict()
            prefixes = set(self.stored.prefixes.values())
            assert all(len(p) == BLOCK or p[:-BLOCK] in prefixes for p in prefixes)

    # ------------------------------------------------------------ what is always true

    def _run_copies(self) -> None:
        """All reads before all writes, as the contract of a copy batch says."""
        written = {
            copy.dst * BLOCK + offset: self.memory.get(copy.src * BLOCK + offset)
            for copy in self.manager.take_copies()
            for offset in range(BLOCK)
        }
        self.memory.update({k: v for k, v in written.items() if v is not None})

    @invariant()
    def structure_is_sound(self) -> None:
        check_integrity(self.manager)

    @invariant()
    def every_filled_slot_holds_its_own_prefix(self) -> None:
        for sequence in self.live:
            table = sequence.table
            for position in range(table.num_filled):
                slot = int(table.row[position // BLOCK]) * BLOCK + position % BLOCK
                expected = (sequence.namespace, tuple(sequence.tokens[: position + 1]))
                assert self.memory[slot] == expected

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.live:
            self.manager.release(sequence.table)
        for lease in list(self.manager.leases):
            self.manager.end_lease(lease)
        for pin in list(self.manager.pins):
            self.manager.unpin(pin)
        self.manager.flush()
        check_integrity(self.manager)
        assert self.manager.num_free == self.manager.pool.num_blocks
        assert not self.manager.trie.roots()


class CollidingMachine(CacheMachine):
    """Digests of two bits: nearly all collide. That costs hits, and never gives a wrong block."""

    @initialize(num_blocks=st.integers(6, 40))
    def start(self, num_blocks: int) -> None:
        digest = BlockDigest(1, lambda data, seed: bytes([sum(data) % 4]) * 16)
        self.manager = BlockManager(num_blocks, BLOCK, digest)
        self.memory = {}
        self.live = []

    def check_match(self, found: int, namespace: bytes, tokens: list[int]) -> None:
        assert found <= len(tokens)  # what it is, the slots show

    @precondition(lambda self: not self.live and self.manager.trie.idle.num_blocks)
    @rule()
    def evict_all(self) -> None:
        while self.manager.trie.idle.num_blocks:
            self.manager._evict()
            check_integrity(self.manager)


SETTINGS = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [CacheMachine, CollidingMachine])
def test_the_cache_against_its_model(machine: type[CacheMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CacheMachine, CollidingMachine])
def test_the_cache_against_its_model_for_longer(machine: type[CacheMachine]) -> None:
    longer = settings(SETTINGS, max_examples=400, stateful_step_count=60)
    run_state_machine_as_test(machine, settings=longer)
