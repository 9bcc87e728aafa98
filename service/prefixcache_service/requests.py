"""What a caller writes in Python to requests of the wire; shared by both clients.

Pure. Checks only what the wire cannot carry; the server checks the rest, and names the field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Required, TypedDict, TypeVar

from google.protobuf.message import Message

from prefixcache.errors import InvalidArgument
from prefixcache_service.v1 import prefixcache_pb2 as pb

M = TypeVar("M", bound=Message)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with "role" and "content"."""


class Sampling(TypedDict, total=False):
    """How to draw tokens; see SamplingParams in the proto for ranges and defaults.

    max_tokens left out means until the model's length.
    """

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stream_key: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool


class Options(Sampling, total=False):
    """What a Generate or a Fork takes: how to draw tokens, and of the request as a whole:

    keep_seconds: how long the finished sequences can still be forked; 0 by default.
    priority: lower is more urgent; 0 by default.
    request_id: your name for the request; AlreadyExists while another one has it.
    """

    keep_seconds: float
    priority: int
    request_id: str


class BeamSearch(TypedDict, total=False):
    """How to search; see BeamSearchParams in the proto for ranges and defaults.

    early_stopping: False, True or "never", as in Hugging Face's `generate`.
    """

    num_beams: Required[int]
    num_return_sequences: int
    max_tokens: int
    min_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_beam_groups: int
    diversity_penalty: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    skip_special_tokens: bool


class BeamOptions(BeamSearch, total=False):
    """What a beam search takes: how to search, and the rest as in Options."""

    keep_seconds: float
    priority: int
    request_id: str


_OF_THE_REQUEST = ("keep_seconds", "priority", "request_id")


@dataclass(frozen=True, slots=True)
class Branch:
    """One continuation of a sequence that runs or is kept.

    text or token_ids: put behind the parent before sampling goes on; at most one of them.
    position: tokens of the parent to keep, prompt included; None keeps all.
    keep_seconds, sampling: for this branch, instead of what the call says.
    """

    parent_sequence_id: str
    text: str | None = None
    token_ids: Sequence[int] | None = None
    position: int | None = None
    keep_seconds: float | None = None
    sampling: Sampling = field(default_factory=Sampling)


def generate(prompt: Prompt, cache_salt: str, options: Options) -> pb.GenerateRequest:
    """A GenerateRequest; raises InvalidArgument for values that the wire cannot carry."""
    sampling, rest = _split(options)
    return _make(
        pb.GenerateRequest,
        sampling=_sampling_params(sampling, "sampling"),
        cache_salt=cache_salt,
        **rest,
        **_prompt(prompt),
    )


def beam(prompt: Prompt, cache_salt: str, options: BeamOptions) -> pb.GenerateRequest:
    """A GenerateRequest for a beam search; raises InvalidArgument as `generate` does."""
    search, rest = _split(options)
    search = _given(search)
    if "early_stopping" in search:
        search["early_stopping"] = _early_stopping(search["early_stopping"])
    return _make(
        pb.GenerateRequest,
        beam_search=_make(pb.BeamSearchParams, "beam_search", **search),
        cache_salt=cache_salt,
        **rest,
        **_prompt(prompt),
    )


def _early_stopping(value: object) -> pb.EarlyStopping:
    if value == "never":
        return pb.EARLY_STOPPING_NEVER
    if not isinstance(value, bool):
        raise InvalidArgument("beam_search.early_stopping", 'must be True, False or "never"')
    return pb.EARLY_STOPPING_TRUE if value else pb.EARLY_STOPPING_FALSE


def fork(branches: Sequence[Branch], cache_salt: str, options: Options) -> pb.ForkRequest:
    """A ForkRequest; a branch's own sampling is laid over the call's."""
    sampling, rest = _split(options)
    return _make(
        pb.ForkRequest,
        branches=[
            _branch(branch, f"branches[{index}]", sampling) for index, branch in enumerate(branches)
        ],
        sampling=_sampling_params(sampling, "sampling"),
        cache_salt=cache_salt,
        **rest,
    )


def _branch(branch: Branch, where: str, sampling: Mapping[str, Any]) -> pb.ForkBranch:
    if branch.text is not None and branch.token_ids is not None:
        raise InvalidArgument(f"{where}.text", "is given together with token_ids; give one of them")
    own = None
    if branch.sampling:
        merged = {**sampling, **branch.sampling}
        if branch.sampling.get("stream_key") is not None and "seed" not in branch.sampling:
            merged["seed"] = None  # the call's seed is for branches without a key of their own
        own = _sampling_params(merged, f"{where}.sampling")
    return _make(
        pb.ForkBranch,
        where,
        parent_sequence_id=branch.parent_sequence_id,
        text=branch.text,
        token_ids=None if branch.token_ids is None else _token_ids(branch.token_ids, where),
        position=branch.position,
        keep_seconds=branch.keep_seconds,
        sampling=own,
    )


def score(
    prefix: Prompt,
    continuations: Sequence[str | Sequence[int]],
    cache_salt: str,
    *,
    top_logprobs: int,
    priority: int,
    request_id: str,
) -> pb.ScoreRequest:
    """A ScoreRequest."""
    return _make(
        pb.ScoreRequest,
        continuations=[
            _make(pb.Continuation, f"continuations[{index}]", **_prompt(continuation))
            for index, continuation in enumerate(continuations)
        ],
        top_logprobs=top_logprobs,
        cache_salt=cache_salt,
        priority=priority,
        request_id=request_id,
        **_prompt(prefix),
    )


def release(sequence_ids: Sequence[str], subtree: bool, cache_salt: str) -> pb.ReleaseRequest:
    """A ReleaseRequest."""
    return _make(
        pb.ReleaseRequest, sequence_ids=sequence_ids, subtree=subtree, cache_salt=cache_salt
    )


def pin(prompt: Prompt, seconds: float, cache_salt: str) -> pb.PinPrefixRequest:
    """A PinPrefixRequest."""
    return _make(pb.PinPrefixRequest, seconds=seconds, cache_salt=cache_salt, **_prompt(prompt))


def tokenize(prompt: Prompt, add_special_tokens: bool) -> pb.TokenizeRequest:
    """A TokenizeRequest; of text or chat."""
    fields = _prompt(prompt)
    if "token_ids" in fields:
        raise InvalidArgument("prompt", "give text or chat messages, not token ids")
    return _make(pb.TokenizeRequest, add_special_tokens=add_special_tokens, **fields)


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """A DetokenizeRequest."""
    return _make(pb.DetokenizeRequest, token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def _split(options: Options | BeamOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """How to decode, and what is of the request itself."""
    decoding = {name: value for name, value in options.items() if name not in _OF_THE_REQUEST}
    rest = {name: value for name, value in options.items() if name in _OF_THE_REQUEST}
    return decoding, rest


def _sampling_params(options: Mapping[str, Any], where: str) -> pb.SamplingParams:
    return _make(pb.SamplingParams, where, **_given(options))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not None, which stays unset."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    return given


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if len(prompt) and isinstance(prompt[0], Mapping):
        messages = [
            _make(pb.ChatMessage, f"chat.messages[{index}]", **message)  # type: ignore[arg-type]
            for index, message in enumerate(prompt)
        ]
        return {"chat": pb.ChatPrompt(messages=messages)}
    return {"token_ids": _token_ids(prompt)}  # type: ignore[arg-type]


def _token_ids(ids: Sequence[int], where: str = "") -> pb.TokenIds:
    path = f"{where}.token_ids" if where else "token_ids"
    return _named(path, lambda: pb.TokenIds(ids=ids))


def _make(kind: type[M], where: str = "", **fields: Any) -> M:
    """A message, field by field, so that one that does not fit is named."""
    message = kind()
    for name, value in fields.items():
        path = f"{where}.{name}" if where else name
        if name not in kind.DESCRIPTOR.fields_by_name:
            raise InvalidArgument(path, "there is no such field")
        if value is not None:
            part = _named(path, lambda name=name, value=value: kind(**{name: value}))  # type: ignore[misc]
            message.MergeFrom(part)
    return message


def _named(path: str, make: Callable[[], M]) -> M:
    try:
        return make()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(path, str(error)) from None
