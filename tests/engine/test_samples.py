"""What is drawn and where it ends, through the whole engine: seeds, stops, forced and odd tokens.

`test_sampler.py`, `test_stop.py` and `test_detokenizer.py` prove the parts; here they are wired.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.messages import Finished
from prefixcache.engine.outputs import CompletionOutput
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, bits, run_one
from tests.model.checkpoints import TOKENIZER_SIZE

PROMPT = [10, 11, 12, 13, 14]
FREE = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=1)


def only(*tokens: int) -> dict[int, float]:
    """A bias that leaves these tokens alone, and lets no other through."""
    return dict.fromkeys(tokens, 100.0)


def long_token(engine: Engine) -> tuple[int, str]:
    """A token of several characters, the first of which is not the last."""
    for token in range(4, TOKENIZER_SIZE):
        text = engine.tokenizer.decode([token])
        if len(text) > 1 and text.isalpha() and text[0] != text[-1]:
            return token, text
    raise AssertionError("the tokenizer has no such token")


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("seed", [7, 2**64 - 1])
def test_samples_of_one_seed_differ_and_come_again_in_order(
    seed: int, make_engine: MakeEngine
) -> None:
    """PS-01: n = 4 at temperature 1; the largest seed there is wraps round and overflows not."""
    params = replace(FREE, n=4, seed=seed)
    engine = make_engine(seed=None)
    runs = [engine.generate([PROMPT], params)[0].outputs for _ in range(3)]
    assert len({tuple(sample.token_ids) for sample in runs[0]}) == 4
    for again in runs[1:]:
        assert [bits(sample) for sample in again] == [bits(sample) for sample in runs[0]]


def test_a_seed_touches_no_other_request_and_no_global_generator(make_engine: MakeEngine) -> None:
    """SM-08: unseeded B, five times, each beside a new A with seed 11."""
    engine = make_engine(seed=None)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    seeded, unseeded = set(), set()
    for _ in range(5):
        a, b = engine.generate([PROMPT, PROMPT[::-1]], [replace(FREE, seed=11), FREE])
        seeded.add(tuple(a.outputs[0].token_ids))
        unseeded.add(tuple(b.outputs[0].token_ids))
    assert len(seeded) == 1
    assert len(unseeded) == 5
    assert states[0] == random.getstate()
    assert states[1] == np.random.get_state()[1].tolist()
    assert states[2] == torch.get_rng_state().tolist()


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("logprobs", [0, 1])
def test_a_token_that_is_forced_has_its_logprob(logprobs: int, make_engine: MakeEngine) -> None:
    """SM-09: the least likely token of the vocabulary, and a special one, at temperature 2."""
    engine = make_engine()
    everything = replace(FREE, max_tokens=0, logprobs=64, temperature=2.0)
    likely = {
        token for token, _ in engine.generate([PROMPT], everything)[0].outputs[0].next_token.top
    }
    least = next(token for token in range(4, TOKENIZER_SIZE) if token not in likely)
    for token in (least, 2, 0):
        params = replace(
            FREE, max_tokens=1, temperature=2.0, logprobs=logprobs, logit_bias=only(token)
        )
        output = run_one(engine, PROMPT, params)
        (entry,) = output.logprobs
        assert output.token_ids == [entry.token_id] == [token]
        assert -60 < entry.logprob < 0
        assert len(entry.top) == logprobs
        assert token not in {best for best, _ in entry.top}


def test_ids_beyond_the_tokenizer_come_out_of_no_request(make_engine: MakeEngine) -> None:
    """SM-16: the model has 320 columns, the tokenizer 300 ids; hot samples, and wide beams."""
    engine = make_engine(max_num_seqs=16)
    hot = SamplingParams(
        n=16, temperature=100.0, max_tokens=60, ignore_eos=True, logprobs=8, seed=1
    )
    search = BeamSearchParams(16, 16, max_tokens=12, ignore_eos=True)
    samples = engine.generate([PROMPT], hot)[0].outputs
    found = [token for sample in samples for token in sample.token_ids]
    assert len(set(found)) > 200  # nearly flat: a padding id would have come 60 times
    found += [best for s in samples for entry in s.logprobs for best, _ in entry.top]
    found += [token for o in engine.generate([PROMPT], search)[0].outputs for token in o.token_ids]
    assert max(found) < TOKENIZER_SIZE


# ---------------------------------------------------------------- stop strings


def test_a_stop_string_ends_inside_a_token(make_engine: MakeEngine) -> None:
    """DT-01: two tokens hold it across their edge; the text is what precedes it, usage counts 2."""
    engine = make_engine()
    token, text = long_token(engine)
    params = SamplingParams(max_tokens=9, logit_bias=only(token), stop=(text[-1] + text[0],))
    output = run_one(engine, PROMPT, params)
    assert output.text == text[:-1]
    assert (output.finish_reason, output.stop_reason) == ("stop", text[-1] + text[0])
    assert output.token_ids == [token, token]
    assert output.usage.completion_tokens == 2


def test_a_stop_string_that_comes_too_early_is_text(make_engine: MakeEngine) -> None:
    """SM-14: it occurs at token 2 and again at 7; with min_tokens = 5 the output ends at 7."""
    engine = make_engine()
    letters = [engine.tokenizer.encode(letter)[0] for letter in "xyz"]
    mixed = replace(FREE, temperature=5.0, logit_bias=only(*letters))
    texts = (run_one(engine, PROMPT, replace(mixed, seed=seed)) for seed in range(2_000))
    free = next(
        output
        for output in texts
        if [at for at, letter in enumerate(output.text, 1) if letter == output.text[1]][:2]
        == [2, 7]
    )
    own = replace(mixed, stream_key=free.stream_key, stop=(free.text[1],))
    for min_tokens, length in ((0, 2), (2, 2), (3, 7), (5, 7), (7, 7)):
        output = run_one(engine, PROMPT, replace(own, min_tokens=min_tokens))
        assert output.text == free.text[: length - 1]
        assert output.token_ids == free.token_ids[:length]
        assert (output.finish_reason, output.stop_reason) == ("stop", free.text[1])
    never = replace(own, min_tokens=9, stop=(free.text[1] + "?",))
    assert run_one(engine, PROMPT, never).text == free.text


# ---------------------------------------------------------------- samples that end apart


@pytest.mark.parametrize("ends", [(2, 4, 6, 8), (1, 5, 9)], ids=str)
def test_samples_that_end_at_different_tokens_are_all_there(
    ends: tuple[int, ...], make_engine: MakeEngine
) -> None:
    """PS-03, PS-05: one end a sample, in order of the tokens; each has all that it generated."""
    engine = make_engine()
    driver = Driver(engine)
    params, free = samples_that_end_at(engine, ends)
    output = driver.start("samples", PROMPT, params)
    order = []
    while engine.has_work:
        order += [event.index for event in driver.step() if isinstance(event, Finished)]
    assert sorted(order) == list(range(len(ends)))
    lengths = [len(output.outputs[index].token_ids) for index in order]
    assert lengths == sorted(ends)
    assert output.finished
    for sample, whole in zip(output.outputs, free, strict=True):
        count = len(sample.token_ids)
        assert bits(sample) == (whole.token_ids[:count], whole.logprobs[:count])


def samples_that_end_at(
    engine: Engine, ends: tuple[int, ...]
) -> tuple[SamplingParams, list[CompletionOutput]]:
    """Parameters whose n samples end at these tokens, and the same samples when nothing ends them.

    The ends are stop tokens: of each sample the one at its place, where none comes before.
    """
    for seed in range(500):
        params = replace(FREE, n=len(ends), max_tokens=max(ends), seed=seed)
        free = engine.generate([PROMPT], params)[0].outputs
        stops = {o.token_ids[end - 1] for o, end in zip(free, ends, strict=True)}
        found = [next(i for i, t in enumerate(o.token_ids, 1) if t in stops) for o in free]
        if tuple(found) == ends:
            return replace(params, stop_token_ids=tuple(stops)), free
    raise AssertionError("no seed gives such samples")
