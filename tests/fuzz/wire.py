"""Messages of every kind, and bytes that were once messages, over a real channel.

Whatever comes, the status is one of the contract's, a wrong field is one that the message has, and
the server is idle afterwards, with every block accounted for.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from hypothesis import strategies as st

from prefixcache.config import EngineConfig
from prefixcache.errors import NotFound
from prefixcache_service.calls import SERVICE
from prefixcache_service.limits import CLIENT_OPTIONS
from tests.fuzz.mutations import mostly, mutated
from tests.fuzz.target import Check, Target, dump_named, load_named
from tests.model.checkpoints import write_checkpoint
from tests.service.conftest import RunningServer

KEPT = "0123456789abcdef" * 2
"""Stands for the id of a kept sequence, which has as many characters."""
METHODS: dict[str, MethodDescriptor] = {method.name: method for method in SERVICE.methods}
STATUSES = frozenset(
    {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
)
ENOUGH = 3
"""Messages of a stream that are read before it is dropped."""

# ---------------------------------------------------------------- messages

_EDGES = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 255, 256, 257, 511, 512, 2**31 - 1, 2**32 - 1,
          2**63 - 1, 2**64 - 1]  # fmt: skip
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "ids": st.integers(0, 299),
    "stop_token_ids": st.integers(0, 299),
    "token_ids": st.integers(0, 299),
    "request_id": st.sampled_from(["", "mine"]),
    "text": st.text(min_size=1, max_size=8),
    "stop": st.text(min_size=1, max_size=3),
    "key": st.integers(0, 299),
    "early_stopping": st.integers(0, 3),
    "max_tokens": st.integers(1, 6),
    "min_tokens": st.just(0),
    "n": st.sampled_from([1, 1, 4]),
    "num_beams": st.integers(1, 4),
    "num_return_sequences": st.just(1),
    "num_beam_groups": st.just(1),
    "top_k": st.integers(-1, 400),
    "logprobs": st.integers(0, 64),
    "prompt_logprobs": st.integers(0, 64),
    "top_logprobs": st.integers(0, 64),
    "position": st.integers(1, 5),
    "priority": st.integers(-2, 2),
    "parent_sequence_id": st.just(KEPT),
    "sequence_ids": st.just(KEPT),
    "cache_salt": st.just(""),
    "role": st.sampled_from(["user", "system"]),
    "keep_seconds": st.sampled_from([0.0, 0.5, 60.0]),
    "seconds": st.sampled_from([0.5, 60.0]),
    "diversity_penalty": st.just(0.0),
}
_NEEDED = ("max_tokens", "num_beams", "branches", "continuations", "sequence_ids", "seconds",
           "parent_sequence_id", "role", "ids", "messages", "pin_id")  # fmt: skip
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return _message(field.message_type)
    if kind in _RANGES:
        low, high = _RANGES[kind]
        edges = st.sampled_from([edge for edge in _EDGES if low <= edge <= high])
        anything = edges | st.integers(low, high)
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        strange = st.binary(max_size=8) if field.type == FieldDescriptor.TYPE_BYTES else st.text()
        anything = strange
    elif kind == FieldDescriptor.CPPTYPE_BOOL:
        anything = st.booleans()
    else:
        anything = mostly(st.floats(0.1, 1), st.floats())
    likely = _LIKELY.get(field.name)
    return anything if likely is None else mostly(likely, anything)


def _field(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = (_value(entry.fields_by_name[name]) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=3)
    if field.is_repeated:
        one = _value(field)
        return mostly(st.lists(one, min_size=1, max_size=8), st.just([]))
    return _value(field)


def _message(kind: Descriptor) -> st.SearchStrategy[Message]:
    """Any message of a kind; with one member of a oneof, usually."""
    make = message_factory.GetMessageClass(kind)
    fields = {field.name: _field(field) for field in kind.fields}
    oneofs = [[f.name for f in oneof.fields] for oneof in kind.oneofs if len(oneof.fields) > 1]
    needed = [*_NEEDED, *(name for names in oneofs for name in names)]
    required = {name: fields.pop(name) for name in needed if name in fields}
    chosen = st.tuples(*(st.sampled_from([*names, *names, None]) for names in oneofs))

    def build(given: tuple[dict[str, Any], tuple[str | None, ...]]) -> Message:
        values, members = given
        others = {name for names in oneofs for name in names} - set(members)
        return make(**{name: value for name, value in values.items() if name not in others})

    return st.tuples(st.fixed_dictionaries(required, optional=fields), chosen).map(build)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A method, and the bytes that it is sent."""
    name = draw(st.sampled_from(sorted(METHODS)))
    data = draw(_MESSAGES[name]).SerializeToString()
    if draw(st.sampled_from([True, True, False])):
        return name, data
    other = draw(_MESSAGES[name]).SerializeToString()  # two messages in one are a message too
    return name, draw(mutated(data + other) | mutated(data) | st.binary(max_size=24))


_MESSAGES = {name: _message(method.input_type) for name, method in METHODS.items()}

# ---------------------------------------------------------------- the server


@contextlib.contextmanager
def served() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "llama")
        config = EngineConfig(
            model=str(model), block_size=4, num_gpu_blocks_override=512, max_model_len=128,
            max_num_seqs=16, max_num_batched_tokens=64, seed=5,
        )  # fmt: skip
        server = RunningServer(config).load()
        try:
            with grpc.insecure_channel(server.target, options=CLIENT_OPTIONS) as channel:
                grpc.channel_ready_future(channel).result(30)
                yield Sender(server, channel).check
        finally:
            server.close()


class Sender:
    """Sends bytes, and looks at what becomes of them."""

    def __init__(self, server: RunningServer, channel: grpc.Channel) -> None:
        self._server = server
        self._channel = channel

    def check(self, one: tuple[str, bytes]) -> None:
        name, data = one
        with self._server.client() as client:
            kept = client.generate([10, 11, 12], max_tokens=2, keep_seconds=60).sequence_id
            assert len(kept) == len(KEPT)
            try:
                self._send(METHODS[name], data.replace(KEPT.encode(), kept.encode()))
            except grpc.RpcError as error:
                check_error(error, METHODS[name].input_type)
            for info in client.sequences():
                with contextlib.suppress(NotFound):  # a call that was dropped ends by itself
                    client.release(info.sequence_id)
        self._server.check()

    def _send(self, method: MethodDescriptor, data: bytes) -> None:
        path = f"/{SERVICE.full_name}/{method.name}"
        kind = message_factory.GetMessageClass(method.output_type)
        if not method.server_streaming:
            kind.FromString(self._channel.unary_unary(path)(data, timeout=50))
            return
        watches = method.name == "WatchCacheEvents"
        call = self._channel.unary_stream(path)(data, timeout=0.1 if watches else 50)
        try:
            for _ in range(ENOUGH):
                kind.FromString(next(call))
        except StopIteration:
            pass
        except grpc.RpcError as error:
            if not (watches and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        finally:
            call.cancel()


def check_error(error: Any, kind: Descriptor) -> None:
    """A status of the contract; a wrong field is one that this message has."""
    code, sentence = error.code().name, error.details()
    assert code in STATUSES, (code, sentence)
    assert sentence
    if code == "INVALID_ARGUMENT":
        details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        bad = error_details_pb2.BadRequest()
        assert status_pb2.Status.FromString(details).details[0].Unpack(bad)
        field = bad.field_violations[0].field
        assert field == "request" or is_path(field, kind), field


def is_path(path: str, kind: Descriptor) -> bool:
    """Whether a dotted path names a field, or a oneof, of a message and of those inside it."""
    name, _, rest = path.partition(".")
    name = re.sub(r"\[\d+\]$", "", name)
    field = kind.fields_by_name.get(name)
    if field is None:
        return name in kind.oneofs_by_name and not rest
    return not rest or (field.message_type is not None and is_path(rest, field.message_type))


WIRE = Target(
    "wire",
    requests(),
    served,
    few=100,
    many=700,
    load=load_named,
    dump=dump_named,
)
