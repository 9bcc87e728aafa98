"""What every call goes through: the gate, who calls, strict parsing, statuses, one log line.

Owns which calls are open, and whether new ones may come in. Knows nothing of what a call means:
that is the servicers', whose methods take a message and return, or yield, messages.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from prefixcache.errors import (
    Cancelled,
    Internal,
    PrefixCacheError,
    ResourceExhausted,
    Unavailable,
)
from prefixcache.limits import DEFAULTS, Limits, flag
from prefixcache_service import log, strict
from prefixcache_service.status import details_of, shortened, status_of
from prefixcache_service.tenants import EVERYBODY, Tenant, Tenants
from prefixcache_service.v1 import prefixcache_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["PrefixCache"]
MAX_LOGGED_CHARS = 128


class Context(Protocol):
    """What is used of grpc.aio.ServicerContext."""

    async def write(self, message: Any, /) -> None:
        """Send a message; waits while the reader is slow."""

    def invocation_metadata(self) -> Any:
        """Pairs of key and value that came with the call, or None."""

    def auth_context(self) -> Any:
        """What TLS knows of the peer: property to values."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> Any:
        """End the call with a status; always raises."""


class Calls:
    """All calls of all services. They are refused until `open`, and again after `close`.

    tenants: who may call; None lets everybody in. limits: how many calls may be open.
    """

    def __init__(self, tenants: Tenants | None = None, limits: Limits = DEFAULTS) -> None:
        self._tenants = tenants
        self._limits = limits
        self._open_calls: Counter[str] = Counter()
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

    def handler(
        self, service: ServiceDescriptor, servicer: object
    ) -> "grpc.GenericRpcHandler[Any, Any]":
        """What a server registers: every method of a service, from its descriptor."""
        return grpc.method_handlers_generic_handler(
            service.full_name,
            {method.name: self._method(method, servicer) for method in service.methods},
        )

    def _method(
        self, method: MethodDescriptor, servicer: object
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        behaviour = getattr(servicer, _snake(method.name))
        kind, response_kind = _class_of(method.input_type), _class_of(method.output_type)
        streaming = method.server_streaming
        of = method.containing_service
        name = method.name if of.full_name == SERVICE.full_name else f"{of.name}.{method.name}"

        async def handle(data: bytes, context: Context) -> Message | None:
            call = _Call(name)
            with self._counted():
                try:
                    caller = self._caller(context, call)
                    response = None
                    with self._one_more_of(caller):
                        request = self._admit(kind, data, call)
                        if streaming:
                            await _write_all(behaviour(request, caller), context)
                        else:
                            response = await behaviour(request, caller)
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

    @contextmanager
    def _one_more_of(self, caller: Tenant) -> Iterator[None]:
        """Count the open calls, of all and of a tenant; raises ResourceExhausted beyond a limit."""
        most, most_of_one = self._limits.open_calls, self._limits.tenant_calls
        if self._open_calls.total() >= most:
            raise ResourceExhausted(
                f"this server has at most {most} calls open at once {flag('open_calls')}", 1.0
            )
        if self._tenants is not None and self._open_calls[caller.name] >= most_of_one:
            raise ResourceExhausted(
                f"you have {most_of_one} calls open, the most at once {flag('tenant_calls')}", 1.0
            )
        self._open_calls[caller.name] += 1
        try:
            yield
        finally:
            self._open_calls[caller.name] -= 1
            if not self._open_calls[caller.name]:
                del self._open_calls[caller.name]

    def _caller(self, context: Context, call: "_Call") -> Tenant:
        """Who calls. Raises Unavailable, Unauthenticated."""
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        metadata = context.invocation_metadata() or ()
        caller = self._tenant(self._tenants, context, metadata)
        call.tenant = caller.name
        traces = [value for key, value in metadata if key == "traceparent"]
        return replace(caller, trace_parent=traces[0]) if traces else caller

    @staticmethod
    def _tenant(tenants: Tenants | None, context: Context, metadata: Any) -> Tenant:
        if tenants is None:
            return EVERYBODY
        shown = context.auth_context()
        names = [
            name.decode(errors="replace")
            for key in ("x509_subject_alternative_name", "x509_common_name")
            for name in shown.get(key, ())
        ]
        return tenants.of_caller(metadata, names)

    def _admit(self, kind: type[Message], data: bytes, call: "_Call") -> Message:
        request = strict.parse(kind, data)
        if "request_id" in request.DESCRIPTOR.fields_by_name:
            named: Any = request
            named.request_id = call.request_id = named.request_id or uuid.uuid4().hex
        return request


class _Call:
    """One call, as far as the log and its status go."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.request_id = ""
        self.tenant = ""
        self._began = time.monotonic()

    def report(self, status: str) -> None:
        """Write the call's log line."""
        milliseconds = (time.monotonic() - self._began) * 1000
        whose = {"tenant": self.tenant} if self.tenant else {}
        log.info(
            "call",
            method=self.method,
            **whose,
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
