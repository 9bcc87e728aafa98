"""Puts the messages of a running call together; shared by both clients. Pure."""

from dataclasses import dataclass, field
from typing import Any

from prefixcache.errors import Internal
from prefixcache_service.results import (
    REASON,
    Completion,
    Delta,
    TokenLogprobs,
    logprobs,
    usage,
)
from prefixcache_service.v1 import prefixcache_pb2 as pb


class Assembler:
    """Puts the messages of one call together. Feed it all of them, in order."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}

    def feed(self, response: pb.GenerateResponse) -> Delta:
        """Take one message; returns what it adds."""
        if response.WhichOneof("response") == "complete":
            complete = response.complete
            part = self._parts.setdefault(complete.index, _Part(pb.Chunk(index=complete.index)))
            part.complete = complete
            return part.delta(
                finish_reason=REASON[complete.finish_reason], kept_seconds=complete.kept_seconds
            )
        chunk = response.chunk
        if chunk.sequence_id:
            self._parts[chunk.index] = _Part(chunk)
        part = self._parts[chunk.index]
        delta = part.delta(
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            logprobs=tuple(map(logprobs, chunk.logprobs)),
        )
        part.add(delta, chunk)
        return delta

    @property
    def started(self) -> bool:
        """True from the first message on."""
        return bool(self._parts)

    @property
    def first_sequence_id(self) -> str:
        """Of the sequence that was admitted first."""
        return next(iter(self._parts.values())).admission.sequence_id

    @property
    def address(self) -> str:
        """Of the server that holds the sequences; empty where it is not known."""
        return next((part.admission.address for part in self._parts.values()), "")

    def outputs(self) -> tuple[Completion, ...]:
        """All sequences by index; raises Internal where the call ended without all of them."""
        return tuple(self._parts[index].completion() for index in sorted(self._parts))


@dataclass(slots=True)
class _Part:
    admission: pb.Chunk
    complete: pb.Complete | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def delta(self, **added: Any) -> Delta:
        """What a message of this sequence adds."""
        first = self.admission
        return Delta(
            first.index,
            first.sequence_id,
            stream_key=first.stream_key,
            address=first.address,
            **added,
        )

    def add(self, delta: Delta, chunk: pb.Chunk) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(map(logprobs, chunk.prompt_logprobs))

    def completion(self) -> Completion:
        first, last = self.admission, self.complete
        if last is None:
            raise Internal("the server ended a call before all its sequences were complete")
        stop = last.WhichOneof("stop_reason")
        return Completion(
            index=first.index,
            sequence_id=first.sequence_id,
            stream_key=first.stream_key,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
            finish_reason=REASON[last.finish_reason],
            stop_reason=getattr(last, stop) if stop else None,
            usage=usage(last.usage),
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            num_forked_tokens=first.num_forked_tokens,
            kept_seconds=last.kept_seconds,
            next_token=logprobs(last.next_token) if last.HasField("next_token") else None,
            score=last.score if last.HasField("score") else None,
            address=first.address,
        )
