"""The engine: commands in, steps, events out. Single-threaded; `EngineLoop` gives it a thread.

A step is schedule -> run -> sample -> publish, and fits on a screen below. Owns the requests, and
through its parts all state of serving; never does I/O, never tokenises.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from prefixcache.cache import check_integrity
from prefixcache.config import EngineConfig
from prefixcache.engine.beam_runner import BeamRunner
from prefixcache.engine.build import Progress, build_parts
from prefixcache.engine.calls import answer
from prefixcache.engine.forward import Forward, RowResult, device_is_lost, is_out_of_memory
from prefixcache.engine.injection import Injection
from prefixcache.engine.inspect import Inspector
from prefixcache.engine.messages import (
    Abort,
    Command,
    Event,
    Failed,
    Finished,
    FinishReason,
    Fork,
    Generate,
    Output,
    Score,
    SetTenants,
    Started,
    TokenLogprobs,
    Usage,
    num_indexes,
    num_prompt_tokens,
)
from prefixcache.engine.metrics import EngineMetrics
from prefixcache.engine.outputs import RequestOutput
from prefixcache.engine.registry import Registry
from prefixcache.engine.sampler import NO_TOKEN
from prefixcache.engine.scheduler import ScheduledRow
from prefixcache.engine.sequence import Sequence, SequenceGroup, State
from prefixcache.engine.tenants import RETRY_SECONDS, Quotas
from prefixcache.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    PrefixCacheError,
    ResourceExhausted,
)
from prefixcache.params import BeamSearchParams, SamplingParams

logger = logging.getLogger(__name__)

Decoding = SamplingParams | BeamSearchParams
T = TypeVar("T")


class Engine:
    """A model, its KV blocks, and the requests on them.

    >>> engine = Engine(EngineConfig(model="smollm2"))
    >>> engine.generate(["The sky is"], SamplingParams(temperature=0))[0].outputs[0].text

    Raises ModelError or ConfigurationError where it cannot start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
        injection: Injection | None = None,
    ) -> None:
        parts = build_parts(config, progress, clock)
        self.config = config
        self.model_config = parts.model_config
        self.model_name = parts.model_name
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.num_blocks = parts.manager.pool.num_blocks
        self.same_bits = parts.same_bits
        self.arithmetic = parts.arithmetic
        self.bytes_per_block = parts.bytes_per_block
        self.manager = parts.manager
        self.scheduler = parts.scheduler
        self.event_log = parts.event_log
        self.requests = parts.requests
        self.observers = parts.scheduler.observers
        self.registry = Registry(parts.manager, clock)
        self.metrics = EngineMetrics(parts.cache_metrics, clock, max_tenants=config.metrics_tenants)
        self.inspector = Inspector(self)
        self.observers.add(self.metrics)
        self.observers.add(self.inspector)
        self._beams = BeamRunner(parts.scheduler, self.registry, parts.requests)
        self._clock = clock
        self._injection = injection or Injection()
        self._runner = parts.runner
        self._forward = Forward(parts.runner, parts.sampler)
        self._groups: dict[str, SequenceGroup] = {}
        self.quotas = Quotas(self._groups, self.registry, self.num_blocks, clock)
        self._events: list[Event] = []

    # ------------------------------------------------------------ commands

    @property
    def has_work(self) -> bool:
        """True where a step would run something."""
        return self.scheduler.has_work

    def execute(self, command: Command) -> None:
        """Take a command in; what it answers is among the events of the next `step`."""
        match command:
            case Generate() | Fork() | Score():
                try:
                    self._add(command)
                except PrefixCacheError as error:
                    self._refuse(command, error)
                except Exception as error:
                    logger.exception("request %s could not be taken in", command.request_id)
                    self._refuse(command, Internal(f"{type(error).__name__} in the engine"))
            case Abort():
                group = self._groups.get(command.request_id)
                if group is not None and group.beam is not None:
                    self._end_search(group, self._beams.end(group, "abort"))
                elif group is not None:
                    self.abort(group.live)
            case SetTenants():
                self.quotas.set(command.policies)
                self.scheduler.turns.weights = {p.name: p.weight for p in command.policies}
            case _:
                self._events.extend(answer(self, command))

    def _refuse(self, command: Generate | Fork | Score, error: PrefixCacheError) -> None:
        self._events.append(Failed(command.request_id, error))
        self.observers.ended(command.request_id, None, error)
        if command.tenant:
            self.metrics.own(command.tenant).counters.requests_failed += 1

    def _add(self, command: Generate | Fork | Score) -> None:
        if command.request_id in self._groups:
            raise AlreadyExists(f"request id {command.request_id!r} is in use by a live request")
        self.registry.expire()  # what is past its time counts no more
        self._check_queue(command.tenant)
        group = self._group(command)
        group.trace_parent = command.trace_parent
        self._check_leases(group)
        self.quotas.take_in(group, num_prompt_tokens(command))
        for sequence in group.sequences:
            if group.is_fork:
                self._inherit(sequence)
            if group.beam is None:  # beams come and go; only results get handles
                self.registry.add(sequence, group)
        self._groups[command.request_id] = group
        self.scheduler.add(group)
        self.observers.queued(group)

    def _group(self, command: Generate | Fork | Score) -> SequenceGroup:
        match command:
            case Generate():
                return self.requests.generate(command)
            case Score():
                return self.requests.score(command)
            case Fork():
                return self.requests.fork(command, self.registry)

    def _inherit(self, child: Sequence) -> None:
        """Number a fork, and lease it its parent's blocks where those are computed already."""
        parent = self.registry.get(child.parent_id, child.owner)
        self.requests.number_branch(child, parent.sequence)
        self.registry.renew(parent)
        source = parent.lease or parent.sequence.table
        if source is not None and source.num_filled >= child.fork_position - 1:
            child.lease = self.manager.lease(source, child.fork_position)
            self.manager.num_forks += 1

    def _check_queue(self, tenant: str) -> None:
        """Each tenant has the queue for itself, so that none can fill it for the others."""
        longest = self.config.max_queue
        waiting = self.scheduler.waiting
        if len(waiting) >= longest and sum(g.tenant == tenant for g in waiting) >= longest:
            raise ResourceExhausted(
                f"the queue is full: {longest} requests wait already (--max-queue)", RETRY_SECONDS
            )

    def _check_leases(self, group: SequenceGroup) -> None:
        promised = self.registry.num_kept + sum(g.num_to_keep for g in self._groups.values())
        asked = group.num_to_keep
        if asked and promised + asked > self.config.max_leases:
            raise ResourceExhausted(
                f"the {asked} sequences of this request cannot be kept now: at most "
                f"{self.config.max_leases} are kept at once (--max-leases)",
                RETRY_SECONDS if asked <= self.config.max_leases else None,
            )

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End live sequences now; blocks that only they used are the first to be reused."""
        for sequence in list(sequences):
            if sequence.state is not State.FINISHED:
                self._finish(sequence, self._group_of(sequence), "abort")

    def _group_of(self, sequence: Sequence) -> SequenceGroup:
        return self.registry.get(sequence.id, sequence.owner).group

    # ------------------------------------------------------------ the step

    def step(self) -> list[Event]:
        """Run one step: schedule -> run -> sample -> publish. Returns all events since the last."""
        began = self._clock()
        self._injection.before_step(self)
        self.registry.expire()
        step = self.scheduler.schedule()
        self._runner.move_blocks(step)
        for sequence, group in step.full:
            self._announce(sequence, group)
            self._finish_full(sequence, group)
        rows = [row for row in step.rows if row.sequence.state is not State.FINISHED]
        for row in rows:
            self._announce(row.sequence, row.group)
        for result in self._run(rows):
            if result.row.sequence.state is not State.FINISHED:  # a sibling failed the group
                self.scheduler.advance(result.row)
                made = len(result.token_ids) or int(result.continuations is not None)
                self.quotas.generated(result.row.group, made)
                self._guarded(result.row.group, self._apply, result)
        for search in dict.fromkeys(row.group for row in step.rows if row.group.beam):
            self._guarded(search, self._advance_search, search)
        self.observers.stepped(len(rows), sum(row.count for row in rows), self._clock() - began)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Events that have gathered, cache events for subscribers last."""
        events, self._events = self._events, []
        return events + list(self.event_log.batches())

    def _run(self, rows: list[ScheduledRow]) -> list[RowResult]:
        """Run rows together; where that fails, each group alone: only the faulty one ends.

        Memory that was too little for all may be enough for each. Raises what no group is to blame
        for: a device that is gone.
        """
        if not rows:
            return []
        groups = list(dict.fromkeys(row.group for row in rows))
        try:
            self._injection.before_forward(rows)
            return self._forward.run(rows)
        except Exception as error:
            if device_is_lost(error):
                raise
            if len(groups) == 1:
                logger.exception("request %s failed", groups[0].request_id)
                self._fail(groups[0], _failure(error))
                return []
        # Here, and not above: an error that is being handled holds all that its pass had allocated.
        results = [self._run([row for row in rows if row.group is g]) for g in groups]
        return [result for part in results for result in part]

    def _guarded(self, group: SequenceGroup, work: Callable[[T], None], subject: T) -> None:
        """Do what concerns one request alone; what is raised there ends that one alone."""
        try:
            work(subject)
        except Exception as error:
            logger.exception("request %s failed", group.request_id)
            self._fail(group, Internal(f"its output cannot be made: {type(error).__name__}"))

    # ------------------------------------------------------------ results

    def _announce(self, sequence: Sequence, group: SequenceGroup) -> None:
        if sequence.announced:
            return
        sequence.announced = True
        self._events.append(
            Started(
                group.request_id,
                sequence.index,
                sequence.id,
                sequence.stream_key,
                sequence.num_prompt_tokens,
                sequence.num_cached_tokens,
                sequence.num_forked_tokens,
            )
        )

    def _apply(self, result: RowResult) -> None:
        """Give a row's results to its sequence, and to the samples that begin with it."""
        row = result.row
        sequence, group = row.sequence, row.group
        sequence.prompt_logprobs += result.prompt_logprobs
        sequence.beam_candidates = result.continuations
        if result.next_token is not None:
            self._emit_prompt_logprobs(sequence, group)
            self._finish(sequence, group, "length", next_token=result.next_token)
        if not result.token_ids:
            return
        self._emit_prompt_logprobs(sequence, group)
        samples = [sequence]
        for index in range(1, len(result.token_ids)):
            sample = self.requests.sample(sequence, index)
            self.scheduler.fork(sequence, group, sample)
            self.registry.add(sample, group)
            self._announce(sample, group)
            samples.append(sample)
        group.num_samples = 1
        for sample, token, logprobs in zip(samples, result.token_ids, result.logprobs, strict=True):
            if sample.state is not State.FINISHED:
                self._append(sample, group, token, logprobs)

    def _emit_prompt_logprobs(self, sequence: Sequence, group: SequenceGroup) -> None:
        if sequence.logprob_start is not None and sequence.num_generated == 0:
            logprobs = tuple(sequence.prompt_logprobs)
            event = Output(group.request_id, sequence.index, prompt_logprobs=logprobs)
            self._events.append(event)

    def _append(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        token: int,
        logprobs: TokenLogprobs | None,
    ) -> None:
        """One more token of a sequence: its text, and whether it ends."""
        if token == NO_TOKEN:
            self._fail(group, Internal("the logits leave no token to draw; is the model broken?"))
            return
        sequence.tokens.append(token)
        if sequence.sampler_state is not None:
            sequence.sampler_state.append(token)
        self.observers.sampled(sequence, group)
        enough = sequence.num_generated >= sequence.params.min_tokens
        stopped = enough and token in sequence.stop_ids
        text = "" if stopped else sequence.detokenizer.push([token])
        emit, matched = sequence.stop.push(text, enough)
        reason: FinishReason | None = None
        if stopped or matched is not None:
            reason = "stop"
        elif self._at_limit(sequence):
            reason = "length"
        if reason is not None and matched is None:
            rest, matched = sequence.stop.push(sequence.detokenizer.flush(), enough)
            emit += rest + ("" if matched else sequence.stop.flush())
        entry = () if logprobs is None else (logprobs,)
        self._events.append(Output(group.request_id, sequence.index, (token,), emit, entry))
        if reason is not None:
            cause = matched if matched is not None else token if stopped else None
            self._finish(sequence, group, "stop" if matched else reason, cause)

    def _at_limit(self, sequence: Sequence) -> bool:
        limit = sequence.params.max_tokens
        full = len(sequence.tokens) >= self.max_model_len
        return full or (limit is not None and sequence.num_generated >= limit)

    def _finish(
        self,
        sequence: Sequence,
        group: SequenceGroup,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        next_token: TokenLogprobs | None = None,
    ) -> None:
        """End one sequence: keep it where that was asked for, free it, say so."""
        aborted = reason == "abort"
        table = sequence.table
        kept = sequence.keep_seconds > 0 and not aborted
        if kept and table is not None:
            self.registry.keep(sequence, group, table)
        else:
            self.registry.end(sequence)
        self.scheduler.finish(sequence, group, pruned=aborted and group.is_fork)
        seconds = sequence.keep_seconds if kept else 0.0
        ends = [(sequence.index, sequence.usage)]
        ends += [(index, Usage()) for index in group.take_unborn()]
        for index, usage in ends:
            self._events.append(
                Finished(group.request_id, index, reason, stop_reason, usage, seconds, next_token)
            )
        self.observers.finished(sequence, group, reason)
        if not group.live:
            del self._groups[group.request_id]
            self.observers.ended(group.request_id, group, None)

    def _fail(self, group: SequenceGroup, error: PrefixCacheError) -> None:
        """End a whole request in an error."""
        for sequence in group.live:
            self.registry.end(sequence)
            self.scheduler.finish(sequence, group, pruned=True)
        if self._groups.pop(group.request_id, None) is not None:
            self._events.append(Failed(group.request_id, error))
            self.observers.ended(group.request_id, group, error)

    def _finish_full(self, sequence: Sequence, group: SequenceGroup) -> None:
        """Nothing is left to grow into: a sample ends with what it has.

        A search has nothing yet, nor has a prompt whose log-probabilities are still missing.
        """
        if group.beam is not None:
            what = "go on with this beam search: unpin prefixes, or narrow it"
        elif sequence.next_logprob_position is not None:
            what = "score these tokens: unpin prefixes, or ask for fewer at once"
        else:
            self._finish(sequence, group, "length")
            return
        self._fail(group, ResourceExhausted(f"the pool is too full to {what}"))

    def _advance_search(self, group: SequenceGroup) -> None:
        if group.live:
            self._end_search(group, self._beams.advance(group))

    def _end_search(self, group: SequenceGroup, events: list[Event]) -> None:
        """Pass a search's events on; it has some only when it has ended."""
        if not events:
            return
        self._events += events
        del self._groups[group.request_id]
        for event in events:
            if isinstance(event, Finished):
                self.observers.finished(group.first, group, event.reason)
        self.observers.ended(group.request_id, group, None)

    # ------------------------------------------------------------ for callers in this process

    def generate(
        self,
        prompts: Seq[str | Seq[int]],
        params: Decoding | Seq[Decoding] | None = None,
        *,
        cache_salt: str = "",
        keep_seconds: float = 0.0,
    ) -> list[RequestOutput]:
        """Run prompts (text or token ids) to their end, together; outputs in their order.

        Raises the first request's error, if any; the others are ended.
        """
        if isinstance(prompts, str):
            raise InvalidArgument("prompts", "must be a list of prompts, not one string")
        if params is None or isinstance(params, SamplingParams | BeamSearchParams):
            params = [params or SamplingParams()] * len(prompts)
        commands = [
            Generate(
                f"local-{index}",
                tuple(self.tokenizer.encode(p) if isinstance(p, str) else p),
                own,
                cache_salt,
                keep_seconds=keep_seconds,
            )
            for index, (p, own) in enumerate(zip(prompts, params, strict=True))
        ]
        return self.run(commands)

    def run(self, commands: Seq[Generate | Fork | Score]) -> list[RequestOutput]:
        """Run commands to their end, together; outputs in their order."""
        outputs = []
        for command in commands:
            prompt = command.prompt_token_ids if isinstance(command, Generate) else ()
            count = num_indexes(command)
            outputs.append(RequestOutput(command.request_id, list(prompt), count))
            self.execute(command)
        try:
            while not all(output.finished for output in outputs):
                events = self.step()
                for output in outputs:
                    output.apply(events)
        except BaseException:
            for command in commands:
                self.execute(Abort(command.request_id))
            self.take_events()
            raise
        return outputs

    def check_integrity(self) -> None:
        """Verify that no block is lost. Raises IntegrityError."""
        check_integrity(self.manager)
        self.scheduler.check_swap_space()


def _failure(error: Exception) -> PrefixCacheError:
    """What a request is told whose forward pass failed, run alone."""
    if is_out_of_memory(error):
        return ResourceExhausted("there is not enough memory to run this request, even alone")
    return Internal(f"the forward pass failed: {type(error).__name__}")
