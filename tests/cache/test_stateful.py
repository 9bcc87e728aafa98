"""The whole cache against a plain dictionary model, driven by hypothesis.

KV memory is simulated: what is written to a slot is the whole token prefix that it stands for. So
any block that is shared, copied, evicted or rewritten wrongly shows as a slot that holds another
prefix. The trie is modelled as the set of prefixes that its events say are stored.
"""

from collections.abc import Sequence

import numpy as np
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
        data = token_bytes(np.array(tokens, np.uint32))
        match = self.manager.match(namespace, data)
        assert match.num_tokens == self.stored.longest_match(namespace, tokens)
        if self.manager.room_after(match, self.manager.blocks_for(len(tokens))) < 0:
            return multiple()
        table = self.manager.admit(namespace, data, match)
        assert table.num_filled == match.num_tokens
        return self._started(LiveSequence(namespace, list(tokens), table))

    def _started(self, sequence: LiveSequence) -> LiveSequence:
        self._run_copies()
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def append_and_run(self, sequence: LiveSequence, more: list[int]) -> None:
        if sequence not in self.live:
            return
        sequence.tokens += more
        start, stop = sequence.table.num_filled, len(sequence.tokens)
        before = self.manager.num_available
        try:
            self.manager.grow(sequence.table, stop)
        except NoFreeBlocks:
            assert self.manager.num_available == before
            del sequence.tokens[-len(more) :]
            return
        self._run_copies()
        slots = sequence.table.slots(0, stop, BLOCK)
        assert (slots[:start] == -1).all()
        for position in range(start, stop):
            prefix = tuple(sequence.tokens[: position + 1])
            self.memory[int(slots[position])] = (sequence.namespace, prefix)
        self.manager.publish(sequence.table, np.array(sequence.tokens, np.uint32), stop)

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


CacheMachine.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCache = CacheMachine.TestCase
