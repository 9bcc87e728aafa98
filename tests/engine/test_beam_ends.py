"""When a beam search ends, what it keeps, and what it leaves in the cache."""

import math
from dataclasses import replace

import numpy as np
import pytest

from prefixcache import BeamSearchParams, Engine, SamplingParams
from prefixcache.engine.beam import BeamSearch, Ending, Scored
from prefixcache.engine.messages import Finished, Score
from prefixcache.engine.outputs import RequestOutput
from prefixcache.errors import InvalidArgument
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Driver, run_one
from tests.model.checkpoints import TOKENIZER_SIZE

PROMPT = [5, 9, 33, 7, 12, 80, 41]
PLAIN = BeamSearchParams(3, 3, max_tokens=12, ignore_eos=True)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, TOKENIZER_SIZE, count).tolist()


def results(output: RequestOutput) -> list[tuple[list[int], float | None]]:
    return [(o.token_ids, o.score) for o in output.outputs]


# ---------------------------------------------------------------- a toy model

END, SURE = 1, 5
TOY = {SURE: 0.90, END: 0.06, 6: 0.02, 7: 0.02}


def toy_search(params: BeamSearchParams) -> tuple[BeamSearch, int]:
    """A search in which every token has the same odds everywhere; the search, and its steps."""
    search = BeamSearch(params, num_end_tokens=1)
    scored: Scored = (
        np.log(np.array(list(TOY.values()), np.float32)),
        np.array(list(TOY), np.int64),
    )
    paths: list[tuple[int, ...]] = [()]
    steps = 0

    def ending(beam: int, token: int) -> Ending | None:
        tokens = (*paths[beam], token)
        if token == END:
            return Ending(tokens, END)
        return Ending(tokens, None) if len(tokens) == params.max_tokens else None

    while not search.done:
        running = search.step([scored] * len(paths), ending)
        paths = [(*paths[c.parent], c.token) for c in running]
        steps += 1
    return search, steps


def test_the_best_are_returned_and_not_the_first_that_end() -> None:
    """BM-09: the end is second best at every step, the long path nearly sure; beam 3.

    Best first: the whole path; the one that ends with its last token, and one token earlier. Were
    the first three that end returned, they would have 1, 2 and 3 tokens.
    """
    search, steps = toy_search(BeamSearchParams(3, 3, max_tokens=20))
    sure, end = math.log(0.90), math.log(0.06)
    expected = [
        ((SURE,) * 20, sure),
        ((*(SURE,) * 19, END), (19 * sure + end) / 20),
        ((*(SURE,) * 18, END), (18 * sure + end) / 19),
    ]
    assert steps == 20
    assert [h.ending.tokens for h in search.finished] == [tokens for tokens, _ in expected]
    scores = [h.score for h in search.finished]
    assert scores == pytest.approx([score for _, score in expected], abs=1e-5)
    first, quick = toy_search(BeamSearchParams(3, 3, max_tokens=20, early_stopping=True))
    assert (quick, [len(h.ending.tokens) for h in first.finished]) == (3, [3, 2, 1])


def test_equal_scores_stand_in_a_fixed_order() -> None:
    """BM-09: tokens 6 and 7 have the same odds; the one that is listed first comes first."""
    search, _ = toy_search(BeamSearchParams(4, 4, max_tokens=1))
    assert [h.ending.tokens[0] for h in search.finished] == [SURE, END, 6, 7]
    assert search.finished[2].score == search.finished[3].score


# ---------------------------------------------------------------- the engine


def test_the_length_of_the_prompt_is_in_no_score(make_engine: MakeEngine) -> None:
    """BM-01: behind a prompt of 100, a score is the mean of the generated tokens' logprobs."""
    engine = make_engine()
    tokens = prompt(100)
    search = BeamSearchParams(4, 4, max_tokens=8, stop_token_ids=tuple(range(20, 60)))
    found = engine.generate([tokens], search)[0].outputs
    assert [o.score for o in found] == sorted((o.score for o in found), reverse=True)
    assert len({len(o.token_ids) for o in found}) > 1
    score = Score("score", tuple(tokens), tuple(tuple(o.token_ids) for o in found))
    ends: dict[int, list[float]] = {}
    engine.execute(score)
    while engine.has_work:
        for event in engine.step():
            for entry in getattr(event, "prompt_logprobs", ()):
                ends.setdefault(event.index, []).append(entry.logprob)
    for index, output in enumerate(found):
        assert len(ends[index]) == len(output.token_ids)
        assert output.score == pytest.approx(sum(ends[index]) / len(ends[index]), abs=1e-4)


def test_a_search_that_is_done_waits_for_no_other(make_engine: MakeEngine) -> None:
    """BM-04: one done at step 3, one at step 12, together and alone."""
    short, long = replace(PLAIN, max_tokens=3), PLAIN
    engine = make_engine()
    driver = Driver(engine)
    driver.start("short", PROMPT, short)
    driver.start("long", PROMPT[::-1], long)
    ended, in_use = {}, []
    while engine.has_work:
        ended |= {e.request_id: len(in_use) + 1 for e in driver.step() if isinstance(e, Finished)}
        in_use.append(engine.manager.num_in_use)
    assert ended == {"short": 3, "long": 12}
    alone = make_engine()
    only = Driver(alone)
    only.start("long", PROMPT[::-1], long)
    counts = []
    while alone.has_work:
        only.step()
        counts.append(alone.manager.num_in_use)
    assert in_use[0] > counts[0]
    assert in_use[2:] == counts[2:]  # from its end on the short one holds no block
    assert results(driver.outputs["long"]) == results(only.outputs["long"])
    other = make_engine().generate([PROMPT], short)[0]
    assert results(driver.outputs["short"]) == results(other)


@pytest.mark.parametrize("width", [16, 40])
def test_a_search_may_look_at_more_tokens_than_a_caller_may_ask_logprobs_of(
    width: int, make_engine: MakeEngine
) -> None:
    """BM-06: it needs two tokens a beam: 32, and with 40 beams more than the 64 of the limit."""
    engine = make_engine(max_num_seqs=64)
    search = BeamSearchParams(width, width, max_tokens=5, ignore_eos=True)
    found = engine.generate([PROMPT], search)[0].outputs
    assert len({tuple(o.token_ids) for o in found}) == width
    # The best 40 of the first step are the best 40 tokens of the model.
    first = engine.generate([PROMPT], replace(search, max_tokens=1))[0].outputs
    peek = SamplingParams(max_tokens=0, logprobs=width)
    best = run_one(engine, PROMPT, peek).next_token
    assert [o.token_ids[0] for o in first] == [token for token, _ in best.top]


def test_a_search_wider_than_half_the_vocabulary_is_refused_before_any_work(
    make_engine: MakeEngine,
) -> None:
    """BM-06: 151 beams would look at 302 of 300 tokens."""
    engine = make_engine(max_num_seqs=256)
    with pytest.raises(InvalidArgument, match="302 tokens a step, and the vocabulary has 300"):
        engine.generate([PROMPT], BeamSearchParams(151, max_tokens=2))
    assert not engine.has_work
    assert engine.manager.num_free == engine.num_blocks
    assert len(engine.generate([PROMPT], BeamSearchParams(150, 3, max_tokens=1))[0].outputs) == 3


def steps_of(
    engine: Engine, params: BeamSearchParams, tokens: list[int] = PROMPT
) -> tuple[int, RequestOutput]:
    driver = Driver(engine)
    output = driver.start("search", tokens, params)
    steps = 0
    while engine.has_work:
        driver.step()
        steps += 1
    return steps, output


def test_a_stop_string_that_never_occurs_changes_nothing(make_engine: MakeEngine) -> None:
    """BM-07: beam 3, at most 12 tokens, early stopping."""
    engine = make_engine()
    early = replace(PLAIN, early_stopping=True)
    steps, never = steps_of(engine, replace(early, stop=("\u2603 never \u2603",)))
    assert steps == 12
    assert results(never) == results(steps_of(engine, early)[1])


def test_a_stop_string_ends_only_the_beam_in_which_it_occurs(make_engine: MakeEngine) -> None:
    """BM-07: of three results one holds it; that one ends there, the others go on to 12 tokens."""
    engine = make_engine()
    shortest = replace(PLAIN, length_penalty=0.0)  # undivided sums: what ends first is not behind
    for seed in range(100):
        texts = [o.text for o in steps_of(engine, shortest, prompt(7, seed))[1].outputs]
        words = ((text, text[at : at + 2]) for text in texts for at in range(1, len(text) - 2))
        alone = [(text, w) for text, w in words if sum(w in other for other in texts) == 1]
        if alone:
            break
    whole, word = alone[0]
    steps, stopped = steps_of(engine, replace(shortest, stop=(word,)), prompt(7, seed))
    assert steps <= 12
    ended = [o for o in stopped.outputs if o.finish_reason == "stop"]
    assert whole[: whole.index(word)] in [o.text for o in ended]
    for output in stopped.outputs:
        assert word not in output.text
        assert output.stop_reason == (word if output in ended else None)
        assert (len(output.token_ids) == 12) or output in ended
    assert len(ended) < 3


def test_blocks_of_beams_that_part_are_cached_under_their_own_tokens(
    make_engine: MakeEngine,
) -> None:
    """FK-08: two beams part at output token 2; each path hits the KV of its own tokens only.

    Of 7 + 6 tokens the last one's KV is never written: 12 are cached, three whole blocks, and they
    part where the third begins.
    """
    engine = make_engine()
    search = BeamSearchParams(2, 2, max_tokens=6, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    for seed in range(200):
        tokens = prompt(7, seed)
        paths = [[*tokens, *o.token_ids] for o in engine.generate([tokens], search)[0].outputs]
        if paths[0][7] == paths[1][7] and paths[0][8] != paths[1][8]:
            break
        engine.manager.flush()
    assert paths[0][8] != paths[1][8]
    warm = [engine.generate([path], greedy)[0] for path in paths]
    assert [output.num_cached_tokens for output in warm] == [12, 12]
    for path, output in zip(paths, warm, strict=True):
        cold = run_one(make_engine(enable_prefix_caching=False), path, greedy)
        assert output.outputs[0].token_ids == cold.token_ids
        assert output.outputs[0].logprobs == cold.logprobs
