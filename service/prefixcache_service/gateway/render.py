"""Events of the engine to messages of a gateway: what `prefixcache_service.render` is for ours.

Pure: touches neither network nor engine.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from prefixcache.engine import messages as engine
from prefixcache_service.mailbox import Progress
from prefixcache_service.servicer import Served

TOKENIZER_PATH = "rpc:GetTokenizer"
"""No path, and no name of a hub: a gateway that cannot open it asks for the tokenizer itself."""


@dataclass(slots=True)
class _Output:
    """What one index has given so far, for a caller that wants all of it at once."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[engine.TokenLogprobs | None] = field(default_factory=list)


class Responses:
    """The messages of one request: chunks and completes, or completes alone.

    Completes alone come in the order of their indices: a gateway numbers choices as they come.
    """

    def __init__(self, command: engine.Generate, *, stream: bool) -> None:
        self._prompt = command.prompt_token_ids
        self._stream = stream
        self._cached = 0
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)
        self._completes: dict[int, Any] = {}
        self._next = 0

    def of(self, event: Progress) -> Iterator[Any]:
        """The messages that an event makes, if any."""
        if isinstance(event, engine.Started):
            self._cached = max(
                self._cached, event.num_cached_tokens
            )  # of samples, the first has it
        elif isinstance(event, engine.Finished):
            complete = vllm.GenerateResponse(complete=self._complete(event))
            yield from [complete] if self._stream else self._in_order(event.index, complete)
        elif self._stream:
            if event.token_ids or event.prompt_logprobs:
                yield vllm.GenerateResponse(chunk=self._chunk(event))
        else:
            output = self._outputs[event.index]
            output.token_ids += event.token_ids
            output.logprobs += event.logprobs
            output.prompt_logprobs += event.prompt_logprobs

    def _in_order(self, index: int, complete: Any) -> Iterator[Any]:
        self._completes[index] = complete
        while self._next in self._completes:
            yield self._completes.pop(self._next)
            self._next += 1

    def _chunk(self, event: engine.Output) -> Any:
        return vllm.GenerateStreamChunk(
            index=event.index,
            token_ids=event.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(event.token_ids),
            cached_tokens=self._cached,
            output_logprobs=_output_logprobs(event.logprobs),
            input_logprobs=self._input_logprobs(event.prompt_logprobs),
        )

    def _complete(self, event: engine.Finished) -> Any:
        output = self._outputs.pop(event.index, _Output())
        complete = vllm.GenerateComplete(
            index=event.index,
            output_ids=output.token_ids,
            finish_reason=event.reason,
            prompt_tokens=len(self._prompt),
            completion_tokens=event.usage.completion_tokens,
            cached_tokens=self._cached,
            output_logprobs=_output_logprobs(output.logprobs),
            input_logprobs=self._input_logprobs(output.prompt_logprobs),
        )
        if isinstance(event.stop_reason, str):
            complete.matched_stop_str = event.stop_reason
        elif event.stop_reason is not None:
            complete.matched_token_id = event.stop_reason
        return complete

    def _input_logprobs(self, entries: Sequence[engine.TokenLogprobs | None]) -> Any:
        """None where there are none. The first token of a prompt has no log-probability."""
        if not entries:
            return None
        logprobs = vllm.InputLogProbs(token_ids=self._prompt)
        for entry in entries:
            logprobs.token_logprobs.add(value=None if entry is None else entry.logprob)
            logprobs.top_logprobs.append(_top(entry))
        return logprobs


def _output_logprobs(entries: Sequence[engine.TokenLogprobs]) -> Any:
    if not entries:
        return None
    return vllm.OutputLogProbs(
        token_ids=[entry.token_id for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_top(entry) for entry in entries],
    )


def _top(entry: engine.TokenLogprobs | None) -> Any:
    top = () if entry is None else entry.top
    return vllm.TopLogProbs(
        token_ids=[token for token, _ in top], values=[logprob for _, logprob in top]
    )


# ---------------------------------------------------------------- what is served


def model_info(served: Served) -> Any:
    """The model's card. Clients of the gateway ask for the model by `served_model_name`."""
    info = served.info
    return vllm.GetModelInfoResponse(
        model_path=info.name,
        served_model_name=info.name,
        tokenizer_path=TOKENIZER_PATH,
        is_generation=True,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len,
        vocab_size=info.vocab_size,
        architectures=[info.architecture],
        eos_token_ids=info.eos_token_ids,
    )


def loads(stats: engine.CacheStats, max_num_seqs: int) -> Any:
    """How busy the one engine is; of the pool, a tenant sees nothing."""
    size = stats.block_size
    load = vllm.SchedulerLoad(
        num_running_reqs=stats.sequences_running,
        num_waiting_reqs=stats.sequences_waiting,
        num_total_reqs=stats.sequences_running + stats.sequences_waiting,
        num_used_tokens=stats.blocks_in_use * size,
        max_total_num_tokens=stats.blocks_total * size,
        token_usage=stats.blocks_in_use / max(stats.blocks_total, 1),
        cache_hit_rate=stats.hit_rate or 0.0,
        utilization=stats.sequences_running / max_num_seqs,
        max_running_requests=max_num_seqs,
    )
    return vllm.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version("prefixcache"),
        dp_rank_count=1,
        loads=[load],
    )
