"""What int8 activations gain over float32: tokens a second of processor time, one thread each.

    python -m benchmarks.int8 --json

The default model through the engine, in turn in one process. Processor time leaves out what other
work on the cores takes, so ratios hold on a shared machine; what threads lose by waiting for each
other is not in it.
"""

import random
import statistics
import time

from benchmarks._report import Report
from prefixcache import Engine, EngineConfig, SamplingParams

PREFIX, OUTPUT, SAMPLES = 1_024, 32, 16


def main() -> None:
    report = Report("int8", "Int8 activations against float32, in processor time.")
    options = report.parse()
    engines = {name: engine(mode) for name, mode in (("f32", None), ("int8", "int8"))}
    draw = random.Random(0)
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(1 if options.quick else 5):
        prompt = [draw.randrange(100, 40_000) for _ in range(PREFIX)]
        for name, served in engines.items():
            for row, rate in measure(served, prompt).items():
                rates.setdefault((row, name), []).append(rate)
    for row in ("prefill", "single", "n16"):
        both = [rates[row, name] for name in engines]
        for name, figures in zip(engines, both, strict=True):
            report.add(f"{row}_{name}", statistics.median(figures), unit="tok/s of one thread")
        ratios = [quantised / exact for exact, quantised in zip(*both, strict=True)]
        report.add(f"{row}_int8_vs_f32", statistics.median(ratios))
    report.finish()


def engine(mode: str | None) -> Engine:
    return Engine(
        EngineConfig(
            activation_quantization=mode,
            num_threads=1,
            num_gpu_blocks_override=1_024,
            max_model_len=2 * PREFIX,
        )
    )


def measure(served: Engine, prompt: list[int]) -> dict[str, float]:
    """Prefill of a prompt that is not cached, then one stream and n samples behind it."""
    one = seconds(served, prompt, n=1, max_tokens=1)
    single = seconds(served, prompt, n=1, max_tokens=OUTPUT)
    many = seconds(served, prompt, n=SAMPLES, max_tokens=OUTPUT)
    return {
        "prefill": len(prompt) / one,
        "single": OUTPUT / single,
        "n16": SAMPLES * OUTPUT / many,
    }


def seconds(served: Engine, prompt: list[int], n: int, max_tokens: int) -> float:
    params = SamplingParams(
        n=n, temperature=0.0 if n == 1 else 1.0, max_tokens=max_tokens, ignore_eos=True
    )
    start = time.process_time()
    served.generate([prompt], params)
    return time.process_time() - start


if __name__ == "__main__":
    main()
