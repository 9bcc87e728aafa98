"""Requests served with time: how many run at once, what is preempted, hit, and how fast it goes.

Owns a schedule, simpler than the engine's and with no model behind it; the cache is `BlockManager`.
A step decodes one token for each running sequence and, within the token budget, runs chunks of
prompts in order of arrival; `cost.py` says how long it takes. A request is admitted when it has
arrived and its prompt and a watermark fit; its prompt's room is taken at once. Where a sequence
finds no block to grow into, the youngest is preempted and begins again behind what is cached.

Between two events (a block is full, a sequence ends, a request arrives) all steps are alike, so
they are taken together: the work grows with the events and not with the tokens.
"""

import heapq
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache.cache import BlockDigest, BlockManager, BlockTable, NoFreeBlocks
from prefixcache.simulate.cost import StepCost
from prefixcache.simulate.replay import NAMESPACE, Hits, room_of
from prefixcache.simulate.trace import NAME_WORDS, Request, SequenceRecord

Words = npt.NDArray[np.uint32]
Progress = Callable[[str, int, int], None]

_NOBODYS = 2**63
"""Names from here on are of blocks whose content the trace does not tell; no two are equal."""

_LOOK_AHEAD = 64
"""Waiting requests looked at before a step: those whose blocks others compute are passed over."""

_SAMPLES = 400
"""Points of the course over time that are kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server is started with.

    num_blocks: the pool. block_size: tokens a block. max_num_seqs: sequences that run at once.
    token_budget: tokens of a step.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int = 256
    token_budget: int = 8192


@dataclass(slots=True)
class Served:
    """What came out. Times are seconds, or steps where the model's size is not known.

    hits: at first admissions; recomputed_tokens: after preemptions, in no other figure.
    running_time: sequences that ran, each times how long. most_blocks: in use at once.
    course: (time, running, waiting, blocks in use), now and then.
    """

    hits: Hits = field(default_factory=Hits)
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    most_running: int = 0
    most_blocks: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    running_time: float = 0.0
    first_token: list[float] = field(default_factory=list)
    course: list[tuple[float, int, int, int]] = field(default_factory=list)

    @property
    def mean_running(self) -> float:
        """Sequences that ran at once, on average over the time in which any did."""
        return self.running_time / self.busy if self.busy else 0.0


@dataclass(eq=False, slots=True)
class _Job:
    """A sequence on its way.

    order: most urgent first, then oldest. names: of all its whole blocks, as the cache's tokens.
    length: tokens it had when it was last started; target: how long it becomes. computed: those
    with KV. began: the step in which it began to decode. version: its events of an older one are
    void.
    """

    order: tuple[int, float, int]
    arrival: float
    record: SequenceRecord
    names: Words
    length: int
    target: int
    samples: list["_Job"] = field(default_factory=list)
    table: BlockTable | None = None
    computed: int = 0
    began: int = 0
    counted: bool = False
    blocked_on: bytes | None = None
    version: int = 0


class Serving:
    """One simulated server."""

    def __init__(self, limits: Limits, cost: StepCost) -> None:
        self.limits = limits
        self.served = Served()
        self.manager = BlockManager(limits.num_blocks, NAME_WORDS, BlockDigest(seed=0))
        self._cost = cost
        self._timed = cost.model.known
        self._waiting: list[_Job] = []
        self._prefilling: list[_Job] = []
        self._decoding: dict[_Job, None] = {}
        self._events: list[tuple[int, int, int, _Job]] = []
        self._numbers = itertools.count()
        self._names = _NOBODYS
        self._clock = 0.0
        self._steps = 0
        self._context = 0
        """Tokens of all decoding sequences together."""
        self._sampled_at = 0.0
        self._watermark = limits.num_blocks // 100

    def run(self, requests: Sequence[Request], progress: Progress | None = None) -> Served:
        """Serve all requests to their end. progress: called with (step, done, total)."""
        arriving = deque(sorted(requests, key=lambda r: r.arrival))
        total, every = len(arriving), max(len(arriving) // 100, 1)
        self._sampled_at = arriving[-1].arrival / _SAMPLES if arriving else 0.0
        while arriving or self._waiting or self._prefilling or self._decoding:
            while arriving and (not self._timed or arriving[0].arrival <= self._clock):
                self._arrive(arriving.popleft())
                if progress is not None and len(arriving) % every == 0:
                    progress("serve", total - len(arriving), total)
            self._admit()
            if self._prefilling or self._decoding:
                self._advance(arriving[0].arrival if arriving and self._timed else math.inf)
            elif arriving:
                self._idle_until(arriving[0].arrival)
        self.served.seconds = self._clock
        self.served.course = _thinned(self.served.course)
        return self.served

    def _idle_until(self, arrival: float) -> None:
        """Nothing runs before the next request arrives."""
        if arrival - self._clock >= self._sampled_at:
            rest = 0, len(self._waiting), self.manager.num_in_use
            self.served.course += [(self._clock, *rest), (arrival, *rest)]
        self._clock = max(self._clock, arrival)

    # ------------------------------------------------------------ arrival

    def _arrive(self, request: Request) -> None:
        jobs: list[_Job] = []
        for record in request.sequences:
            job = self._job(request, record)
            if record.sample and jobs:
                jobs[0].samples.append(job)
            else:
                jobs.append(job)
        if room_of(request, self.limits.block_size) <= self.limits.num_blocks and all(
            self._blocks(job.target) <= self.limits.num_blocks for job in jobs
        ):
            for job in jobs:
                insort(self._waiting, job, key=lambda j: j.order)
        else:
            self.served.hits.refused += 1

    def _job(self, request: Request, record: SequenceRecord) -> _Job:
        size = self.limits.block_size
        target = record.prompt_tokens + record.output_tokens
        known = record.blocks[: min(target, record.filled_tokens) // size]
        if record.prompt_blocks > record.prompt_tokens // size:  # its last block is not full
            known = known[: record.prompt_tokens // size]
        more = target // size - len(known)
        unknown = np.arange(self._names, self._names + more, dtype=np.uint64)
        self._names += more
        names = np.concatenate([known, unknown]).view(np.uint32)
        arrival = request.arrival if self._timed else 0.0
        order = (request.priority, request.arrival, next(self._numbers))
        return _Job(order, arrival, record, names, record.prompt_tokens, target)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    # ------------------------------------------------------------ admission

    def _admit(self) -> None:
        """Admit in order; the first that does not fit holds back all behind it."""
        budget = self.limits.token_budget - len(self._decoding)
        budget -= sum(job.length - job.computed for job in self._prefilling)
        for job in list(itertools.islice(self._waiting, _LOOK_AHEAD)):
            if job.blocked_on is not None and job.blocked_on in self.manager.in_flight:
                continue
            running = len(self._decoding) + len(self._prefilling)
            full = running + 1 + len(job.samples) > self.limits.max_num_seqs
            if running and (full or budget <= 0):
                return
            if not self._start(job, alone=not running):
                if job.blocked_on is None:
                    return
                continue
            self._waiting.remove(job)
            budget -= job.length - job.computed

    def _start(self, job: _Job, *, alone: bool) -> bool:
        """Give a waiting job its blocks. False where it does not fit, or others compute some."""
        manager, size = self.manager, self.limits.block_size
        data = job.names[: job.length // size * NAME_WORDS].tobytes()
        match = manager.match(NAMESPACE, data)
        needed = self._blocks(job.length) + len(job.samples)
        if not alone and manager.room_after(match, needed) < self._watermark:
            job.blocked_on = None
            return False
        in_flight = manager.in_flight.next_block(NAMESPACE, data, match)
        job.blocked_on = None if in_flight is None else in_flight[0]
        if in_flight is not None:
            return False
        job.table = manager.admit(NAMESPACE, data, match)
        manager.grow(job.table, self._blocks(job.length) * NAME_WORDS)
        usable = job.length - 1
        if job.record.usable_tokens is not None:
            usable = min(usable, job.record.usable_tokens)
        job.computed = min(match.num_blocks * size, usable)
        if job.counted:
            self.served.recomputed_tokens += job.length - job.computed
        elif not job.record.sample:
            self.served.hits.add(job.record, match.num_blocks, size)
        job.counted = True
        self._prefilling.append(job)
        return True

    # ------------------------------------------------------------ steps

    def _advance(self, until: float) -> None:
        """Take one step with chunks of prompts, or all steps up to the next event."""
        self._settle()
        chunks = self._chunks()
        count = 1 if chunks else self._steps_alike(until)
        if not count:
            return
        rows = len(self._decoding)
        context = self._context + rows * (count - 1) / 2
        tokens, pairs, read = float(rows), context, context
        for job, chunk in chunks:
            tokens += chunk
            pairs += chunk * (job.computed + chunk / 2)
            read += job.computed + chunk
        self._pass_time(count * self._cost.seconds(tokens, pairs, read))
        self._steps += count
        self._context += rows * count
        for job, chunk in chunks:
            job.computed += chunk
            self._publish(job, job.computed)
            if job.computed == job.length:
                self._prefilling.remove(job)
                self._begin_decoding(job)

    def _chunks(self) -> list[tuple[_Job, int]]:
        budget = self.limits.token_budget - len(self._decoding)
        chunks = []
        for job in self._prefilling:
            chunk = min(job.length - job.computed, max(budget, 0))
            if chunk:
                chunks.append((job, chunk))
            budget -= chunk
        return chunks

    def _steps_alike(self, until: float) -> int:
        """How many steps it takes to the next event or arrival; 0 where nothing decodes."""
        if not self._decoding:
            return 0
        while self._events[0][2] != self._events[0][3].version:
            heapq.heappop(self._events)
        count = self._events[0][0] - self._steps
        if until < math.inf:
            step = self._cost.seconds(len(self._decoding), self._context, self._context)
            count = min(count, math.ceil((until - self._clock) / step))
        return max(count, 1)

    def _pass_time(self, seconds: float) -> None:
        served = self.served
        running = len(self._decoding) + len(self._prefilling)
        self._clock += seconds
        served.busy += seconds
        served.running_time += seconds * running
        served.most_running = max(served.most_running, running)
        in_use = self.manager.num_in_use
        served.most_blocks = max(served.most_blocks, in_use)
        last = served.course[-1][0] if served.course else -math.inf
        if self._clock - last >= self._sampled_at:
            served.course.append((self._clock, running, len(self._waiting), in_use))

    # ------------------------------------------------------------ a job's way

    def _begin_decoding(self, job: _Job) -> None:
        """Its prompt is done: the first token is there, and its samples begin as well."""
        if job.length == job.record.prompt_tokens and not job.record.sample:
            self.served.first_token.append(self._clock - job.arrival)
        samples, job.samples = job.samples, []
        self._decode(job)
        for sample in samples:
            if self._start(sample, alone=False):
                self._prefilling.remove(sample)
                sample.computed = sample.length
                self._decode(sample)
            else:
                insort(self._waiting, sample, key=lambda j: j.order)

    def _decode(self, job: _Job) -> None:
        if job.length >= job.target:  # a prompt alone, or a search's prompt
            self._end(job, job.computed)
            return
        self.served.output_tokens += 1
        job.length += 1
        job.began = self._steps
        self._decoding[job] = None
        self._context += job.length
        self._schedule(job)

    def _schedule(self, job: _Job) -> None:
        """Its next event: it ends, or the block it writes to is full."""
        assert job.table is not None
        full = job.table.num_blocks * self.limits.block_size + 1
        step = job.began + min(job.target, full) - job.length
        heapq.heappush(self._events, (step, next(self._numbers), job.version, job))

    def _settle(self) -> None:
        """Handle what has become due."""
        while self._events and self._events[0][0] <= self._steps:
            _, _, version, job = heapq.heappop(self._events)
            if version != job.version:
                continue
            if job.length + self._steps - job.began >= job.target:
                self._leave(job)
                self._end(job, job.target - 1)
            elif self._grow(job):
                self._schedule(job)

    def _grow(self, job: _Job) -> bool:
        """One block more, if need be from the youngest; False where that was the job itself."""
        assert job.table is not None
        while True:
            try:
                self.manager.grow(job.table, (job.table.num_blocks + 1) * NAME_WORDS)
            except NoFreeBlocks:
                last = max([*self._decoding, *self._prefilling], key=lambda j: j.order)
                self._preempt(last)
                if last is job:
                    return False
            else:
                return True

    def _preempt(self, job: _Job) -> None:
        self.served.preemptions += 1
        if job in self._decoding:
            self._leave(job)
            job.computed = job.length - 1
        else:
            self._prefilling.remove(job)
        self._release(job, job.computed, pruned=False)
        insort(self._waiting, job, key=lambda j: j.order)

    def _leave(self, job: _Job) -> None:
        """It decodes no more: its length is settled."""
        gained = self._steps - job.began
        job.length += gained
        self.served.output_tokens += gained
        self._context -= job.length
        del self._decoding[job]
        job.version += 1

    def _end(self, job: _Job, computed: int) -> None:
        self._release(job, computed, pruned=job.record.pruned)

    def _release(self, job: _Job, computed: int, *, pruned: bool) -> None:
        assert job.table is not None
        self._publish(job, computed)
        self.manager.release(job.table, job.order[0], pruned=pruned)
        job.table = None

    def _publish(self, job: _Job, computed: int) -> None:
        assert job.table is not None
        whole = computed // self.limits.block_size
        self.manager.publish(job.table, job.names, whole * NAME_WORDS)


def _thinned(course: list[tuple[float, int, int, int]]) -> list[tuple[float, int, int, int]]:
    """At most some hundred points: without arrivals the time was not known beforehand."""
    return course[:: len(course) // _SAMPLES + 1]
