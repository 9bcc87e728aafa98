"""Beam searches on the engine's sequences: beams are forked, extended and dropped by table.

Owns no state of its own: a search lives in its group. A step copies no KV but tail blocks, and
those only when a beam that shares one writes.
"""

from dataclasses import replace

from prefixcache.cache import token_bytes
from prefixcache.engine.beam import BeamSearch, Continuation, Ending, Hypothesis
from prefixcache.engine.messages import Event, Finished, FinishReason, Output, Started, Usage
from prefixcache.engine.registry import Registry
from prefixcache.engine.requests import RequestBuilder
from prefixcache.engine.scheduler import Scheduler
from prefixcache.engine.sequence import Sequence, SequenceGroup, State


class BeamRunner:
    """Advances the searches of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        requests: RequestBuilder,
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._requests = requests

    def advance(self, group: SequenceGroup) -> list[Event]:
        """Take a step of the search once all its beams have been run; its results at the end.

        After a preemption beams come back one by one: those that are ready wait for the others.
        """
        search, beams = _search(group), group.live
        if any(not _is_ready(beam) for beam in beams):
            return []
        scored = [beam.beam_candidates for beam in beams if beam.beam_candidates is not None]
        running = search.step(scored, lambda beam, token: self._ending(beams[beam], token))
        if search.done:
            return self._results(group, search)
        self._reorder(group, beams, running)
        return []

    def end(self, group: SequenceGroup, reason: FinishReason) -> list[Event]:
        """End a search without results: what it has cost is its prompt."""
        self._drop(group, group.live)
        prompt = replace(group.first.usage, completion_tokens=0)
        more = _search(group).params.num_return_sequences - 1
        usages = [prompt, *[Usage()] * more]
        return [
            Finished(group.request_id, index, reason, None, usage)
            for index, usage in enumerate(usages)
        ]

    def _ending(self, beam: Sequence, token: int) -> Ending | None:
        """How a beam ends with this token; None where it runs on."""
        tokens = (*beam.tokens.view()[beam.num_prompt_tokens :].tolist(), token)
        if token in beam.stop_ids:
            return Ending(tokens, token)
        if beam.params.stop:
            text = beam.detokenizer.fork().push([token])
            enough = len(tokens) >= beam.params.min_tokens
            matched = beam.stop.fork().push(text, enough).matched
            if matched is not None:
                return Ending(tokens, matched)
        longest = len(tokens) == beam.params.max_tokens
        return Ending(tokens, None) if longest else None

    def _reorder(
        self, group: SequenceGroup, beams: list[Sequence], running: list[Continuation]
    ) -> None:
        """Let each continuation have a sequence: its parent's own, or a fork of it."""
        taken: set[int] = set()
        chosen: list[Sequence] = []
        for continuation in running:
            beam = beams[continuation.parent]
            if continuation.parent in taken:
                child = beam.branch()
                self._scheduler.fork(beam, group, child)
                beam = child
            taken.add(continuation.parent)
            chosen.append(beam)
        self._drop(group, [beam for i, beam in enumerate(beams) if i not in taken])
        group.sequences = chosen
        for beam, continuation in zip(chosen, running, strict=True):
            _extend(beam, continuation.token)

    def _drop(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Beams that are given up; the blocks that only they used are the first to be reused."""
        for beam in beams:
            self._scheduler.finish(beam, group, pruned=True)

    def _results(self, group: SequenceGroup, search: BeamSearch) -> list[Event]:
        best = search.finished[: search.params.num_return_sequences]
        events: list[Event] = []
        for index, hypothesis in enumerate(best):
            events += self._result(group, index, hypothesis)
        self._drop(group, group.live)
        return events

    def _result(self, group: SequenceGroup, index: int, hypothesis: Hypothesis) -> list[Event]:
        """Started (the first index had it at admission), Output and Finished of a hypothesis."""
        name, ending = group.request_id, hypothesis.ending
        result = self._requests.hypothesis(group, index, ending.tokens)
        kept = result.keep_seconds
        if kept > 0:
            self._keep(result, group)
        reason: FinishReason = "length" if ending.stop_reason is None else "stop"
        cause, score = ending.stop_reason, hypothesis.score
        finished = Finished(name, index, reason, cause, result.usage, kept, score=score)
        events: list[Event] = [Output(name, index, ending.tokens, _text(result, ending)), finished]
        if index > 0:
            started = Started(
                name, index, result.id, result.stream_key, result.num_prompt_tokens, 0
            )
            events.insert(0, started)
        return events

    def _keep(self, result: Sequence, group: SequenceGroup) -> None:
        """Lease what is cached of a hypothesis; the rest is computed again when it is forked."""
        manager = self._scheduler.manager
        data = token_bytes(result.tokens.view())
        table = manager.admit(group.namespace, data, manager.match(group.namespace, data))
        self._registry.keep(result, group, table)
        manager.release(table, group.priority)


def _search(group: SequenceGroup) -> BeamSearch:
    assert group.beam is not None
    return group.beam


def _is_ready(beam: Sequence) -> bool:
    """True where the beam's last token has been run, and its KV is still there."""
    return beam.state is State.RUNNING and beam.num_computed == len(beam.tokens)


def _extend(beam: Sequence, token: int) -> None:
    beam.tokens.append(token)
    if beam.sampler_state is not None:
        beam.sampler_state.append(token)
    if beam.params.stop:
        text = beam.detokenizer.push([token])
        beam.stop.push(text, beam.num_generated >= beam.params.min_tokens)


def _text(result: Sequence, ending: Ending) -> str:
    """The text of a whole hypothesis, without its end token or stop string."""
    tokens = ending.tokens[:-1] if isinstance(ending.stop_reason, int) else ending.tokens
    text = ""
    for number, token in enumerate(tokens, start=1):
        enough = number >= result.params.min_tokens
        emit, matched = result.stop.push(result.detokenizer.push([token]), enough)
        text += emit
        if matched is not None:
            return text
    return text + result.stop.push(result.detokenizer.flush(), False).emit + result.stop.flush()
