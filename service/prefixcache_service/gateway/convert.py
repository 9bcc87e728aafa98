"""Requests of a gateway to commands of the engine: what `prefixcache_service.convert` is for ours.

Owns the meaning of fields that are unset, and which fields are refused. Pure: may run on any
thread. Limits and checks are those of our own API.
"""

from importlib.metadata import version
from typing import Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from prefixcache.engine import messages as engine
from prefixcache.errors import InvalidArgument
from prefixcache.params import SamplingParams
from prefixcache_service import convert
from prefixcache_service.convert import Edge

_UNSUPPORTED = {
    "mm_inputs": "multimodal input",
    "extra_mm_inputs": "multimodal input",
    "media_refs": "multimodal input",
    "kv_transfer_params": "moving KV between servers",
    "kv_transfer_params_json": "moving KV between servers",
    "data_parallel_rank": "choosing a data-parallel rank",
}


def generate(request: Any, edge: Edge) -> engine.Generate:
    """The command of a GenerateRequest of VllmEngine; raises InvalidArgument, ResourceExhausted."""
    _refuse_unsupported(request)
    token_ids = _prompt_ids(request, edge)
    params = _sampling_params(request.sampling_params, edge)
    convert.check_size(len(token_ids), params, "sampling_params", edge)
    return engine.Generate(request_id(request.request_id, edge), token_ids, params)


def request_id(name: str, edge: Edge) -> str:
    """The engine's id of a request: a gateway uses no cache salt."""
    return convert.request_id(name, "", edge)


def _prompt_ids(request: Any, edge: Edge) -> engine.TokenIds:
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("input", "missing: give tokenized or text")
    if kind == "tokenized":
        return convert.checked_ids(request.tokenized.input_ids, "tokenized.input_ids", edge)
    return convert.encode(request.text, "text", edge, special=True)


def _sampling_params(message: Any, edge: Edge) -> SamplingParams:
    """Zero, where it can mean nothing, is the default: such fields of the wire cannot be unset."""

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    temperature, seed = given("temperature"), given("seed")
    params = SamplingParams(
        n=message.n or 1,
        temperature=1.0 if temperature is None else _shortest(temperature),
        top_k=message.top_k,
        top_p=_shortest(message.top_p) or 1.0,
        min_p=_shortest(message.min_p),
        repetition_penalty=_shortest(message.repetition_penalty) or 1.0,
        presence_penalty=_shortest(message.presence_penalty),
        frequency_penalty=_shortest(message.frequency_penalty),
        logit_bias={token: _shortest(bias) for token, bias in message.logit_bias.items()},
        seed=None if seed is None else seed % 2**64,
        max_tokens=given("max_tokens"),
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        skip_special_tokens=message.skip_special_tokens,
    )
    params.validate(edge.vocab_size, "sampling_params", edge.limits)
    return params


def _shortest(value: float) -> float:
    """The shortest number that a float32 of the wire stands for.

    0.9, as the client wrote it, and not 0.8999999761581421: so that a seed draws the same tokens
    as through our own API.
    """
    return float(str(np.float32(value)))


def _refuse_unsupported(request: Any) -> None:
    given = {field.name for field, _ in request.ListFields()}
    for name, what in _UNSUPPORTED.items():
        if name in given:
            raise InvalidArgument(name, f"{what} is not supported")
    params = request.sampling_params
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidArgument(f"sampling_params.{constraint}", "structured output is not supported")
    if params.HasField("truncate_prompt_tokens"):
        raise InvalidArgument(
            "sampling_params.truncate_prompt_tokens", "is not supported: send a shorter prompt"
        )
    parts = (("", request), ("tokenized.", request.tokenized), ("sampling_params.", params))
    for where, message in parts:
        unknown: Any = UnknownFieldSet(message)  # whose stub does not say that it is a sequence
        for field in unknown:
            raise InvalidArgument(
                f"{where}{field.field_number}",
                f"there is no field of this number in smg-grpc-proto {version('smg-grpc-proto')}: "
                "the gateway is newer than this server; see docs/scale-out.md for the versions",
            )
