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
    OutOfRange,
    PermissionDenied,
    PrefixCacheError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from prefixcache.limits import flag

STATUS: dict[type[PrefixCacheError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
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
    """Trailing metadata, as google.rpc has it: the wrong field, or when to retry; else empty."""
    status = status_pb2.Status(message=shortened(str(error)))
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=shortened(error.message)
        )
        status.code = code_pb2.INVALID_ARGUMENT
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, ResourceExhausted) and error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.code = code_pb2.RESOURCE_EXHAUSTED
        status.details.add().Pack(retry)
    else:
        return ()
    return ((_DETAILS_KEY, status.SerializeToString()),)


def error_from(
    code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, str | bytes]] = ()
) -> PrefixCacheError:
    """The error that a status stands for; codes outside the table give the base class."""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        for bad in _details(trailing, error_details_pb2.BadRequest):
            for violation in bad.field_violations:
                return InvalidArgument(violation.field, violation.description)
        return InvalidArgument("request", message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retries = _details(trailing, error_details_pb2.RetryInfo)
        seconds = [retry.retry_delay.ToNanoseconds() / 1e9 for retry in retries]
        return ResourceExhausted(message, seconds[0] if seconds else None)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Cancelled(f"deadline exceeded: {message}")
    return _ERRORS.get(code, PrefixCacheError)(message)


def error_from_call(error: Any, holder: str = "") -> PrefixCacheError:
    """The error that a failed call stands for: a grpc.RpcError of either client.

    holder: address of the one server that could answer; it is named where it does not.
    """
    found = _error_from_call(error)
    if holder and isinstance(found, Unavailable):
        return Unavailable(f"{holder}, which holds what was asked for: {found}", holder)
    return found


def _error_from_call(error: Any) -> PrefixCacheError:
    message = error.details() or ""
    if error.code() is grpc.StatusCode.UNAVAILABLE and ("onnect" in message or "resolv" in message):
        reason = message.rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
        message = f"no server answers ({reason}); is `prefixcache serve` running there?"
    if "larger than max" in message:  # gRPC itself says it, before any word of ours
        message = f"{message}; see GetModelInfo.limits['message_bytes'] {flag('message_bytes')}"
    if error.code() is grpc.StatusCode.CANCELLED and message in ("", "CANCELLED"):
        return Unavailable("the call was reset without a word: the server stops, or is flooded")
    return error_from(error.code(), message, error.trailing_metadata() or ())


def _details(trailing: Iterable[tuple[str, str | bytes]], kind: Any) -> list[Any]:
    """The details of one kind."""
    found = []
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                message = kind()
                if detail.Unpack(message):
                    found.append(message)
    return found
