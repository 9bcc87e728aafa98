"""What waits for one reader. Used on the event loop only; never touches the engine.

A Mailbox merges the outputs of a slow reader, so that it holds at most the sequences themselves. A
CacheEventBox cannot merge, and so gives up on a reader that is too slow.
"""

import asyncio
from dataclasses import dataclass, field

from prefixcache.engine.messages import (
    CacheEvent,
    Failed,
    Finished,
    Output,
    Started,
    TokenLogprobs,
)
from prefixcache.errors import PrefixCacheError, ResourceExhausted
from prefixcache.limits import flag

MAX_MERGED_TOKENS = 1024  # keeps a message with log-probabilities for each token below 32 MiB

Progress = Started | Output | Finished


class Mailbox:
    """The events of one request on their way to its reader."""

    def __init__(self, indexes: int) -> None:
        self._waiting: list[Started | Finished | _Merged] = []
        self._growing: dict[int, _Merged] = {}
        self._unfinished = indexes
        self._error: PrefixCacheError | None = None
        self._arrived = asyncio.Event()
        self.complete = False  # the engine has no more to say

    @property
    def ended(self) -> bool:
        """True where nothing waits and nothing will come."""
        return not self._waiting and self._error is None and self.complete

    def put(self, event: Progress | Failed) -> None:
        """Add an event of the engine."""
        if isinstance(event, Failed):
            self.complete = True
            self._error = event.error
        elif isinstance(event, Output):
            self._merge(event)
        else:
            self._waiting.append(event)
            if isinstance(event, Finished):
                self._unfinished -= 1
                self.complete = self.complete or self._unfinished == 0
        self._arrived.set()

    def fail(self, error: PrefixCacheError) -> None:
        """Let the reader meet `error` behind what waits; the engine may still be at work."""
        self._error = self._error or error
        self._arrived.set()

    async def take(self) -> list[Progress]:
        """All that waits, once there is something; raises the request's error behind it."""
        await self._arrived.wait()
        self._arrived.clear()
        taken, self._waiting = self._waiting, []
        self._growing.clear()
        if self._error is not None:
            if not taken:
                raise self._error
            self._arrived.set()
        return [item.output() if isinstance(item, _Merged) else item for item in taken]

    def _merge(self, event: Output) -> None:
        merged = self._growing.get(event.index)
        if merged is None or len(merged.token_ids) >= MAX_MERGED_TOKENS:
            merged = self._growing[event.index] = _Merged(event.request_id, event.index)
            self._waiting.append(merged)
        merged.add(event)


@dataclass(slots=True)
class _Merged:
    """Outputs of one index that wait, as one."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def add(self, event: Output) -> None:
        self.token_ids.extend(event.token_ids)
        self.texts.append(event.text)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)

    def output(self) -> Output:
        return Output(
            request_id=self.request_id,
            index=self.index,
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )


class CacheEventBox:
    """The cache's events on their way to one watcher, for whom at most so many wait."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: list[CacheEvent] = []
        self._error: PrefixCacheError | None = None
        self._arrived = asyncio.Event()

    def put(self, events: tuple[CacheEvent, ...]) -> None:
        """Add a batch, or give up where too many wait."""
        if self._error is not None or not events:
            return
        if len(self._waiting) + len(events) > self._most:
            last = self._waiting[0].number - 1 if self._waiting else events[0].number - 1
            self._waiting.clear()
            self._error = ResourceExhausted(
                f"more than {self._most} events wait {flag('waiting_events')}: read faster, "
                f"and resume with after = {last}"
            )
        self._waiting.extend(() if self._error else events)
        self._arrived.set()

    def fail(self, error: PrefixCacheError) -> None:
        """Let the watcher meet `error`."""
        self._error = self._error or error
        self._arrived.set()

    async def take(self) -> tuple[CacheEvent, ...]:
        """All that waits, once there is something; raises the error where there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._error is not None:
            raise self._error
        taken, self._waiting = self._waiting, []
        return tuple(taken)
