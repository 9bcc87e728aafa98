"""Results of the Python API, put together from the engine's events."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefixcache.engine.messages import (
    CacheEvents,
    Event,
    Failed,
    Finished,
    FinishReason,
    Output,
    Reply,
    Started,
    TokenLogprobs,
    Usage,
)


@dataclass(slots=True)
class CompletionOutput:
    """One sample. logprobs: one entry a token where asked for; cumulative_logprob: their sum.

    next_token: with max_tokens = 0, the distribution of the token that would come next.
    score: of a beam search's hypothesis; they come best first.
    """

    index: int
    sequence_id: str = ""
    stream_key: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    next_token: TokenLogprobs | None = None
    score: float | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the chosen tokens' logprobs; None where none were asked for."""
        return sum(entry.logprob for entry in self.logprobs) if self.logprobs else None


@dataclass(slots=True)
class RequestOutput:
    """One request: its samples by index, and what its prompt cost.

    finished: true once `num_outputs` indexes have ended.
    """

    request_id: str
    prompt_token_ids: list[int]
    num_outputs: int = 1
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_forked_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finished: bool = False

    def apply(self, events: Iterable[Event]) -> None:
        """Take in the events of this request; others are passed over. Raises a Failed's error."""
        for event in events:
            if isinstance(event, Reply | CacheEvents) or event.request_id != self.request_id:
                continue
            self._apply(event)

    def _apply(self, event: Started | Output | Finished | Failed) -> None:
        match event:
            case Failed():
                raise event.error
            case Started():
                self._output(event.index).sequence_id = event.sequence_id
                self._output(event.index).stream_key = event.stream_key
                if event.index == 0:
                    self.num_cached_tokens = event.num_cached_tokens
                    self.num_forked_tokens = event.num_forked_tokens
            case Output():
                output = self._output(event.index)
                output.text += event.text
                output.token_ids += event.token_ids
                output.logprobs += event.logprobs
                self.prompt_logprobs += event.prompt_logprobs
            case Finished():
                output = self._output(event.index)
                output.finish_reason, output.stop_reason = event.reason, event.stop_reason
                output.next_token, output.usage = event.next_token, event.usage
                output.score = event.score
                ended = sum(1 for o in self.outputs if o.finish_reason)
                self.finished = ended == max(len(self.outputs), self.num_outputs)

    def _output(self, index: int) -> CompletionOutput:
        while len(self.outputs) <= index:
            self.outputs.append(CompletionOutput(len(self.outputs)))
        return self.outputs[index]
