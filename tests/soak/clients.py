"""Clients that do everything that can be done to a server, at random, and know what they may meet.

One `Clients` a thread, with a seed of its own. What comes back is checked as far as it can be: a
greedy answer is the same each time that it is asked for, whatever else goes on; wrong input is
refused by name; and each call ends in an answer or in an error that the caller brought about.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from prefixcache.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PrefixCacheError,
    ResourceExhausted,
)
from prefixcache_service import Branch, Client
from prefixcache_service.client import Stream
from prefixcache_service.results import Completion

TOKENS = (5, 6, 7)  # few, so that prompts share more and less than whole blocks
SALTS = ("", "", "tenant")
MODEL_LENGTH = 128  # tokens; see the server's flags in `run`
MAX_FORCED = 4
PATIENCE = 60.0  # seconds until a call counts as lost
MISSING_MODEL_TOKEN = 2**31

BAD_SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"n": 0},
    {"n": 257},
    {"max_tokens": 10**6},
    {"min_tokens": 9, "max_tokens": 3},
    {"logit_bias": {MISSING_MODEL_TOKEN: 1.0}},
    {"logprobs": 65},
    {"stop": [""]},
    {"stop_token_ids": [MISSING_MODEL_TOKEN]},
    {"seed": 1, "stream_key": 1},
)
EXPECTED = (Cancelled, FailedPrecondition, NotFound, ResourceExhausted)


class Ledger:
    """What all clients have seen, together; safe to use from their threads."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def lose(self, what: str) -> None:
        """Something that must not happen: a call without an end, or with a wrong one."""
        with self._lock:
            self.lost.append(what)

    def compare(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A greedy answer: it must go with what was answered to the same tokens before."""
        key, answer = tuple(prompt), tuple(answer)
        with self._lock:
            known = self._answers.setdefault(key, answer)
            if len(known) < len(answer):
                self._answers[key] = answer
            self.counts["answers compared"] += known is not answer
            shorter = min(len(known), len(answer))
            if known[:shorter] != answer[:shorter]:
                self.lost.append(f"two answers to {key}: {known} and {answer}")


class Clients:
    """One thread's clients."""

    def __init__(self, target: str, seed: str, ledger: Ledger) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._ledger = ledger
        self._kept: list[tuple[str, str, list[int]]] = []  # id, salt, tokens
        self._clients = {salt: Client(target, cache_salt=salt, timeout=PATIENCE) for salt in SALTS}
        self._acts: dict[Callable[[], None], float] = {
            self._generate: 6,
            self._samples: 2,
            self._beam: 2,
            self._fork: 6,
            self._score: 1,
            self._cancel: 3,
            self._disconnect: 1,
            self._hurry: 2,
            self._dawdle: 0.5,
            self._release: 2,
            self._flush: 0.5,
            self._pin: 1,
            self._watch: 0.2,
            self._bad_input: 3,
            self._noise: 1,
            self._look: 1,
        }

    def run(self, until: float) -> None:
        """Act until this time of the monotonic clock."""
        while time.monotonic() < until:
            act = self._random.choices(list(self._acts), list(self._acts.values()))[0]
            try:
                act()
            except EXPECTED as error:
                self._ledger.count(f"refused: {type(error).__name__}")
                if isinstance(error, Cancelled) and act != self._hurry:
                    self._ledger.lose(f"{act.__name__}: no end in {PATIENCE} s: {error}")
            except Internal as error:
                self._ledger.count("failed by an injected fault")
                if "InjectedFault" not in str(error):
                    self._ledger.lose(f"{act.__name__}: {error}")
            except Exception as error:
                self._ledger.lose(f"{act.__name__}: {type(error).__name__}: {error}")
        for client in self._clients.values():
            client.close()

    # ------------------------------------------------------------ what they ask

    def _generate(self) -> None:
        prompt, salt = self._prompt(), self._salt()
        result = self._clients[salt].generate(
            prompt, temperature=0.0, priority=self._random.randint(-1, 1), **self._options()
        )
        (out,) = result.outputs
        self._served(salt, prompt, out)
        self._ledger.compare(prompt, out.token_ids)

    def _samples(self) -> None:
        prompt, salt = self._prompt(), self._salt()
        n = self._random.randint(2, 4)
        result = self._clients[salt].generate(
            prompt, n=n, logprobs=2, repetition_penalty=1.2, **self._options()
        )
        if len(result.outputs) != n or not all(out.finish_reason for out in result.outputs):
            self._ledger.lose(f"{n} samples: {result}")
        for out in result.outputs:
            self._served(salt, prompt, out)

    def _beam(self) -> None:
        prompt, salt = self._prompt(), self._salt()
        result = self._clients[salt].beam(
            prompt,
            num_beams=self._random.randint(2, 4),
            max_tokens=self._random.randint(1, 10),
            keep_seconds=self._keep(),
        )
        for out in result.outputs:
            self._served(salt, prompt, out)

    def _fork(self) -> None:
        """Of several parents at once, at their ends or rewound, forced on or not."""
        options = self._options()
        room = MODEL_LENGTH - MAX_FORCED - options["max_tokens"]
        known = [kept for kept in self._kept if len(kept[2]) <= room]
        if not known:
            return
        salt = self._random.choice(known)[1]
        parents = [kept for kept in known if kept[1] == salt][-4:]
        chosen = self._random.choices(parents, k=self._random.randint(1, 3))
        starts = []
        branches = []
        for sequence_id, _, tokens in chosen:
            position = self._random.choice((None, self._random.randint(1, len(tokens))))
            forced = self._random.choices(TOKENS, k=self._random.randint(0, MAX_FORCED))
            starts.append([*tokens[:position], *forced])
            branches.append(Branch(sequence_id, position=position, token_ids=forced or None))
        outs = self._clients[salt].fork(branches, temperature=0.0, **options)
        for start, out in zip(starts, outs, strict=True):
            self._served(salt, start, out)
            self._ledger.compare(start, out.token_ids)

    def _score(self) -> None:
        salt = self._salt()
        continuations = [self._prompt(6) for _ in range(self._random.randint(1, 3))]
        result = self._clients[salt].score(self._prompt(), continuations)
        if [len(each.token_ids) for each in result.scores] != [len(c) for c in continuations]:
            self._ledger.lose(f"scores of {continuations}: {result}")
        self._ledger.count("served")

    # ------------------------------------------------------------ how they leave

    def _cancel(self) -> None:
        stream = self._stream(self._clients[""])
        for _ in range(self._random.randint(0, 8)):
            next(stream, None)
        stream.cancel()
        self._ledger.count("cancelled")

    def _disconnect(self) -> None:
        with Client(self._target, timeout=PATIENCE) as own:
            for _ in range(3):
                next(self._stream(own), None)
        self._ledger.count("disconnected")

    def _hurry(self) -> None:
        with Client(self._target, timeout=self._random.choice((0.003, 0.02, 0.1))) as own:
            for _ in self._stream(own):
                pass
        self._ledger.count("served")

    def _dawdle(self) -> None:
        stream = self._stream(self._clients[""])
        next(stream, None)
        time.sleep(0.2)
        for _ in stream:
            pass
        self._ledger.count("served")

    def _stream(self, client: Client) -> Stream:
        """A call of any kind that would last."""
        options = {"max_tokens": 60, "ignore_eos": True, "keep_seconds": self._keep()}
        kept = [each for each, salt, tokens in self._kept[-5:] if not salt and len(tokens) <= 60]
        if kept and self._random.random() < 0.3:
            return client.stream_fork([Branch(each) for each in kept], **options)  # type: ignore[arg-type]
        return client.stream(self._prompt(), n=self._random.choice((1, 1, 3)), **options)  # type: ignore[arg-type]

    # ------------------------------------------------------------ what they do to the cache

    def _release(self) -> None:
        if self._kept:
            sequence_id, salt, _ = self._kept.pop(self._random.randrange(len(self._kept)))
            self._clients[salt].release(sequence_id, subtree=self._random.random() < 0.5)

    def _flush(self) -> None:
        self._clients[self._salt()].flush(all_salts=self._random.random() < 0.5)

    def _pin(self) -> None:
        client = self._clients[self._salt()]
        pin = client.pin(self._prompt(), seconds=self._random.choice((0.05, 5.0)))
        time.sleep(self._random.choice((0.0, 0.1)))
        client.unpin(pin.pin_id)

    def _watch(self) -> None:
        events = self._clients[""].watch_events()
        number = next(events).number
        if next(events).number != number + 1:
            self._ledger.lose("a gap in the cache's events")

    def _look(self) -> None:
        client = self._clients[self._salt()]
        stats = client.stats()
        if stats.blocks_free + stats.blocks_evictable + stats.blocks_in_use != stats.blocks_total:
            self._ledger.lose(f"blocks do not add up: {stats}")
        client.sequences()

    # ------------------------------------------------------------ what they get wrong

    def _bad_input(self) -> None:
        """Must be refused for what it is: never served, never a fault of the server."""
        client = self._clients[self._salt()]
        prompt = self._prompt()
        wrong = dict(self._random.choice(BAD_SAMPLING))
        sequence_id = self._kept[-1][0] if self._kept else "0" * 32
        attempts: tuple[Callable[[], object], ...] = (
            lambda: client.generate(prompt, **wrong),  # type: ignore[arg-type]
            lambda: client.generate([MISSING_MODEL_TOKEN]),
            lambda: client.generate([]),
            lambda: client.generate([5] * 10_000),
            lambda: client.beam(prompt, num_beams=self._random.choice((0, 257))),
            lambda: client.fork([Branch(sequence_id[::-1])]),
            lambda: client.fork([Branch(sequence_id, position=10**6)]),
            lambda: client.fork([]),
            lambda: client.score(prompt, [[]]),
            lambda: client.pin(prompt, seconds=-1.0),
            lambda: client.unpin("no such pin"),
            lambda: client.release("no such sequence"),
            lambda: client.generate("\0" * 100_000),
        )
        self._refused(self._random.choice(attempts))

    def _refused(self, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except (InvalidArgument, NotFound, ResourceExhausted):
            self._ledger.count("bad inputs")
        except PrefixCacheError as error:
            self._ledger.lose(f"bad input: {type(error).__name__}: {error}")
        else:
            self._ledger.lose("bad input was served")

    def _noise(self) -> None:
        """Bytes that are no message, or none of ours; any that happen to be one are fine."""
        method = self._random.choice(("Generate", "Fork", "WatchCacheEvents"))
        data = self._random.randbytes(self._random.randint(1, 200))
        with grpc.insecure_channel(self._target) as channel:
            call = channel.unary_stream(f"/prefixcache.v1.PrefixCache/{method}")(data, timeout=0.5)
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.INTERNAL:  # type: ignore[attr-defined]
                    self._ledger.lose(f"noise: {error.details()}")  # type: ignore[attr-defined]
        self._ledger.count("bad inputs")

    # ------------------------------------------------------------ choices

    def _served(self, salt: str, start: Sequence[int], out: Completion) -> None:
        """Remember a sequence; now and then one that was not kept, and so is not there."""
        self._ledger.count("served")
        if out.kept_seconds or self._random.random() < 0.1:
            kept = (out.sequence_id, salt, [*start, *out.token_ids])
            self._kept = [*self._kept[-20:], kept]

    def _prompt(self, longest: int = 24) -> list[int]:
        """Half of them from a few that come again and again."""
        draw = self._random
        if draw.random() < 0.5:
            draw = random.Random(draw.randrange(40))
        return draw.choices(TOKENS, k=draw.randint(1, longest))

    def _salt(self) -> str:
        return self._random.choice(SALTS)

    def _keep(self) -> float:
        return self._random.choice((0.0, 0.02, 0.3, 3.0))

    def _options(self) -> dict[str, Any]:
        return {
            "max_tokens": self._random.choice((1, 4, 12, 40, 90)),
            "ignore_eos": self._random.random() < 0.7,
            "keep_seconds": self._keep(),
        }
