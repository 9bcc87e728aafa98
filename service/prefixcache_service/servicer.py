"""The methods of prefixcache.v1.PrefixCache: message in, messages out.

Owns nothing but the order of things: convert off the event loop, run through the front, render.
Errors are raised as they are; `calls` turns them into statuses.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar, cast

from prefixcache.engine import messages as engine
from prefixcache.errors import Cancelled, NotFound, Unavailable
from prefixcache_service import convert, render
from prefixcache_service.front import AsyncFront, Request
from prefixcache_service.tenants import C, Tenant
from prefixcache_service.v1 import prefixcache_pb2 as pb

T = TypeVar("T")
Responses = AsyncGenerator[pb.GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model as the service sees it.

    pieces: the bytes of each token, by id. address: where clients reach this very server, or empty.
    """

    edge: convert.Edge
    info: pb.GetModelInfoResponse
    pieces: tuple[bytes, ...]
    address: str = ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none beyond the tokenizer's ids."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


class Servicer:
    """All methods, in the order of the proto. `serve` must come before the first call."""

    def __init__(self, front: AsyncFront, threads: ThreadPoolExecutor) -> None:
        self._front = front
        self._threads = threads
        self._served: Served | None = None

    def serve(self, model: Served) -> None:
        """Name the model that is served."""
        self._served = model

    async def generate(self, request: pb.GenerateRequest, caller: Tenant) -> Responses:
        """Stream the samples of one prompt."""
        edge = self._model.edge
        command = await self._off_loop(lambda: caller.own(convert.generate(request, edge)))
        async with aclosing(self._run(command)) as responses:
            async for response in responses:
                yield response

    async def fork(self, request: pb.ForkRequest, caller: Tenant) -> Responses:
        """Stream the branches of live or kept sequences."""
        edge = self._model.edge
        command = await self._off_loop(lambda: caller.own(convert.fork(request, edge)))
        async with aclosing(self._run(command)) as responses:
            async for response in responses:
                yield response

    async def score(self, request: pb.ScoreRequest, caller: Tenant) -> pb.ScoreResponse:
        """Score all continuations, and answer once."""
        edge = self._model.edge
        command = await self._off_loop(lambda: caller.own(convert.score(request, edge)))
        entries: list[list[engine.TokenLogprobs]] = [[] for _ in command.continuations]
        cached = 0
        async with aclosing(self._front.stream(command)) as events:
            async for event in events:
                if isinstance(event, engine.Output):
                    entries[event.index].extend(filter(None, event.prompt_logprobs))
                elif isinstance(event, engine.Started) and event.index == 0:
                    cached = event.num_cached_tokens
                elif isinstance(event, engine.Finished) and event.reason == "abort":
                    raise Cancelled("the scoring was ended by Release")
        token_bytes = self._model.token_bytes
        return await self._off_loop(lambda: render.score(command, entries, cached, token_bytes))

    async def list_sequences(
        self, request: pb.ListSequencesRequest, caller: Tenant
    ) -> pb.ListSequencesResponse:
        """Show the live tree of one salt."""
        salt = convert.salt(request.cache_salt, self._model.edge)
        infos = await self._front.call(
            lambda call_id: caller.own(engine.ListSequences(call_id, salt))
        )
        return render.sequences(cast(tuple[engine.SequenceInfo, ...], infos), self._model.address)

    async def release(self, request: pb.ReleaseRequest, caller: Tenant) -> pb.ReleaseResponse:
        """Give back sequences, all between the same two steps; raises NotFound if none is there."""
        commands = convert.release(request, self._model.edge)
        calls = [self._front.call(_owned(make, caller)) for make in commands]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        receipts = [answer for answer in answers if isinstance(answer, engine.ReleaseReceipt)]
        for error in answers:
            if isinstance(error, BaseException) and not (isinstance(error, NotFound) and receipts):
                raise error
        return render.receipt(receipts)

    async def get_cache_stats(
        self, request: pb.GetCacheStatsRequest, caller: Tenant
    ) -> pb.GetCacheStatsResponse:
        """Show pool and counters; to a tenant its own."""
        stats = await self._front.call(_owned(engine.GetStats, caller))
        return render.stats(cast(engine.CacheStats, stats))

    async def flush_cache(
        self, request: pb.FlushCacheRequest, caller: Tenant
    ) -> pb.FlushCacheResponse:
        """Drop what nobody uses."""
        edge = self._model.edge
        freed = await self._front.call(
            lambda call_id: caller.own(convert.flush(request, call_id, edge))
        )
        return pb.FlushCacheResponse(blocks_freed=cast(int, freed))

    async def pin_prefix(
        self, request: pb.PinPrefixRequest, caller: Tenant
    ) -> pb.PinPrefixResponse:
        """Pin what is cached of a prompt."""
        edge = self._model.edge
        make = await self._off_loop(lambda: convert.pin(request, edge))
        pin = await self._front.call(_owned(make, caller))
        return pb.PinPrefixResponse(
            pin=render.pin(cast(engine.PinInfo, pin)), address=self._model.address
        )

    async def unpin_prefix(
        self, request: pb.UnpinPrefixRequest, caller: Tenant
    ) -> pb.UnpinPrefixResponse:
        """End a pin."""
        edge = self._model.edge
        pin = await self._front.call(
            lambda call_id: caller.own(convert.unpin(request, call_id, edge))
        )
        return pb.UnpinPrefixResponse(pin=render.pin(cast(engine.PinInfo, pin)))

    async def watch_cache_events(
        self, request: pb.WatchCacheEventsRequest, caller: Tenant
    ) -> AsyncGenerator[pb.WatchCacheEventsResponse, None]:
        """Stream the changes of the cache until the caller leaves; for the operator only."""
        caller.require_admin("WatchCacheEvents")
        watch = self._front.watch(lambda call_id: convert.watch(request, call_id))
        async with aclosing(watch) as batches:
            async for batch in batches:
                for response in render.cache_events(batch):
                    yield response

    async def get_model_info(
        self, request: pb.GetModelInfoRequest, caller: Tenant
    ) -> pb.GetModelInfoResponse:
        """Describe the model and the limits."""
        return self._model.info

    async def tokenize(self, request: pb.TokenizeRequest, caller: Tenant) -> pb.TokenizeResponse:
        """Text to ids."""
        edge = self._model.edge
        ids = await self._off_loop(lambda: convert.prompt_ids(request, "prompt", edge))
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(
        self, request: pb.DetokenizeRequest, caller: Tenant
    ) -> pb.DetokenizeResponse:
        """Ids to text."""
        edge = self._model.edge

        def decode() -> str:
            ids = convert.detokenize_ids(request, edge)
            skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
            return edge.tokenizer.decode(ids, skip_special_tokens=skip)

        return pb.DetokenizeResponse(text=await self._off_loop(decode))

    async def stats(self) -> engine.CacheStats:
        """The engine's figures, all of them, for the metrics page."""
        return cast(engine.CacheStats, await self._front.call(engine.GetStats))

    @property
    def _model(self) -> Served:
        if self._served is None:
            raise Unavailable("the model is still loading")
        return self._served

    async def _run(self, command: Request) -> Responses:
        model = self._model
        async with aclosing(self._front.stream(command)) as events:
            async for event in events:
                for response in render.responses(event, model.token_bytes, model.address):
                    yield response

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Run what may take long, tokenization above all, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _owned(make: Callable[[str], C], caller: Tenant) -> Callable[[str], C]:
    """The same command, as the caller's."""
    return lambda call_id: caller.own(make(call_id))
