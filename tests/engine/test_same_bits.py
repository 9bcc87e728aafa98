"""Same bits (design.md §5.2): tokens and logprobs do not depend on how a request was served.

The reference is always the same request cold and alone: cache off, whole prompt in one step. All
comparisons are exact, floats included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache import Engine, EngineConfig, SamplingParams
from prefixcache.engine.messages import FlushCache, ForkBranch, Score
from tests.engine.conftest import MakeEngine
from tests.engine.driving import Bits, Driver, bits, run_one
from tests.model.checkpoints import TOKENIZER_SIZE, default_model_path

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral-window": {"family": "mistral", "model": {"sliding_window": 24}},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "llama-torch": {"attention_backend": "torch"},  # the fallback for machines without a compiler
    "llama-fp8": {"attention_backend": "torch", "kv_cache_dtype": "fp8"},
}
BASE = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=4)
GREEDY = replace(BASE, temperature=0.0)
SAMPLED = replace(BASE, temperature=0.9, top_p=0.95, stream_key=11)
PENALISED = replace(
    BASE,
    temperature=1.2,
    top_k=60,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias={7: 2.0, 9: -3.0},
    stream_key=12,
)


@dataclass(frozen=True)
class Case:
    """A model, and how to draw from it."""

    family: str
    params: SamplingParams

    @property
    def model(self) -> dict[str, Any]:
        return FAMILIES[self.family]


CASES = {
    "llama-greedy": Case("llama", GREEDY),
    "llama-sampled": Case("llama", SAMPLED),
    "llama-penalised": Case("llama", PENALISED),
    "mistral-window-penalised": Case("mistral-window", PENALISED),
    "qwen2-sampled": Case("qwen2", SAMPLED),
    "qwen3-greedy": Case("qwen3", GREEDY),
    "llama-torch-penalised": Case("llama-torch", PENALISED),
    "llama-fp8-sampled": Case("llama-fp8", SAMPLED),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_mode = pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)


def prompt(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, TOKENIZER_SIZE, count).tolist()


PROMPT = prompt(150)  # more than one span of attention, no multiple of a block


Cold = Callable[..., Bits]


@pytest.fixture(scope="session")
def cold(checkpoint_of: Callable[..., Path]) -> Cold:
    """The reference: (tokens, params, family) -> bits, on a quiet engine without a cache."""
    quiet: dict[str, Engine] = {}
    known: dict[str, Bits] = {}

    def run(tokens: Sequence[int], params: SamplingParams, family: str = "llama") -> Bits:
        key = f"{family} {tokens} {params}"
        if family not in quiet:
            model = FAMILIES[family]
            directory = checkpoint_of(model.get("family", "llama"), **model.get("model", {}))
            quiet[family] = Engine(
                EngineConfig(
                    model=str(directory),
                    attention_backend=model.get("attention_backend", "auto"),
                    kv_cache_dtype=model.get("kv_cache_dtype", "auto"),
                    enable_prefix_caching=False,
                    num_gpu_blocks_override=64,
                    max_model_len=512,
                    max_num_batched_tokens=4096,
                )
            )
        if key not in known:
            known[key] = bits(run_one(quiet[family], tokens, params))
        return known[key]

    return run


@every_case
def test_cache_on_or_off(case: Case, make_engine: MakeEngine, cold: Cold) -> None:
    engine = make_engine(**case.model)
    expected = cold(PROMPT, case.params, case.family)
    for cached in (0, 149, 149):  # cold, then everything but the last token, which always runs
        output = engine.generate([PROMPT], case.params)[0]
        assert output.num_cached_tokens == cached
        assert bits(output.outputs[0]) == expected
    # A hit that ends at a block's edge, one inside a block, and one on generated tokens.
    generated = expected[0]
    for tokens, cached in (
        ([*PROMPT[:40], *prompt(20, seed=5)], 40),
        ([*PROMPT[:63], *prompt(20, seed=6)], 63),
        ([*PROMPT, *generated[:9], 77], 159),
    ):
        output = engine.generate([tokens], case.params)[0]
        assert output.num_cached_tokens == cached
        assert bits(output.outputs[0]) == cold(tokens, case.params, case.family)


@every_case
@pytest.mark.parametrize("caching", [True, False])
def test_prefill_budget(case: Case, caching: bool, make_engine: MakeEngine, cold: Cold) -> None:
    expected = cold(PROMPT, case.params, case.family)
    for budget in (16, 37, 4096):
        engine = make_engine(
            **case.model, max_num_batched_tokens=budget, enable_prefix_caching=caching
        )
        assert bits(run_one(engine, PROMPT, case.params)) == expected, budget
        assert bits(run_one(engine, PROMPT, case.params)) == expected, budget


@every_case
def test_alone_or_beside_15_others(case: Case, make_engine: MakeEngine, cold: Cold) -> None:
    engine = make_engine(**case.model, max_num_batched_tokens=64)
    others = [
        [*PROMPT[: 10 * i], *prompt(1 + 7 * i, seed=i)] if i % 2 else prompt(1 + 17 * i, seed=i)
        for i in range(15)
    ]
    modes = [GREEDY, SAMPLED, PENALISED]
    wanted = [(tokens, modes[i % 3]) for i, tokens in enumerate(others)]
    wanted.insert(8, (PROMPT, case.params))
    outputs = engine.generate([tokens for tokens, _ in wanted], [mode for _, mode in wanted])
    for output, (tokens, mode) in zip(outputs, wanted, strict=True):
        assert bits(output.outputs[0]) == cold(tokens, mode, case.family)


@pytest.mark.parametrize("size", [1, 16, 128])
@every_mode
def test_block_size(size: int, params: SamplingParams, make_engine: MakeEngine, cold: Cold) -> None:
    engine = make_engine(block_size=size)
    for _ in range(2):
        assert bits(run_one(engine, PROMPT, params)) == cold(PROMPT, params)


@every_case
@pytest.mark.parametrize("caching", [True, False])
def test_a_forced_preemption(
    case: Case, caching: bool, make_engine: MakeEngine, cold: Cold
) -> None:
    long = replace(case.params, max_tokens=40)
    engine = make_engine(
        **case.model,
        num_gpu_blocks_override=40,
        max_model_len=128,
        enable_prefix_caching=caching,
    )
    prompts = [prompt(30, seed=i) for i in range(4)]
    outputs = engine.generate(prompts, long)
    assert engine.metrics.counters.preemptions > 0
    assert engine.metrics.counters.recomputed_tokens > 0
    for output, tokens in zip(outputs, prompts, strict=True):
        assert bits(output.outputs[0]) == cold(tokens, long, case.family)


@pytest.mark.parametrize("params", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_a_preempted_group_of_samples(
    params: SamplingParams, make_engine: MakeEngine, cold: Cold
) -> None:
    engine = make_engine(num_gpu_blocks_override=40, max_model_len=128)
    driver = Driver(engine)
    first = driver.start("first", prompt(30, seed=1), replace(params, max_tokens=60))
    group = driver.start("group", prompt(30, seed=2), replace(params, n=4, max_tokens=30))
    driver.finish()
    assert engine.metrics.counters.preemptions > 0
    assert bits(first.outputs[0]) == cold(prompt(30, seed=1), replace(params, max_tokens=60))
    for output in group.outputs:
        alone = replace(params, max_tokens=30, stream_key=output.stream_key)
        assert bits(output) == cold(prompt(30, seed=2), alone)


@every_case
def test_after_eviction(case: Case, make_engine: MakeEngine, cold: Cold) -> None:
    engine = make_engine(**case.model, num_gpu_blocks_override=60, max_model_len=200)
    tokens = prompt(100)
    expected = cold(tokens, case.params, case.family)
    assert bits(run_one(engine, tokens, case.params)) == expected
    run_one(engine, prompt(150, seed=1), case.params)
    assert engine.manager.num_evicted > 0
    output = engine.generate([tokens], case.params)[0]
    assert 0 < output.num_cached_tokens < 99  # its last blocks went, its first are still there
    assert bits(output.outputs[0]) == expected


# -------------------------------------------------------------------------------- forks


def kept(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> Any:
    return engine.generate([list(tokens)], params, keep_seconds=60)[0].outputs[0]


PLACES: list[tuple[int | None, tuple[int, ...]]] = [
    (None, ()),  # at the end: the last sampled token's KV is not there yet
    (None, (9, 8, 7)),
    (161, ()),  # all but the last token
    (152, ()),  # at a block's edge, among generated tokens
    (153, (5,)),
    (150, ()),  # the prompt's end
    (101, ()),  # inside a block of the prompt
    (100, (6, 5)),  # at a block's edge of the prompt
    (1, ()),
]


@every_case
@pytest.mark.parametrize("together", [True, False])
def test_a_fork_equals_a_fresh_request(
    case: Case, together: bool, make_engine: MakeEngine, cold: Cold
) -> None:
    """Branches from all places in one call, and one call a place."""
    engine = make_engine(**case.model)
    parent = kept(engine, PROMPT, case.params)
    sequence = [*PROMPT, *parent.token_ids]
    own = replace(case.params, stream_key=None, max_tokens=9)
    branches = [ForkBranch(parent.sequence_id, own, *place) for place in PLACES]
    driver = Driver(engine)
    if together:
        children = driver.fork("all", *branches).outputs
        driver.finish()
    else:
        children = []
        for index, branch in enumerate(branches):
            output = driver.fork(f"fork {index}", branch)
            driver.finish()
            children += output.outputs
    assert len({parent.stream_key, *(child.stream_key for child in children)}) == 10
    for (position, forced), child in zip(PLACES, children, strict=True):
        tokens = [*sequence[:position], *forced]
        key = child.stream_key
        assert bits(child) == cold(tokens, replace(own, stream_key=key), case.family)
        inherited = min(len(sequence) - 1, position or len(sequence), len(tokens) - 1)
        assert child.usage.forked_tokens == inherited
        assert child.usage.prompt_tokens == len(tokens)


@every_mode
@pytest.mark.parametrize("position", [151, 152, 155, 161])
def test_a_fork_with_its_parents_key_repeats_its_parent(
    params: SamplingParams, position: int, make_engine: MakeEngine
) -> None:
    """A draw depends on key and position. Without penalties of the output only, so do tokens."""
    params = replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    engine = make_engine()
    parent = kept(engine, PROMPT, params)
    done = position - len(PROMPT)
    own = replace(params, stream_key=parent.stream_key, max_tokens=12 - done)
    driver = Driver(engine)
    child = driver.fork("fork", ForkBranch(parent.sequence_id, own, position))
    driver.finish()
    tokens, logprobs = bits(parent)
    assert bits(child.outputs[0]) == (tokens[done:], logprobs[done:])


@every_case
def test_nested_forks(case: Case, make_engine: MakeEngine, cold: Cold) -> None:
    """Forks of forks, three deep, at the end and inside a block, all sharing one tail."""
    engine = make_engine(**case.model)
    driver = Driver(engine)
    own = replace(case.params, stream_key=None, max_tokens=3)
    root = kept(engine, PROMPT, replace(case.params, max_tokens=3))
    level = [([*PROMPT, *root.token_ids], root.sequence_id)]
    for depth in range(3):
        branches, starts = [], []
        for tokens, sequence_id in level:
            for position, forced in ((len(tokens), ()), (len(tokens) - 2, (depth + 20,))):
                branches.append(ForkBranch(sequence_id, own, position, forced, keep_seconds=60))
                starts.append([*tokens[:position], *forced])
        children = driver.fork(f"depth {depth}", *branches)
        driver.finish()
        for tokens, output in zip(starts, children.outputs, strict=True):
            expected = cold(tokens, replace(own, stream_key=output.stream_key), case.family)
            assert bits(output) == expected
        level = [
            ([*tokens, *output.token_ids], output.sequence_id)
            for tokens, output in zip(starts, children.outputs, strict=True)
        ]
    assert len(level) == 8


@every_mode
def test_forks_of_a_running_sequence(
    params: SamplingParams, make_engine: MakeEngine, cold: Cold
) -> None:
    """Forked between its steps, a parent and its children run on side by side, undisturbed."""
    engine = make_engine(max_num_batched_tokens=64)
    driver = Driver(engine)
    parent = driver.start("parent", PROMPT, replace(params, max_tokens=20))
    children: list[tuple[list[int], Any]] = []
    own = replace(params, stream_key=None, max_tokens=10)
    while len(children) < 12:
        driver.step()
        if not parent.outputs or not parent.outputs[0].token_ids:
            continue
        tokens = [*PROMPT, *parent.outputs[0].token_ids]
        for position in (len(tokens), len(tokens) - 1):
            branch = ForkBranch(parent.outputs[0].sequence_id, own, position)
            child = driver.fork(f"fork {len(children)}", branch)
            children.append((tokens[:position], child))
    driver.finish()
    assert bits(parent.outputs[0]) == cold(PROMPT, replace(params, max_tokens=20))
    for tokens, child in children:
        key = child.outputs[0].stream_key
        assert bits(child.outputs[0]) == cold(tokens, replace(own, stream_key=key))
        assert child.outputs[0].usage.computed_tokens == 1


@every_mode
def test_a_fork_whose_leased_blocks_were_evicted(
    params: SamplingParams, make_engine: MakeEngine, cold: Cold
) -> None:
    engine = make_engine(num_gpu_blocks_override=50, max_model_len=200)
    tokens = prompt(100)
    parent = kept(engine, tokens, params)
    run_one(engine, prompt(180, seed=3), params)
    assert engine.manager.num_evicted > 0
    own = replace(params, stream_key=None)
    driver = Driver(engine)
    child = driver.fork("fork", ForkBranch(parent.sequence_id, own)).outputs
    driver.finish()
    assert child[0].usage.computed_tokens > 1  # some were lost
    start = [*tokens, *parent.token_ids]
    assert bits(child[0]) == cold(start, replace(own, stream_key=child[0].stream_key))


# -------------------------------------------------------------------------------- samples


@every_case
@pytest.mark.parametrize("length", [148, 150])
@pytest.mark.parametrize("caching", [True, False])
def test_four_samples_equal_four_requests(
    case: Case,
    length: int,
    caching: bool,
    make_engine: MakeEngine,
    cold: Cold,
) -> None:
    engine = make_engine(**case.model, enable_prefix_caching=caching)
    tokens = prompt(length)
    for _ in range(2):
        samples = engine.generate([tokens], replace(case.params, n=4))[0].outputs
        assert len({sample.stream_key for sample in samples}) == 4
        for sample in samples:
            own = replace(case.params, stream_key=sample.stream_key)
            assert bits(sample) == cold(tokens, own, case.family)
    different = {tuple(sample.token_ids) for sample in samples}
    assert len(different) == (1 if case.params.greedy else 4)


def test_a_seed_gives_the_same_samples_in_order_whatever_else_runs(make_engine: MakeEngine) -> None:
    params = replace(SAMPLED, stream_key=None, seed=7, n=3)
    alone = make_engine().generate([PROMPT], params)[0].outputs
    engine = make_engine(max_num_batched_tokens=16)
    many = engine.generate([prompt(50, seed=1), PROMPT, PROMPT], [SAMPLED, params, params])
    for output in many[1:]:
        assert [bits(sample) for sample in output.outputs] == [bits(sample) for sample in alone]
        assert [s.stream_key for s in output.outputs] == [s.stream_key for s in alone]


# -------------------------------------------------------------------------------- logprobs


@every_family
@pytest.mark.parametrize("budget", [16, 4096])
def test_prompt_logprobs(family: str, budget: int, make_engine: MakeEngine) -> None:
    params = replace(GREEDY, prompt_logprobs=3)
    quiet = make_engine(
        **FAMILIES[family], enable_prefix_caching=False, max_num_batched_tokens=4096
    )
    expected = quiet.generate([PROMPT], params)[0]
    assert expected.prompt_logprobs[0] is None
    assert [entry.token_id for entry in expected.prompt_logprobs[1:]] == PROMPT[1:]
    engine = make_engine(**FAMILIES[family], max_num_batched_tokens=budget)
    engine.generate([PROMPT, prompt(40, seed=1)], SAMPLED)
    for _ in range(2):
        output = engine.generate([PROMPT], params)[0]
        assert output.num_cached_tokens == 0  # such a prompt is run, not looked up
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert bits(output.outputs[0]) == bits(expected.outputs[0])


@every_family
def test_scores_are_the_prompts_logprobs(family: str, make_engine: MakeEngine) -> None:
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=2)
    continuations = (tuple(prompt(9, seed=1)), tuple(prompt(1, seed=2)), tuple(prompt(30, seed=3)))
    quiet = make_engine(
        **FAMILIES[family], enable_prefix_caching=False, max_num_batched_tokens=4096
    )
    prompts = [[*PROMPT, *tokens] for tokens in continuations]
    whole = [output.prompt_logprobs for output in quiet.generate(prompts, params)]
    engine = make_engine(**FAMILIES[family], max_num_batched_tokens=32)
    engine.generate([PROMPT], GREEDY)
    engine.execute(Score("score", tuple(PROMPT), continuations, top_logprobs=2))
    found: dict[int, list[object]] = {0: [], 1: [], 2: []}
    while engine.has_work:
        for event in engine.step():
            if hasattr(event, "prompt_logprobs"):
                found[event.index] += event.prompt_logprobs
    for index, expected in enumerate(whole):
        assert found[index] == expected[len(PROMPT) :]


# -------------------------------------------------------------------------------- SmolLM2


def test_smollm2_gives_the_same_bits_however_it_is_served(
    smollm2: Engine, engines: list[Engine]
) -> None:
    """One engine with everything that disturbs, one with nothing."""
    busy = Engine(
        EngineConfig(
            model=str(default_model_path()),
            num_gpu_blocks_override=16,
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=16,
        )
    )
    engines.append(busy)
    text = (
        "A hash trie shares what prompts have in common. Grüße! 你好 🙂 2, 3, 5, 7, 11, 13, 17.\n"
    )
    tokens = (smollm2.tokenizer.encode(text) * 4)[:120]
    long = [replace(mode, max_tokens=10) for mode in (GREEDY, SAMPLED)]
    expected = []
    for mode in long:
        smollm2.execute(FlushCache("flush"))
        expected.append(bits(run_one(smollm2, tokens, mode)))
    for mode, want in zip(long, expected, strict=True):  # from the cache
        output = smollm2.generate([tokens], mode)[0]
        assert output.num_cached_tokens == 119
        assert bits(output.outputs[0]) == want

    others = [tokens[i : i + 14] for i in range(3)]
    more = replace(GREEDY, max_tokens=36)
    outputs = busy.generate([*others, tokens, tokens], [more, more, more, *long])
    assert busy.metrics.counters.preemptions > 0
    assert [bits(output.outputs[0]) for output in outputs[3:]] == expected

    driver = Driver(smollm2)
    parent = kept(smollm2, tokens, long[1])
    sequence = [*tokens, *parent.token_ids]
    own = replace(long[1], stream_key=None)
    places = ((130, ()), (119, ()), (112, ()), (127, (99,)))
    branches = [ForkBranch(parent.sequence_id, own, at, forced) for at, forced in places]
    children = driver.fork("forks", *branches)
    driver.finish()
    fresh = [[*sequence[:at], *forced] for at, forced in places]
    keyed = [replace(own, stream_key=child.stream_key) for child in children.outputs]
    again = busy.generate(fresh, keyed)
    for child, output in zip(children.outputs, again, strict=True):
        assert bits(child) == bits(output.outputs[0])
