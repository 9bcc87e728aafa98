"""The client for programs that wait. Owns one channel; everything else it shares with `aio`."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
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


class Client:
    """A connection to a prefixcache server; may be shared by threads.

    target: host:port, or a host, whose port is then the default one.
    cache_salt: sent with each call. Clients with different salts share nothing.
    timeout: seconds that each call may take, streams included; None sets no limit.
    token: who calls, where the server knows tenants; None takes $PREFIXCACHE_TOKEN.
    ca: for TLS: PEM file of who signs the server's certificate, or "system".
    certificate: for mutual TLS: PEM file of the client's certificate and its key.

    All methods raise the errors of prefixcache.errors: InvalidArgument names the field, NotFound,
    Unavailable where no server answers, and so on.

    >>> with Client("localhost:50051") as c:
    ...     s = c.generate("The answer is", max_tokens=8, keep_seconds=60)
    ...     branches = [Branch(s.sequence_id, text=" yes"), Branch(s.sequence_id, text=" no")]
    ...     yes, no = c.fork(branches, max_tokens=16)
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
            grpc.insecure_channel(where, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.secure_channel(where, tls, options=CLIENT_OPTIONS)
        )
        self._stub = PrefixCacheStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        self._channel.close()

    # ------------------------------------------------------------ generate, fork, score

    def generate(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> GenerateResult:
        """Continue a prompt and wait for all its samples; arguments as for `stream`."""
        with self.stream(
            prompt,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        ) as stream:
            return stream.result()

    def stream(
        self,
        prompt: Prompt,
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> "Stream":
        """Continue a prompt; what is generated comes as it is made.

        prompt: text, token ids, or chat messages.
        keep_seconds: how long the finished sequences can still be forked.
        priority: lower is more urgent.
        request_id: your name for the request; AlreadyExists while another one has it.
        sampling: see Sampling.
        """
        common = Common(request_id, self.cache_salt, priority)
        request = requests.generate(prompt, common, keep_seconds, sampling)
        return Stream(self._stub.Generate(request, **self._options))

    def best_of(
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
        result = self.generate(
            prompt,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        )
        return result.ranked()

    def beam(
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
        with Stream(call) as stream:
            return stream.result()

    def fork(
        self,
        branches: Sequence[Branch],
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> list[Completion]:
        """Continue sequences that run or are kept, and wait; one result a branch, in order."""
        with self.stream_fork(
            branches,
            keep_seconds=keep_seconds,
            priority=priority,
            request_id=request_id,
            **sampling,
        ) as stream:
            return list(stream.result().outputs)

    def stream_fork(
        self,
        branches: Sequence[Branch],
        *,
        keep_seconds: float = 0.0,
        priority: int = 0,
        request_id: str = "",
        **sampling: Unpack[Sampling],
    ) -> "Stream":
        """Continue sequences that run or are kept, streamed; `index` is the branch."""
        common = Common(request_id, self.cache_salt, priority)
        request = requests.fork(branches, common, keep_seconds, sampling)
        return Stream(self._stub.Fork(request, **self._options))

    def score(
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
        return results.score(self._call(self._stub.Score, request))

    # ------------------------------------------------------------ sequences

    def sequences(self) -> tuple[SequenceInfo, ...]:
        """The sequences of this salt that wait, run or are kept."""
        request = pb.ListSequencesRequest(cache_salt=self.cache_salt)
        return results.sequences(self._call(self._stub.ListSequences, request))

    def release(self, *sequence_ids: str, subtree: bool = False) -> ReleaseReceipt:
        """Give back kept sequences, end running ones; with `subtree` their descendants too.

        Those that are not there are passed over; raises NotFound where none of them is.
        """
        request = requests.release(sequence_ids, subtree, self.cache_salt)
        return results.receipt(self._call(self._stub.Release, request))

    # ------------------------------------------------------------ cache

    def stats(self) -> CacheStats:
        """Pool and counters at this moment."""
        return results.stats(self._call(self._stub.GetCacheStats, pb.GetCacheStatsRequest()))

    def flush(self, *, all_salts: bool = False) -> int:
        """Drop cached blocks that nobody uses, of this salt or of all; returns how many."""
        request = pb.FlushCacheRequest(cache_salt=None if all_salts else self.cache_salt)
        return int(self._call(self._stub.FlushCache, request).blocks_freed)

    def pin(self, prompt: Prompt, *, seconds: float) -> PinInfo:
        """Keep the cached full blocks of a prompt from eviction."""
        request = requests.pin(prompt, seconds, self.cache_salt)
        return results.pin(self._call(self._stub.PinPrefix, request))

    def unpin(self, pin_id: str) -> PinInfo:
        """End a pin; returns what it held."""
        request = pb.UnpinPrefixRequest(pin_id=pin_id, cache_salt=self.cache_salt)
        return results.pin(self._call(self._stub.UnpinPrefix, request))

    def watch_events(
        self, *, after: int | None = None, with_tokens: bool = False
    ) -> Iterator[CacheEvent]:
        """Changes of the cache as they happen; `after` resumes behind that number."""
        request = pb.WatchCacheEventsRequest(after=after, with_tokens=with_tokens)
        call = self._stub.WatchCacheEvents(request, **self._options)
        try:
            while True:
                yield from results.cache_events(_next(call))
        except StopIteration:
            return
        finally:
            call.cancel()

    # ------------------------------------------------------------ model

    def model_info(self) -> ModelInfo:
        """The model and the limits of the server."""
        return results.model_info(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text or chat messages, as `generate` reads them."""
        request = requests.tokenize(prompt, add_special_tokens)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = requests.detokenize(token_ids, skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request).text)

    def _call(self, method: Callable[..., T], request: Any) -> T:
        try:
            return method(request, **self._options)
        except grpc.RpcError as error:
            raise error_from_call(error) from None


class Stream(Iterator[Delta]):
    """What a running call generates; iterate it, or wait for `result`.

    Leaving the `with` block, or `cancel`, ends the work on the server.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._assembler = results.Assembler()
        self._ahead: deque[Delta] = deque()

    def __next__(self) -> Delta:
        return self._ahead.popleft() if self._ahead else self._receive()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    @property
    def sequence_id(self) -> str:
        """Of the first sequence that is admitted; waits for it. It can be forked at once."""
        if not self._assembler.started:
            self._ahead.append(self._receive())
        return self._assembler.first_sequence_id

    def result(self) -> GenerateResult:
        """Wait for the end; everything, also what was iterated before."""
        for _ in self:
            pass
        return GenerateResult(self._assembler.outputs())

    def cancel(self) -> None:
        """End the call; without effect where it has ended."""
        self._call.cancel()

    def _receive(self) -> Delta:
        return self._assembler.feed(_next(self._call))


def _next(call: Any) -> Any:
    try:
        return next(call)
    except grpc.RpcError as error:
        raise error_from_call(error) from None
