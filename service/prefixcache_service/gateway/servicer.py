"""The methods of vllm.grpc.engine.VllmEngine, over the same front as our own.

Owns nothing but the order of things, and the number of its cache events. Errors are raised as they
are; `prefixcache_service.calls` turns them into statuses, and asks who calls.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar, cast

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from prefixcache.engine import messages as engine
from prefixcache.errors import FailedPrecondition, OutOfRange, Unavailable, Unimplemented
from prefixcache_service.front import AsyncFront
from prefixcache_service.gateway import bundle, convert, render
from prefixcache_service.gateway.kv_events import Numbering
from prefixcache_service.servicer import Served
from prefixcache_service.tenants import Tenant

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]

T = TypeVar("T")


class GatewayServicer:
    """All methods, in the order of the proto. `serve` must come before the first call."""

    def __init__(self, front: AsyncFront, threads: ThreadPoolExecutor) -> None:
        self._front = front
        self._threads = threads
        self._numbering = Numbering()
        self._began = time.monotonic()
        self._served: Served | None = None
        self._archive: bytes | None = None

    def serve(self, model: Served) -> None:
        """Name the model that is served."""
        self._served = model

    async def generate(self, request: Any, caller: Tenant) -> AsyncGenerator[Any, None]:
        """Run one prompt: chunks, where it is to be streamed, and one complete an index."""
        edge = self._model.edge
        command = await self._off_loop(lambda: caller.own(convert.generate(request, edge)))
        responses = render.Responses(command, stream=request.stream)
        async with aclosing(self._front.stream(command)) as events:
            async for event in events:
                for response in responses.of(event):
                    yield response

    async def embed(self, request: Any, caller: Tenant) -> Any:
        """Refuse."""
        raise Unimplemented("Embed: this server generates text and gives no embeddings")

    async def health_check(self, request: Any, caller: Tenant) -> Any:
        """Say that calls are let in: where they are not, this one is refused too."""
        return vllm.HealthCheckResponse(healthy=True, message="serving")

    async def abort(self, request: Any, caller: Tenant) -> Any:
        """End live requests; ids that are not known are ignored."""
        for name in request.request_ids:
            self._front.abort(caller.request_id(convert.request_id(name, self._model.edge)))
        return vllm.AbortResponse()

    async def get_model_info(self, request: Any, caller: Tenant) -> Any:
        """Describe the model."""
        return render.model_info(self._model)

    async def get_server_info(self, request: Any, caller: Tenant) -> Any:
        """Describe the process."""
        info = self._model.info
        return vllm.GetServerInfoResponse(
            server_type="prefixcache",
            active_requests=self._front.num_requests if caller.admin else 0,
            uptime_seconds=time.monotonic() - self._began,
            data_parallel_size=1,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
        )

    async def get_loads(self, request: Any, caller: Tenant) -> Any:
        """Say how busy the engine is."""
        stats = await self._front.call(lambda call_id: caller.own(engine.GetStats(call_id)))
        return render.loads(cast(engine.CacheStats, stats), self._model.edge.max_num_seqs)

    async def get_tokenizer(self, request: Any, caller: Tenant) -> AsyncGenerator[Any, None]:
        """Send the tokenizer, as files in an archive. It is packed once."""
        tokenizer = self._model.edge.tokenizer
        if self._archive is None:
            self._archive = await self._off_loop(lambda: bundle.pack(tokenizer.files()))
        for chunk in bundle.chunks(self._archive):
            yield chunk

    async def subscribe_kv_events(self, request: Any, caller: Tenant) -> AsyncGenerator[Any, None]:
        """Stream what enters and leaves the cache of the caller's prompts; for the operator only.

        The first message goes out at once: a gateway waits for it before it does anything else.
        """
        caller.require_admin("SubscribeKvEvents")
        start = request.start_sequence_number
        after = self._numbering.after(start)
        watch = self._front.watch(
            lambda call_id: engine.SubscribeEvents(
                call_id,
                after,
                with_tokens=True,
                snapshot=after is None,
                cache_salt="",
                tenant=caller.name,
            )
        )
        async with aclosing(watch) as batches:
            try:
                first = await anext(batches)
            except FailedPrecondition:  # whose sentence has the engine's numbers
                raise OutOfRange(
                    f"event {start} is no longer in the backlog, or still to come: subscribe from 0"
                ) from None
            for batch in self._numbering.snapshot(first) if first else [_nothing(start)]:
                yield batch
            async for events in batches:
                for batch in self._numbering.batches(events):
                    yield batch

    async def flush_cache(self, request: Any, caller: Tenant) -> Any:
        """Drop what nobody uses, at once; what is in use stays."""
        freed = await self._front.call(lambda call_id: caller.own(engine.FlushCache(call_id)))
        return common.FlushCacheResponse(success=True, message=f"{freed} blocks freed")

    async def start_profile(self, request: Any, caller: Tenant) -> Any:
        """Refuse."""
        raise Unimplemented("StartProfile: this server has no profiler to be started from outside")

    async def stop_profile(self, request: Any, caller: Tenant) -> Any:
        """Refuse."""
        raise Unimplemented("StopProfile: this server has no profiler to be stopped from outside")

    @property
    def _model(self) -> Served:
        if self._served is None:
            raise Unavailable("the model is still loading")
        return self._served

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Run what may take long, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _nothing(number: int) -> Any:
    """A batch that its receiver has had already."""
    return common.KvEventBatch(sequence_number=number)
