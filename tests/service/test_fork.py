"""Forks of running and of kept sequences, over a real channel."""

import threading
import time

import pytest

from prefixcache.errors import InvalidArgument, NotFound
from prefixcache_service import Branch

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def kept(client):
    """A finished sequence of 38 tokens that can be forked."""
    return client.generate(PROMPT, max_tokens=8, keep_seconds=60, **GREEDY)


def test_branches_of_a_kept_sequence_come_in_order(client, kept):
    branches = [Branch(kept.sequence_id, token_ids=[50 + i]) for i in range(5)]
    outs = client.fork(branches, max_tokens=6, **GREEDY)
    assert [out.index for out in outs] == [0, 1, 2, 3, 4]
    for i, out in enumerate(outs):
        cold = client.generate([*PROMPT, *kept.token_ids, 50 + i], max_tokens=6, **GREEDY)
        assert out.token_ids == cold.token_ids
        assert out.text == cold.text


def test_a_fork_inherits_and_does_not_count_as_a_hit(client, kept):
    (out,) = client.fork([Branch(kept.sequence_id, token_ids=[50, 51])], max_tokens=2, **GREEDY)
    assert out.num_prompt_tokens == out.usage.prompt_tokens == 40
    usage = out.usage
    assert usage.cached_tokens + usage.forked_tokens + usage.computed_tokens == 40
    assert out.num_forked_tokens == usage.forked_tokens >= 37
    assert out.num_cached_tokens == 0


def test_a_fork_at_an_earlier_position_equals_a_fresh_request(client, kept):
    for position in (1, 4, 29, 30, 31, 37, 38):
        (out,) = client.fork([Branch(kept.sequence_id, position=position)], max_tokens=5, **GREEDY)
        tokens = [*PROMPT, *kept.token_ids][:position]
        assert out.token_ids == client.generate(tokens, max_tokens=5, **GREEDY).token_ids, position


def test_a_running_sequence_can_be_forked_and_goes_on(client):
    alone = client.generate(PROMPT, max_tokens=300, **GREEDY)
    stream = client.stream(PROMPT, max_tokens=300, **GREEDY)
    seen = []
    while len(seen) < 10:
        seen.extend(next(stream).token_ids)
    outs = client.fork(
        [Branch(stream.sequence_id, token_ids=[60], position=35), Branch(stream.sequence_id)],
        max_tokens=4,
        **GREEDY,
    )
    tokens = [*PROMPT, *seen[:5], 60]
    assert outs[0].token_ids == client.generate(tokens, max_tokens=4, **GREEDY).token_ids
    where = outs[1].num_prompt_tokens - len(PROMPT)
    assert outs[1].token_ids == alone.token_ids[where : where + 4]
    assert stream.result().token_ids == alone.token_ids


def test_branches_differ_and_repeat_by_their_stream_keys(client, kept):
    branches = [Branch(kept.sequence_id)] * 4
    outs = client.fork(branches, max_tokens=8, ignore_eos=True)
    assert len({out.stream_key for out in outs}) == 4
    assert len({out.token_ids for out in outs}) == 4
    later = client.fork(branches, max_tokens=8, ignore_eos=True)
    assert not {out.stream_key for out in outs} & {out.stream_key for out in later}
    again = client.fork(
        [Branch(kept.sequence_id, sampling={"stream_key": out.stream_key}) for out in outs],
        max_tokens=8,
        ignore_eos=True,
    )
    assert [out.token_ids for out in again] == [out.token_ids for out in outs]


def test_branches_with_one_seed_differ_and_repeat(client, kept):
    """PS-01: one seed for the call is no reason for equal branches."""
    branches = [Branch(kept.sequence_id)] * 4
    first, second = (client.fork(branches, seed=7, max_tokens=8, ignore_eos=True) for _ in "ab")
    assert len({out.token_ids for out in first}) == 4
    assert [out.token_ids for out in first] == [out.token_ids for out in second]


def test_text_continuations_and_own_parameters(client, kept):
    yes, no, peek = client.fork(
        [
            Branch(kept.sequence_id, text=" yes"),
            Branch(kept.sequence_id, text=" no", sampling={"max_tokens": 3}),
            Branch(kept.sequence_id, sampling={"max_tokens": 0, "logprobs": 4}),
        ],
        max_tokens=5,
        **GREEDY,
    )
    ids = client.tokenize(" no", add_special_tokens=False)
    assert no.num_prompt_tokens == 38 + len(ids)
    assert (len(yes.token_ids), len(no.token_ids), len(peek.token_ids)) == (5, 3, 0)
    assert len(peek.next_token.top) == 4


def test_several_parents_in_one_call(client):
    parents = [client.generate([*PROMPT, i], max_tokens=3, keep_seconds=60, **GREEDY)
               for i in (3, 4)]  # fmt: skip
    outs = client.fork([Branch(p.sequence_id) for p in parents], max_tokens=3, **GREEDY)
    for i, parent, out in zip((3, 4), parents, outs, strict=True):
        cold = client.generate([*PROMPT, i, *parent.token_ids], max_tokens=3, **GREEDY)
        assert out.token_ids == cold.token_ids


def test_deltas_of_a_fork_join_to_its_unary_reply(client, kept):
    branches = [Branch(kept.sequence_id, token_ids=[i]) for i in (70, 71, 72)]
    whole = client.fork(branches, max_tokens=9, **GREEDY)
    texts = ["", "", ""]
    for delta in client.stream_fork(branches, max_tokens=9, **GREEDY):
        texts[delta.index] += delta.text
    assert texts == [out.text for out in whole]


def test_a_kept_fork_is_a_parent_in_its_turn(client, kept):
    (child,) = client.fork([Branch(kept.sequence_id)], max_tokens=2, keep_seconds=60, **GREEDY)
    (grandchild,) = client.fork([Branch(child.sequence_id)], max_tokens=2, **GREEDY)
    tokens = [*PROMPT, *kept.token_ids, *child.token_ids]
    assert grandchild.token_ids == client.generate(tokens, max_tokens=2, **GREEDY).token_ids


def test_unknown_expired_released_and_foreign_sequences_are_not_found(server, client, kept):
    """FK-06 and design §6: the same answer for all of them."""
    brief = client.generate(PROMPT, max_tokens=2, keep_seconds=0.2, **GREEDY)
    unkept = client.generate(PROMPT, max_tokens=2, **GREEDY)
    released = client.generate(PROMPT, max_tokens=2, keep_seconds=60, **GREEDY)
    assert client.release(released.sequence_id).sequence_ids == (released.sequence_id,)
    time.sleep(0.4)
    for gone in (brief, unkept, released):
        with pytest.raises(NotFound):
            client.fork([Branch(gone.sequence_id)], max_tokens=1)
    with server.client(cache_salt="other") as other:
        with pytest.raises(NotFound):
            other.fork([Branch(kept.sequence_id)], max_tokens=1)
        with pytest.raises(NotFound):
            other.release(kept.sequence_id)
        assert other.sequences() == ()
    assert len(client.fork([Branch(kept.sequence_id)], max_tokens=1)) == 1


def test_use_renews_a_lease(client):
    parent = client.generate(PROMPT, max_tokens=2, keep_seconds=0.6, **GREEDY)
    for _ in range(3):
        time.sleep(0.35)
        client.fork([Branch(parent.sequence_id)], max_tokens=1, **GREEDY)
    time.sleep(0.8)
    with pytest.raises(NotFound):
        client.fork([Branch(parent.sequence_id)], max_tokens=1)


def test_a_position_behind_the_parents_end_is_named(client, kept):
    with pytest.raises(InvalidArgument) as caught:
        client.fork([Branch(kept.sequence_id), Branch(kept.sequence_id, position=39)], max_tokens=1)
    assert caught.value.field == "branches[1].position"


def test_release_ends_a_running_sequence_and_its_descendants(client):
    stream = client.stream(PROMPT, max_tokens=450, **GREEDY)
    parent = stream.sequence_id
    fork = client.stream_fork([Branch(parent)], **GREEDY)
    assert fork.sequence_id in {
        info.sequence_id for info in client.sequences() if info.parent_id == parent
    }
    receipt = client.release(parent, subtree=True)
    assert set(receipt.sequence_ids) == {parent, fork.sequence_id}
    assert stream.result().finish_reason == fork.result().finish_reason == "abort"


def test_several_are_released_in_one_call_and_those_gone_are_passed_over(client):
    """A search gives back a whole generation at once, whichever of them have ended."""
    outs = client.generate(PROMPT, n=3, max_tokens=4, keep_seconds=60, **GREEDY).outputs
    (child,) = client.fork([Branch(outs[0].sequence_id)], max_tokens=2, keep_seconds=60, **GREEDY)
    ids = [out.sequence_id for out in outs]
    receipt = client.release(ids[0], "nobody", ids[2])
    assert receipt.sequence_ids == (ids[0], ids[2])
    assert {info.sequence_id for info in client.sequences()} == {ids[1], child.sequence_id}
    receipt = client.release(ids[0], ids[1], child.sequence_id, child.sequence_id, subtree=True)
    assert receipt.sequence_ids == (ids[1], child.sequence_id)
    with pytest.raises(NotFound):
        client.release(*ids)


@pytest.mark.parametrize("n", [1, 4])
def test_a_waiting_request_can_be_released(server, client, n):
    """RC-06: its call ends with `abort`, though it was never admitted."""
    blocker = client.stream(PROMPT, n=16, max_tokens=80, seed=1, ignore_eos=True)
    assert blocker.sequence_id
    with server.client(timeout=3) as patient:
        waiting = patient.stream([1, 2, 3], n=n, max_tokens=5, request_id="waits")
        found = []
        while not found:
            found = [i.sequence_id for i in client.sequences() if i.request_id == "waits"]
        client.release(found[0])
        outputs = waiting.result().outputs
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert len(blocker.result().outputs) == 16


def test_forks_while_many_streams_run(client):
    """FK-06: the fork comes between two steps, whatever else runs."""
    streams = [client.stream([*PROMPT, i], max_tokens=120, **GREEDY) for i in range(4)]
    results = [None] * 4

    def read(index):
        results[index] = streams[index].result()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(4)]
    ids = [stream.sequence_id for stream in streams]
    for reader in readers:
        reader.start()
    outs = client.fork([Branch(i, position=20) for i in ids], max_tokens=10, **GREEDY)
    for reader in readers:
        reader.join()
    cold = client.generate(PROMPT[:20], max_tokens=10, **GREEDY)
    assert [out.token_ids for out in outs] == [cold.token_ids] * 4
    for index, result in enumerate(results):
        alone = client.generate([*PROMPT, index], max_tokens=120, **GREEDY)
        assert result.token_ids == alone.token_ids
