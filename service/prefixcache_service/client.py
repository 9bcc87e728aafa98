"""The client for programs that wait. Owns only its calls; everything else it shares with `aio`."""

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Unpack

import grpc
from google.protobuf.message import Message

from prefixcache.engine.messages import (
    CacheEvent,
    CacheStats,
    PinInfo,
    ReleaseReceipt,
    SequenceInfo,
)
from prefixcache.errors import PrefixCacheError
from prefixcache_service import requests, results
from prefixcache_service.assembler import Assembler
from prefixcache_service.channel import File, call_options, connector
from prefixcache_service.limits import DEFAULT_TARGET, target_of
from prefixcache_service.requests import BeamOptions, Branch, Options, Prompt
from prefixcache_service.results import Completion, Delta, GenerateResult, ModelInfo, ScoreResult
from prefixcache_service.routing import TARGET, Replicas
from prefixcache_service.status import error_from_call
from prefixcache_service.v1 import prefixcache_pb2 as pb


class Client:
    """A connection to a prefixcache server; may be shared by threads.

    Where servers say under which address each can be reached (--advertise-address), the target may
    be a load balancer: what names a sequence or a pin goes straight to the server that holds it,
    with the same token and certificates, and Unavailable names it where it does not answer.

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
        self._replicas = Replicas(target_of(target), connector(grpc, ca, certificate))

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
        """Close all connections; calls that run are cancelled."""
        for channel in self._replicas.take_channels():
            channel.close()

    # ------------------------------------------------------------ generate, fork, score

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateResult:
        """Continue a prompt and wait for all its samples; arguments as for `stream`."""
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """Continue a prompt; what is generated comes as it is made.

        prompt: text, token ids, or chat messages. options: see Options and Sampling.
        """
        return self._stream("Generate", requests.generate(prompt, self.cache_salt, options))

    def best_of(self, prompt: Prompt, **options: Unpack[Options]) -> GenerateResult:
        """Draw `n` samples and rank them by cumulative log-probability: best first."""
        options.setdefault("logprobs", 0)
        return self.generate(prompt, **options).ranked()

    def beam(self, prompt: Prompt, **options: Unpack[BeamOptions]) -> GenerateResult:
        """Search for the likeliest continuations; best first, each with its `score`.

        options: num_beams, and more; see BeamOptions and BeamSearch.
        """
        request = requests.beam(prompt, self.cache_salt, options)
        with self._stream("Generate", request) as stream:
            return stream.result()

    def fork(self, branches: Sequence[Branch], **options: Unpack[Options]) -> list[Completion]:
        """Continue sequences that run or are kept, and wait; one result a branch, in order."""
        with self.stream_fork(branches, **options) as stream:
            return list(stream.result().outputs)

    def stream_fork(self, branches: Sequence[Branch], **options: Unpack[Options]) -> "Stream":
        """Continue sequences that run or are kept, streamed; `index` is the branch."""
        request = requests.fork(branches, self.cache_salt, options)
        return self._stream("Fork", request, self._replicas.holder(branches))

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
        request = requests.score(
            prefix,
            continuations,
            self.cache_salt,
            top_logprobs=top_logprobs,
            priority=priority,
            request_id=request_id,
        )
        return results.score(self._call("Score", request))

    # ------------------------------------------------------------ sequences

    def sequences(self) -> tuple[SequenceInfo, ...]:
        """The sequences of this salt that wait, run or are kept, on the server that answers."""
        request = pb.ListSequencesRequest(cache_salt=self.cache_salt)
        response = self._call("ListSequences", request)
        infos = results.sequences(response)
        self._replicas.learn((info.sequence_id for info in infos), response.address)
        return infos

    def release(self, *sequence_ids: str, subtree: bool = False) -> ReleaseReceipt:
        """Give back kept sequences, end running ones; with `subtree` their descendants too.

        Those that are not there are passed over; raises NotFound where none of them is.
        """
        answers: list[pb.ReleaseResponse | PrefixCacheError] = []
        for address, held in self._replicas.by_holder(sequence_ids).items():
            request = requests.release(held, subtree, self.cache_salt)
            try:
                answers.append(self._call("Release", request, address))
            except PrefixCacheError as error:
                answers.append(error)
        receipt = results.receipt(answers)
        self._replicas.forget(receipt.sequence_ids)
        return receipt

    # ------------------------------------------------------------ cache

    def stats(self) -> CacheStats:
        """Pool and counters at this moment."""
        return results.stats(self._call("GetCacheStats", pb.GetCacheStatsRequest()))

    def flush(self, *, all_salts: bool = False) -> int:
        """Drop cached blocks that nobody uses, of this salt or of all; returns how many."""
        request = pb.FlushCacheRequest(cache_salt=None if all_salts else self.cache_salt)
        return int(self._call("FlushCache", request).blocks_freed)

    def pin(self, prompt: Prompt, *, seconds: float) -> PinInfo:
        """Keep the cached full blocks of a prompt from eviction, on the server that answers."""
        response = self._call("PinPrefix", requests.pin(prompt, seconds, self.cache_salt))
        pin = results.pin(response)
        self._replicas.learn([pin.pin_id], response.address)
        return pin

    def unpin(self, pin_id: str) -> PinInfo:
        """End a pin; returns what it held."""
        request = pb.UnpinPrefixRequest(pin_id=pin_id, cache_salt=self.cache_salt)
        (address,) = self._replicas.by_holder([pin_id])
        pin = results.pin(self._call("UnpinPrefix", request, address))
        self._replicas.forget([pin_id])
        return pin

    def watch_events(
        self, *, after: int | None = None, with_tokens: bool = False
    ) -> Iterator[CacheEvent]:
        """Changes of the cache as they happen; `after` resumes behind that number."""
        request = pb.WatchCacheEventsRequest(after=after, with_tokens=with_tokens)
        call = self._replicas.stub().WatchCacheEvents(request, **self._options)
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
        return results.model_info(self._call("GetModelInfo", pb.GetModelInfoRequest()))

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of text or chat messages, as `generate` reads them."""
        request = requests.tokenize(prompt, add_special_tokens)
        return list(self._call("Tokenize", request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = requests.detokenize(token_ids, skip_special_tokens)
        return str(self._call("Detokenize", request).text)

    def _call(self, method: str, request: Message, address: str = TARGET) -> Any:
        try:
            return getattr(self._replicas.stub(address), method)(request, **self._options)
        except grpc.RpcError as error:
            raise error_from_call(error, address) from None

    def _stream(self, method: str, request: Message, address: str = TARGET) -> "Stream":
        call = getattr(self._replicas.stub(address), method)(request, **self._options)
        return Stream(call, self._replicas, address)


class Stream(Iterator[Delta]):
    """What a running call generates; iterate it, or wait for `result`.

    Leaving the `with` block, or `cancel`, ends the work on the server.
    """

    def __init__(self, call: Any, replicas: Replicas, address: str) -> None:
        self._call = call
        self._replicas = replicas
        self._address = address
        self._assembler = Assembler()
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
        delta = self._assembler.feed(_next(self._call, self._assembler.address or self._address))
        self._replicas.note(delta)
        return delta


def _next(call: Any, holder: str = "") -> Any:
    try:
        return next(call)
    except grpc.RpcError as error:
        raise error_from_call(error, holder) from None
