"""How many tokens came from the cache: exact to the token, per request and in the counters.

After g generated tokens KV is there for prompt + g - 1 tokens. Only full blocks are in the cache,
and a hit may end inside one of them. The last prompt token is always run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.cache import BlockDigest, BlockManager, namespace_key
from prefixcache.engine.messages import Finished, ForkBranch, PinPrefix, Usage
from prefixcache.engine.outputs import RequestOutput
from prefixcache.engine.sequence import Owner
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits, run_one
from tests.model.checkpoints import TOKENIZER_SIZE

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def ids(first: int, last: int) -> list[int]:
    """[first..last] of known-bugs.md, as ids that are no special tokens."""
    return list(range(first + 10, last + 11))


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    return replace(ONE, max_tokens=max_tokens, n=n, logprobs=2)


def cached(engine: Engine, tokens: Sequence[int], params: SamplingParams = ONE) -> int:
    """Run a request to its end; its cached tokens, checked against usage and counters."""
    return accounted(engine, [tokens], params)[0].num_cached_tokens


def accounted(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[RequestOutput]:
    """Run requests together; the scheduler's counters must rise by exactly what they report."""
    before = replace(engine.metrics.counters)
    outputs = engine.generate(prompts, params)
    usages = [o.usage for output in outputs for o in output.outputs]
    for output, tokens in zip(outputs, prompts, strict=True):
        first = output.outputs[0].usage
        assert first.prompt_tokens == len(tokens)
        assert first.cached_tokens == output.num_cached_tokens
        assert all(o.usage.prompt_tokens == 0 for o in output.outputs[1:])
    for usage in usages:
        parts = usage.cached_tokens + usage.forked_tokens + usage.computed_tokens
        assert parts == usage.prompt_tokens
    now = engine.metrics.counters
    assert now.prompt_tokens - before.prompt_tokens == sum(map(len, prompts))
    for name in ("prompt_tokens", "cached_tokens", "forked_tokens", "computed_tokens"):
        risen = getattr(now, name) - getattr(before, name)
        assert risen == sum(getattr(usage, name) for usage in usages), name
    assert now.recomputed_tokens == before.recomputed_tokens
    return outputs


# -------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A prompt of so many tokens that generated so many, and what a query then finds.

    keep: tokens of prompt + output that the query begins with. more: tokens of its own behind.
    """

    prompt: int
    generated: int
    keep: int
    more: int
    cached: int


# Blocks of 4.
TINY = {
    "shorter than a block": Row(3, 1, keep=3, more=0, cached=0),
    "shorter than a block, filled by its output": Row(3, 2, keep=3, more=0, cached=2),
    "one token": Row(1, 1, keep=1, more=0, cached=0),
    "one token, its block filled by output": Row(1, 4, keep=1, more=0, cached=0),
    "one block: the last token is run": Row(4, 1, keep=4, more=0, cached=3),
    "one block and a token": Row(5, 1, keep=5, more=0, cached=4),
    "a multiple of blocks": Row(12, 1, keep=12, more=0, cached=11),
    "a multiple and one": Row(13, 1, keep=13, more=0, cached=12),
    "a partly filled last block is not in the cache": Row(14, 1, keep=14, more=0, cached=12),
    "until output fills it: then a hit ends inside it": Row(14, 3, keep=14, more=0, cached=13),
    "the last token's KV is missing": Row(14, 2, keep=14, more=0, cached=12),
    "a prefix that ends at an edge": Row(16, 1, keep=8, more=0, cached=7),
    "a prefix that ends at an edge, and a token": Row(16, 1, keep=8, more=1, cached=8),
    "a prefix that ends inside a block": Row(16, 1, keep=6, more=0, cached=5),
    "a prefix shorter than a block": Row(16, 1, keep=2, more=0, cached=1),
    "an extension": Row(16, 1, keep=16, more=9, cached=16),
    "an extension of a partly filled block": Row(15, 1, keep=15, more=9, cached=12),
    "divergence at an edge": Row(40, 1, keep=20, more=20, cached=20),
    "divergence inside a block": Row(40, 1, keep=22, more=18, cached=22),
    "divergence at a block's last token": Row(40, 1, keep=23, more=1, cached=23),
    "divergence inside the first block": Row(40, 1, keep=2, more=20, cached=2),
    "divergence at the first block's last token": Row(40, 1, keep=3, more=20, cached=3),
    "divergence at the first token": Row(40, 1, keep=0, more=40, cached=0),
    "generated tokens reused": Row(10, 7, keep=16, more=0, cached=15),
    "generated tokens reused and gone on": Row(10, 7, keep=17, more=5, cached=16),
    "divergence among generated tokens": Row(10, 10, keep=14, more=3, cached=14),
    "three spans of attention": Row(391, 1, keep=391, more=0, cached=388),
}


def query_of(row: Row, engine: Engine) -> list[int]:
    """Run the row's first request; the tokens of its second."""
    tokens = np.random.default_rng(7).integers(4, TOKENIZER_SIZE, row.prompt).tolist()
    output = accounted(engine, [tokens], greedy(row.generated))[0]
    assert output.num_cached_tokens == 0
    sequence = [*tokens, *output.outputs[0].token_ids]
    assert len(sequence) >= row.keep
    kept = sequence[: row.keep]
    other = (sequence[row.keep] if row.keep < len(sequence) else 0) != 7
    return [*kept, *([7 if other else 8] * row.more)]


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("row", TINY.values(), ids=TINY)
def test_hits_to_the_token(row: Row, n: int, make_engine: MakeEngine) -> None:
    engine = make_engine()
    query = query_of(row, engine)
    assert cached(engine, query, replace(ONE, n=n)) == row.cached
    # The second time it finds its own blocks, or still the ones that reach further.
    own = len(query) // 4 * 4
    again = min(max(own, row.cached), len(query) - 1)
    assert cached(engine, query, replace(ONE, n=n)) == again
    assert cached(engine, query, replace(ONE, n=n)) == again


@pytest.mark.parametrize(
    ("length", "generated", "second"),
    [(1, 1, 0), (15, 1, 0), (15, 2, 14), (16, 1, 15), (17, 1, 16), (40, 1, 32), (40, 9, 39)],
)
@pytest.mark.parametrize("n", [1, 4])
def test_smollm2_first_and_second_time(
    length: int, generated: int, second: int, n: int, smollm2: Engine
) -> None:
    """Blocks of 16."""
    text = "The tree that clients can fork: 1, 2, 3 and all the way to the last one. " * 4
    tokens = smollm2.tokenizer.encode(text)[:length]
    assert cached(smollm2, tokens, greedy(generated, n)) == 0
    assert cached(smollm2, tokens, greedy(generated, n)) == second
    full = (length + generated - 1) // 16 * 16
    assert cached(smollm2, [*tokens, 9, 9], ONE) == min(full, length)


def test_of_many_branches_the_one_that_goes_furthest_is_found(make_engine: MakeEngine) -> None:
    """Behind a stem of two blocks: branches that leave each other at every offset of a block."""
    engine = make_engine()
    stem = ids(1, 8)
    branches = [[50, 60, 70, 80], [50, 60, 70, 90], [50, 60, 10, 90], [50, 20, 70, 80]]
    branches += [[49, 60, 70, 80], [51, 60, 70, 80], [255, 60, 70, 80], [256, 60, 70, 80]]
    for branch in branches:
        engine.generate([[*stem, *branch]], ONE)
    for rest, common in (
        ([50, 60, 70, 85], 3),
        ([50, 60, 70, 79], 3),
        ([50, 60, 10, 91], 3),
        ([50, 60, 11, 90], 2),
        ([50, 61, 70, 80], 1),
        ([50, 60], 2),
        ([48, 60, 70, 80], 0),
        ([256, 60, 71, 80], 2),
        ([255, 60, 70, 81], 3),
        ([256, 60, 70, 80], 4),
    ):
        assert cached(engine, [*stem, *rest, 99]) == 8 + common, rest
        engine.manager.flush()
        for branch in branches:
            engine.generate([[*stem, *branch]], ONE)


def test_without_a_cache_nothing_is_ever_cached(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(3):
        assert cached(engine, ids(1, 30), replace(ONE, n=4)) == 0


def test_a_fork_counts_what_it_inherits_as_forked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    parent = engine.generate([ids(1, 10)], greedy(5), keep_seconds=60)[0].outputs[0]
    before = replace(engine.metrics.counters)
    driver = Driver(engine)
    places = [(None, (), 14), (None, (90, 91), 14), (12, (), 11), (12, (92,), 12), (1, (93,), 1)]
    children = driver.fork(
        "forks", *(ForkBranch(parent.sequence_id, ONE, at, more) for at, more, _ in places)
    )
    driver.finish()
    total = 0
    for child, (at, more, forked) in zip(children.outputs, places, strict=True):
        prompt = (at or 15) + len(more)
        usage = child.usage
        assert (usage.prompt_tokens, usage.forked_tokens, usage.cached_tokens) == (
            prompt,
            forked,
            0,
        )
        assert usage.computed_tokens == prompt - forked
        total += prompt
    now = engine.metrics.counters
    assert now.prompt_tokens - before.prompt_tokens == total
    assert now.forked_tokens - before.forked_tokens == sum(forked for _, _, forked in places)
    assert now.cached_tokens == before.cached_tokens


def test_preempted_work_is_counted_apart(make_engine: MakeEngine) -> None:
    engine = make_engine(num_gpu_blocks_override=24, max_model_len=64)
    driver = Driver(engine)
    names = ["a", "b", "c"]
    for index, name in enumerate(names):
        driver.start(name, ids(1 + 20 * index, 20 + 20 * index), greedy(30))
    driver.finish()
    counters = engine.metrics.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    assert (counters.prompt_tokens, counters.computed_tokens) == (60, 60)
    for name in names:
        usage = driver.outputs[name].outputs[0].usage
        assert (usage.prompt_tokens, usage.computed_tokens, usage.completion_tokens) == (20, 20, 30)
    assert engine.metrics.counters.completion_tokens == 90


# -------------------------------------------------------------------------------- known bugs


def test_hm_01_a_waiting_request_is_counted_once(make_engine: MakeEngine) -> None:
    """HM-01: 9 tokens, 8 of them cached (and pinned), wait 20 steps for blocks, then run."""
    engine = make_engine(num_gpu_blocks_override=10, max_model_len=32)
    driver = Driver(engine)
    assert cached(engine, ids(1, 8)) == 0
    engine.execute(PinPrefix("pin", tuple(ids(1, 8)), 60.0))
    engine.step()
    holder = driver.start("holder", ids(21, 28), greedy(24))
    driver.step()
    before = replace(engine.metrics.counters)
    # Six samples want a block each besides the prompt's: too many beside the holder.
    waiter = driver.start("waiter", ids(1, 9), greedy(2, n=6))
    driver.step(20)
    assert not waiter.outputs
    assert replace(engine.metrics.counters, completion_tokens=2) == before
    driver.finish()
    assert holder.finished
    assert waiter.num_cached_tokens == 8
    now = engine.metrics.counters
    assert now.prompt_tokens - before.prompt_tokens == 9
    assert now.cached_tokens - before.cached_tokens == 8


def test_hm_04_samples_count_their_prompt_once_and_not_as_cached(make_engine: MakeEngine) -> None:
    """HM-04: a fresh prompt of 9, n = 4, then again."""
    engine = make_engine()
    driver = Driver(engine)
    for expected in (0, 8):
        before = replace(engine.metrics.counters)
        output = driver.start(f"cached {expected}", ids(1, 9), greedy(4, n=4))
        events = []
        while engine.has_work:
            events += driver.step()
        usages = {e.index: e.usage for e in events if isinstance(e, Finished)}
        assert [usages[i].prompt_tokens for i in range(4)] == [9, 0, 0, 0]
        assert [usages[i].cached_tokens for i in range(4)] == [expected, 0, 0, 0]
        assert [usages[i].completion_tokens for i in range(4)] == [4, 4, 4, 4]
        assert output.num_cached_tokens == expected
        now = engine.metrics.counters
        assert now.prompt_tokens - before.prompt_tokens == 9
        assert now.cached_tokens - before.cached_tokens == expected
        assert now.computed_tokens - before.computed_tokens == 9 - expected


def test_hm_05_totals_are_the_sums_over_requests_however_they_end(make_engine: MakeEngine) -> None:
    """HM-05: five requests, each aborted after two tokens; then others in other states.

    The rule: what an admission counts, the request's own usage says too, whatever comes after; one
    that was never admitted has computed nothing, and a search that was aborted has generated
    nothing.
    """
    engine = make_engine(max_num_seqs=5, max_num_batched_tokens=32)
    driver, counters = Driver(engine), engine.metrics.counters
    usages: list[Usage] = []

    def step(count: int = 1) -> None:
        usages.extend(e.usage for e in driver.step(count) if isinstance(e, Finished))

    for index in range(5):
        driver.start(f"{index}", ids(1 + 10 * index, 6 + 10 * index), greedy(100))
    step(2)
    assert [len(driver.outputs[f"{index}"].outputs[0].token_ids) for index in range(5)] == [2] * 5
    for index in range(5):
        driver.abort(f"{index}")
    step()
    assert (counters.requests_aborted, counters.requests_finished) == (5, 0)
    assert [(u.prompt_tokens, u.completion_tokens) for u in usages] == [(6, 2)] * 5

    driver.start("in its prompt", ids(61, 130), greedy(9, n=3))
    driver.start("queued", ids(131, 141), greedy(9, n=4))
    step()
    search = BeamSearchParams(2, max_tokens=9, ignore_eos=True)
    driver.start("queued search", ids(141, 152), search)
    for name in ("in its prompt", "queued", "queued search"):
        driver.abort(name)
    driver.start("search", ids(151, 163), search)
    step(4)
    driver.abort("search")
    driver.start("to its end", ids(171, 184), greedy(3, n=2))
    driver.start("a search to its end", ids(191, 205), search)
    while engine.has_work:
        step()
    sums = {}
    for name in ("prompt_tokens", "cached_tokens", "forked_tokens", "computed_tokens"):
        sums[name] = sum(getattr(usage, name) for usage in usages)
        assert sums[name] == getattr(counters, name), name
    assert sums["prompt_tokens"] == 5 * 6 + 70 + 13 + 14 + 15
    assert sum(usage.completion_tokens for usage in usages) == counters.completion_tokens
    assert (counters.requests_aborted, counters.requests_finished) == (9, 2)


def test_pc_03_outputs_are_those_of_cold_runs(make_engine: MakeEngine) -> None:
    """PC-03 with salts, the part of a namespace that a request names: 'a', 'b', none, 'a'."""
    engine = make_engine()
    outputs = [
        engine.generate([ids(1, 9)], greedy(6), cache_salt=s)[0] for s in ("a", "b", "", "a")
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 8]
    cold = bits(run_one(make_engine(enable_prefix_caching=False), ids(1, 9), greedy(6)))
    assert [bits(output.outputs[0]) for output in outputs] == [cold] * 4


def test_se_02_the_seed_of_the_digests_is_secret_by_default(make_engine: MakeEngine) -> None:
    """SE-02: two starts, two seeds; one that is given is kept. Reuse is the same either way."""
    names = []
    for seed in (None, None, 7, 7):
        engine = make_engine(digest_seed=seed)
        assert cached(engine, ids(1, 9)) == 0
        assert cached(engine, ids(1, 9)) == 8
        names.append(next(engine.manager.trie.walk()).last_digest)
    assert len(set(names[:3])) == 3
    assert names[2] == names[3]


def test_pc_05_fields_of_a_namespace_cannot_stand_for_one_another(make_engine: MakeEngine) -> None:
    """PC-05: adapter 'x' and salt 'x'; adapter and salt 'ab', 'c' and 'a', 'bc'."""
    names = [("x", ""), ("", "x"), ("ab", "c"), ("a", "bc"), ("", ""), ("abc", ""), ("", "abc")]
    names += [("aTSb", ""), ("a", "bTS")]  # which hold the tags that part the fields
    keys = [namespace_key(model=b"m", adapter=adapter, salt=salt) for adapter, salt in names]
    keys.append(namespace_key(model=b"mA", adapter="", salt=""))
    assert len(set(keys)) == len(keys)
    manager = BlockManager(32, 4, BlockDigest(1))
    tokens = np.arange(9, dtype=np.uint32)
    for key in keys:  # every prompt is new to its namespace, and known there afterwards
        match = manager.match(key, tokens.tobytes())
        assert match.num_tokens == 0
        table = manager.admit(key, tokens.tobytes(), match)
        manager.grow(table, 9)
        manager.publish(table, tokens, 9)
        manager.release(table)
        assert manager.match(key, tokens.tobytes()).num_tokens == 8
    engine = make_engine()
    found = []
    for salt in ("", "x", "y", "x", ""):
        found.append(engine.generate([ids(1, 9)], greedy(3), cache_salt=salt)[0].num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]


def test_pc_07_blocks_behind_a_fully_hit_prompt_stay_in_the_chain(make_engine: MakeEngine) -> None:
    """PC-07: P = [1..8] twice with 5 tokens each, then P, g1..g4 and another: 12 cached."""
    engine = make_engine()
    outputs = [engine.generate([ids(1, 8)], greedy(5))[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 7]
    assert bits(outputs[0].outputs[0]) == bits(outputs[1].outputs[0])
    generated = outputs[0].outputs[0].token_ids
    assert cached(engine, [*ids(1, 8), *generated[:4], 99]) == 12


def test_pc_09_a_partly_filled_block_is_nobodys_hit(make_engine: MakeEngine) -> None:
    """PC-09: while A runs on from [1..6], only its first block is shared; each equals its solo run.

    Once A has filled its second block a hit may end inside it: then 5 of B's 6 tokens are cached,
    and 6 of C's.
    """
    params = replace(greedy(6), temperature=0.9, stream_key=1)
    other = replace(params, stream_key=2)
    prompts = {"A": ids(1, 6), "B": ids(1, 6), "C": [*ids(1, 6), 60], "D": ids(1, 6), "E": []}
    prompts["E"] = prompts["C"]
    modes = {"A": params, "B": other, "C": params, "D": other, "E": params}
    engine = make_engine()
    driver = Driver(engine)
    driver.start("A", prompts["A"], params)
    driver.step()  # A's prompt has run: block 1 is full, block 2 half
    for name in ("B", "C"):
        driver.start(name, prompts[name], modes[name])
    driver.step(2)  # A's tokens 7 and 8 have run
    for name in ("D", "E"):
        driver.start(name, prompts[name], modes[name])
    driver.finish()
    hits = {name: output.num_cached_tokens for name, output in driver.outputs.items()}
    assert hits == {"A": 0, "B": 4, "C": 4, "D": 5, "E": 6}
    for name, output in driver.outputs.items():
        solo = run_one(make_engine(enable_prefix_caching=False), prompts[name], modes[name])
        assert bits(output.outputs[0]) == bits(solo)


@pytest.mark.parametrize(("waits", "expected"), [(False, 4), (True, 12)])
def test_pc_11_a_chunks_half_block_is_not_published(
    waits: bool, expected: int, make_engine: MakeEngine
) -> None:
    """PC-11: [1..12] in chunks of 7 and 5; between them comes [1..12, 13].

    The first chunk fills one block and three tokens of the next. A request that does not wait gets
    the one block; one that waits gets all three. Hits of free but cached blocks stay hits. The
    budget is 7, not 6, so that there is some left for the second request beside the second chunk.
    """
    engine = make_engine(max_num_batched_tokens=7, max_num_seqs=4, wait_for_inflight=waits)
    driver = Driver(engine)
    driver.start("first", ids(1, 12), greedy(1))
    driver.step()
    assert engine.manager.trie.num_blocks == 1
    driver.start("second", ids(1, 13), greedy(1))
    driver.finish()
    assert driver.outputs["second"].num_cached_tokens == expected
    for _ in range(3):
        assert cached(engine, ids(1, 13)) == 12
        assert engine.manager.num_in_use == 0


def test_pc_11_between_chunks_of_six_one_block_is_found(make_engine: MakeEngine) -> None:
    """PC-11: chunks of 6; what a lookup finds between them, at the first and the second end."""
    engine = make_engine(max_num_batched_tokens=6, max_num_seqs=4)
    driver = Driver(engine)
    driver.start("first", ids(1, 12), greedy(1))
    data = np.array(ids(1, 13), np.uint32).tobytes()
    found = []
    for _ in range(2):
        driver.step()
        found.append(engine.manager.match(engine.requests.namespace(Owner()), data).num_tokens)
    assert found == [4, 12]


@pytest.mark.parametrize("waits", [False, True])
def test_pc_13_equal_blocks_of_two_requests_become_one(
    waits: bool, make_engine: MakeEngine
) -> None:
    """PC-13: [1..8, 30] and [1..8, 40] in one step; one copy is left, found, evicted, not found."""
    engine = make_engine(num_gpu_blocks_override=8, max_model_len=32, wait_for_inflight=waits)
    outputs = accounted(engine, [[*ids(1, 8), 30], [*ids(1, 8), 40]], ONE)
    assert [output.num_cached_tokens for output in outputs] == ([0, 8] if waits else [0, 0])
    assert engine.manager.trie.num_blocks == engine.manager.num_evictable == 2
    assert cached(engine, [*ids(1, 8), 50]) == 8
    assert cached(engine, ids(31, 60)) == 0  # takes every block of the pool
    assert engine.manager.num_evicted == 2
    assert cached(engine, [*ids(1, 8), 50]) == 0


@pytest.mark.parametrize("evicted", [0, 1, 2, 3])
def test_pc_14_nothing_behind_a_gap_counts(evicted: int, make_engine: MakeEngine) -> None:
    """PC-14: of three cached blocks the last go first, so no gap can arise."""
    engine = make_engine(num_gpu_blocks_override=8, max_model_len=32)
    assert cached(engine, ids(1, 13)) == 0
    assert engine.manager.num_free == 5
    assert cached(engine, ids(101, 99 + 4 * (5 + evicted))) == 0
    assert engine.manager.num_evicted == evicted
    assert cached(engine, ids(1, 13)) == 12 - 4 * evicted


@pytest.mark.parametrize("first", [0, 1, 2])
def test_pc_14_branches_go_before_their_stem_whatever_their_priority(
    first: int, make_engine: MakeEngine
) -> None:
    """PC-14: [1..4] with three branches of different urgency, each of one block, in every order."""
    engine = make_engine(num_gpu_blocks_override=8, max_model_len=32)
    driver = Driver(engine)
    for index in range(3):
        branch = (first + index) % 3
        tail = ids(20 + 10 * branch, 24 + 10 * branch)
        driver.start(f"{branch}", [*ids(1, 4), *tail], ONE, priority=branch)
        driver.finish()
    assert engine.manager.num_free == 4
    for need in (5, 6, 7, 8):  # one block more each time; priority 2 goes first, the stem last
        engine.manager.flush(engine.requests.namespace(Owner("", "other")))
        big = ids(101, 99 + 4 * need)
        assert engine.generate([big], ONE, cache_salt="other")[0].num_cached_tokens == 0
        data = [np.array([*ids(1, 4), *ids(20 + 10 * b, 24 + 10 * b)], np.uint32) for b in range(3)]
        namespace = engine.requests.namespace(Owner())
        found = [engine.manager.match(namespace, tokens.tobytes()).num_tokens for tokens in data]
        left = 8 - need
        assert found == [(8 if b < left - 1 else 4) if left else 0 for b in range(3)]


def test_pc_16_a_waiting_request_is_looked_up_again(make_engine: MakeEngine) -> None:
    """PC-16: W = [1..9] with 8 cached waits; its blocks go before it runs."""
    engine = make_engine(num_gpu_blocks_override=10, max_model_len=40)
    assert cached(engine, ids(1, 9)) == 0
    driver = Driver(engine)
    driver.start("holder", ids(21, 48), greedy(12))
    driver.step()
    waiter = driver.start("W", ids(1, 9), greedy(4))
    driver.step()
    data = np.array(ids(1, 9), np.uint32).tobytes()
    first_look = engine.manager.match(engine.requests.namespace(Owner()), data)
    assert first_look.num_tokens == 8
    assert not waiter.outputs
    driver.finish()
    assert engine.manager.num_evicted > 0
    assert waiter.num_cached_tokens == 0
    assert waiter.outputs[0].usage.computed_tokens == 9
    solo = run_one(make_engine(enable_prefix_caching=False), ids(1, 9), greedy(4))
    assert bits(waiter.outputs[0]) == bits(solo)
