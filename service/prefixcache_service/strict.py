"""Parse requests strictly, and name the field that is wrong.

Owns what protobuf lets pass or reports without a name: two members of one oneof in a message (the
last would win in silence), text that is not UTF-8, and truncated bytes. Knows nothing of meaning.
"""

from collections.abc import Iterator
from functools import cache
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from prefixcache.errors import InvalidArgument

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)


def parse(kind: type[M], data: bytes) -> M:
    """Parse `data` as a `kind`.

    Raises InvalidArgument naming the field for two members of a oneof and for text that is not
    UTF-8, and naming `request` for bytes that are no such message.
    """
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    try:
        message = kind.FromString(data)
    except DecodeError:
        _find_fault(descriptor, memoryview(data), "", decode=True)
        raise InvalidArgument("request", f"these bytes are not a {kind.__name__}") from None
    if _holds_oneof(descriptor):
        _find_fault(descriptor, memoryview(data), "", decode=False)
    return message


def _find_fault(kind: Descriptor, data: memoryview, where: str, *, decode: bool) -> None:
    """Walk the fields of one message, and of those inside that can be at fault."""
    seen: dict[str, int] = {}
    count: dict[int, int] = {}
    for number, payload in _fields(data):
        field = kind.fields_by_number.get(number)
        if field is None:
            continue
        path = where + field.name
        if field.is_repeated:
            count[number] = count.get(number, -1) + 1
            path += f"[{count[number]}]"
        oneof = field.containing_oneof
        if oneof is not None and seen.setdefault(oneof.name, number) != number:
            other = kind.fields_by_number[seen[oneof.name]].name
            raise InvalidArgument(path, f"is given together with {other}; give one of them")
        if payload is None:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and decode:
            _require_utf8(path, payload)
        elif (inner := field.message_type) is not None and (decode or _holds_oneof(inner)):
            _find_fault(inner, payload, f"{path}.", decode=decode)


def _require_utf8(path: str, payload: memoryview) -> None:
    try:
        str(payload, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(path, f"is not UTF-8 at byte {error.start}") from None


@cache
def _holds_oneof(kind: Descriptor) -> bool:
    """True where a message, or one inside it, has a oneof (those that `optional` makes aside)."""
    if any(len(oneof.fields) > 1 for oneof in kind.oneofs):
        return True
    inner = (field.message_type for field in kind.fields)
    return any(_holds_oneof(message) for message in inner if message is not None)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Number and, of length-delimited fields, payload of each field, in order of the wire.

    Groups, which no message of ours has, are passed over. Stops where the bytes are not a message.
    """
    at = depth = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            number, kind = tag >> 3, tag & 7
            payload = None
            if kind == _BYTES:
                size, at = _varint(data, at)
                payload = data[at : at + size]
                at += size
            elif kind == _VARINT:
                at = _varint(data, at)[1]
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            elif kind in (_GROUP, _END_GROUP):
                depth += 1 if kind == _GROUP else -1
                continue
            else:
                return
            if not depth:
                yield number, payload
    except IndexError:
        return


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError
