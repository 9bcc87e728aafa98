"""Preemption, aborts, and what never fits: the PR, RC and SC faults of known-bugs.md.

Blocks of 4 tokens; a solo run is one on a quiet engine without a cache.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prefixcache import SamplingParams
from prefixcache.engine.messages import Finished
from prefixcache.engine.outputs import RequestOutput
from prefixcache.errors import InvalidArgument, ResourceExhausted
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Bits, Driver, bits
from tests.model.checkpoints import TOKENIZER_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
SAMPLED = replace(GREEDY, temperature=1.0, stream_key=5)
every_mode = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
with_and_without_a_cache = pytest.mark.parametrize("caching", [True, False])


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, TOKENIZER_SIZE, count).tolist()


Solo = Callable[[list[int], SamplingParams], RequestOutput]


@pytest.fixture
def solo(make_engine: MakeEngine) -> Solo:
    quiet = make_engine(enable_prefix_caching=False, max_num_batched_tokens=4096)
    return lambda tokens, params: quiet.generate([tokens], params)[0]


def solo_bits(solo: Solo, tokens: list[int], params: SamplingParams) -> Bits:
    return bits(solo(tokens, params).outputs[0])


# -------------------------------------------------------------------------------- preemption


@every_mode
@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("length", [8, 9, 10])
def test_pr_02_a_preempted_sequence_loses_and_repeats_nothing(
    length: int, evicted: bool, params: SamplingParams, make_engine: MakeEngine, solo: Solo
) -> None:
    """PR-02: preempted at a total length of 2B, 2B + 1, 2B + 2; its blocks stay, or are lost."""
    tokens = prompt(5)
    blocks: dict[str, list[tuple[int, int]]] = {"disturbed": [], "quiet": []}
    for name, counts in blocks.items():
        engine = make_engine()
        driver = Driver(engine)
        output = driver.start(name, tokens, replace(params, max_tokens=12))
        while engine.has_work:
            driver.step()
            if not engine.has_work:
                break
            sequence = driver.group(name).sequences[0]
            counts.append((len(sequence.tokens), sequence.table.num_blocks))
            if name == "disturbed" and len(sequence.tokens) == length:
                driver.preempt(name)
                assert engine.manager.num_in_use == 0
                if evicted:
                    engine.manager.flush()
                driver.step()
                counts.append((len(sequence.tokens), sequence.table.num_blocks))
        counters = engine.metrics.counters
        assert counters.preemptions == (name == "disturbed")
        if name == "disturbed":  # KV of `length` - 1 tokens was there, its full blocks still are
            found = (length - 1) // 4 * 4 if not evicted else 0
            assert counters.recomputed_tokens == length - found
        assert bits(output.outputs[0]) == solo_bits(solo, tokens, replace(params, max_tokens=12))
    assert blocks["disturbed"] == blocks["quiet"]


@with_and_without_a_cache
def test_pr_04_history_holds_each_token_once(
    caching: bool, make_engine: MakeEngine, solo: Solo
) -> None:
    """PR-04: preempted twice, in prefill and in decode; block keys are those of its tokens."""
    engine = make_engine(max_num_batched_tokens=16, enable_prefix_caching=caching)
    driver = Driver(engine)
    tokens = prompt(30)
    output = driver.start("twice", tokens, replace(SAMPLED, max_tokens=20))
    driver.step()
    driver.preempt("twice")
    driver.step(8)
    assert 0 < len(output.outputs[0].token_ids) < 20
    driver.preempt("twice")
    driver.finish()
    assert engine.metrics.counters.preemptions == 2
    assert bits(output.outputs[0]) == solo_bits(solo, tokens, replace(SAMPLED, max_tokens=20))
    history = np.array([*tokens, *output.outputs[0].token_ids], np.uint32)
    assert len(history) == 50
    trie = engine.manager.trie
    (root,) = trie.roots()
    keys = [key for node in trie.walk() for key in map(node.digest_of, range(len(node.blocks)))]
    expected = [root.last_digest]
    for start in range(0, 48, 4):
        expected.append(trie.digest(expected[-1] + history[start : start + 4].tobytes()))
    assert keys == expected[1:]


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_pr_06_prompt_logprobs_survive_preemption(
    cached: bool, after: int, make_engine: MakeEngine, solo: Solo
) -> None:
    """PR-06: a prompt of 12 in chunks of 4, preempted after a chunk; 12 entries, none twice.

    Where another request has left the whole prompt in the cache, the rest is run all the same.
    """
    params = replace(GREEDY, prompt_logprobs=2)
    tokens = prompt(12)
    expected = solo(tokens, params)
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4)
    driver = Driver(engine)
    if cached:
        engine.generate([tokens], GREEDY)
    output = driver.start("scored", tokens, params)
    driver.step(after)
    driver.preempt("scored")
    driver.finish()
    assert engine.metrics.counters.preemptions == 1
    assert len(output.prompt_logprobs) == 12
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert bits(output.outputs[0]) == bits(expected.outputs[0])


def test_the_oldest_of_the_most_urgent_is_never_preempted(
    make_engine: MakeEngine, solo: Solo
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, max_model_len=72)
    driver = Driver(engine)
    params = replace(GREEDY, max_tokens=40)
    order = [("late and urgent", -1), ("first", 0), ("second", 0), ("idle", 5)]
    for index, (name, priority) in enumerate(reversed(order)):
        driver.start(name, prompt(10, seed=index), params, priority=priority)
    finished: list[str] = []
    while engine.has_work:
        finished += [e.request_id for e in driver.step() if isinstance(e, Finished)]
    assert engine.metrics.counters.preemptions > 0
    # Within a level the one that came first: "second" was queued before "first".
    assert finished == ["late and urgent", "second", "first", "idle"]
    for index, (name, _) in enumerate(reversed(order)):
        output = driver.outputs[name].outputs[0]
        assert bits(output) == solo_bits(solo, prompt(10, seed=index), params)


# -------------------------------------------------------------------------------- aborts


def test_rc_01_an_aborted_group_stops_and_frees_its_blocks(make_engine: MakeEngine) -> None:
    """RC-01: n = 4, max_tokens = 1000, aborted after three tokens; no step runs for it any more."""
    long = {"max_position_embeddings": 2048}
    engine = make_engine(model=long, max_model_len=1100, num_gpu_blocks_override=1100)
    driver = Driver(engine)
    free = engine.manager.num_available
    output = driver.start("four", prompt(30), replace(SAMPLED, n=4, max_tokens=1000))
    driver.step(3)
    assert [len(sample.token_ids) for sample in output.outputs] == [3, 3, 3, 3]
    driver.abort("four")
    assert not engine.has_work
    assert engine.manager.num_available == free
    events = driver.step()
    assert [(event.index, event.reason) for event in events] == [(i, "abort") for i in range(4)]
    assert [event.usage.completion_tokens for event in events] == [3, 3, 3, 3]
    assert driver.step(2) == []
    assert engine.metrics.counters.completion_tokens == 12
    assert engine.metrics.counters.requests_aborted == 1


def test_rc_01_an_abort_in_mid_prefill_before_any_token(make_engine: MakeEngine) -> None:
    """RC-01, before the samples exist."""
    engine = make_engine(max_num_batched_tokens=16)
    driver = Driver(engine)
    driver.start("four", prompt(40), replace(SAMPLED, n=4, max_tokens=400))
    driver.step()
    driver.abort("four")
    assert not engine.has_work
    assert engine.manager.num_in_use == 0
    events = driver.step()
    assert [(event.index, event.reason) for event in events] == [(i, "abort") for i in range(4)]
    assert [event.usage.prompt_tokens for event in events] == [40, 0, 0, 0]
    assert engine.metrics.counters.completion_tokens == 0


def test_rc_06_a_request_that_never_ran_can_be_aborted(make_engine: MakeEngine, solo: Solo) -> None:
    """RC-06: in the queue, twice, and by an unknown name; the others go on."""
    engine = make_engine(num_gpu_blocks_override=16, max_model_len=64)
    driver = Driver(engine)
    params = replace(GREEDY, max_tokens=12)
    driver.start("runs", prompt(50), params)
    driver.step()
    driver.start("waits", prompt(20, seed=1), params)
    driver.start("next", prompt(20, seed=2), params)
    driver.step()
    assert [group.request_id for group in engine.scheduler.waiting] == ["waits", "next"]
    for name in ("waits", "waits", "unknown"):
        driver.abort(name)
    assert [group.request_id for group in engine.scheduler.waiting] == ["next"]
    assert engine.metrics.counters.requests_aborted == 1
    driver.finish()
    assert driver.outputs["waits"].outputs[0].finish_reason == "abort"
    assert driver.outputs["waits"].outputs[0].token_ids == []
    for name, tokens in (("runs", prompt(50)), ("next", prompt(20, seed=2))):
        assert bits(driver.outputs[name].outputs[0]) == solo_bits(solo, tokens, params)


def test_an_aborted_producer_hands_its_prompt_to_the_first_that_waits(
    make_engine: MakeEngine, solo: Solo
) -> None:
    """Design §4, in flight: no waiter waits for blocks that nobody computes."""
    engine = make_engine(max_num_batched_tokens=16)
    driver = Driver(engine)
    tokens = prompt(60)
    for name in ("producer", "second", "third"):
        driver.start(name, tokens, GREEDY)
    driver.step(2)
    assert [g.request_id for g in engine.scheduler.waiting] == ["second", "third"]
    driver.abort("producer")
    driver.finish()
    hits = [driver.outputs[name].num_cached_tokens for name in ("second", "third")]
    assert hits == [32, 59]  # what the producer had computed, and all that the second did
    for name in ("second", "third"):
        assert bits(driver.outputs[name].outputs[0]) == solo_bits(solo, tokens, GREEDY)


# -------------------------------------------------------------------------------- what fits


def test_sc_01_what_can_never_fit_is_refused_at_once(make_engine: MakeEngine, solo: Solo) -> None:
    """SC-01: a pool of 8 blocks; a prompt of 20 with n = 4, and one whose branches grow too far."""
    engine = make_engine(num_gpu_blocks_override=8, max_model_len=32)
    never = ("wide", "deep", "long")
    driver = Driver(engine, fails=never)
    driver.start("wide", prompt(20), replace(GREEDY, n=4, max_tokens=12))
    driver.start("deep", prompt(8), replace(GREEDY, n=2, max_tokens=24))
    driver.start("long", prompt(20), replace(GREEDY, max_tokens=13))
    driver.start("behind", prompt(3, seed=1), GREEDY)
    driver.step()
    assert set(driver.errors) == set(never)
    # 5 blocks of prompt and 4 x 3 behind it: 31 tokens each, as the last one's KV isn't written.
    assert isinstance(driver.errors["wide"], ResourceExhausted)
    assert "needs 17 blocks of 4 tokens; the pool has 8" in str(driver.errors["wide"])
    assert "needs 14 blocks of 4 tokens; the pool has 8" in str(driver.errors["deep"])
    assert isinstance(driver.errors["long"], InvalidArgument)
    assert "exceed the model's length of 32" in str(driver.errors["long"])
    assert driver.outputs["behind"].outputs[0].token_ids
    driver.finish()
    expected = solo_bits(solo, prompt(3, seed=1), GREEDY)
    assert bits(driver.outputs["behind"].outputs[0]) == expected
    assert engine.metrics.counters.requests_failed == 3


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sc_01_a_lone_grower_ends_with_length(n: int, make_engine: MakeEngine, solo: Solo) -> None:
    """SC-01: without max_tokens a group that alone fills the pool ends; nothing preempts itself."""
    engine = make_engine(num_gpu_blocks_override=8, max_model_len=32)
    driver = Driver(engine)
    params = replace(SAMPLED, n=n, max_tokens=None)
    output = driver.start("grows", prompt(18), params)
    for _ in range(200):
        if engine.has_work:
            driver.step()
    assert output.finished
    assert engine.metrics.counters.preemptions == 0
    assert [sample.finish_reason for sample in output.outputs] == ["length"] * n
    lengths = [len(sample.token_ids) for sample in output.outputs]
    assert max(lengths) == 14  # as others end, one gets to the model's length
    assert all(2 <= length <= 14 for length in lengths)
    for sample in output.outputs:
        own = replace(params, n=1, max_tokens=len(sample.token_ids), stream_key=sample.stream_key)
        assert bits(sample) == solo_bits(solo, prompt(18), own)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [8, 12])
@with_and_without_a_cache
def test_sc_06_the_last_chunk_of_whole_blocks(
    caching: bool, length: int, n: int, make_engine: MakeEngine, solo: Solo
) -> None:
    """SC-06: prompts of 8 and 12 in chunks of 4."""
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=4, enable_prefix_caching=caching)
    params = replace(SAMPLED, n=n)
    expected = [bits(sample) for sample in solo(prompt(length), params).outputs]
    for _ in range(2):
        output = engine.generate([prompt(length)], params)[0]
        assert [bits(sample) for sample in output.outputs] == expected


def test_sc_08_a_chunked_prefill_never_asks_for_its_cached_part(
    make_engine: MakeEngine, solo: Solo
) -> None:
    """SC-08: 28 of 32 tokens cached, 9 blocks, chunks of 2, two such requests at once."""
    engine = make_engine(
        num_gpu_blocks_override=9, max_model_len=36, max_num_seqs=2, max_num_batched_tokens=2
    )
    params = replace(GREEDY, max_tokens=1)
    shared = prompt(28)
    engine.generate([shared], params)
    assert engine.manager.num_evictable == 7
    before = replace(engine.metrics.counters)
    ends = [prompt(4, seed=1), prompt(4, seed=2)]
    outputs = engine.generate([[*shared, *end] for end in ends], params)
    counters = engine.metrics.counters
    assert [output.num_cached_tokens for output in outputs] == [28, 28]
    assert counters.computed_tokens - before.computed_tokens == 8
    assert (counters.preemptions, counters.recomputed_tokens) == (0, 0)
    assert engine.manager.num_evicted == 0
    for output, end in zip(outputs, ends, strict=True):
        assert bits(output.outputs[0]) == solo_bits(solo, [*shared, *end], params)
