"""The whole engine on the device: the same tokens and logprobs, however a request is served.

On a tiny checkpoint, and on the default model if its file is there: with `--batch-invariant`, from
graphs and launched, cached and not, in chunks, preempted with blocks moved to the host, and with
keys and values in fp8; and the time of a decode step either way. Needs what the engine needs, and
transformers and gguf to write a tiny checkpoint.
"""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._report import Report
from benchmarks.gpu_check.device import Target

_NEEDED = ("xxhash", "sortedcontainers", "tokenizers", "transformers", "gguf", "jinja2")
_CLOSE = 1e-3


def engine(report: Report, target: Target) -> None:
    """Sampled requests: alone, in one batch, launched, without the cache, in small chunks…"""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        report.add("engine_same_bits", None, unit=f"left out: no {', '.join(missing)}")
        return
    from tests.model.checkpoints import write_checkpoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "llama", max_position_embeddings=2_048)
        _compare(report, target, model, "engine")
        _fp8(report, target, model)
    default = None if target.toy else _default_model()  # hours in the interpreter
    if default is not None:
        _compare(report, target, default, "default_model")


def _default_model() -> Path | None:
    from prefixcache.model.default_model import find_default_model  # noqa: PLC0415

    return find_default_model()


def _make(target: Target, model: Path, **fields: Any) -> Any:
    from prefixcache import Engine, EngineConfig  # noqa: PLC0415

    settings = {
        "model": str(model),
        "device": target.device.type,
        "attention_backend": "triton",
        "batch_invariant": True,
        "num_gpu_blocks_override": 600,
        "max_model_len": 1_024,
        "max_num_seqs": 4 if target.toy else 16,
        "swap_space": 0.25,
    }
    return Engine(EngineConfig(**{**settings, **fields}))


def _prompts(target: Target) -> list[list[int]]:
    length, count = (24, 2) if target.toy else (700, 8)
    return [
        [10 + (7 * i + 3 * n * (i > length // 2)) % 280 for i in range(length)]
        for n in range(count)
    ]


def _params(target: Target) -> Any:
    from prefixcache import SamplingParams  # noqa: PLC0415

    tokens = 3 if target.toy else 24
    return SamplingParams(n=2, seed=3, max_tokens=tokens, logprobs=1, ignore_eos=True)


def _compare(report: Report, target: Target, model: Path, name: str) -> None:
    """One way of serving after another against each request alone; graphs are on but for one."""
    prompts, params = _prompts(target), _params(target)
    cached = _make(target, model)
    bound = None if target.toy else 1.0  # the interpreter's products promise nothing
    report.add(f"{name}_says_same_bits", cached.same_bits, at_least=bound)
    alone = [cached.generate([prompt], params)[0] for prompt in prompts]
    launched = _make(target, model, enforce_eager=True)
    ways = {
        "batched": cached.generate(prompts, params),
        "launched": launched.generate(prompts, params),
        "uncached": _make(target, model, enable_prefix_caching=False).generate(prompts[:2], params),
        "chunked": _make(target, model, max_num_batched_tokens=16).generate(prompts[:2], params),
        "swapped": _preempted(_make(target, model), prompts[:2], params),
    }
    for way, outputs in ways.items():
        different = sum(
            not _equal(a, b, 0.0 if target.device.type == "cuda" else _CLOSE)
            for one, other in zip(alone, outputs, strict=False)
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )
        report.add(f"{name}_{way}_differing_outputs", different, at_most=0)
    for how, engine_ in (("captured", cached), ("launched", launched)):
        seconds = _step_seconds(engine_, prompts, params)
        report.add(f"{name}_step_{how}_ms", seconds * 1e3, unit="ms a decode step, all of it")


def _preempted(served: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    """Requests that are all preempted in the middle, and whose cache is then flushed.

    What they had comes back from host memory, whatever the estimate says.
    """
    from prefixcache.engine.messages import Generate  # noqa: PLC0415
    from prefixcache.engine.outputs import RequestOutput  # noqa: PLC0415

    scheduler = served.scheduler
    scheduler.swap.worth = lambda num_blocks: True
    outputs = []
    for number, prompt in enumerate(prompts):
        name = f"preempted-{number}"
        outputs.append(RequestOutput(name, prompt, params.n))
        served.execute(Generate(name, tuple(prompt), params))
    steps = 0
    while not all(output.finished for output in outputs):
        events = served.step()
        for output in outputs:
            output.apply(events)
        steps += 1
        if steps == 2:  # in the middle of a long prompt, or of decoding a short one
            for group in list(scheduler.running):
                scheduler._preempt(group)
            served.manager.flush()
    assert scheduler.swap.num_in > 0, "nothing was moved back"
    return outputs


def _fp8(report: Report, target: Target, model: Path) -> None:
    """Keys and values in e4m3: alone and in a batch, where the device has the conversions."""
    from prefixcache.errors import ConfigurationError  # noqa: PLC0415

    prompts, params = _prompts(target)[:2], _params(target)
    try:
        engine_ = _make(target, model, kv_cache_dtype="fp8")
    except ConfigurationError as error:
        report.add("engine_fp8_differing_outputs", None, unit=str(error))
        return
    alone = [engine_.generate([prompt], params)[0] for prompt in prompts]
    different = sum(
        not _equal(a, b, 0.0 if target.device.type == "cuda" else _CLOSE)
        for one, other in zip(alone, engine_.generate(prompts, params), strict=True)
        for a, b in zip(one.outputs, other.outputs, strict=True)
    )
    report.add("engine_fp8_differing_outputs", different, at_most=0)


def _step_seconds(served: Any, prompts: list[list[int]], params: Any) -> float:
    """Median wall time of the engine's steps that only decode, scheduling and sampling included."""
    from prefixcache.engine.messages import Generate  # noqa: PLC0415

    for number, prompt in enumerate(prompts[: served.config.max_num_seqs // params.n]):
        served.execute(Generate(f"timed-{number}", tuple(prompt), params))
    times = []
    while served.has_work:
        began = time.perf_counter()
        served.step()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return one.token_ids == other.token_ids and all(
        abs(a.logprob - b.logprob) <= tolerance for a, b in pairs
    )
