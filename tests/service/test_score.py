"""Score ranks continuations behind one prefix, with the numbers that whole prompts give."""

import random

import pytest

CHOOSE = random.Random(4)
PREFIX = CHOOSE.choices(range(5, 280), k=41)
CONTINUATIONS = [CHOOSE.choices(range(5, 280), k=length) for length in (1, 2, 3, 4, 5, 9, 30)]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 31, 41])
def test_scores_are_those_of_whole_prompts(client, length):
    """To the bit, cold and warm, at prefix lengths around a block of 4."""
    prefix = PREFIX[:length]
    cold = client.score(prefix, CONTINUATIONS, top_logprobs=2)
    warm = client.score(prefix, CONTINUATIONS, top_logprobs=2)
    assert warm.scores == cold.scores
    assert cold.num_prefix_tokens == length
    for continuation, score in zip(CONTINUATIONS, cold.scores, strict=True):
        whole = client.generate([*prefix, *continuation], max_tokens=0, prompt_logprobs=2)
        assert score.logprobs == whole.outputs[0].prompt_logprobs[length:]
        assert score.token_ids == tuple(continuation)
        assert score.sum_logprob == sum(entry.chosen.logprob for entry in score.logprobs)


def test_a_generated_text_scores_what_it_was_generated_with(client):
    out = client.generate(PREFIX, max_tokens=12, seed=1, logprobs=0, ignore_eos=True)
    (score,) = client.score(PREFIX, [out.token_ids]).scores
    assert score.logprobs == out.logprobs
    assert score.sum_logprob == out.outputs[0].cumulative_logprob


def test_equal_and_nested_continuations_do_not_disturb_each_other(client):
    nested = [CONTINUATIONS[-1][:n] for n in (30, 7, 8, 7, 1)]
    scores = client.score(PREFIX, nested).scores
    for score, continuation in zip(scores, nested, strict=True):
        assert score.logprobs == scores[0].logprobs[: len(continuation)]


def test_the_prefix_is_computed_once(client):
    """Each continuation runs the prefix's last token for its first probability, and itself."""
    before = client.stats()
    client.score(PREFIX, [continuation * 2 for continuation in CONTINUATIONS])
    after = client.stats()
    computed = after.computed_tokens - before.computed_tokens
    own = sum(2 * len(continuation) for continuation in CONTINUATIONS)
    assert computed <= len(PREFIX) + own + len(CONTINUATIONS) * client.model_info().block_size
