"""What every call goes through: the gate, strict parsing, errors to statuses, one log line.

Owns which calls are open, and whether new ones may come in. Knows nothing of what a call means:
that is the servicer's, whose methods take a message and return, or yield, messages.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message

from prefixcache.errors import Cancelled, Internal, PrefixCacheError, Unavailable
from prefixcache_service import log, strict
from prefixcache_service.status import details_of, shortened, status_of
from prefixcache_service.v1 import prefixcache_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["PrefixCache"]
NAMED = (pb.GenerateRequest, pb.ForkRequest, pb.ScoreRequest)
MAX_LOGGED_CHARS = 128


class Context(Protocol):
    """What is used of grpc.aio.ServicerContext."""

    async def write(self, message: Any, /) -> None:
        """Send a message; waits while the reader is slow."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> Any:
        """End the call with a status; always raises."""


class Calls:
    """All calls of the service. They are refused until `open`, and again after `close`."""

    def __init__(self, servicer: object) -> None:
        self._servicer = servicer
        self._refusal: str | None = "the model is still loading; see grpc.health.v1"
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Let calls in."""
        self._refusal = None

    def close(self, reason: str) -> None:
        """Answer new calls with UNAVAILABLE and this reason; running ones go on."""
        self._refusal = reason

    async def wait_idle(self, seconds: float) -> bool:
        """Wait for running calls to end; False where they did not in this time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a server registers: every method of the proto, from its descriptor."""
        return grpc.method_handlers_generic_handler(
            SERVICE.full_name, {method.name: self._method(method) for method in SERVICE.methods}
        )

    def _method(self, method: MethodDescriptor) -> "grpc.RpcMethodHandler[Any, Any]":
        behaviour = getattr(self._servicer, _snake(method.name))
        kind, response_kind = _class_of(method.input_type), _class_of(method.output_type)
        streaming = method.server_streaming

        async def handle(data: bytes, context: Context) -> Message | None:
            call = _Call(method.name)
            with self._counted():
                try:
                    request = self._admit(kind, data, call)
                    response = None
                    if streaming:
                        await _write_all(behaviour(request), context)
                    else:
                        response = await behaviour(request)
                    call.report("OK")
                    return response
                except asyncio.CancelledError:
                    call.report("CANCELLED")
                    raise
                except Exception as error:
                    await call.abort(error, context)
                    return None

        make = (
            grpc.unary_stream_rpc_method_handler
            if streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(handle, None, response_kind.SerializeToString)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()

    def _admit(self, kind: type[Message], data: bytes, call: "_Call") -> Message:
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        request = strict.parse(kind, data)
        if isinstance(request, NAMED):
            request.request_id = call.request_id = request.request_id or uuid.uuid4().hex
        return request


class _Call:
    """One call, as far as the log and its status go."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.request_id = ""
        self._began = time.monotonic()

    def report(self, status: str) -> None:
        """Write the call's log line."""
        milliseconds = (time.monotonic() - self._began) * 1000
        log.info(
            "call",
            method=self.method,
            request_id=self.request_id[:MAX_LOGGED_CHARS],
            status=status,
            ms=milliseconds,
        )

    async def abort(self, error: Exception, context: Context) -> None:
        """End the call with the status of `error`; a fault of ours goes to the log in full."""
        if not isinstance(error, PrefixCacheError):
            log.error("fault", error, method=self.method, request_id=self.request_id)
            error = Internal("a fault of the server; its log has the details")
        code = status_of(error)
        self.report(code.name)
        await context.abort(code, shortened(str(error)), details_of(error))


async def _write_all(responses: AsyncGenerator[Message, None], context: Context) -> None:
    """Send what a method yields.

    Written from here, not handed to gRPC to iterate: a call that is cancelled while a slow reader
    makes it wait then ends the generator at once, and with it the work.
    """
    async with aclosing(responses):
        async for response in responses:
            await _write(response, context)


async def _write(response: Message, context: Context) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:  # the caller has just gone: no fault of ours
        raise Cancelled("the call has ended") from error


def _class_of(message: Descriptor) -> type[Message]:
    return message_factory.GetMessageClass(message)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
