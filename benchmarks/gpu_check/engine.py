"""The whole engine on the device: the same tokens and logprobs, however a request is served.

Needs what the engine needs, and transformers and gguf to write a tiny checkpoint.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._report import Report
from benchmarks.gpu_check.device import Target

_NEEDED = ("xxhash", "sortedcontainers", "tokenizers", "transformers", "gguf", "jinja2")
_CLOSE = 1e-3


def engine(report: Report, target: Target) -> None:
    """Greedy and sampled requests: alone, in one batch, without the cache, in small chunks."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        report.add("engine_same_bits", None, unit=f"left out: no {', '.join(missing)}")
        return
    from tests.model.checkpoints import write_checkpoint  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "llama", max_position_embeddings=2_048)
        _compare(report, target, model)


def _compare(report: Report, target: Target, model: Path) -> None:
    from prefixcache import Engine, EngineConfig, SamplingParams  # noqa: PLC0415

    length, count, tokens = (24, 3, 3) if target.toy else (700, 8, 24)
    prompts = [
        [10 + (7 * i + 3 * n * (i > length // 2)) % 280 for i in range(length)]
        for n in range(count)
    ]
    params = SamplingParams(n=2, seed=3, max_tokens=tokens, logprobs=1, ignore_eos=True)

    def make(**fields: Any) -> Engine:
        return Engine(
            EngineConfig(
                **{
                    "model": str(model),
                    "device": target.device.type,
                    "attention_backend": "triton",
                    "batch_invariant": True,
                    "num_gpu_blocks_override": 600,
                    "max_model_len": 1_024,
                    "max_num_seqs": 16,
                    **fields,
                }
            )
        )

    cached = make()
    bound = None if target.toy else 1.0  # the interpreter's products promise nothing
    report.add("engine_says_same_bits", cached.same_bits, at_least=bound)
    alone = [cached.generate([prompt], params)[0] for prompt in prompts]
    ways = {
        "batched": cached.generate(prompts, params),
        "uncached": make(enable_prefix_caching=False).generate(prompts[:2], params),
        "chunked": make(max_num_batched_tokens=16).generate(prompts[:2], params),
    }
    for name, outputs in ways.items():
        different = sum(
            not _equal(a, b, 0.0 if target.device.type == "cuda" else _CLOSE)
            for one, other in zip(alone, outputs, strict=False)
            for a, b in zip(one.outputs, other.outputs, strict=True)
        )
        report.add(f"engine_{name}_differing_outputs", different, at_most=0)


def _equal(one: Any, other: Any, tolerance: float) -> bool:
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return one.token_ids == other.token_ids and all(
        abs(a.logprob - b.logprob) <= tolerance for a, b in pairs
    )
