"""OpenVINO GenAI: its continuous batching pipeline with prefix caching, on the GGUF file itself."""

from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from _loop import Result, Server, Tokens, serve

CACHE_GB = 4


class OpenVINO(Server):
    """`settings` of the job are device properties: empty is the default configuration."""

    def __init__(self, job: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = CACHE_GB
        for name, value in job["settings"].get("scheduler", {}).items():
            setattr(scheduler, name, value)
        properties = job["settings"].get("properties", {})
        self._pipeline = genai.LLMPipeline(
            job["gguf"], "CPU", scheduler_config=scheduler, **properties
        )
        self.version = str(genai.__version__)
        self.facts: dict[str, Any] = {}

    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        config = self._config(max_tokens)
        config.do_sample = n > 1
        config.num_return_sequences = n
        if n > 1:
            config.temperature = 1.0
        return self._run(prompts, config)

    def beam(self, prompt: Tokens, width: int, max_tokens: int) -> Result:
        config = self._config(max_tokens)
        config.num_beams = width
        config.num_return_sequences = 1
        return self._run([prompt], config)

    def _config(self, max_tokens: int) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.apply_chat_template = False
        config.do_sample = False
        return config

    def _run(self, prompts: list[Tokens], config: genai.GenerationConfig) -> Result:
        ids = openvino.Tensor(np.array(prompts, dtype=np.int64))
        mask = openvino.Tensor(np.ones((len(prompts), len(prompts[0])), dtype=np.int64))
        results = self._pipeline.generate(genai.TokenizedInputs(ids, mask), config)
        first = float(results.perf_metrics.get_ttft().mean) / 1e3
        return Result([len(tokens) for tokens in results.tokens], None, first)


if __name__ == "__main__":
    serve(OpenVINO)
