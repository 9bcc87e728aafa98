"""Responses of the wire to what a caller sees in Python; shared by both clients. Pure.

What the engine's messages describe already (usage, sequences, pins, figures, cache events) is given
in their form.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prefixcache.engine.messages import (
    CacheEvent,
    CacheStats,
    FinishReason,
    Histogram,
    PinInfo,
    ReleaseReceipt,
    SequenceInfo,
    SizePoint,
    TenantStats,
    Usage,
)
from prefixcache.errors import NotFound, PrefixCacheError
from prefixcache_service.v1 import prefixcache_pb2 as pb

REASON: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}
_STATE: dict[int, Literal["waiting", "running", "kept"]] = {
    pb.SEQUENCE_STATE_WAITING: "waiting",
    pb.SEQUENCE_STATE_RUNNING: "running",
    pb.SEQUENCE_STATE_KEPT: "kept",
}
_KIND: dict[int, Literal["stored", "removed", "cleared"]] = {
    pb.CacheEvent.KIND_STORED: "stored",
    pb.CacheEvent.KIND_REMOVED: "removed",
    pb.CacheEvent.KIND_CLEARED: "cleared",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural log-probability, and its bytes (perhaps part of a character)."""

    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token there, None for the first one of a prompt, and the best ones."""

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sequence: a sample of a generate, a branch of a fork, a result of a search.

    stop_reason: the stop string or stop token id that ended it, else None.
    num_cached_tokens: prompt tokens that came from the cache.
    num_forked_tokens: prompt tokens taken over from the fork's parent.
    kept_seconds: how long it can still be forked.
    next_token: with max_tokens = 0, the distribution of the token that would come next.
    score: of a beam search's result: the sum of its logprobs / length ** length_penalty.
    address: of the server that holds it; empty where that does not tell (--advertise-address).
    """

    index: int
    sequence_id: str
    stream_key: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    num_prompt_tokens: int
    num_cached_tokens: int
    num_forked_tokens: int
    kept_seconds: float
    next_token: TokenLogprobs | None
    score: float | None = None
    address: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the output's tokens; None where no log-probabilities were asked for."""
        if not self.logprobs:
            return None
        return sum(entry.chosen.logprob for entry in self.logprobs if entry.chosen)


def _cost(output: Completion) -> float:
    logprob = output.cumulative_logprob
    return math.inf if logprob is None else -logprob


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """All samples of one prompt, in order. The properties are those of the first.

    The results of a beam search, and of best_of, come best first.
    """

    outputs: tuple[Completion, ...]

    def ranked(self) -> "GenerateResult":
        """The same samples by cumulative log-probability, best first; those without one last."""
        return GenerateResult(tuple(sorted(self.outputs, key=_cost)))

    @property
    def sequence_id(self) -> str:
        """What to name in a fork."""
        return self.outputs[0].sequence_id

    @property
    def address(self) -> str:
        """Of the server that holds it."""
        return self.outputs[0].address

    @property
    def stream_key(self) -> int:
        """Key of the random stream."""
        return self.outputs[0].stream_key

    @property
    def text(self) -> str:
        """The output's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output's tokens."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One a token, where asked for."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Tokens, each counted once."""
        return self.outputs[0].usage

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the cache."""
        return self.outputs[0].num_cached_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What one message added to one sequence. The first of an index, at admission, adds nothing.

    stream_key, address: as in Completion, and known from the first one on: with them the tokens so
    far can be continued elsewhere. kept_seconds: on the last one.
    """

    index: int
    sequence_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stream_key: int = 0
    address: str = ""
    kept_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """One scored continuation; sum_logprob is its whole log-probability."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    sum_logprob: float


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores in the order of the continuations."""

    scores: tuple[ContinuationScore, ...]
    num_prefix_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model and the limits of a server; see GetModelInfoResponse.

    limits: by name, as docs/api.md lists them. dtype, kv_cache_dtype, attention_backend,
    activation_quantization (empty for none): what computes, "auto" resolved.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_keep_seconds: float
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]
    version: str
    limits: Mapping[str, int]
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    activation_quantization: str


def usage(message: pb.Usage) -> Usage:
    """Tokens of one sequence."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        forked_tokens=message.forked_tokens,
        computed_tokens=message.computed_tokens,
        completion_tokens=message.completion_tokens,
    )


def logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    """One position."""
    return TokenLogprobs(
        chosen=_logprob(message.chosen) if message.HasField("chosen") else None,
        top=tuple(map(_logprob, message.top)),
    )


def _logprob(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.token)


def score(response: pb.ScoreResponse) -> ScoreResult:
    """The result of a score."""
    return ScoreResult(
        scores=tuple(
            ContinuationScore(
                tuple(one.token_ids), tuple(map(logprobs, one.logprobs)), one.sum_logprob
            )
            for one in response.scores
        ),
        num_prefix_tokens=response.num_prefix_tokens,
        num_cached_tokens=response.num_cached_tokens,
    )


def sequences(response: pb.ListSequencesResponse) -> tuple[SequenceInfo, ...]:
    """The live tree."""
    return tuple(
        SequenceInfo(
            sequence_id=info.sequence_id,
            parent_id=info.parent_sequence_id,
            request_id=info.request_id,
            state=_STATE[info.state],
            num_tokens=info.num_tokens,
            fork_position=info.fork_position,
            own_blocks=info.own_blocks,
            shared_blocks=info.shared_blocks,
            stream_key=info.stream_key,
            kept_seconds=info.kept_seconds,
        )
        for info in response.sequences
    )


def receipt(answers: Sequence[pb.ReleaseResponse | PrefixCacheError]) -> ReleaseReceipt:
    """What a release did on all servers that it went to; raises the error that matters most.

    That a server has none of its sequences any more does not matter where another had some.
    """
    done = [answer for answer in answers if isinstance(answer, pb.ReleaseResponse)]
    errors = [answer for answer in answers if isinstance(answer, PrefixCacheError)]
    for error in sorted(errors, key=lambda error: isinstance(error, NotFound)):
        if not (done and isinstance(error, NotFound)):
            raise error
    return ReleaseReceipt(
        tuple(sequence_id for response in done for sequence_id in response.sequence_ids),
        sum(response.blocks_freed for response in done),
    )


def pin(response: pb.PinPrefixResponse | pb.UnpinPrefixResponse) -> PinInfo:
    """A pin."""
    message = response.pin
    return PinInfo(message.pin_id, message.num_tokens, message.num_blocks, message.seconds)


def stats(response: pb.GetCacheStatsResponse) -> CacheStats:
    """Pool and counters; the fields have the same names on both sides."""
    values = {name: getattr(response, name) for name in CacheStats.__dataclass_fields__}
    for name in ("misses", "finish_reasons", "extra"):
        values[name] = dict(values[name])
    values["size_curve"] = tuple(map(_size_point, response.size_curve))
    values["histograms"] = tuple(map(_histogram, response.histograms))
    values["tenants"] = tuple(map(_tenant, response.tenants))
    return CacheStats(**values)


def _size_point(point: pb.SizePoint) -> SizePoint:
    hit_rate = point.hit_rate if point.HasField("hit_rate") else None
    return SizePoint(point.scale, point.blocks, hit_rate)


def _histogram(message: pb.Histogram) -> Histogram:
    return Histogram(
        message.name,
        dict(message.labels),
        tuple(message.bounds),
        tuple(message.counts),
        message.sum,
    )


def _tenant(message: pb.TenantStats) -> TenantStats:
    values = {name: getattr(message, name) for name in TenantStats.__dataclass_fields__}
    return TenantStats(**values)


def model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """The model card; the fields have the same names on both sides."""
    values = {name: getattr(response, name) for name in ModelInfo.__dataclass_fields__}
    values["eos_token_ids"] = tuple(response.eos_token_ids)
    values["limits"] = dict(response.limits)
    return ModelInfo(**values)


def cache_events(response: pb.WatchCacheEventsResponse) -> Iterable[CacheEvent]:
    """The events of one message."""
    for event in response.events:
        yield CacheEvent(
            number=event.number,
            kind=_KIND[event.kind],
            parent=event.parent,
            digests=tuple(event.digests),
            block_size=event.block_size,
            token_ids=tuple(event.token_ids),
            seed_id=response.seed_id,
        )
