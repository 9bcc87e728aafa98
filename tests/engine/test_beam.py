"""Beam search against Hugging Face's `generate`, token for token, and what it does to the pool."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache.engine.beam import BeamGroup, Continuation, Ending
from prefixcache.engine.messages import Abort, Finished, Fork, ForkBranch, Generate
from prefixcache.engine.sequence import Owner
from prefixcache.errors import InvalidArgument, NotFound, ResourceExhausted
from tests.model.checkpoints import TOKENIZER_SIZE, write_checkpoint

BEAMS = (2, 4, 8)
PENALTIES = (0.6, 1.0, 2.0, -1.0)
STOPPING = (True, False, "never")
GRID = list(itertools.product(BEAMS, PENALTIES, STOPPING))
PROMPT = [5, 9, 33, 7, 12, 80, 41]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("beam") / "llama", "llama", seed=11)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval()


def make_engine(checkpoint: Path, **changes) -> Engine:
    config = {"num_gpu_blocks_override": 256, "max_model_len": 128, "block_size": 4, **changes}
    return Engine(EngineConfig(model=str(checkpoint), **config))


@pytest.fixture(scope="module")
def shared_engine(checkpoint: Path) -> Engine:
    return make_engine(checkpoint)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    yield shared_engine
    shared_engine.check_integrity()
    assert shared_engine.manager.num_in_use == 0


def expected(model, prompt, params: BeamSearchParams, eos) -> list[tuple[list[int], float]]:
    """What transformers gives: generated tokens up to and with the end token, and the score."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.num_return_sequences,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=eos,
        pad_token_id=0,
        suppress_tokens=_beyond_the_tokenizer(model),
        return_dict_in_generate=True,
        output_scores=True,
    )
    results = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [i for i, token in enumerate(tokens) if token in eos]
        results.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return results


def _beyond_the_tokenizer(model) -> list[int] | None:
    """The tiny models' output layer is wider than their tokenizer; ids beyond never come out."""
    small = model.config.vocab_size < 1_000
    return list(range(TOKENIZER_SIZE, model.config.vocab_size)) if small else None


def check_equal(engine: Engine, model, prompt, params: BeamSearchParams, eos) -> None:
    outputs = engine.generate([prompt], params)[0].outputs
    wanted = expected(model, prompt, params, eos)
    assert [output.token_ids for output in outputs] == [tokens for tokens, _ in wanted]
    for output, (tokens, score) in zip(outputs, wanted, strict=True):
        # Each token's logprob to 1e-4; a penalty below 1 divides their sum by less than its length.
        scale = max(1.0, len(tokens) ** (1 - params.length_penalty))
        assert output.score == pytest.approx(score, abs=1e-4 * scale)


def grid_params(beams: int, penalty: float, stopping: bool | str, **changes) -> BeamSearchParams:
    return BeamSearchParams(
        num_beams=beams,
        num_return_sequences=beams,
        max_tokens=14,
        length_penalty=penalty,
        early_stopping=stopping,
        **changes,
    )


@pytest.fixture(scope="module")
def likely_ends(reference) -> list[int]:
    """Tokens that beams really meet: without them no hypothesis would end before its length."""
    tokens = reference.generate(
        torch.tensor([PROMPT]), do_sample=False, num_beams=8, num_return_sequences=8,
        max_new_tokens=10, eos_token_id=None, pad_token_id=0,
    )[:, len(PROMPT) :]  # fmt: skip
    counts = np.bincount(tokens.flatten().numpy(), minlength=TOKENIZER_SIZE)[:TOKENIZER_SIZE]
    return np.argsort(-counts)[[2, 5, 9]].tolist()


@pytest.mark.parametrize("case", GRID, ids=str)
def test_equals_transformers(engine, reference, likely_ends, case) -> None:
    """Beams end at several tokens and at different lengths; order and scores included."""
    stop = tuple(likely_ends)
    params = grid_params(*case, stop_token_ids=stop, ignore_eos=True)
    check_equal(engine, reference, PROMPT, params, list(stop))


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"min_tokens": 6}])
def test_processors_inside_the_search_equal_transformers(
    engine, reference, likely_ends, changes
) -> None:
    stop = tuple(likely_ends)
    params = grid_params(4, 1.0, False, stop_token_ids=stop, ignore_eos=True, **changes)
    check_equal(engine, reference, PROMPT, params, list(stop))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_whole_grid_equals_transformers(tmp_path: Path, family: str) -> None:
    directory = write_checkpoint(tmp_path / family, family, seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = make_engine(directory)
    random = np.random.default_rng(1)
    for beams, penalty, stopping in GRID:
        prompt = random.integers(5, TOKENIZER_SIZE, 9).tolist()
        stop = tuple(random.choice(np.arange(5, TOKENIZER_SIZE), 30, replace=False).tolist())
        params = grid_params(beams, penalty, stopping, stop_token_ids=stop, ignore_eos=True)
        check_equal(engine, model, prompt, params, list(stop))
        engine.check_integrity()


TEXTS = (
    "The old lighthouse keeper climbed the stairs, as on every evening, and",
    "def fibonacci(n: int) -> list[int]:\n    if n <= 0:\n        return []\n",
    "1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "Привет, мир! Как дела?",
    "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n",
    "The capital of France is",
    '{"name": "Ada", "born": 1815, "tags": ["maths",',
    "Once",
    "# Results\n\n| model | tokens/s |\n|---|---|\n| small |",
    "你好,世界。",
    "Question: What is a trie?\nAnswer:",
    "In the beginning " * 20,
)
SAMPLED = [(text, GRID[(7 * i + 3) % len(GRID)]) for i, text in enumerate(TEXTS)]


def check_smollm2(engine: Engine, model, text: str, case, max_tokens: int) -> None:
    beams, penalty, stopping = case
    params = BeamSearchParams(beams, beams, max_tokens, 0, penalty, stopping)
    eos = list(engine.model_config.eos_token_ids)
    check_equal(engine, model, engine.tokenizer.encode(text), params, eos)


@pytest.mark.parametrize(("text", "case"), SAMPLED[::4], ids=str)
def test_smollm2_equals_transformers(smollm2, smollm2_reference, text, case) -> None:
    check_smollm2(smollm2, smollm2_reference, text, case, max_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_smollm2_equals_transformers_on_twelve_prompts(smollm2, smollm2_reference, case) -> None:
    text = TEXTS[GRID.index(case) % len(TEXTS)]
    check_smollm2(smollm2, smollm2_reference, text, case, max_tokens=24)


def test_two_searches_at_once_equal_two_alone(engine, reference, likely_ends) -> None:
    """BM-04."""
    stop = tuple(likely_ends)
    both = [
        grid_params(4, 1.0, True, stop_token_ids=stop, ignore_eos=True),
        grid_params(3, 2.0, "never", ignore_eos=True),
    ]
    prompts = [PROMPT, PROMPT[::-1]]
    together = engine.generate(prompts, both)
    for prompt, params, output in zip(prompts, both, together, strict=True):
        alone = engine.generate([prompt], params)[0]
        assert [(o.token_ids, o.score) for o in alone.outputs] == [
            (o.token_ids, o.score) for o in output.outputs
        ]


def test_a_preempted_search_gives_the_same(checkpoint: Path, engine) -> None:
    params = grid_params(4, 1.0, False, ignore_eos=True)
    quiet = engine.generate([PROMPT], params)[0]
    small = make_engine(checkpoint, num_gpu_blocks_override=22, max_model_len=40)
    crowd = [[20 + i, *PROMPT] for i in range(4)]
    each = [*[SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 4, params]
    outputs = small.generate([*crowd, PROMPT], each)
    assert small.metrics.counters.preemptions > 0
    assert [(o.token_ids, o.score) for o in outputs[-1].outputs] == [
        (o.token_ids, o.score) for o in quiet.outputs
    ]
    small.check_integrity()
    assert small.manager.num_in_use == 0


def test_blocks_and_copies_of_a_wide_search(checkpoint: Path) -> None:
    """Beam 8 holds its prompt once, and copies at most one tail a beam in a step."""
    engine = make_engine(checkpoint, block_size=16, max_model_len=512, max_num_batched_tokens=512)
    prompt = np.random.default_rng(0).integers(5, TOKENIZER_SIZE, 330).tolist()
    params = BeamSearchParams(8, 8, max_tokens=48, ignore_eos=True)
    engine.execute(Generate("wide", tuple(prompt), params))
    peak = copies = 0
    while engine.has_work:
        before = engine.manager.num_copies
        engine.step()
        copies = max(copies, engine.manager.num_copies - before)
        peak = max(peak, engine.manager.num_in_use)
        engine.check_integrity()
    separate = 8 * engine.manager.blocks_for(330 + 48 - 1)
    assert peak <= 20 + 8 * 4
    assert peak <= 0.3 * separate
    assert 0 < copies <= 8


def test_blocks_of_a_beam_are_cached_under_its_own_tokens(engine) -> None:
    """FK-08: what a search leaves behind is right for each path."""
    params = grid_params(2, 1.0, False, ignore_eos=True)
    results = engine.generate([PROMPT], params)[0].outputs
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    for result in results:
        path = [*PROMPT, *result.token_ids]
        warm = engine.generate([path], greedy)[0]
        engine.manager.flush()
        cold = engine.generate([path], greedy)[0]
        assert warm.num_cached_tokens > len(PROMPT)
        assert cold.num_cached_tokens == 0
        assert warm.outputs[0].logprobs == cold.outputs[0].logprobs


def test_kept_hypotheses_can_be_forked(engine) -> None:
    params = grid_params(3, 1.0, False, ignore_eos=True)
    search = engine.generate([PROMPT], params, keep_seconds=60)[0]
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    branches = tuple(ForkBranch(output.sequence_id, greedy) for output in search.outputs)
    forked = engine.run([Fork("fork", branches)])[0]
    for branch, output in zip(forked.outputs, search.outputs, strict=True):
        fresh = engine.generate([[*PROMPT, *output.token_ids]], greedy)[0]
        assert branch.token_ids == fresh.outputs[0].token_ids
    for output in search.outputs:
        entry = engine.registry.get(output.sequence_id, Owner())
        engine.registry.drop(entry)


def test_an_aborted_search_gives_its_blocks_back(engine) -> None:
    engine.execute(Generate("gone", tuple(PROMPT), grid_params(4, 1.0, False, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    assert engine.manager.num_in_use > 0
    engine.execute(Abort("gone"))
    events = engine.step()
    assert [event.reason for event in events if isinstance(event, Finished)] == ["abort"] * 4
    assert not engine.has_work


def test_a_stop_string_ends_only_its_own_beam(engine) -> None:
    """BM-07: one that never occurs changes nothing; one that occurs in one beam ends that one."""
    plain = grid_params(3, 1.0, True, ignore_eos=True)
    without = engine.generate([PROMPT], plain)[0]
    never = grid_params(3, 1.0, True, ignore_eos=True, stop=("\u2603 never \u2603",))
    assert [o.token_ids for o in engine.generate([PROMPT], never)[0].outputs] == [
        o.token_ids for o in without.outputs
    ]
    word = without.outputs[0].text[4:7]
    # Undivided, the shortest hypothesis has the best score: the one that the word ends.
    stopped = grid_params(3, 0.0, False, ignore_eos=True, stop=(word,))
    outputs = engine.generate([PROMPT], stopped)[0].outputs
    assert any(output.stop_reason == word for output in outputs)
    for output in outputs:
        assert word not in output.text
        assert output.finish_reason == ("stop" if output.stop_reason else "length")


# ---------------------------------------------------------------- diverse groups

DIVERSE = [
    (beams, groups, penalty, length_penalty, stopping)
    for beams, groups in ((4, 2), (6, 3), (4, 4))
    for penalty in (0.5, 2.0)
    for length_penalty in (1.0, 0.6)
    for stopping in STOPPING
]


def diverse_params(case, stop: list[int]) -> BeamSearchParams:
    beams, groups, penalty, length_penalty, stopping = case
    return grid_params(
        beams,
        length_penalty,
        stopping,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        stop_token_ids=tuple(stop),
        ignore_eos=True,
    )


def test_groups_part_at_the_first_token(engine) -> None:
    params = diverse_params((4, 4, 100.0, 1.0, False), [])
    outputs = engine.generate([PROMPT], params)[0].outputs
    assert len({output.token_ids[0] for output in outputs}) == 4
    again = engine.generate([PROMPT], params)[0].outputs
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


@pytest.mark.slow
def test_diverse_groups_equal_an_older_transformers(
    engine, checkpoint: Path, likely_ends: list[int], tmp_path: Path
) -> None:
    """transformers 5 has no diverse groups any more: a release that had them is installed apart."""
    packages = tmp_path / "packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    subprocess.run([*command, "transformers==4.49.0"], check=True)
    job = {
        "checkpoint": str(checkpoint),
        "prompt": PROMPT,
        "eos": likely_ends,
        "suppress": list(range(TOKENIZER_SIZE, 320)),
        "max_new_tokens": 14,
        "cases": DIVERSE,
    }
    older = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("older_transformers.py"))],
        input=json.dumps(job),
        env={**os.environ, "PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=True,
    )
    for case, wanted in zip(DIVERSE, json.loads(older.stdout.splitlines()[-1]), strict=True):
        outputs = engine.generate([PROMPT], diverse_params(case, likely_ends))[0].outputs
        # That release writes its first end token, whichever one ended a hypothesis.
        found = [
            [*o.token_ids[:-1], likely_ends[0]] if o.finish_reason == "stop" else o.token_ids
            for o in outputs
        ]
        assert found == [tokens for tokens, _ in wanted], case
        scores = [score for _, score in wanted]
        assert [o.score for o in outputs] == pytest.approx(scores, abs=1e-3), case


# ---------------------------------------------------------------- the pure search


def step(search: BeamGroup, *candidates: tuple[int, int, float, bool]) -> list[Continuation]:
    """Candidates as (parent, token, score, ends)."""
    listed = [Continuation(p, t, s) for p, t, s, _ in candidates]
    endings = [Ending((t,) * (search.length + 1), t) if e else None for _, t, _, e in candidates]
    return search.advance(listed, endings)


def test_a_score_is_divided_by_the_generated_length_alone() -> None:
    """BM-01: S of 2 tokens at -2.0, L of 8 tokens at -2.4: L first, whatever the prompt."""
    search = BeamGroup(BeamSearchParams(2, 2, max_tokens=8, early_stopping="never"), 4)
    step(search, (0, 5, -0.1, False), (0, 6, -0.2, False))
    step(search, (0, 1, -2.0, True), (0, 5, -2.1, False), (1, 6, -2.2, False))
    for length in range(3, 8):
        step(search, (0, 5, -2.1 - length / 100, False), (1, 6, -2.3, False))
    step(search, (0, 5, -2.4, True), (1, 6, -9.0, True))
    assert search.done
    assert [round(h.score, 3) for h in search.finished] == [-0.3, -1.0]


def test_the_best_hypotheses_are_kept_and_not_the_first() -> None:
    """BM-09: the search goes on until no runner can beat the worst kept one."""
    search = BeamGroup(BeamSearchParams(2, 2, max_tokens=20), 4)
    step(search, (0, 5, -0.1, False), (0, 1, -3.0, True), (0, 6, -4.0, False))
    step(search, (0, 5, -0.2, False), (0, 1, -3.1, True), (1, 6, -5.0, False))
    assert len(search.finished) == 2
    assert not search.done
    step(search, (0, 1, -0.25, True), (0, 5, -0.3, False), (1, 6, -9.0, False))
    assert round(search.finished[0].score, 4) == round(-0.25 / 3, 4)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (BeamSearchParams(0), "num_beams"),
        (BeamSearchParams(257), "num_beams"),
        (BeamSearchParams(2, 3), "num_return_sequences"),
        (BeamSearchParams(2, max_tokens=0), "max_tokens"),
        (BeamSearchParams(2, length_penalty=float("nan")), "length_penalty"),
        (BeamSearchParams(2, early_stopping="sometimes"), "early_stopping"),
        (BeamSearchParams(2, repetition_penalty=0.0), "repetition_penalty"),
        (BeamSearchParams(4, num_beam_groups=3, diversity_penalty=1.0), "num_beam_groups"),
        (BeamSearchParams(4, num_beam_groups=2), "diversity_penalty"),
        (BeamSearchParams(4, diversity_penalty=1.0), "diversity_penalty"),
        (BeamSearchParams(2, stop=("",)), "stop"),
        (BeamSearchParams(2, max_tokens=1_000), "max_tokens"),
        (BeamSearchParams(200, max_tokens=2), "num_beams"),  # BM-06: 400 of 300 tokens
    ],
)
def test_bad_parameters_are_refused_by_name(engine, params, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        engine.generate([PROMPT], params)
    assert caught.value.field == f"beam_search.{field}"


def test_a_search_that_can_never_fit_is_refused_with_the_arithmetic(engine) -> None:
    with pytest.raises(ResourceExhausted, match="the pool has 256"):
        engine.generate([PROMPT], BeamSearchParams(40, max_tokens=100))


def test_a_running_beam_has_no_handle(engine) -> None:
    engine.execute(Generate("s", tuple(PROMPT), grid_params(2, 1.0, False, ignore_eos=True)))
    events = engine.step() + engine.step() + engine.step()
    assert len(events) == 1
    with pytest.raises(NotFound):
        engine.registry.get(events[0].sequence_id, Owner())
    engine.execute(Abort("s"))
    engine.step()
