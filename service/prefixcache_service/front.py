"""Between the event loop of the server and the thread of the engine.

Owns who waits for which event. Commands go down at once; events come up in one batch a step and
are put where their reader waits. Touches neither protobuf nor gRPC.

    handler ─── stream(request) ──▶ submit ──▶ engine's thread
       ▲                                             │ deliver(events), once a step
       └── mailbox ◀── dispatch ◀── call_soon_threadsafe
"""

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from prefixcache.engine.messages import (
    Abort,
    CacheEvent,
    CacheEvents,
    Command,
    Event,
    Fork,
    Generate,
    Reply,
    Score,
    SubscribeEvents,
    UnsubscribeEvents,
    num_indexes,
)
from prefixcache.errors import AlreadyExists, PrefixCacheError, Unavailable
from prefixcache.limits import DEFAULTS
from prefixcache_service.mailbox import CacheEventBox, Mailbox, Progress

Request = Generate | Fork | Score


class Submits(Protocol):
    """The side of the engine loop that takes commands."""

    def submit(self, command: Command, /) -> None:
        """Hand over a command; raises Unavailable once the loop has ended."""


class AsyncFront:
    """Asyncio's side of an engine loop. Use it on the loop that made it, `deliver` excepted.

    waiting_events: of the cache, for each watcher.
    """

    def __init__(self, waiting_events: int = DEFAULTS.waiting_events) -> None:
        self._waiting_events = waiting_events
        self._loop = asyncio.get_running_loop()
        self._engine: Submits | None = None
        self._numbers = itertools.count(1)
        self._names: dict[str, str] = {}
        """Of live requests, to the engine's ids."""
        self._mailboxes: dict[str, Mailbox] = {}
        self._calls: dict[str, asyncio.Future[object]] = {}
        self._watchers: dict[str, CacheEventBox] = {}

    def connect(self, engine: Submits) -> None:
        """Name the engine's loop. Until then all commands meet Unavailable."""
        self._engine = engine

    # ------------------------------------------------------------ commands

    async def stream(self, request: Request) -> AsyncGenerator[Progress, None]:
        """Run a request; its events in order, for each index Started, Output…, Finished.

        Raises AlreadyExists while a request of this id runs, or the error that ended the request.
        Leaving early aborts it. The engine sees the id with a number behind it, so that late
        events of an aborted request cannot reach the next one of the same name.
        """
        name = request.request_id
        if name in self._names:
            raise AlreadyExists("a request with this request_id is still running")
        numbered = replace(request, request_id=f"{name}/{next(self._numbers)}")
        mailbox = Mailbox(num_indexes(request))
        self._submit(numbered)
        self._names[name] = numbered.request_id
        self._mailboxes[numbered.request_id] = mailbox
        try:
            while not mailbox.ended:
                for event in await mailbox.take():
                    yield event
        finally:
            del self._names[name]
            del self._mailboxes[numbered.request_id]
            if not mailbox.complete:
                self._submit_quietly(Abort(numbered.request_id))

    def abort(self, request_id: str) -> None:
        """End a live request, whose stream ends with Finished events; unknown ids are ignored."""
        if request_id in self._names:
            self._submit_quietly(Abort(self._names[request_id]))

    @property
    def num_requests(self) -> int:
        """Requests that have a stream now."""
        return len(self._names)

    async def call(self, make: Callable[[str], Command]) -> object:
        """Submit the command that `make(call_id)` gives and await the value of its Reply.

        Raises the Reply's error.
        """
        call_id = uuid.uuid4().hex
        answer = self._loop.create_future()
        command = make(call_id)
        self._calls[call_id] = answer
        try:
            self._submit(command)
            return await answer
        finally:
            del self._calls[call_id]

    def tell(self, command: Command) -> None:
        """Submit a command that is not answered. Raises Unavailable."""
        self._submit(command)

    async def watch(
        self, make: Callable[[str], SubscribeEvents]
    ) -> AsyncGenerator[tuple[CacheEvent, ...], None]:
        """Subscribe to the cache's events: batches without gaps, the backlog first, empty or not.

        Raises FailedPrecondition where the backlog does not reach back so far, ResourceExhausted,
        saying where to resume, where the reader falls far behind.
        """
        box = CacheEventBox(self._waiting_events)
        subscribed: list[str] = []

        def command(call_id: str) -> SubscribeEvents:
            subscribed.append(call_id)
            self._watchers[call_id] = box
            return make(call_id)

        try:
            backlog = await self.call(command)
            yield backlog if isinstance(backlog, tuple) else ()
            while True:
                yield await box.take()
        finally:
            for call_id in subscribed:
                del self._watchers[call_id]
                self._submit_quietly(UnsubscribeEvents(call_id))

    def fail_all(self, error: PrefixCacheError) -> None:
        """End everything that waits with `error`: the engine is down, or its time is up."""
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        self.fail_watchers(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)

    def fail_watchers(self, error: PrefixCacheError) -> None:
        """End all subscriptions with `error`: they have no end of their own."""
        for box in self._watchers.values():
            box.fail(error)

    def _submit(self, command: Command) -> None:
        if self._engine is None:
            raise Unavailable("the model is still loading")
        self._engine.submit(command)

    def _submit_quietly(self, command: Command) -> None:
        try:
            self._submit(command)
        except Unavailable:
            return  # an engine that has ended holds nothing to give back

    # ------------------------------------------------------------ events

    def deliver(self, events: Sequence[Event]) -> None:
        """Take the events of one step, on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:
            return  # the event loop is closed: nobody waits any more

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Reply):
                self._answer(event)
            elif isinstance(event, CacheEvents):
                if box := self._watchers.get(event.call_id):
                    box.put(event.events)
            elif mailbox := self._mailboxes.get(event.request_id):
                mailbox.put(event)

    def _answer(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call_id)
        if answer is None or answer.done():
            return
        if reply.error is not None:
            answer.set_exception(reply.error)
        else:
            answer.set_result(reply.value)
