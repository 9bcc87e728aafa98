"""The error tree: every error that a caller can meet, each with a sentence that says what to do.

PrefixCacheError
├── InvalidArgument      a request is wrong in itself; names the field
├── Unauthenticated      no token or certificate that this server knows
├── PermissionDenied     only for the operator
├── NotFound             no such sequence, pin or request (also: expired, or another tenant's)
├── AlreadyExists        the request id is in use
├── FailedPrecondition   right in itself, but not in this state
├── OutOfRange           behind the end, or before what is still there; only gateways meet it
├── ResourceExhausted    can never fit, or not now; carries the arithmetic and when to retry
├── Unavailable          draining, or down; names the one server that could answer
├── Unimplemented        a documented part of the contract that this build lacks
├── Cancelled            aborted by its caller
├── Internal             a fault of ours; the request ends, the engine goes on
├── ModelError           a model cannot be loaded: unknown architecture, missing tensor, broken file
├── ConfigurationError   the server cannot start as configured
└── TraceError           a trace to be replayed cannot be read; names file, line and reason
"""


class PrefixCacheError(Exception):
    """Base of all errors raised by prefixcache."""


class InvalidArgument(PrefixCacheError):
    """A request is wrong in itself. `field` is its dotted path in the request message."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type["InvalidArgument"], tuple[str, str]]:
        return InvalidArgument, (self.field, self.message)


class Unauthenticated(PrefixCacheError):
    """The caller showed no token or certificate that the server knows."""


class PermissionDenied(PrefixCacheError):
    """The caller is known, and may not do this."""


class NotFound(PrefixCacheError):
    """Unknown, expired, or not the caller's."""


class AlreadyExists(PrefixCacheError):
    """The request id is in use by a live request."""


class FailedPrecondition(PrefixCacheError):
    """The request is right in itself but not in the present state."""


class OutOfRange(PrefixCacheError):
    """What is asked for is gone, or still to come: begin anew. Only gateways meet it."""


class ResourceExhausted(PrefixCacheError):
    """The request can never fit the configured limits, or does not fit them now.

    retry_after: seconds after which it may, as far as that is known; None where it never will.
    The sentence tells configured limits and the caller's own use, never what others hold.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type["ResourceExhausted"], tuple[str, float | None]]:
        return ResourceExhausted, (str(self), self.retry_after)


class Unavailable(PrefixCacheError):
    """The engine is draining or down; try again, or elsewhere.

    address: host:port of the server that alone could answer, since it holds what was asked for;
    empty where that is not known.
    """

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address

    def __reduce__(self) -> tuple[type["Unavailable"], tuple[str, str]]:
        return Unavailable, (str(self), self.address)


class Unimplemented(PrefixCacheError):
    """A part of the contract that this build does not have yet."""


class Cancelled(PrefixCacheError):
    """The caller aborted the request."""


class Internal(PrefixCacheError):
    """A fault of ours. The request that met it ends; the engine goes on."""


class ModelError(PrefixCacheError):
    """A model cannot be loaded; the message names the file, tensor or field."""


class ConfigurationError(PrefixCacheError):
    """The engine cannot start as configured; the message shows the arithmetic."""


class TraceError(PrefixCacheError):
    """A trace of requests cannot be read; the message names the file, the line and the reason."""
