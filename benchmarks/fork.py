"""What branching costs through a real server and channel: n samples, forks, beams.

    python -m benchmarks.fork --json

The default model on this machine, `prefixcache serve` in a process of its own. Compared figures are
measured in turn, so that a slow moment of a shared machine meets both.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks._report import Comparison, Report, compare, median_seconds
from benchmarks._server import serve
from examples.best_of_n_with_pruning import best_of_n
from examples.client_beam_search import beam_search
from prefixcache import BeamSearchParams, Engine, EngineConfig
from prefixcache.engine.messages import Generate
from prefixcache_service import Branch, Client

PREFIX, LONG = 1_024, 4_096  # tokens
BRANCHES = 8
STEPS_AFTER = 12  # tokens of each branch behind a fork: enough to know what a step takes


def main() -> None:
    report = Report("fork", "n samples, forks of a running sequence, and beams, over gRPC.")
    report.parser.add_argument("--server", metavar="HOST:PORT", help="use this one, start none")
    options = report.parse()
    rounds = 3 if options.quick else 9
    if options.server:
        measure(report, options.server, rounds)
    else:
        report.progress("starting a server")
        with serve("--max-model-len", "5120", "--num-gpu-blocks-override", "1024") as target:
            measure(report, target, rounds)
    blocks_of_a_search(report)
    report.finish()


def measure(report: Report, target: str, rounds: int) -> None:
    random = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        tokens: list[int] = random.integers(100, 40_000, length).tolist()
        return tokens

    with Client(target, timeout=120) as c:
        first_token_of_samples(report, c, prompt, rounds)
        fork_of_a_running_sequence(report, c, prompt(LONG), 5 * rounds)
        searches(report, c, prompt, rounds)
        pruning_and_scores(report, c, prompt(PREFIX), rounds)
        c.flush()


# ---------------------------------------------------------------- n samples


def first_token_of_samples(
    report: Report, c: Client, prompt: Callable[[int], list[int]], rounds: int
) -> None:
    """Behind a new prompt each time: until all samples have their first token."""

    def seconds(n: int) -> float:
        waiting = set(range(n))
        tokens = prompt(PREFIX)
        start = time.perf_counter()
        with c.stream(tokens, n=n, max_tokens=2, seed=1, ignore_eos=True) as stream:
            for delta in stream:
                if delta.token_ids:
                    waiting.discard(delta.index)
                if not waiting:
                    return time.perf_counter() - start
        raise RuntimeError("a sample gave no token")

    pair = compare(lambda: seconds(16), lambda: seconds(1), rounds=rounds)
    report.add("n1_first_token_s", pair.second, unit="s")
    report.add("n16_first_token_ratio", pair.ratio, at_most=1.15)


# ---------------------------------------------------------------- forks


def fork_of_a_running_sequence(report: Report, c: Client, tokens: list[int], rounds: int) -> None:
    """From the call to the last branch's first token, in steps of the batch then running."""
    c.generate(tokens, max_tokens=1)
    seconds, steps = [], []
    for _ in range(rounds):
        waited, step = fork_once(c, tokens)
        seconds.append(waited)
        steps.append(waited / step)
    report.add("fork_first_token_ms", statistics.median(seconds) * 1e3, unit="ms")
    report.add("fork_first_token_steps", statistics.median(steps), at_most=1.7)
    report.add("fork_first_token_steps_p95", float(np.quantile(steps, 0.95)), at_most=2.2)


def fork_once(c: Client, tokens: list[int]) -> tuple[float, float]:
    """Seconds to the last branch's first token, and what a step of parent and branches takes.

    The call follows a token of the parent, as a client that reads along would make it, and so comes
    when the parent's next step has just begun: the wait holds nearly all of that step.
    """
    with c.stream(tokens, max_tokens=512, ignore_eos=True) as parent:
        for _ in range(4):  # it runs, and its prompt is cached
            next(parent)
        branches = [Branch(parent.sequence_id)] * BRANCHES
        waiting = set(range(BRANCHES))
        arrivals: list[float] = []
        start = time.perf_counter()
        with c.stream_fork(branches, max_tokens=STEPS_AFTER, ignore_eos=True) as fork:
            for delta in fork:
                if delta.token_ids:
                    waiting.discard(delta.index)
                if (not waiting and not arrivals) or (
                    arrivals and delta.token_ids and not delta.index
                ):
                    arrivals.append(time.perf_counter())
        gaps = np.diff(arrivals)
        return arrivals[0] - start, float(np.median(gaps))


def pruning_and_scores(report: Report, c: Client, tokens: list[int], rounds: int) -> None:
    """What giving up half of 16 samples saves, and what it takes to score 8 answers."""
    length = 64
    pair = compare(
        lambda: best_of_n(c, tokens, n=16, max_tokens=length, seed=1),
        lambda: c.best_of(tokens, n=16, max_tokens=length, seed=1),
        rounds=rounds,
    )
    report.add("pruned_best_of_ratio", pair.ratio, unit="of the time of all 16 to their end")
    answers = [tokens[at : at + 16] for at in range(0, 128, 16)]
    seconds = median_seconds(lambda: c.score(tokens, answers), rounds=rounds)
    report.add("score8_s", seconds, unit="s")


# ---------------------------------------------------------------- beam search


def searches(report: Report, c: Client, prompt: Callable[[int], list[int]], rounds: int) -> None:
    """The client's search against the engine's: the same sequences, steps per second."""
    steps = 32
    for key, width, length in (
        ("client_beam_ratio", 4, PREFIX),
        ("client_beam_ratio_short_prompt", 4, 16),
        ("client_beam_ratio_width_8", 8, PREFIX),
    ):
        pair = compare_searches(c, prompt(length), width, steps, rounds)
        if key == "client_beam_ratio":
            report.add("engine_beam4_steps_s", steps / pair.first, unit="steps/s")
            report.add("client_beam4_steps_s", steps / pair.second, unit="steps/s")
        report.add(key, pair.ratio, at_least=0.6)


def compare_searches(
    c: Client, tokens: list[int], width: int, steps: int, rounds: int
) -> Comparison:
    """Engine first, client second; raises RuntimeError where they do not find the same."""

    def by_engine() -> list[tuple[int, ...]]:
        result = c.beam(
            tokens,
            num_beams=width,
            num_return_sequences=width,
            max_tokens=steps,
            ignore_eos=True,
        )
        return [out.token_ids for out in result.outputs]

    def by_client() -> list[tuple[int, ...]]:
        found = beam_search(c, tokens, num_beams=width, max_tokens=steps, ignore_eos=True)
        return [hypothesis.tokens for hypothesis in found]

    if by_engine() != by_client():
        raise RuntimeError("the two searches differ")
    return compare(by_engine, by_client, rounds=rounds)


def blocks_of_a_search(report: Report) -> None:
    """Beam 8 x 64 behind 1,024 tokens, blocks in use and copies after each step.

    In this process: only there can every single step be looked at.
    """
    width, steps = 8, 64
    engine = Engine(EngineConfig(num_gpu_blocks_override=256, max_model_len=2048))
    tokens = tuple(np.random.default_rng(1).integers(100, 40_000, PREFIX).tolist())
    engine.execute(Generate("search", tokens, BeamSearchParams(width, max_tokens=steps)))
    peak = copies = 0
    while engine.has_work:
        before = engine.manager.num_copies
        engine.step()
        peak = max(peak, engine.manager.num_in_use)
        copies = max(copies, engine.manager.num_copies - before)
    separate = width * engine.manager.blocks_for(PREFIX + steps - 1)
    report.add("beam8_peak_blocks", peak, unit=f"of {separate} for {width} separate sequences")
    report.add("beam8_blocks_ratio", peak / separate, at_most=0.2)
    report.add("beam8_copies_a_step", copies, at_most=width)


if __name__ == "__main__":
    main()
