"""Engines driven step by step, for tests: requests by name, their answers, and what must match."""

from collections.abc import Sequence

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import (
    Abort,
    Event,
    Failed,
    Fork,
    ForkBranch,
    Generate,
    TokenLogprobs,
)
from prefixcache.engine.outputs import CompletionOutput, RequestOutput
from prefixcache.engine.sequence import SequenceGroup
from prefixcache.errors import PrefixCacheError


class Driver:
    """Puts commands into an engine, steps it, and keeps what comes out by request name.

    fails: requests that are expected to; their errors are kept, any other's is raised.
    """

    def __init__(self, engine: Engine, fails: Sequence[str] = ()) -> None:
        self.engine = engine
        self.fails = fails
        self.outputs: dict[str, RequestOutput] = {}
        self.errors: dict[str, PrefixCacheError] = {}

    def start(
        self,
        name: str,
        tokens: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        keep_seconds: float = 0.0,
    ) -> RequestOutput:
        command = Generate(name, tuple(tokens), params, cache_salt, priority, keep_seconds)
        return self._execute(name, command, list(tokens))

    def fork(self, name: str, *branches: ForkBranch) -> RequestOutput:
        return self._execute(name, Fork(name, branches), [])

    def _execute(self, name: str, command: Generate | Fork, tokens: list[int]) -> RequestOutput:
        self.outputs[name] = RequestOutput(name, tokens)
        self.engine.execute(command)
        return self.outputs[name]

    def abort(self, name: str) -> None:
        self.engine.execute(Abort(name))

    def step(self, count: int = 1) -> list[Event]:
        """Run steps; their events, which have reached the outputs."""
        events: list[Event] = []
        for _ in range(count):
            events += self.engine.step()
        for event in events:
            if isinstance(event, Failed):
                if event.request_id not in self.fails:
                    raise event.error
                self.errors[event.request_id] = event.error
        good = [event for event in events if not isinstance(event, Failed)]
        for output in self.outputs.values():
            output.apply(good)
        return events

    def finish(self) -> dict[str, RequestOutput]:
        """Run until nothing is left to do."""
        while self.engine.has_work:
            self.step()
        self.step()  # hands over what a refused or aborted request left
        return self.outputs

    def group(self, name: str) -> SequenceGroup:
        """The live request of this name, queued or running."""
        groups = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        return next(group for group in groups if group.request_id == name)

    def preempt(self, name: str) -> None:
        """Take a running request's blocks now, as lack of room would at this moment."""
        self.engine.scheduler._preempt(self.group(name))


Bits = tuple[list[int], list[TokenLogprobs]]


def bits(output: CompletionOutput) -> Bits:
    """What must be the same, exactly: tokens, and every float of their logprobs."""
    assert len(output.logprobs) == len(output.token_ids) > 0
    return output.token_ids, output.logprobs


def run_one(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> CompletionOutput:
    """One request alone, to its end; its first sample."""
    return engine.generate([list(tokens)], params)[0].outputs[0]
