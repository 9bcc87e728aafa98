"""Beam search and best_of over a real channel: the engine's results, handles, and their end."""

import asyncio
import time

import pytest

from prefixcache import BeamSearchParams, Engine
from prefixcache.errors import Cancelled, NotFound
from prefixcache_service import AsyncClient, Branch
from prefixcache_service.v1 import prefixcache_pb2 as pb

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SEARCHES = {
    "plain": {"num_beams": 4},
    "all": {"num_beams": 4, "num_return_sequences": 4, "max_tokens": 9},
    "one": {"num_beams": 1, "max_tokens": 7},
    "true": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True,
             "stop_token_ids": tuple(range(40, 120))},
    "never": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": "never",
              "length_penalty": -1.5, "stop_token_ids": tuple(range(40, 120)), "min_tokens": 2},
    "diverse": {"num_beams": 6, "num_return_sequences": 6, "max_tokens": 6, "num_beam_groups": 3,
                "diversity_penalty": 0.7},
    "edits": {"num_beams": 2, "max_tokens": 8, "repetition_penalty": 1.4, "ignore_eos": True,
              "logit_bias": {50: 3.0, 60: -9.0}, "skip_special_tokens": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_config):
    return Engine(tiny_config)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_equals_the_engines(client, engine, name):
    search = SEARCHES[name]
    wanted = engine.generate([PROMPT], BeamSearchParams(**search))[0].outputs
    got = client.beam(PROMPT, **search).outputs
    assert len(got) == search.get("num_return_sequences", 1)
    assert [(o.index, o.token_ids, o.text, o.score, o.finish_reason, o.stop_reason) for o in got] \
        == [(o.index, tuple(o.token_ids), o.text, o.score, o.finish_reason, o.stop_reason)
            for o in wanted]  # fmt: skip
    assert [o.usage.completion_tokens for o in got] == [len(o.token_ids) for o in got]
    assert [o.usage.prompt_tokens for o in got] == [30, *[0] * (len(got) - 1)]


def test_unset_differs_from_zero(stub):
    """length_penalty = 0 is a penalty of its own; early_stopping unset is FALSE."""

    def scores(**fields):
        search = pb.BeamSearchParams(num_beams=3, num_return_sequences=3, max_tokens=6, **fields)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), beam_search=search)
        last = [m.complete for m in stub.Generate(request) if m.HasField("complete")]
        assert [message.index for message in last] == [0, 1, 2]
        assert all(message.HasField("score") for message in last)
        return [message.score for message in last]

    unset = scores()
    assert unset == scores(length_penalty=1, early_stopping=pb.EARLY_STOPPING_FALSE)
    assert scores(length_penalty=0) == pytest.approx([6 * score for score in unset], rel=1e-5)
    sampled = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]),
                            sampling=pb.SamplingParams(max_tokens=1)))  # fmt: skip
    assert not list(sampled)[-1].complete.HasField("score")


def test_a_wider_search_is_never_worse_than_greedy(client):
    greedy = client.generate(PROMPT, max_tokens=8, logprobs=0, **GREEDY).outputs[0]
    one = client.beam(PROMPT, num_beams=1, max_tokens=8, ignore_eos=True, length_penalty=0)
    assert one.token_ids == greedy.token_ids
    assert one.outputs[0].score == pytest.approx(greedy.cumulative_logprob, abs=1e-4)
    wide = client.beam(PROMPT, num_beams=16, max_tokens=8, ignore_eos=True, length_penalty=0)
    assert wide.outputs[0].score >= one.outputs[0].score


def test_kept_hypotheses_can_be_forked_and_released(client):
    search = client.beam(
        PROMPT, num_beams=4, num_return_sequences=3, max_tokens=7, ignore_eos=True, keep_seconds=60
    )
    ids = [output.sequence_id for output in search.outputs]
    assert {info.sequence_id for info in client.sequences()} == set(ids)
    outs = client.fork([Branch(i) for i in ids], max_tokens=5, **GREEDY)
    for parent, out in zip(search.outputs, outs, strict=True):
        fresh = client.generate([*PROMPT, *parent.token_ids], max_tokens=5, **GREEDY)
        assert out.token_ids == fresh.token_ids
        assert parent.kept_seconds == 60
    for i in ids:
        assert client.release(i).sequence_ids == (i,)
    assert client.sequences() == ()


def test_a_cancelled_search_frees_its_blocks(server, client):
    async def scenario():
        async with AsyncClient(server.target) as c:
            search = asyncio.create_task(c.beam(PROMPT, num_beams=4, max_tokens=450,
                                                ignore_eos=True))  # fmt: skip
            while (await c.stats()).sequences_running < 4:
                assert not search.done()
                await asyncio.sleep(0.01)
            search.cancel()
            with pytest.raises(asyncio.CancelledError):
                await search

    before = client.stats().requests_aborted
    asyncio.run(scenario())
    stats = server.settle()
    assert stats.blocks_in_use == 0
    assert stats.requests_aborted == before + 1


def test_a_search_past_its_deadline_ends(server):
    with server.client(timeout=0.05) as client:
        began = time.monotonic()
        with pytest.raises(Cancelled):
            client.beam(PROMPT, num_beams=4, max_tokens=450, ignore_eos=True)
        assert time.monotonic() - began < 5
    assert server.settle().blocks_in_use == 0


def test_a_running_beam_has_no_handle(server, client, stub):
    search = pb.BeamSearchParams(num_beams=4, max_tokens=400, ignore_eos=True)
    call = stub.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), beam_search=search, keep_seconds=60)
    )
    sequence_id = next(call).chunk.sequence_id
    assert client.sequences() == ()
    with pytest.raises(NotFound):
        client.fork([Branch(sequence_id)], max_tokens=1)
    with pytest.raises(NotFound):
        client.release(sequence_id)
    call.cancel()


def test_best_of_ranks_samples_by_their_logprob(client):
    settings = {"n": 6, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    drawn = client.generate(PROMPT, logprobs=0, **settings).outputs
    best = client.best_of(PROMPT, **settings)
    wanted = sorted(drawn, key=lambda o: -o.cumulative_logprob)
    assert [(o.index, o.token_ids, o.logprobs) for o in best.outputs] == [
        (o.index, o.token_ids, o.logprobs) for o in wanted
    ]
    assert best.text == best.outputs[0].text
    assert [output.index for output in best.outputs] != [0, 1, 2, 3, 4, 5]


def test_best_of_and_beam_can_be_awaited(server, client):
    async def scenario():
        async with AsyncClient(server.target) as c:
            return await asyncio.gather(
                c.best_of(PROMPT, n=3, seed=3, max_tokens=4),
                c.beam(PROMPT, num_beams=3, max_tokens=4),
            )

    best, search = asyncio.run(scenario())
    assert [o.index for o in best.outputs] == [
        o.index for o in client.best_of(PROMPT, n=3, seed=3, max_tokens=4).outputs
    ]
    assert search.token_ids == client.beam(PROMPT, num_beams=3, max_tokens=4).token_ids
