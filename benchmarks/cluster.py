"""Two replicas behind the gateway: what routing by the cache gains, and what the gateway costs.

    python -m benchmarks.cluster --json

Gain: 64 prompts over 8 shared prefixes, one after another, routed by where the prefix is cached and
at random (the mean of three runs, which differ), on new replicas each time. Each replica is given
four of the prefixes first, and its pool holds five: all eight fit into the two together, but not
into one, which is when routing matters most. Beside it: empty pools that hold all eight.

Cost: one replica, a prompt that is cached; a completion through the gateway by HTTP, and the call
of gRPC that it makes of it, in turns. Tokenizing and detokenizing are part of the gateway's cost.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import httpx
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from benchmarks._gateway import Gateway, gateway
from benchmarks._report import Report, compare
from benchmarks._server import serve
from prefixcache_service import Client

PREFIXES, PROMPTS = 8, 64
PREFIX_WORDS, OWN_WORDS = 400, 24
BLOCK_SIZE = 16
FLAGS = ("--num-threads", "1", "--max-model-len", "1024")
TOKENS = 64
RANDOM_RUNS = 3
WORDS = ("red", "blue", "green", "old", "new", "tall", "small", "warm", "cold", "quiet", "loud")


@dataclass(frozen=True)
class Cluster:
    """Replicas and the gateway in front of them."""

    front: Gateway
    targets: list[str]
    clients: list[Client]
    model: str

    def ask(self, http: httpx.Client, prompt: str, max_tokens: int) -> None:
        """One completion through the gateway."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        reply = http.post(f"{self.front.url}/v1/completions", json=body, timeout=120)
        reply.raise_for_status()

    def hit_tokens(self) -> int:
        """Prompt tokens that all replicas together did not compute."""
        return sum(client.stats().cached_tokens for client in self.clients)

    def place(self) -> None:
        """Give the replicas the prefixes in turn, and the gateway a moment to hear of them."""
        for number in range(PREFIXES):
            self.clients[number % len(self.clients)].generate(prefix(number), max_tokens=0)
        time.sleep(1.0)


@contextmanager
def cluster(replicas: int, policy: str, *flags: str) -> Iterator[Cluster]:
    """New replicas behind a new gateway."""
    with ExitStack() as stack:
        targets = [stack.enter_context(serve(*FLAGS, *flags)) for _ in range(replicas)]
        clients = [stack.enter_context(Client(target, timeout=120)) for target in targets]
        front = stack.enter_context(gateway(targets, policy=policy))
        yield Cluster(front, targets, clients, clients[0].model_info().name)


def text(seed: int, words: int) -> str:
    """A text of its own for each seed."""
    return " ".join(WORDS[(seed * 31 + k * (seed + 3)) % len(WORDS)] for k in range(words))


def prompts(count: int) -> list[str]:
    """They take turns: no two neighbours share a prefix."""
    return [
        f"{prefix(number % PREFIXES)} Question {number}: {text(number + 100, OWN_WORDS)}"
        for number in range(count)
    ]


def prefix(number: int) -> str:
    """What one prompt in eight begins with."""
    return f"Document {number}. {text(number, PREFIX_WORDS)}"


def main() -> None:
    report = Report("cluster", "Routing by the cache, and what the gateway costs.")
    options = report.parse()
    measure_gain(report, options)
    measure_cost(report, options)
    report.finish()


# ---------------------------------------------------------------- gain


def measure_gain(report: Report, options: argparse.Namespace) -> None:
    """Hit tokens, routed by the cache over at random, in a small and in a large pool."""
    asked = prompts(PROMPTS // 2 if options.quick else PROMPTS)
    with cluster(1, "random", "--num-gpu-blocks-override", "512") as one:
        lengths = [len(one.clients[0].tokenize(prompt)) for prompt in asked[:PREFIXES]]
    blocks = -(-max(lengths) // BLOCK_SIZE) + 1
    report.add("prompt_tokens", sum(lengths) / len(lengths), unit="tokens a prompt")
    for name, held in (("", 5), ("_large_pool", 2 * PREFIXES)):
        runs = {"cache_aware": 1, "random": 1 if options.quick or name else RANDOM_RUNS}
        hits = {
            policy: statistics.mean(
                hit_tokens(asked, policy, held * blocks, placed=not name) for _ in range(count)
            )
            for policy, count in runs.items()
        }
        for policy, tokens in hits.items():
            report.add(f"hit_tokens_{policy}{name}", tokens, unit=f"of {len(asked)} prompts")
        gain = hits["cache_aware"] / max(hits["random"], 1)
        report.add(f"routing_hit_gain{name}", gain, at_least=None if name else 1.5)


def hit_tokens(asked: list[str], policy: str, num_blocks: int, *, placed: bool) -> int:
    """Of these prompts, one after another."""
    pool = ("--num-gpu-blocks-override", str(num_blocks))
    with cluster(2, policy, *pool) as replicas, httpx.Client() as http:
        if placed:
            replicas.place()
        before = replicas.hit_tokens()
        for prompt in asked:
            replicas.ask(http, prompt, 1)
        return replicas.hit_tokens() - before


# ---------------------------------------------------------------- cost


def measure_cost(report: Report, options: argparse.Namespace) -> None:
    """Of a request that gives one token, and of each token of a stream."""
    rounds = 5 if options.quick else 25
    prompt = prompts(1)[0]
    with (
        cluster(1, "cache_aware", "--num-gpu-blocks-override", "512") as one,
        httpx.Client() as http,
        grpc.insecure_channel(one.targets[0]) as channel,
    ):
        stub, ids = VllmEngineStub(channel), one.clients[0].tokenize(prompt)
        for what, tokens in (("request", 1), ("token", TOKENS)):
            through = streaming(one, http, prompt, tokens)
            pair = compare(through, calling(stub, ids, tokens), rounds=rounds, warm_up=2)
            first, second = (seconds / tokens * 1e3 for seconds in (pair.first, pair.second))
            unit = "ms" if tokens == 1 else "ms a token"
            report.add(f"{what}_through_gateway", first, unit=unit)
            report.add(f"{what}_straight", second, unit=unit)
            report.add(f"{what}_gateway_overhead", first - second, unit=unit)


def streaming(one: Cluster, http: httpx.Client, prompt: str, tokens: int) -> Callable[[], object]:
    """A streamed completion through the gateway, to its end."""
    body = {
        "model": one.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    def work() -> None:
        url = f"{one.front.url}/v1/completions"
        with http.stream("POST", url, json=body, timeout=120) as reply:
            *_, last = filter(None, reply.iter_lines())
        assert last == "data: [DONE]"

    return work


def calling(stub: VllmEngineStub, ids: list[int], tokens: int) -> Callable[[], object]:
    """The gateway's own call, to its end."""
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        stream=True,
    )

    def work() -> None:
        *_, last = stub.Generate(request)
        assert last.complete.completion_tokens == tokens

    return work


if __name__ == "__main__":
    main()
