"""What looking on costs: processor time of the observers over the time of the steps they watch.

    python -m benchmarks.metrics_cost --json

The default model on the CPU, an engine in this process, with a subscriber to cache events. Every
observer's method is timed from outside; its time includes the timing's own, so shares are too high
rather than too low. Three mixes: cold prompts, prompts that are nearly all cached (the least work
beside the most figures), and decoding.
"""

import functools
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks._report import Report
from prefixcache import Engine, EngineConfig, SamplingParams
from prefixcache.engine.messages import Generate, SubscribeEvents

SHARED = 1_024
OWN = 16
VOCABULARY = 49_152


class Stopwatch:
    """Processor time of this thread in the outermost of the methods that it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, target: object, names: Iterable[str]) -> None:
        for name in names:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def timed(*args: object, **more: object) -> object:
            if self._inside:
                return method(*args, **more)
            self._inside = True
            began = time.thread_time()
            try:
                return method(*args, **more)
            finally:
                self.seconds += time.thread_time() - began
                self._inside = False

        return timed


class Bench:
    """An engine under two stopwatches: of the curve of sizes, and of all observers with it."""

    def __init__(self) -> None:
        config = EngineConfig(num_gpu_blocks_override=2_048, max_model_len=4_096, seed=1)
        self.engine = Engine(config)
        self.curve, self.all = Stopwatch(), Stopwatch()
        metrics, cache = self.engine.metrics, self.engine.metrics.cache
        blocks = ("stored", "idled", "evicted", "removed")
        self.curve.around(cache._curve, ("access", "touch"))
        self.all.around(cache, blocks)
        self.all.around(
            metrics,
            ("queued", "admitted", "preempted", "sampled", "finished", "ended", "stepped"),
        )
        self.all.around(self.engine.event_log, ("stored", "removed", "batches"))
        self.engine.execute(SubscribeEvents("events", with_tokens=True))
        self._random = np.random.default_rng(0)
        self._number = 0

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(100, VOCABULARY, count).tolist())

    def run(self, prompts: Iterable[tuple[int, ...]], params: SamplingParams) -> dict[str, float]:
        """Shares of the time of the steps that these requests take."""
        self.curve.seconds = self.all.seconds = 0.0
        for prompt in prompts:
            self._number += 1
            self.engine.execute(Generate(f"{self._number}", prompt, params))
        began = time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
        took = time.perf_counter() - began
        return {"size_curve": self.curve.seconds / took, "metrics": self.all.seconds / took}


def main() -> None:
    report = Report("metrics_cost", "Processor time of metrics and events over that of the steps.")
    options = report.parse()
    number = 4 if options.quick else 24
    bench = Bench()
    head = bench.ids(SHARED)
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    long = SamplingParams(n=16, max_tokens=16 if options.quick else 64, ignore_eos=True, seed=1)
    bench.run([head], once)
    mixes = {
        "prefill": lambda: bench.run([bench.ids(256) for _ in range(number)], once),
        "cached": lambda: bench.run([head + bench.ids(OWN) for _ in range(number)], once),
        "decode": lambda: bench.run([head + bench.ids(OWN)], long),
    }
    shares = {name: mix() for name, mix in mixes.items()}
    for name, share in shares.items():
        report.add(f"size_curve_share_{name}", share["size_curve"])
        report.add(f"metrics_share_{name}", share["metrics"])
    for key in ("size_curve", "metrics"):
        worst = max(share[key] for share in shares.values())
        report.add(f"{key}_share", worst, unit="of step time, the worst mix", at_most=0.01)
    report.finish()


if __name__ == "__main__":
    main()
