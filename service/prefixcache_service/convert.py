"""Requests of the wire to commands of the engine: all validation at the edge.

Owns the names of fields in errors; the numbers are `prefixcache.limits`. Pure: touches neither
network nor engine, and may run on any thread. What only the engine can know (is the sequence there,
does it fit the pool) is left to it. `render` is the other direction.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from prefixcache.engine import messages as engine
from prefixcache.errors import InvalidArgument, ResourceExhausted
from prefixcache.limits import Limits, flag
from prefixcache.params import BeamSearchParams, SamplingParams
from prefixcache_service.v1 import prefixcache_pb2 as pb

_EARLY_STOPPING: dict[int, bool | str] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}

PromptMessage = pb.GenerateRequest | pb.ScoreRequest | pb.PinPrefixRequest | pb.TokenizeRequest
T = TypeVar("T")


class Tokenizer(Protocol):
    """What the service needs of `prefixcache.model.tokenizer.Tokenizer`. Any thread may call it."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "") -> list[int]:
        """Text to ids."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""

    def files(self) -> Mapping[str, str]:
        """The files that it is made from elsewhere; FailedPrecondition where it cannot be."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation up to the assistant's turn; FailedPrecondition without template."""


@dataclass(frozen=True, slots=True)
class Edge:
    """What validation has to know of the engine; fixed while it lives.

    longest_token: bytes of the longest token: longer texts than max_model_len such tokens are
        refused before they are tokenized.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_keep_seconds: float
    longest_token: int
    limits: Limits


# ---------------------------------------------------------------- commands


def generate(request: pb.GenerateRequest, edge: Edge) -> engine.Generate:
    """The command of a GenerateRequest; raises InvalidArgument, ResourceExhausted."""
    token_ids = prompt_ids(request, "prompt", edge)
    params: SamplingParams | BeamSearchParams
    if request.WhichOneof("decoding") == "beam_search":
        params = beam_search_params(request.beam_search, "beam_search", edge)
        _require_length(len(token_ids), params, "beam_search", edge)
        _require_at_once("beam_search.num_beams", params.num_beams, edge)
    else:
        params = sampling_params(request.sampling, "sampling", edge)
        check_size(len(token_ids), params, "sampling", edge)
    return engine.Generate(
        request_id=request_id(request.request_id, request.cache_salt, edge),
        prompt_token_ids=token_ids,
        params=params,
        cache_salt=salt(request.cache_salt, edge),
        priority=request.priority,
        keep_seconds=_keep_seconds("keep_seconds", request.keep_seconds, edge),
    )


def fork(request: pb.ForkRequest, edge: Edge) -> engine.Fork:
    """The command of a ForkRequest; raises InvalidArgument, ResourceExhausted."""
    _require_count("branches", len(request.branches), edge)
    _require_at_once("branches", len(request.branches), edge)
    return engine.Fork(
        request_id=request_id(request.request_id, request.cache_salt, edge),
        branches=tuple(
            _branch(branch, f"branches[{index}]", request, edge)
            for index, branch in enumerate(request.branches)
        ),
        cache_salt=salt(request.cache_salt, edge),
        priority=request.priority,
    )


def _branch(
    branch: pb.ForkBranch, where: str, request: pb.ForkRequest, edge: Edge
) -> engine.ForkBranch:
    own = branch.HasField("sampling")
    params_where = f"{where}.sampling" if own else "sampling"
    params = sampling_params(branch.sampling if own else request.sampling, params_where, edge)
    if params.n != 1:
        raise InvalidArgument(f"{params_where}.n", "must be 1; list the branch several times")
    if params.prompt_logprobs is not None:
        raise InvalidArgument(f"{params_where}.prompt_logprobs", "a fork computes no prompt")
    position = branch.position if branch.HasField("position") else None
    if position is not None and not 1 <= position <= edge.max_model_len:
        raise InvalidArgument(
            f"{where}.position", f"must be from 1 to the parent's length, not {position}"
        )
    token_ids: engine.TokenIds = ()
    if branch.WhichOneof("continuation") is not None:
        token_ids = _continuation(branch, f"{where}.", edge)
    _require_length((position or 1) + len(token_ids), params, params_where, edge)
    keep = branch.keep_seconds if branch.HasField("keep_seconds") else request.keep_seconds
    keep_where = f"{where}.keep_seconds" if branch.HasField("keep_seconds") else "keep_seconds"
    return engine.ForkBranch(
        parent_id=_sequence_id(f"{where}.parent_sequence_id", branch.parent_sequence_id),
        params=params,
        position=position,
        token_ids=token_ids,
        keep_seconds=_keep_seconds(keep_where, keep, edge),
    )


def score(request: pb.ScoreRequest, edge: Edge) -> engine.Score:
    """The command of a ScoreRequest; raises InvalidArgument."""
    prefix = prompt_ids(request, "prefix", edge)
    _require_count("continuations", len(request.continuations), edge)
    _require_at_once("continuations", len(request.continuations), edge)
    if not 0 <= request.top_logprobs <= edge.limits.logprobs:
        raise InvalidArgument(
            "top_logprobs", f"must be from 0 to {edge.limits.logprobs} {flag('logprobs')}"
        )
    continuations = []
    for index, message in enumerate(request.continuations):
        where = f"continuations[{index}]"
        if message.WhichOneof("continuation") is None:
            raise InvalidArgument(where, "give text or token_ids")
        ids = _continuation(message, f"{where}.", edge)
        if len(prefix) + len(ids) > edge.max_model_len:
            raise InvalidArgument(where, _too_long(len(prefix), len(ids), edge))
        continuations.append(ids)
    asked = sum(map(len, continuations)) * (1 + request.top_logprobs)
    if asked > edge.limits.score_logprobs:
        raise InvalidArgument(
            "continuations",
            f"have {asked} log-probabilities in all, their top ones included; at most "
            f"{edge.limits.score_logprobs} go into one reply {flag('score_logprobs')}",
        )
    return engine.Score(
        request_id=request_id(request.request_id, request.cache_salt, edge),
        prefix_token_ids=prefix,
        continuations=tuple(continuations),
        cache_salt=salt(request.cache_salt, edge),
        priority=request.priority,
        top_logprobs=request.top_logprobs,
    )


def release(request: pb.ReleaseRequest, edge: Edge) -> list[Callable[[str], engine.Release]]:
    """The commands of a ReleaseRequest, one a sequence, but for their call ids."""
    _require_count("sequence_ids", len(request.sequence_ids), edge)
    cache_salt = salt(request.cache_salt, edge)
    return [
        partial(
            engine.Release,
            sequence_id=_sequence_id(f"sequence_ids[{index}]", sequence_id),
            subtree=request.subtree,
            cache_salt=cache_salt,
        )
        for index, sequence_id in enumerate(request.sequence_ids)
    ]


def pin(request: pb.PinPrefixRequest, edge: Edge) -> Callable[[str], engine.PinPrefix]:
    """The command of a PinPrefixRequest, but for its call id."""
    if not 0 < request.seconds <= edge.max_keep_seconds:  # NaN fails too
        raise InvalidArgument(
            "seconds",
            f"must be above 0 and at most {edge.max_keep_seconds:g} (--max-keep-seconds), not "
            f"{request.seconds}",
        )
    token_ids = prompt_ids(request, "prompt", edge)
    cache_salt = salt(request.cache_salt, edge)
    return lambda call_id: engine.PinPrefix(call_id, token_ids, request.seconds, cache_salt)


def unpin(request: pb.UnpinPrefixRequest, call_id: str, edge: Edge) -> engine.UnpinPrefix:
    """The command of an UnpinPrefixRequest."""
    if not request.pin_id:
        raise InvalidArgument("pin_id", "must not be empty")
    return engine.UnpinPrefix(call_id, request.pin_id, salt(request.cache_salt, edge))


def flush(request: pb.FlushCacheRequest, call_id: str, edge: Edge) -> engine.FlushCache:
    """The command of a FlushCacheRequest."""
    chosen = salt(request.cache_salt, edge) if request.HasField("cache_salt") else None
    return engine.FlushCache(call_id, chosen)


def watch(request: pb.WatchCacheEventsRequest, call_id: str) -> engine.SubscribeEvents:
    """The command of a WatchCacheEventsRequest."""
    after = request.after if request.HasField("after") else None
    return engine.SubscribeEvents(call_id, after, request.with_tokens)


# ---------------------------------------------------------------- parts


def prompt_ids(request: PromptMessage, oneof: str, edge: Edge) -> engine.TokenIds:
    """Token ids of whichever prompt a request carries; raises InvalidArgument."""
    kind = request.WhichOneof(oneof)
    if kind is None:
        raise InvalidArgument(oneof, "missing: give text, token_ids or chat")
    if kind == "text":
        special = not isinstance(request, pb.TokenizeRequest) or (
            not request.HasField("add_special_tokens") or request.add_special_tokens
        )
        ids = encode(request.text, "text", edge, special=special)
    elif kind == "chat":
        ids = encode(_chat_text(request.chat, edge), "chat", edge, special=False)
    else:
        assert not isinstance(request, pb.TokenizeRequest)
        ids = checked_ids(request.token_ids.ids, "token_ids", edge)
    if len(ids) > edge.max_model_len:
        raise InvalidArgument(kind, f"has {len(ids)} tokens; {_longest(edge)}")
    return ids


def check_size(num_prompt: int, params: SamplingParams, where: str, edge: Edge) -> None:
    """Refuse what exceeds the longest sequence, or the most that run at once."""
    _require_length(num_prompt, params, where, edge)
    _require_at_once(f"{where}.n", params.n, edge)


def detokenize_ids(request: pb.DetokenizeRequest, edge: Edge) -> engine.TokenIds:
    """The ids of a DetokenizeRequest; none are fine."""
    if not request.token_ids:
        return ()
    return checked_ids(request.token_ids, "token_ids", edge)


def sampling_params(message: pb.SamplingParams, where: str, edge: Edge) -> SamplingParams:
    """The parameters of a message, checked; raises InvalidArgument naming `where.field`."""
    params = SamplingParams(**{"max_tokens": None, **_given(message)})
    params.validate(edge.vocab_size, where, edge.limits)
    return params


def beam_search_params(message: pb.BeamSearchParams, where: str, edge: Edge) -> BeamSearchParams:
    """The parameters of a message, checked; raises InvalidArgument naming `where.field`."""
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidArgument(
            f"{where}.early_stopping", f"{message.early_stopping} is no value of EarlyStopping"
        )
    early = _EARLY_STOPPING[message.early_stopping]
    params = BeamSearchParams(**{"num_beams": 0, **_given(message), "early_stopping": early})
    params.validate(edge.vocab_size, where, edge.limits)
    return params


def _given(message: pb.SamplingParams | pb.BeamSearchParams) -> dict[str, Any]:
    """The fields that are set, by name: both sides call them the same."""
    plain = {field.name: value for field, value in message.ListFields() if not field.is_repeated}
    return {
        **plain,
        "logit_bias": dict(message.logit_bias),
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
    }


def request_id(name: str, cache_salt: str, edge: Edge) -> str:
    """The engine's id of a request: unique among tenants, since each has a part of its own."""
    most = edge.limits.request_id_chars
    if len(name) > most or not name.isprintable():
        raise InvalidArgument(
            "request_id",
            f"must be at most {most} printable characters {flag('request_id_chars')}",
        )
    tenant = hashlib.blake2b(cache_salt.encode(), digest_size=8).hexdigest()
    return f"{tenant}/{name}"


def salt(cache_salt: str, edge: Edge) -> str:
    """A checked cache salt."""
    most = edge.limits.cache_salt_chars
    if len(cache_salt) > most:
        raise InvalidArgument(
            "cache_salt",
            f"has {len(cache_salt)} characters; at most {most} are allowed "
            f"{flag('cache_salt_chars')}",
        )
    return cache_salt


def _sequence_id(where: str, sequence_id: str) -> str:
    if not sequence_id:
        raise InvalidArgument(where, "must not be empty")
    return sequence_id


def _continuation(
    message: pb.ForkBranch | pb.Continuation, where: str, edge: Edge
) -> engine.TokenIds:
    if message.WhichOneof("continuation") == "text":
        return encode(message.text, f"{where}text", edge, special=False)
    return checked_ids(message.token_ids.ids, f"{where}token_ids", edge)


def encode(text: str, where: str, edge: Edge, *, special: bool) -> engine.TokenIds:
    """Token ids of a text, at least one; raises InvalidArgument naming `where`."""
    if not text:
        raise InvalidArgument(where, "must not be empty")
    limit = edge.max_model_len * edge.longest_token
    if len(text) > limit:
        raise InvalidArgument(
            where,
            f"has {len(text)} characters, which is more than {edge.max_model_len} tokens can hold, "
            "the longest sequence (--max-model-len)",
        )
    ids = tuple(edge.tokenizer.encode(text, add_special_tokens=special, field=where))
    if not ids:
        raise InvalidArgument(where, "gives no token")
    return ids


def checked_ids(ids: Sequence[int], where: str, edge: Edge) -> engine.TokenIds:
    """Ids of the vocabulary, at least one and no more than a sequence may hold."""
    if not ids:
        raise InvalidArgument(where, "must not be empty")
    if len(ids) > edge.max_model_len:
        raise InvalidArgument(where, f"has {len(ids)} tokens; {_longest(edge)}")
    if (highest := max(ids)) >= edge.vocab_size:
        raise InvalidArgument(
            where, f"token id {highest} is outside the vocabulary of {edge.vocab_size}"
        )
    return tuple(ids)


def _chat_text(chat: pb.ChatPrompt, edge: Edge) -> str:
    _require_count("chat.messages", len(chat.messages), edge, limit="chat_messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidArgument(f"chat.messages[{index}].role", "must not be empty")
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        return edge.tokenizer.apply_chat_template(messages)
    except InvalidArgument as error:  # the template knows no path in our request
        raise InvalidArgument("chat.messages", error.message) from None


def _keep_seconds(where: str, seconds: float, edge: Edge) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= edge.max_keep_seconds):
        raise InvalidArgument(
            where,
            f"must be from 0 to {edge.max_keep_seconds:g} seconds (--max-keep-seconds), not "
            f"{seconds}",
        )
    return seconds


def _require_count(where: str, count: int, edge: Edge, *, limit: str = "") -> None:
    most = getattr(edge.limits, limit or where)
    if not 1 <= count <= most:
        raise InvalidArgument(
            where, f"has {count} entries; from 1 to {most} are allowed {flag(limit or where)}"
        )


def _require_at_once(where: str, count: int, edge: Edge) -> None:
    """Refuse what can never run, since a request runs all of it at once."""
    if count > edge.max_num_seqs:
        raise ResourceExhausted(
            f"{where}: {count} are asked for, but at most {edge.max_num_seqs} sequences run at "
            "once (--max-num-seqs)"
        )


def _require_length(
    known: int, params: SamplingParams | BeamSearchParams, where: str, edge: Edge
) -> None:
    """Refuse what cannot fit the longest sequence; `known` tokens are there already."""
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if known + wanted > edge.max_model_len:
        raise InvalidArgument(f"{where}.max_tokens", _too_long(known, wanted, edge))


def _too_long(known: int, more: int, edge: Edge) -> str:
    return f"{known} + {more} = {known + more} tokens; {_longest(edge)}"


def _longest(edge: Edge) -> str:
    return f"the longest sequence is {edge.max_model_len} (--max-model-len)"
