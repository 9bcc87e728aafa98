"""The sampler against a dense float64 reference, and what it promises about bits and bad rows."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.engine import distribution, distribution_torch
from prefixcache.engine.distribution import RowDistribution
from prefixcache.engine.penalties import edit_logits
from prefixcache.engine.philox import derive_key, root_key, uniform
from prefixcache.engine.sampler import NO_TOKEN, Sampler, SampleRow, SamplerState
from prefixcache.params import SamplingParams

SMOLLM2_VOCAB = 49152
GREEDY = SamplingParams(temperature=0.0)
ENDS = np.array([0.0, 1 - 2**-53])  # the least and the greatest uniform


def draw(logits, params, *, key=1, position=0, **row):
    """One token of one row."""
    matrix = torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1)
    size = matrix.shape[1]
    return Sampler(size, size).sample(matrix, [SampleRow(0, params, key, position, **row)])


def draws(logits, params, count, *, key=1, tokenizer_size=None):
    """`count` tokens of one row, at positions 0, 1, …"""
    matrix = torch.as_tensor(logits, dtype=torch.float32).reshape(1, -1)
    size = matrix.shape[1]
    rows = [SampleRow(0, params, key, position) for position in range(count)]
    return np.array(Sampler(size, tokenizer_size or size).sample(matrix, rows).token_ids)


# ---------------------------------------------------------------- a straightforward reference


def edited(logits, params, prompt=(), output=(), banned=()):
    """Bias, penalties, bans: dense, one token after another; float32 after each of the three."""
    values = np.array(logits, np.float32).astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    values = values.astype(np.float32).astype(np.float64)
    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.presence_penalty * (counts[token] > 0)
        values[token] -= params.frequency_penalty * counts[token]
    values = values.astype(np.float32).astype(np.float64)
    values[list(banned)] = -np.inf
    return values


def reference_token(values, params, u, nudge=0.0):
    """The token for the uniform u; `nudge` moves u and the cuts by a rounding error."""
    if params.greedy:
        return int(np.argmax(values))
    weights = np.exp((values - values.max()) / params.temperature)
    probabilities = weights / weights.sum()
    order = np.lexsort((np.arange(len(values)), -probabilities))
    cut = min(1.0, params.min_p * (1 + nudge)) * probabilities.max()
    order = order[probabilities[order] >= cut]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        reached = np.cumsum(probabilities[order]) / probabilities[order].sum()
        order = order[: int(np.sum(reached < params.top_p * (1 + nudge))) + 1]
    kept = np.sort(order)
    reached = np.cumsum(probabilities[kept])
    above = reached > (u + nudge) * reached[-1]
    return int(kept[np.argmax(above)]) if above.any() else int(kept[-1])


VOCAB = 24
token = st.integers(0, VOCAB - 1)
# A grid makes ties common; the rest is arbitrary.
logit = st.one_of(st.integers(-8, 8).map(lambda n: n / 2), st.floats(-30, 30, width=32))
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 1.0, 3.0, 100.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.7, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=3),
    min_tokens=st.sampled_from([0, 4]),
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    logits=st.lists(logit, min_size=VOCAB, max_size=VOCAB),
    params=parameters,
    tokens=st.tuples(st.lists(token, max_size=6), st.lists(token, max_size=8)),
    stop_ids=st.frozensets(token, max_size=3),
    position=st.integers(0, 1000),
)
def test_every_combination_of_parameters_equals_the_reference(
    logits, params, tokens, stop_ids, position
):
    prompt, output = tokens
    state = SamplerState(prompt)
    state.extend(output)
    key = root_key(position)
    found = draw(
        logits,
        params,
        key=key,
        position=position,
        state=state if SamplerState.needed(params) else None,
        num_generated=len(output),
        stop_ids=stop_ids,
    ).token_ids[0]
    banned = stop_ids if len(output) < params.min_tokens else ()
    values = edited(logits, params, prompt, output, banned)
    u = uniform(np.array([key], np.uint64), np.array([position]))[0]
    assert found in {reference_token(values, params, u, nudge) for nudge in (0.0, 1e-6, -1e-6)}


def test_bias_comes_before_penalties():
    """As in transformers: (1 + 2) / 2 < 2.2, while 1 / 2 + 2 would win."""
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={3: 2.0})
    logits = np.zeros(VOCAB)
    logits[3], logits[5] = 1.0, 2.2
    assert draw(logits, params, state=SamplerState([3])).token_ids == [5]


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(token, max_size=30), st.lists(st.tuples(token, st.booleans()), max_size=60))
def test_state_counts_like_a_dictionary_through_copies_and_forks(prompt, steps):
    state, seen, counts = SamplerState(prompt), set(prompt), Counter()
    for generated, fork in steps:
        before = state.counts.tolist()
        parent, state = state, state.fork() if fork else state.copy()
        if fork:
            counts = Counter()  # everything before the fork point is prompt
        state.append(generated)
        seen.add(generated)
        counts[generated] += 1
        assert parent.counts.tolist() == before
        assert dict(zip(state.token_ids.tolist(), state.counts.tolist(), strict=True)) == {
            known: counts[known] for known in seen
        }


def test_copies_of_a_state_go_their_own_ways():
    first = SamplerState([1])
    first.append(2)  # now there is room for more, which a copy must not share
    second = first.copy()
    first.append(3)
    second.append(4)
    assert first.token_ids.tolist() == [1, 2, 3]
    assert second.token_ids.tolist() == [1, 2, 4]


def test_a_fork_is_penalised_like_a_fresh_request_with_the_same_tokens():
    """Design 5.2: for a fork, everything before the fork point is prompt."""
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.7, frequency_penalty=0.4)
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[0]
    parent = SamplerState([5, 6, 7])
    parent.extend([50, 51, 50, 6])
    forked, fresh = parent.fork(), SamplerState([5, 6, 7, 50, 51, 50, 6])
    for state in (forked, fresh):
        state.extend([9, 50])
    edit_logits(logits, [params, params], [forked, fresh], [(), ()])
    assert torch.equal(logits[0], logits[1])


# ---------------------------------------------------------------- distribution of the draws


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=10),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, temperature=0.7),
    ],
)
def test_draws_follow_the_distribution(params):
    """Chi-square with fixed keys; the bound is the 99.9 % point for 49 degrees of freedom."""
    logits = np.random.default_rng(3).normal(size=50).astype(np.float32)
    count = 40_000
    counts = np.bincount(draws(logits, params, count, key=root_key(2)), minlength=50)
    scaled = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-scaled)
    kept = scaled >= params.min_p
    if params.top_k:
        kept[order[params.top_k :]] = False
    if params.top_p < 1:
        mass = np.cumsum(scaled[order]) / scaled.sum()
        kept[order[int(np.sum(mass < params.top_p)) + 1 :]] = False
    expected = count * scaled * kept / (scaled * kept).sum()
    assert counts[~kept].sum() == 0
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 85.4


def test_n_samples_of_one_seed_differ_and_come_again():
    """PS-01: seed = 7 and 2**64 - 1, n = 4, flat logits: four samples, the same four each time."""
    logits = torch.zeros(1, 1000)
    for seed in (7, 2**64 - 1):
        keys = [derive_key(root_key(seed), branch) for branch in range(4)]

        def run(keys=keys):
            sampler = Sampler(1000, 1000)
            params = SamplingParams(n=4)
            steps = [
                sampler.sample(logits, [SampleRow(0, params, key, at) for key in keys]).token_ids
                for at in range(8)
            ]
            return list(zip(*steps, strict=True))

        samples = run()
        assert len(set(samples)) == 4
        assert samples == run()


# ---------------------------------------------------------------- same bits


def _mixed_rows(count):
    kinds = [
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=0),
        SamplingParams(top_k=40, min_p=0.01, logprobs=1),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=1),
        SamplingParams(logit_bias={5: 3.0}, temperature=1.5, logprobs=0),
    ]
    rows = []
    for index in range(count):
        params = kinds[index % len(kinds)]
        state = SamplerState(range(index, index + 50)) if SamplerState.needed(params) else None
        rows.append(SampleRow(index, params, root_key(index), 100 + index, state))
    return rows


def _bits(sampled, index):
    logprobs = sampled.logprobs[index]
    numbers = [logprobs.logprob, *(value for _, value in logprobs.top)]
    ids = [sampled.token_ids[index], *(token for token, _ in logprobs.top)]
    return torch.tensor(ids), torch.tensor(numbers)


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("restore_threads")
def test_a_row_has_the_same_bits_alone_and_in_any_batch_with_any_threads():
    """Design 5.2, over SmolLM2's vocabulary: batches of 1 to 17 rows, 1, 2 and 3 threads."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(17, SMOLLM2_VOCAB, generator=generator) * 3
    rows = _mixed_rows(17)
    sampler = Sampler(SMOLLM2_VOCAB, SMOLLM2_VOCAB)
    alone = [
        _bits(sampler.sample(logits[i : i + 1].clone(), [_moved(rows[i], 0)]), 0) for i in range(17)
    ]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for size in range(1, 18):
            first = 17 - size  # so that a row's place in the batch varies too
            some = [_moved(row, row.logits_row - first) for row in rows[first:]]
            sampled = sampler.sample(logits[first:], some)
            for index in range(size):
                ids, numbers = _bits(sampled, index)
                assert torch.equal(ids, alone[first + index][0])
                assert torch.equal(numbers, alone[first + index][1])


def _moved(row, logits_row):
    return SampleRow(logits_row, row.params, row.stream_key, row.position, row.state)


def test_weights_do_not_depend_on_where_a_row_lies_in_memory():
    """exp is the one operation that rounds; vector code often treats ends and offsets apart."""
    row = np.random.default_rng(0).normal(size=1013).astype(np.float32) * 4
    expected = RowDistribution(1013).weigh(row, 1.0).copy()
    for offset in range(33):
        buffer = np.zeros(1100, np.float32)
        buffer[offset : offset + 1013] = row
        assert np.array_equal(
            RowDistribution(1013).weigh(buffer[offset : offset + 1013], 1.0), expected
        )


def test_samples_that_share_a_row_draw_as_if_each_had_its_own():
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(4))
    params = SamplingParams(n=8, logprobs=2)
    shared = [SampleRow(0, params, key, 9) for key in range(8)]
    own = [SampleRow(i, params, key, 9) for i, key in enumerate(range(8))]
    sampler = Sampler(500, 500)
    assert sampler.sample(logits, shared) == sampler.sample(logits.repeat(8, 1), own)


def test_samples_that_share_a_row_but_not_their_counts_are_penalised_apart():
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    states = [SamplerState([]), SamplerState([])]
    states[0].append(0)
    states[1].append(1)
    rows = [SampleRow(0, params, 1, 1, state) for state in states]
    assert Sampler(2, 2).sample(torch.zeros(1, 2), rows).token_ids == [1, 0]


def test_the_logits_are_left_as_they_were():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    Sampler(300, 300).sample(logits, _mixed_rows(6))
    assert torch.equal(logits, before)


def test_no_global_generator_is_touched_and_none_matters():
    """SM-08: A, with seed 11, is the same beside any B; B, unseeded, varies with its key."""
    logits = torch.zeros(2, 5000)
    sampler = Sampler(5000, 5000)
    seen_a, seen_b = set(), set()
    for key_b in range(5):
        random.seed(key_b)
        np.random.seed(key_b)
        torch.manual_seed(key_b)
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        rows = [
            SampleRow(0, SamplingParams(), root_key(11), 3),
            SampleRow(1, SamplingParams(), key_b, 3),
        ]
        a, b = sampler.sample(logits, rows).token_ids
        seen_a.add(a)
        seen_b.add(b)
        assert random.getstate() == states[0]
        assert np.random.get_state()[1].tolist() == states[1]
        assert torch.equal(torch.get_rng_state(), states[2])
    assert len(seen_a) == 1
    assert len(seen_b) > 1


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("temperature", [1e-3, 9e-4, 1e-4, 1e-5, 1e-6, 1e-7, 5e-324])
def test_tiny_temperatures_equal_greedy(temperature):
    """SM-01: half-precision logits up to 40, all distinct."""
    ladder = torch.linspace(-40, 40, 2001).half()
    logits = ladder[torch.randperm(2001, generator=torch.Generator().manual_seed(2))].float()
    params = SamplingParams(temperature=temperature, logprobs=1)
    for position in range(20):
        found = draw(logits, params, position=position)
        assert found.token_ids == [int(logits.argmax())]
        assert np.isfinite(found.logprobs[0].logprob)


@pytest.mark.parametrize(
    "off", [SamplingParams(top_k=k) for k in (-1, 200, 201, 2**31 - 1)] + [SamplingParams(top_p=1)]
)
def test_values_that_mean_off_change_nothing(off):
    """SM-03"""
    logits = np.random.default_rng(1).normal(size=200)
    expected = draws(logits, SamplingParams(), 300)
    assert draws(logits, off, 300).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_p=1e-9), SamplingParams(top_k=1), SamplingParams(top_p=5e-324)],
)
def test_the_narrowest_filters_keep_one_token(params):
    """SM-03: never none. Among equals it is the lowest id."""
    logits = np.array([0.0, 2.0, 1.0, 2.0, 2.0])
    assert set(draws(logits, params, 100).tolist()) == {1}


def test_min_p_of_one_keeps_the_equals_of_the_best():
    logits = np.array([0.0, 2.0, 1.999, 2.0])
    assert set(draws(logits, SamplingParams(min_p=1.0), 200).tolist()) == {1, 3}


def test_ties_go_to_the_lower_id_in_every_filter():
    flat = np.zeros(100)
    assert draw(flat, GREEDY).token_ids == [0]
    uneven = np.array([1.0, 1.0, 2.0, 1.0])
    assert set(draws(uneven, SamplingParams(top_k=2), 200).tolist()) == {0, 2}
    assert set(draws(flat, SamplingParams(top_k=3), 200).tolist()) == {0, 1, 2}
    assert set(draws(flat, SamplingParams(top_p=0.03), 200).tolist()) == {0, 1, 2}
    top = draw(flat, SamplingParams(temperature=0.0, logprobs=4)).logprobs[0].top
    assert [token for token, _ in top] == [0, 1, 2, 3]


def test_a_token_of_probability_zero_never_comes_out():
    """SM-06: 3 of 50,000 tokens allowed, 10**6 draws, and the uniform forced to its ends."""
    allowed = [0, 777, 49_999]
    for floor in (-np.inf, -200.0):
        for ids in (allowed, [777, 778, 40_000], [1, 2, 3]):
            logits = np.full(50_000, floor, np.float32)
            logits[ids] = [1.0, 0.0, 2.0]
            ends = np.array([0.0, 5e-324, 1 - 2**-53])
            spread = uniform(np.full(10**6 // 6, 3, np.uint64), np.arange(10**6 // 6))
            found = RowDistribution(50_000).draw(
                logits, SamplingParams(), np.concatenate([ends, spread])
            )
            assert set(found) == set(ids)
            assert found[:3] == [ids[0], ids[0], ids[2]]


@pytest.mark.parametrize("size", [3, 50_000, 49_152, 151_936])
def test_the_ends_of_the_uniform_draw_the_first_and_the_last_token(size):
    """SM-06"""
    logits = np.zeros(size, np.float32)
    logits[0] = -200.0
    assert RowDistribution(size).draw(logits, SamplingParams(), ENDS) == [1, size - 1]
    weights = torch.full((1, size), 2**40)
    weights[0, 0] = 0
    found = distribution_torch.draw(weights, torch.tensor([0, 0]), torch.from_numpy(ENDS))
    assert found.tolist() == [1, size - 1]


def test_the_greatest_uniform_stays_below_totals_that_no_float_holds():
    """SM-06: a total beyond 2**53 is rounded as it becomes a float, here up and down."""
    for extra in range(1, 17):
        weights = np.array([2**54, 0, 2**54 + extra, 0])
        assert distribution._invert(np.cumsum(weights), ENDS).tolist() == [0, 2]
        matrix = torch.from_numpy(weights).reshape(1, -1)
        found = distribution_torch.draw(matrix, torch.tensor([0, 0]), torch.from_numpy(ENDS))
        assert found.tolist() == [0, 2]


@pytest.mark.parametrize("params", [SamplingParams(temperature=5.0), GREEDY])
def test_ids_beyond_the_tokenizer_are_never_sampled(params):
    """SM-16: model width 64, tokenizer 60; the padding has the greatest logits."""
    logits = np.zeros(64)
    logits[60:] = 50.0
    assert draws(logits, params, 10_000, tokenizer_size=60).max() < 60


def test_ids_beyond_the_tokenizer_are_no_top_tokens_but_count_in_the_normaliser():
    """SM-16: logprobs are the model's, over all its columns."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    logits[0, 60:] = 5.0
    found = Sampler(64, 60).logprobs(logits, 0, 7, 60)
    exact = torch.log_softmax(logits[0].double(), 0)
    assert max(token for token, _ in found.top) < 60
    assert found.logprob == pytest.approx(float(exact[7]), abs=2e-6)


def test_the_chosen_token_has_its_logprob_however_unlikely():
    """SM-09: temperature 2 and logprobs = 1 or 0 meet tokens of high rank, special ones too."""
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(6)) * 2
    exact = torch.log_softmax(logits[0].double(), 0)
    rank = torch.argsort(torch.argsort(-logits[0]))
    for top_k in (0, 1):
        params = SamplingParams(temperature=2.0, logprobs=top_k)
        rows = [SampleRow(0, params, 5, position) for position in range(500)]
        sampled = Sampler(2000, 2000).sample(logits, rows)
        assert max(int(rank[token]) for token in sampled.token_ids) >= 900
        for token, logprobs in zip(sampled.token_ids, sampled.logprobs, strict=True):
            assert logprobs.token_id == token
            assert logprobs.logprob == pytest.approx(float(exact[token]), abs=2e-6)
            assert [best for best, _ in logprobs.top] == [int(logits[0].argmax())][:top_k]


def test_logprobs_are_of_the_model_and_not_of_the_edited_distribution():
    logits = torch.randn(3, SMOLLM2_VOCAB, generator=torch.Generator().manual_seed(6)) * 4
    exact = torch.log_softmax(logits.double(), -1)
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={7: 50.0}, logprobs=20)
    rows = [SampleRow(row, params, 5, 1) for row in range(3)]
    sampled = Sampler(SMOLLM2_VOCAB, SMOLLM2_VOCAB).sample(logits, rows)
    assert sampled.token_ids == [7, 7, 7]
    for row, logprobs in enumerate(sampled.logprobs):
        best = torch.topk(exact[row], 20)
        assert logprobs.logprob == pytest.approx(float(exact[row, 7]), abs=2e-6)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_rows_that_ask_for_no_logprobs_get_none():
    logits = torch.zeros(2, 10)
    rows = [SampleRow(0, GREEDY, 1, 1), SampleRow(1, SamplingParams(logprobs=0), 1, 1)]
    first, second = Sampler(10, 10).sample(logits, rows).logprobs
    assert first is None
    assert second.top == ()


@pytest.mark.parametrize("batched", [False, True])
def test_logprobs_of_given_tokens_in_a_batch_equal_one_by_one(batched):
    """Prompt logprobs, Score, and the next token's distribution where max_tokens is 0."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(6))
    sampler = Sampler(300, 300, batched=batched)
    batch = sampler.logprobs_batch(logits, [3, None, 299, 0, None], 4)
    assert batch == [
        sampler.logprobs(logits, row, token, 4) for row, token in enumerate([3, None, 299, 0, None])
    ]
    assert batch[1].token_id == int(logits[1].argmax())
    assert batch[1].top[0] == (batch[1].token_id, batch[1].logprob)
    assert len(sampler.logprobs(logits, 0, 3, 1000).top) == 300


def test_end_tokens_are_banned_until_min_tokens():
    """SM-14: the mask side of min_tokens."""
    logits = np.array([9.0, 1.0, 8.0, 0.0])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    stops = frozenset({0, 2})
    assert draw(logits, params, num_generated=1, stop_ids=stops).token_ids == [1]
    assert draw(logits, params, num_generated=2, stop_ids=stops).token_ids == [0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all banned", "all -inf"])
def test_a_row_without_a_distribution_draws_nothing_and_harms_no_other(params, bad):
    """Design 5.5: one bad row never stops the others."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    rows = [SampleRow(i, params, 1, 1) for i in range(3)]
    expected = Sampler(8, 8).sample(logits, rows).token_ids
    if bad == "all banned":
        masked = SamplingParams(temperature=params.temperature, min_tokens=1, logprobs=1)
        rows[1] = SampleRow(1, masked, 1, 1, stop_ids=frozenset(range(8)))
    elif bad == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 3] = bad
    sampled = Sampler(8, 8).sample(logits, rows)
    assert sampled.token_ids == [expected[0], NO_TOKEN, expected[2]]
    assert sampled.logprobs == [None, None, None]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30, 100.0])
def test_extreme_penalties_never_make_an_infinity(penalty):
    """SE-07: a denormal repetition penalty is finite and positive, but divides beyond float32."""
    logits = np.array([40.0, -40.0, 0.0, 39.0])
    params = SamplingParams(repetition_penalty=penalty, temperature=1e-3)
    token = draw(logits, params, state=SamplerState([0, 1, 2, 3])).token_ids[0]
    assert token in ({0, 3} if penalty < 1e-30 else {0})  # both reach the greatest float32


def test_no_rows_draw_nothing():
    sampled = Sampler(10, 10).sample(torch.zeros(0, 10), [])
    assert sampled.token_ids == []
    assert sampled.logprobs == []


# ---------------------------------------------------------------- the accelerator's path


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    logits=st.lists(logit, min_size=VOCAB, max_size=VOCAB),
    params=parameters.filter(lambda p: not p.greedy),
    position=st.integers(0, 1000),
)
def test_for_equal_weights_both_paths_draw_the_same(logits, params, position):
    row = np.array(logits, np.float32)
    u = uniform(np.array([9], np.uint64), np.array([position]))
    host = RowDistribution(VOCAB)
    weights = torch.from_numpy(host.weigh(row, params.temperature).copy()).reshape(1, -1)
    kept = distribution_torch.keep(weights, [params])
    found = distribution_torch.draw(kept, torch.tensor([0]), torch.from_numpy(u))
    assert found.tolist() == host.draw(row, params, u)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(st.one_of(logit, st.just(-0.0)), min_size=VOCAB, max_size=VOCAB),
    st.integers(1, VOCAB),
)
def test_both_paths_rank_tokens_alike(logits, count):
    row = np.array(logits, np.float32)
    values, ids = distribution_torch.top_logits(torch.from_numpy(row).reshape(1, -1), count)
    assert ids[0].tolist() == distribution.top_ids(row, count).tolist()
    assert values[0].tolist() == row[ids[0].numpy()].tolist()


def test_the_accelerator_path_serves_a_mixed_batch():
    """Same tokens and logprobs as the host path, but for the last bits of exp."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(13, 1000, generator=generator) * 3
    logits[12, 4] = np.nan
    rows = [*_mixed_rows(12), SampleRow(12, SamplingParams(logprobs=1), 1, 1)]
    rows.append(SampleRow(0, rows[0].params, 77, 5))  # shares a distribution with row 0
    expected = Sampler(1000, 990).sample(logits, rows)
    found = Sampler(1000, 990, batched=True).sample(logits, rows)
    assert found.token_ids == expected.token_ids
    assert found.token_ids[12] == NO_TOKEN
    for got, wanted in zip(found.logprobs, expected.logprobs, strict=True):
        if wanted is None:
            assert got is None
            continue
        assert got.token_id == wanted.token_id
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-6)
        assert [best for best, _ in got.top] == [best for best, _ in wanted.top]


def test_both_paths_refuse_the_same_rows():
    """Design 5.5: a NaN of either sign, an infinity, nothing allowed."""
    good = [0.0, 1.0, 1.0]
    rows = [[*good, bad] for bad in (np.nan, -np.nan, np.inf, -np.inf)] + [[-np.inf] * 4]
    logits = np.array(rows, np.float32)
    expected = [NO_TOKEN, NO_TOKEN, NO_TOKEN, 1, NO_TOKEN]
    assert [distribution.greedy(row) for row in logits] == expected
    tensor = torch.from_numpy(logits)
    assert distribution_torch.greedy(tensor).tolist() == expected
    zeros = torch.zeros(5, dtype=torch.float64)
    drawn = distribution_torch.draw(distribution_torch.weigh(tensor, 1.0), torch.arange(5), zeros)
    assert drawn.tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0, NO_TOKEN]
    assert [RowDistribution(4).draw(row, SamplingParams(), ENDS[:1])[0] for row in logits] == (
        drawn.tolist()
    )
