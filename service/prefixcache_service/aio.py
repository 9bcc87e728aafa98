"""The client for asyncio: Client with await. Owns one channel; shares the rest with `client`."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

import grpc

from prefixcache.engine.messages import (
    CacheEvent,
    CacheStats,
    PinInfo,
    ReleaseReceipt,
    SequenceInfo,
)
from prefixcache_service import requests, results
from prefixcache_service.channel import File, call_options, credentials
from prefixcache_service.limits import CLIENT_OPTIONS, DEFAULT_TARGET, target_of
from prefixcache_service.requests import BeamSearch, Branch, Common, Prompt, Sampling
from prefixcache_service.results import Completion, Delta, GenerateResult, ModelInfo, ScoreResult
from prefixcache_service.status import error_from_call
from prefixcache_service.v1 import prefixcache_pb2 as pb
from prefixcache_service.v1.prefixcache_pb2_grpc import PrefixCacheStub

T = TypeVar("T")


class AsyncClient:
    """A connection to a prefixcache server, made and used on one event loop.

    Arguments, results and errors are those of Client; `stream` and `stream_fork` return an
    AsyncStream at once, everything else is awaited.

    >>> async with AsyncClient("localhost:50051") as c:
    ...     async for delta in c.stream("Once upon a time", max_tokens=32):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        cache_salt: str = "",
        timeout: float | None = None,
        token: str | None = None,
        ca: File | None = None,
        certificate: File | None = None,
    ) -> None:
        self.cache_salt = cache_salt
        self._options = call_options(token, timeout)
        where, tls = target_of(target), credentials(ca, certificate)
        self._channel = (
            grpc.aio.insecure_channel(where, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(where, tls, options=CLIENT_OPTIONS)
        )
        self._stub = PrefixCacheStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        await self._channel.close(grace=None)

    # ------------------------------------------------------------ generate, fork, score

    async def generate(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> GenerateResult:
        """Continue a prompt and wait for all its samples."""
        stream = self.stream(
            prompt,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        )
        async with stream:
            return await stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> "AsyncStream":
        """Continue a prompt; what is generated comes as it is made."""
        common = Common(request_id, self.cache_salt, priority)
        request = requests.generate(prompt, common, keep_seconds, sampling)
        return AsyncStream(self._stub.Generate(request, **self._options))

    async def best_of(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> GenerateResult:
        """Draw `n` samples and rank them by cumulative log-probability: best first."""
        sampling.setdefault("logprobs", 0)
        result = await self.generate(
            prompt,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        )
        return result.ranked()

    async def beam(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **search: Unpack[BeamSearch],
    ) -> GenerateResult:
        """Search for the likeliest continuations; best first, each with its `score`.

        search: num_beams, and more; see BeamSearch.
        """
        common = Common(request_id, self.cache_salt, priority)
        request = requests.beam(prompt, common, keep_seconds, search)
        call = self._stub.Generate(request, **self._options)
        async with AsyncStream(call) as stream:
            return await stream.result()

    async def fork(
        self,
        branches: Sequence[Branch],
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """Continue sequences that run or are kept, and wait; one result a branch, in order."""
        stream = self.stream_fork(
            branches,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        )
        async with stream:
            return list((await stream.result()).outputs)

    def stream_fork(
        self,
        branches: Sequence[Branch],
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> "AsyncStream":
        """Continue sequences that run or are kept, streamed; `index` is the branch."""
        common = Common(request_id, self.cache_salt, priority)
        request = requests.fork(branches, common, keep_seconds, sampling)
        return AsyncStream(self._stub.Fork(request, **self._options))

    async def score(
        self,
        prefix: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        top_logprobs: int = 0,
        priority: int = 0,
        request_id: str = "",
    ) -> ScoreResult:
        """Log-probabilities of each continuation behind the prefix."""
        common = Common(request_id, self.cache_salt, priority)
        request = requests.score(prefix, continuations, common, top_logprobs)
        return results.score(await self._call(self._stub.Score, request))

    # ------------------------------------------------------------ sequences

    async def sequences(self) -> tuple[SequenceInfo, ...]:
        """The sequences of this salt that wait, run or are kept."""
        request = pb.ListSequencesRequest(cache_salt=self.cache_salt)
        return results.sequences(await self._call(self._stub.ListSequences, request))

    async def release(self, *sequence_ids: str, subtree: bool = False) -> ReleaseReceipt:
        """Give back kept sequences, end running ones; with `subtree` their descendants too.

        Those that are not there are passed over; raises NotFound where none of them is.
        """
        request = requests.release(sequence_ids, subtree, self.cache_salt)
        return results.receipt(await self._call(self._stub.Release, request))

    # ------------------------------------------------------------ cache

    async def stats(self) -> CacheStats:
        """Pool and counters at this moment."""
        return results.stats(await self._call(self._stub.GetCacheStats, pb.GetCacheStatsRequest()))

    async def flush(self, *, all_salts: bool = False) -> int:
        """Drop cached blocks that nobody uses, of this salt or of all; returns how many."""
        request = pb.FlushCacheRequest(cache_salt=None if all_salts else self.cache_salt)
        response = await self._call(self._stub.FlushCache, request)
        return int(response.blocks_freed)

    async def pin(self, prompt: Prompt, *, seconds: float) -> PinInfo:
        """Keep the cached full blocks of a prompt from eviction."""
        request = requests.pin(prompt, seconds, self.cache_salt)
        return results.pin(await self._call(self._stub.PinPrefix, request))

    async def unpin(self, pin_id: str) -> PinInfo:
        """End a pin; returns what it held."""
        request = pb.UnpinPrefixRequest(pin_id=pin_id, cache_salt=self.cache_salt)
        return results.pin(await self._call(self._stub.UnpinPrefix, request))

    async def watch_events(
        self, *, after: int | None = None, with_tokens: bool = False
    ) -> AsyncGenerator[CacheEvent, None]:
        """Changes of the cache as they happen; `after` resumes behind that number."""
        request = pb.WatchCacheEventsRequest(after=after, with_tokens=with_tokens)
        call = self._stub.WatchCacheEvents(request, **self._options)
        try:
            while (response := await _read(call)) is not None:
                for event in results.cache_events(response):
                    yield event
        finally:
            call.cancel()

    # ------------------------------------------------------------ model

    async def model_info(self) -> ModelInfo:
        """The model and the limits of the server."""
        response = await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())
        return results.model_info(response)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text or chat messages, as `generate` reads them."""
        request = requests.tokenize(prompt, add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Text of token ids."""
        request = requests.detokenize(token_ids, skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def _call(self, method: Callable[..., Awaitable[T]], request: Any) -> T:
        try:
            return await method(request, **self._options)
        except grpc.RpcError as error:
            raise error_from_call(error) from None


class AsyncStream(AsyncIterator[Delta]):
    """What a running call generates; iterate it, or await `result`.

    Leaving the `async with` block, or `cancel`, ends the work on the server.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._assembler = results.Assembler()
        self._ahead: deque[Delta] = deque()

    async def __anext__(self) -> Delta:
        return self._ahead.popleft() if self._ahead else await self._receive()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    async def sequence_id(self) -> str:
        """Of the first sequence that is admitted; waits for it. It can be forked at once."""
        if not self._assembler.started:
            self._ahead.append(await self._receive())
        return self._assembler.first_sequence_id

    async def result(self) -> GenerateResult:
        """Wait for the end; everything, also what was iterated before."""
        async for _ in self:
            pass
        return GenerateResult(self._assembler.outputs())

    def cancel(self) -> None:
        """End the call; without effect where it has ended."""
        self._call.cancel()

    async def _receive(self) -> Delta:
        response = await _read(self._call)
        if response is None:
            raise StopAsyncIteration
        return self._assembler.feed(response)


async def _read(call: Any) -> Any:
    """The next message; None at the end."""
    try:
        response = await call.read()
    except grpc.RpcError as error:
        raise error_from_call(error) from None
    end = grpc.aio.EOF  # type: ignore[attr-defined]
    return None if response is end else response
