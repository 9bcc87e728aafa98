"""Time to first token behind a shared system prompt, cold and warm; and what the cache costs.

    python -m benchmarks.ttft --json

The default model on this machine's CPU, through the engine (no network).
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks._report import Report
from prefixcache import Engine, EngineConfig, SamplingParams
from prefixcache.engine.messages import FlushCache, Generate, Output

SYSTEM_TOKENS, OWN_TOKENS = 1_024, 32
CACHE_CALLS = ("match", "room_after", "admit", "resume", "grow", "publish", "release")


def main() -> None:
    report = Report("ttft", "First token behind a 1,024-token system prompt, cold and warm.")
    report.parser.add_argument("--model", default="smollm2")
    options = report.parse()
    report.progress("loading the model")
    engine = Engine(EngineConfig(model=options.model, num_gpu_blocks_override=1_024))
    rounds = 3 if options.quick else 7
    first_token(report, engine, rounds)
    overhead(report, engine, rounds)
    engine.check_integrity()
    report.finish()


def prompt(random: np.random.Generator, system: list[int]) -> tuple[int, ...]:
    return (*system, *random.integers(100, 40_000, OWN_TOKENS).tolist())


def first_token(report: Report, engine: Engine, rounds: int) -> None:
    """Each round: a request on an empty cache, then another behind the same system prompt."""
    random = np.random.default_rng(0)
    system = random.integers(100, 40_000, SYSTEM_TOKENS).tolist()
    cold, warm = [], []
    for _ in range(rounds + 1):
        engine.execute(FlushCache("flush"))
        cold.append(seconds_to_first_token(engine, prompt(random, system), cached=0))
        warm.append(seconds_to_first_token(engine, prompt(random, system), cached=SYSTEM_TOKENS))
    ratios = [c / w for c, w in zip(cold[1:], warm[1:], strict=True)]
    report.add("cold_first_token_s", statistics.median(cold[1:]), unit="s")
    report.add("warm_first_token_s", statistics.median(warm[1:]), unit="s")
    report.add("warm_speedup", statistics.median(ratios), at_least=12)


def seconds_to_first_token(engine: Engine, tokens: tuple[int, ...], cached: int) -> float:
    start = time.perf_counter()
    engine.execute(Generate("ttft", tokens, SamplingParams(temperature=0, max_tokens=1)))
    while True:
        events = engine.step()
        if any(isinstance(event, Output) for event in events):
            break
    elapsed = time.perf_counter() - start
    assert events[-1].usage.cached_tokens == cached, "the cache held something else"
    return elapsed


def overhead(report: Report, engine: Engine, rounds: int) -> None:
    """Time inside the block manager during prompts that share nothing, by step time."""
    random = np.random.default_rng(1)
    inside = 0.0

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **named: object) -> object:
            nonlocal inside
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                inside += time.perf_counter() - start

        return wrapper

    for name in CACHE_CALLS:
        setattr(engine.manager, name, timed(getattr(engine.manager, name)))
    shares = []
    for _ in range(rounds):
        inside = 0.0
        prompts = [random.integers(100, 40_000, 264).tolist() for _ in range(4)]
        start = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        shares.append(inside / (time.perf_counter() - start))
    report.add("cold_overhead", statistics.median(shares), at_most=0.01)


if __name__ == "__main__":
    main()
