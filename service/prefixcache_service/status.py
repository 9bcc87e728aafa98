"""The one table of errors and gRPC statuses, read in both directions.

Owns how an error travels: code, sentence and, for a wrong field, google.rpc.BadRequest in the
details. Knows neither the server nor the client.
"""

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from prefixcache.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PrefixCacheError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)

STATUS: dict[type[PrefixCacheError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Internal: grpc.StatusCode.INTERNAL,
}
_ERRORS = {code: error for error, code in STATUS.items()}

_DETAILS_KEY = "grpc-status-details-bin"

MAX_MESSAGE_BYTES = 800  # sent thrice, once with three bytes for each; headers have 8 KiB

Metadata = tuple[tuple[str, bytes], ...]


def status_of(error: PrefixCacheError) -> grpc.StatusCode:
    """The code of an error: that of its nearest class in the table, else INTERNAL."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


def shortened(message: str) -> str:
    """A message that fits into HTTP/2 headers, in which a status travels."""
    return message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def details_of(error: PrefixCacheError) -> Metadata:
    """Trailing metadata that names the wrong field, as google.rpc has it; else empty."""
    if not isinstance(error, InvalidArgument):
        return ()
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=error.field, description=shortened(error.message)
    )
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=shortened(str(error)))
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return ((_DETAILS_KEY, status.SerializeToString()),)


def error_from(
    code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> PrefixCacheError:
    """The error that a status stands for; codes outside the table give the base class."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        for violation in _violations(trailing):
            return InvalidArgument(violation.field, violation.description)
        return InvalidArgument("request", message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Cancelled(f"deadline exceeded: {message}")
    return _ERRORS.get(code, PrefixCacheError)(message)


def error_from_call(error: Any) -> PrefixCacheError:
    """The error that a failed call stands for: a grpc.RpcError of either client."""
    message = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and ("onnect" in message or "resolv" in message):
        reason = message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        message = f"no server answers ({reason}); is `prefixcache serve` running there?"
    if error.code() is grpc.StatusCode.CANCELLED and message in ("", "CANCELLED"):
        return Unavailable("the call was reset without a word: the server is stopping")
    return error_from(error.code(), message, error.trailing_metadata() or ())


def _violations(
    trailing: Iterable[tuple[str, str | bytes]],
) -> list[error_details_pb2.BadRequest.FieldViolation]:
    found = []
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                bad = error_details_pb2.BadRequest()
                if detail.Unpack(bad):
                    found.extend(bad.field_violations)
    return found
