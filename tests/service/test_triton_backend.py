"""The whole service on the Triton kernels: two real servers, one of them on torch, same answers.

The Triton kernels run in the interpreter, which is numpy underneath: that the bits are the same is
neither promised nor checked here.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefixcache_service import Branch, Client
from tests.model.checkpoints import write_checkpoint
from tests.service.process import Process

BLOCKS, BLOCK_SIZE = 38, 8
PROMPT = [10 + 7 * i % 280 for i in range(150)]  # two spans
GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}


@contextmanager
def _serving(model: Path, backend: str, **environment: str) -> Iterator[Client]:
    process = Process(
        *("--model", str(model), "--attention-backend", backend, "--device", "cpu", "--port", "0"),
        *("--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", "256", "--max-num-seqs", "8", "--seed", "5", "--grace", "0"),
        "--batch-invariant",  # the linear layers are Triton's too
        OMP_NUM_THREADS="1",
        **environment,
    )
    try:
        with Client(f"127.0.0.1:{process.ready()}", timeout=60) as client:
            yield client
    finally:
        process.popen.terminate()
        code, _, errors = process.end(20)
    assert code == 0
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    model = write_checkpoint(tmp_path_factory.mktemp("tiny-triton") / "llama")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        interpreted = _serving(model, "triton", TRITON_INTERPRET="1")
        starting = [
            pool.submit(stack.enter_context, server)
            for server in (interpreted, _serving(model, "torch"))
        ]
        triton, torch = (server.result() for server in starting)
        for client in (triton, torch):
            client.model_info()  # opens the connection, which lives as long as the servers
        yield SimpleNamespace(triton=triton, torch=torch)


def assert_same(ours, theirs):
    """Tokens are equal; logprobs, of the chosen and the next best tokens, within 1e-4."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.token_ids == other.token_ids
        assert [[t.token_id for t in p.top] for p in mine.logprobs] == [
            [t.token_id for t in p.top] for p in other.logprobs
        ]
        for p, q in zip(mine.logprobs, other.logprobs, strict=True):
            assert p.chosen.logprob == pytest.approx(q.chosen.logprob, abs=1e-4)
            assert [t.logprob for t in p.top] == pytest.approx([t.logprob for t in q.top], abs=1e-4)


def test_generate_samples_and_forks_equal_torchs(servers):
    def run(client):
        one = client.generate(PROMPT, max_tokens=4, keep_seconds=60, **GREEDY)
        warm = client.generate(PROMPT, max_tokens=4, **GREEDY)
        assert warm.num_cached_tokens > 0
        assert warm.token_ids == one.token_ids
        three = client.generate(PROMPT[:61], n=3, seed=11, max_tokens=4, logprobs=1)
        branches = [
            Branch(one.sequence_id, position=140, token_ids=[50]),
            Branch(one.sequence_id, position=27),
            Branch(one.sequence_id),
        ]
        forks = client.fork(branches, max_tokens=3, **GREEDY)
        return [*one.outputs, *warm.outputs, *three.outputs, *forks]

    assert_same(run(servers.triton), run(servers.torch))
    assert servers.triton.stats().block_copies > 0


def test_a_preempted_request_equals_torchs(servers):
    """Two requests that grow beyond the pool: one gives way, and goes on where it was."""
    prompts = [PROMPT[:143], [*reversed(PROMPT[:143])]]

    def run(client):
        before = client.stats().preemptions
        streams = [client.stream(prompt, max_tokens=14, **GREEDY) for prompt in prompts]
        outs = [stream.result().outputs[0] for stream in streams]
        assert client.stats().preemptions > before
        return outs

    assert_same(run(servers.triton), run(servers.torch))


def test_bits_are_promised_for_torch_on_the_cpu_and_not_for_the_interpreter(servers):
    assert servers.torch.stats().same_bits
    assert not servers.triton.stats().same_bits
