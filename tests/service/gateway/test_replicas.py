"""Several servers behind the real gateway: where requests go, and what a lost one takes along."""

import openai
import pytest

from benchmarks._gateway import STRICT, free_port, gateway
from prefixcache_service import Client
from tests.service.conftest import BLOCK_SIZE, RunningServer
from tests.service.gateway.waiting import until
from tests.service.process import FAULTY, Process

MODEL = "llama"
GREEDY = {"temperature": 0.0}
DOCUMENTS = [f"{name} document, which is long enough to be worth finding. " for name in "ABCDEF"]
QUESTIONS = ["What is it?", "Who wrote it?", "When was that?"]


def complete(client, prompt, **settings):
    return client.completions.create(
        model=MODEL, prompt=prompt, **{"max_tokens": 4, **GREEDY, **settings}
    )


def cached(reply):
    return reply.usage.prompt_tokens_details.cached_tokens


def openai_of(front):
    """As it comes: it tries again where it is told 5xx, twice."""
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")


class Served:
    """Which of several servers has taken a prompt, by its figures."""

    def __init__(self, targets):
        self._clients = {target: Client(target, timeout=60) for target in targets}
        self._seen = self._counts()

    def _counts(self):
        return {t: client.stats().prompt_tokens for t, client in self._clients.items()}

    def last(self):
        """Where the one prompt since the last look went."""
        before, self._seen = self._seen, self._counts()
        (where,) = [target for target, count in self._seen.items() if count > before[target]]
        return where

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self._clients.values():
            client.close()


@pytest.fixture(scope="module")
def two(tiny_config):
    servers = [RunningServer(tiny_config).load() for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def replicas(two):
    for server in two:
        with server.client() as client:
            client.flush(all_salts=True)
    yield [server.target for server in two]
    for server in two:
        server.check()


def settled(front, targets):
    """Until the gateway knows of each server what it has cached."""

    def same():
        held = {}
        for target in targets:
            with Client(target, timeout=60) as client:
                held[target] = client.stats().blocks_evictable
        return {target: front.indexed()[target] for target in targets} == held

    until(same)


def test_prompts_go_where_their_beginning_is_cached(replicas):
    """Also when it was put there through our own API, and before the gateway was started."""
    with Client(replicas[1], timeout=60) as own:
        own.generate(DOCUMENTS[0], max_tokens=1, **GREEDY)
    with (
        gateway(replicas, *STRICT) as front,
        openai_of(front) as client,
        Served(replicas) as served,
        Client(replicas[0], timeout=60) as own,
    ):
        settled(front, replicas)
        assert front.indexed()[replicas[1]] > 0
        for question in QUESTIONS:
            assert cached(complete(client, DOCUMENTS[0] + question)) >= 2 * BLOCK_SIZE
            assert served.last() == replicas[1]
        own.generate(DOCUMENTS[1], max_tokens=1, **GREEDY)
        assert served.last() == replicas[0]
        homes = {0: replicas[1], 1: replicas[0]}
        for number, document in enumerate(DOCUMENTS):
            for question in QUESTIONS:
                settled(front, replicas)
                reply = complete(client, document + question)
                home = served.last()
                assert homes.setdefault(number, home) == home
                assert question == QUESTIONS[0] or cached(reply) >= 2 * BLOCK_SIZE
        assert set(homes.values()) == set(replicas)  # what is new goes to whoever has least to do


# ---------------------------------------------------------------- a server that dies


def serve(checkpoint, port):
    """Each of its steps takes a while on any machine."""
    return Process(
        *("--model", str(checkpoint), "--port", str(port), "--num-threads", "1"),
        *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "512"),
        *("--max-model-len", "512", "--grace", "10", "--log-level", "warning"),
        program=FAULTY,
        FAULTS_STEP_SECONDS="0.02",
    )


FAST_CHECKS = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", *STRICT)


@pytest.mark.slow
def test_a_killed_server_takes_only_its_own_streams_along(checkpoint):
    ports = [free_port() for _ in range(3)]
    targets = [f"127.0.0.1:{port}" for port in ports]
    processes = {t: serve(checkpoint, p) for t, p in zip(targets, ports, strict=True)}
    try:
        for process in processes.values():
            process.ready()
        with gateway(targets[:2], *FAST_CHECKS) as front, openai_of(front) as client:
            front.join(targets[2])
            front.wait(targets)
            scenario(checkpoint, front, client, targets, processes)
    finally:
        for process in processes.values():
            process.__exit__()


def scenario(checkpoint, front, client, targets, processes):
    with Served(targets) as served:
        complete(client, DOCUMENTS[0])
        victim = served.last()
        settled(front, targets)
        stream = complete(client, DOCUMENTS[0], max_tokens=400, stream=True, extra_body=ENDLESS)
        next(iter(stream))
    survivors = [target for target in targets if target != victim]
    kill(processes[victim])
    with pytest.raises(openai.APIError, match=r"(?i)stream|transport|connection|broken|reset"):
        for _ in stream:  # what had come is read first; the end is an error, not an end
            pass
    with Served(survivors) as served:
        for number in range(6):  # some were meant for the dead one: they are answered all the same
            assert complete(client, DOCUMENTS[0] + QUESTIONS[number % 3]).choices
            assert served.last() in survivors
    until(lambda: front.workers()[victim] != "ready", 30)

    processes[victim] = serve(checkpoint, int(victim.partition(":")[2]))
    processes[victim].ready()
    front.wait(targets)
    with Client(victim, timeout=60) as own:
        own.generate(DOCUMENTS[1], max_tokens=1, **GREEDY)
    settled(front, targets)  # events go on, and nothing that the dead one held is still counted
    with Served(targets) as served:
        assert cached(complete(client, DOCUMENTS[1] + QUESTIONS[0])) >= 2 * BLOCK_SIZE
        assert served.last() == victim

    drain(front, client, targets, processes)


def drain(front, client, targets, processes):
    """A server that is told to stop ends what it runs, and gets nothing new."""
    with Served(targets) as served:
        complete(client, DOCUMENTS[2])
        leaving = served.last()
        settled(front, targets)
        stream = complete(client, DOCUMENTS[2], max_tokens=20, stream=True, extra_body=ENDLESS)
        next(iter(stream))
    processes[leaving].popen.terminate()
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    remaining = [target for target in targets if target != leaving]
    with Served(remaining) as served:
        for question in QUESTIONS:
            assert complete(client, DOCUMENTS[2] + question).choices
            assert served.last() in remaining
    assert processes[leaving].popen.wait(20) == 0


ENDLESS = {"ignore_eos": True}


def kill(process):
    process.popen.kill()
    process.popen.wait()
