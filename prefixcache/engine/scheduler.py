"""Which sequences run in the next step, and on which blocks.

Owns the queue, the running groups and their progress, and is the only user of the block manager's
admit, grow, fork and release. Never touches tokens' values, logits or KV data.

    waiting ── admit (whole groups) ──> running ── finish ──> released, or kept on a lease
       ^                                   │
       └────── preempt (whole groups) ─────┘

Order everywhere is (priority, arrival): lower numbers are more urgent, and a preempted group keeps
its arrival. The first group in this order is never preempted, so it always gets to its end.
Where there are tenants, they take turns within a priority (`turns`) with prompts and admission.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixcache.cache import (
    BlockCopy,
    BlockManager,
    BlockTable,
    Match,
    NoFreeBlocks,
    Snapshot,
    SwapSpace,
    token_bytes,
)
from prefixcache.engine.observer import Observers
from prefixcache.engine.sequence import Sequence, SequenceGroup, State
from prefixcache.engine.sizing import blocks_at_most, shared_tokens
from prefixcache.engine.turns import Turns


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """Run tokens start to start + count - 1 of a sequence."""

    sequence: Sequence
    group: SequenceGroup
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The position behind the last token that runs."""
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """True where the row ends at the sequence's last token, so that a next one is drawn."""
        return self.stop == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The rows of one forward pass, and the block copies to make before it.

    move_out, copies, move_in: to host blocks, within the pool, and from host blocks, in this order.
    full: a sequence that must end, and its group: nothing is left for it to grow into.
    """

    rows: list[ScheduledRow]
    move_out: list[BlockCopy]
    copies: list[BlockCopy]
    move_in: list[BlockCopy]
    full: list[tuple[Sequence, SequenceGroup]]


class Scheduler:
    """Continuous batching over one block manager.

    max_num_seqs: sequences that run at once. token_budget: tokens of a step, at least
    max_num_seqs. wait_for_inflight: let a group wait for prompt blocks that another computes.
    swap: host blocks for what preempted groups had; None: all of it is found or computed again.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        wait_for_inflight: bool = True,
        swap: SwapSpace | None = None,
    ) -> None:
        self.manager = manager
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.observers = Observers()
        self.swap = swap or SwapSpace(0, lambda num_blocks: False)
        self.turns = Turns()
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._wait = wait_for_inflight
        self._watermark = manager.pool.num_blocks // 100
        self._group_of: dict[BlockTable, SequenceGroup] = {}
        self._rows: dict[Sequence, ScheduledRow] = {}
        self._full: list[tuple[Sequence, SequenceGroup]] = []
        self._budget = 0

    @property
    def has_work(self) -> bool:
        """True where a step would do something."""
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.turns.joins(group, self._contending())
        insort(self.waiting, group, key=lambda g: g.order)

    # ------------------------------------------------------------ a step

    def schedule(self) -> ScheduledStep:
        """Choose the rows of the next forward pass: decodes, then prompts, then new groups."""
        self._rows, self._full, self._budget = {}, [], self._token_budget
        for group in list(self.running):
            self._schedule_rows(group, decoding=True)
        later = []
        for group in self.turns.order(list(self.running)):
            if self.turns.gives_way(group, self.waiting):
                later.append(group)
            else:
                self._schedule_rows(group, decoding=False)
        for group in self.running:
            for sequence in group.live:
                if sequence.state is State.WAITING and not self._is_blocked(sequence):
                    self._start(sequence, group)
        self._admit()
        for group in later:
            self._schedule_rows(group, decoding=False)
        self.turns.settle(self._contending())
        out, back = self.swap.take_moves()
        copies = self.manager.take_copies()
        return ScheduledStep(list(self._rows.values()), out, copies, back, self._full)

    def _contending(self) -> Iterator[SequenceGroup]:
        """Groups that want more than they have: those that wait, or have prompt left to run."""
        yield from self.waiting
        yield from (group for group in self.running if any(map(_has_prompt_left, group.sequences)))

    def _schedule_rows(self, group: SequenceGroup, *, decoding: bool) -> None:
        """Give the sequences of a running group that decode, or those that do not, their tokens."""
        for sequence in group.sequences:
            if sequence.state is State.RUNNING and _decodes(sequence) == decoding:
                self._schedule_row(sequence, group)

    def _schedule_row(self, sequence: Sequence, group: SequenceGroup) -> None:
        """Give a running sequence its tokens of this step; may preempt others to make room."""
        count = min(len(sequence.tokens) - sequence.num_computed, self._budget)
        if count and self._make_room(sequence, group, sequence.num_computed + count):
            self._add_row(ScheduledRow(sequence, group, sequence.num_computed, count))

    def _add_row(self, row: ScheduledRow) -> None:
        self._rows[row.sequence] = row
        self._budget -= row.count
        self.turns.charge(row.group, row.count)

    def _make_room(self, sequence: Sequence, group: SequenceGroup, num_tokens: int) -> bool:
        """Grow a table; on lack of blocks preempt the last group in order, perhaps this one."""
        assert sequence.table is not None
        while True:
            try:
                self.manager.grow(sequence.table, num_tokens)
            except NoFreeBlocks:
                last = max(self.running, key=lambda g: g.order)
                if len(self.running) == 1:
                    if not self._full:  # one a step: what it leaves may be enough for the others
                        self._full.append((sequence, group))
                    return False
                self._preempt(last)
                if last is group:
                    return False
            else:
                return True

    def _preempt(self, group: SequenceGroup) -> None:
        """Take a group's blocks; what it has published stays matchable until it is needed.

        What only it used may be moved to host blocks, for the case that it is needed.
        """
        save = self._saver(group)
        for sequence in group.live:
            row = self._rows.pop(sequence, None)
            if row is not None:
                self._budget += row.count
                self.turns.charge(group, -row.count)
            if sequence.table is not None:
                self._release(sequence, group.priority, pruned=False)
            sequence.num_computed = 0
            sequence.state = State.WAITING
        save()
        self.running.remove(group)
        self.add(group)
        self.observers.preempted(group)

    def _saver(self, group: SequenceGroup) -> Callable[[], None]:
        """Note what a group holds; what is returned saves it, once the group has let it go.

        Only then is known which blocks others use, which will thus be found again.
        """
        if not self.swap.enabled:
            return lambda: None
        held = [
            (sequence, table.node, self.manager.readable(table), table.num_filled)
            for sequence in group.live
            if (table := sequence.table) is not None
        ]

        def save() -> None:
            snapshots = []
            for sequence, node, blocks, num_tokens in held:
                first = self.manager.trie.idle_from(node)
                stop = self.manager.blocks_for(num_tokens)
                own = tuple(blocks[first:stop])
                snapshots.append(Snapshot(sequence, first, own, num_tokens))
            self.swap.save(snapshots)

        return save

    # ------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Admit waiting groups in turn, whole; the first that does not fit holds the others back.

        A group that waits for blocks in flight is passed over: those behind it may go on.
        """
        seats = self._max_num_seqs - sum(group.num_branches for group in self.running)
        for group in self.turns.order(list(self.waiting)):
            if all(self._is_blocked(sequence) for sequence in group.live):
                continue
            if not self._budget or group.num_branches > seats or not self._fits(group):
                return
            started = [sequence for sequence in group.live if self._start(sequence, group)]
            if started:
                seats -= group.num_branches
                self.waiting.remove(group)
                insort(self.running, group, key=lambda g: g.order)

    def _fits(self, group: SequenceGroup) -> bool:
        """Room for the prompts, a block a branch and a watermark; alone, a group always fits."""
        if not self.running:
            return True
        prompts = [token_bytes(sequence.tokens.view()) for sequence in group.live]
        lengths = [len(sequence.tokens) for sequence in group.live]
        needed = blocks_at_most(
            lengths, shared_tokens(prompts), [0] * len(lengths), self.manager.block_size
        )
        cached = self.manager.match(group.namespace, min(prompts))
        room = self.manager.room_after(cached, needed)
        return room - group.num_branches >= self._watermark

    def _is_blocked(self, sequence: Sequence) -> bool:
        """True while another sequence is computing the block that this one waits for."""
        return sequence.blocked_on is not None and sequence.blocked_on in self.manager.in_flight

    def _start(self, sequence: Sequence, group: SequenceGroup) -> bool:
        """Give a waiting sequence its table and its first row; False where it waits for blocks."""
        table = self._resume(sequence)
        if table is None:
            table = self._look_up(sequence, group)
        if table is None:
            return False
        sequence.table = table
        sequence.state = State.RUNNING
        sequence.num_computed = min(table.num_filled, sequence.last_useful_cached)
        self._group_of[table] = group
        self._count(sequence, group)
        count = min(len(sequence.tokens) - sequence.num_computed, self._budget)
        if count:
            try:
                self.manager.grow(table, sequence.num_computed + count)
            except NoFreeBlocks:
                return True  # a newcomer preempts nobody; the next step makes room
            self._add_row(ScheduledRow(sequence, group, sequence.num_computed, count))
        return True

    def _resume(self, sequence: Sequence) -> BlockTable | None:
        """A fork's inherited blocks, where they are all still there."""
        if sequence.lease is None:
            return None
        table = self.manager.resume(sequence.lease)
        self.manager.end_lease(sequence.lease)
        sequence.lease = None
        return table

    def _look_up(self, sequence: Sequence, group: SequenceGroup) -> BlockTable | None:
        """A table by tokens; None while blocks that it could share are being computed."""
        data = token_bytes(sequence.tokens.view())
        match = self.manager.match(group.namespace, data)
        in_flight = self.manager.in_flight.next_block(group.namespace, data, match)
        if in_flight is not None and self._wait:
            digest, producer = in_flight
            if self._group_of[producer].priority <= group.priority:
                sequence.blocked_on = digest
                return None
        sequence.blocked_on = None
        return self._admitted(sequence, group.namespace, data, match)

    def _admitted(
        self, sequence: Sequence, namespace: bytes, data: bytes, match: Match
    ) -> BlockTable:
        """A table on a match; what a preempted sequence had beyond it comes from host blocks."""
        saved = self.swap.find(sequence)
        if saved and saved.first <= match.num_blocks and saved.num_tokens > match.num_tokens:
            match = match.whole_blocks(self.manager.block_size)
            table = self.manager.admit(namespace, data, match)
            if self.manager.restore(table, saved.num_tokens):
                self.swap.move_in(saved, table)
        else:
            table = self.manager.admit(namespace, data, match)
        self.swap.drop(sequence)
        return table

    def _count(self, sequence: Sequence, group: SequenceGroup) -> None:
        """Note where the tokens of a sequence come from, once: not again after a preemption."""
        again, sequence.counted = sequence.counted, True
        if not again:
            sequence.num_forked_tokens = min(sequence.num_computed, sequence.fork_position)
            sequence.num_cached_tokens = sequence.num_computed - sequence.num_forked_tokens
        self.observers.admitted(sequence, group, again=again)

    # ------------------------------------------------------------ after a step

    def advance(self, row: ScheduledRow) -> None:
        """A row's forward pass is done: its full blocks become visible to others."""
        table = row.sequence.table
        assert table is not None
        self.manager.publish(table, row.sequence.tokens.view(), row.stop)
        row.sequence.num_computed = row.stop

    def fork(self, parent: Sequence, group: SequenceGroup, child: Sequence) -> None:
        """Let a new sequence of the same group run on from a running one's blocks."""
        assert parent.table is not None
        child.table = self.manager.fork(parent.table)
        child.num_computed = parent.num_computed
        child.state = State.RUNNING
        child.counted = True
        group.sequences.append(child)
        self._group_of[child.table] = group

    def finish(self, sequence: Sequence, group: SequenceGroup, *, pruned: bool = False) -> None:
        """A sequence ends; its group goes with its last one."""
        sequence.state = State.FINISHED
        self.swap.drop(sequence)
        if sequence.lease is not None:
            self.manager.end_lease(sequence.lease)
            sequence.lease = None
        if sequence.table is not None:
            self._release(sequence, group.priority, pruned=pruned)
        if not group.live:
            (self.running if group in self.running else self.waiting).remove(group)

    def check_swap_space(self) -> None:
        """Verify that no host block is lost. Raises AssertionError."""
        groups = [*self.waiting, *self.running]
        self.swap.check_integrity(
            [s for group in groups for s in group.live if s.state is State.WAITING]
        )

    def _release(self, sequence: Sequence, priority: int, *, pruned: bool) -> None:
        assert sequence.table is not None
        del self._group_of[sequence.table]
        self.manager.release(sequence.table, priority, pruned=pruned)
        sequence.table = None


def _has_prompt_left(sequence: Sequence) -> bool:
    return sequence.state is State.RUNNING and not _decodes(sequence)


def _decodes(sequence: Sequence) -> bool:
    return len(sequence.tokens) - sequence.num_computed == 1
