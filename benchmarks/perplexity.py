"""Perplexity with activations in float32 and in int8, on the same English text.

    python -m benchmarks.perplexity --json [--tokens 8192]

The text is the language reference that comes with every Python (`pydoc_data`), in windows of 512
tokens, each a prompt of its own whose first token is not predicted. The engine's prompt logprobs
are what is summed, so all of the model and the vocabulary head take part.
"""

import math
from pydoc_data.topics import topics

from benchmarks._report import Report
from prefixcache import Engine, EngineConfig, SamplingParams

WINDOW = 512


def main() -> None:
    report = Report("perplexity", "Perplexity with activations in float32 and in int8.")
    report.parser.add_argument("--model", default="smollm2")
    report.parser.add_argument("--tokens", type=int, default=8_192, help="of the text")
    options = report.parse()
    count = 2 * WINDOW if options.quick else options.tokens
    exact = perplexity(report, options.model, None, count)
    quantised = perplexity(report, options.model, "int8", count)
    report.add("tokens", count)
    report.add("perplexity_f32", exact)
    report.add("perplexity_int8", quantised)
    report.add("ratio", quantised / exact, at_most=1.01)
    report.finish()


def perplexity(report: Report, model: str, quantization: str | None, count: int) -> float:
    """e to the mean of -log p over the first `count` tokens of the text, window by window."""
    report.progress(f"activations: {quantization or 'float32'}")
    engine = Engine(
        EngineConfig(
            model=model,
            activation_quantization=quantization,
            num_gpu_blocks_override=256,
            max_model_len=2 * WINDOW,
        )
    )
    ids = engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))[:count]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses = [
        -token.logprob
        for window in windows
        if len(window) > 1
        for token in engine.generate([window], params)[0].prompt_logprobs or ()
        if token is not None
    ]
    assert len(losses) == sum(len(window) - 1 for window in windows)
    return math.exp(math.fsum(losses) / len(losses))


if __name__ == "__main__":
    main()
