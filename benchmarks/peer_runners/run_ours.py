"""prefixcache: the engine as the job's settings make it, in a process of its own."""

from importlib.metadata import version
from typing import Any

import torch
from _loop import Result, Server, Tokens, serve

from prefixcache import BeamSearchParams, Engine, EngineConfig, SamplingParams
from prefixcache_kernels import select_kernels

CPU = torch.device("cpu")


class Ours(Server):
    """`facts` hold the model's shape, for the floors."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._engine = Engine(EngineConfig(**job["settings"]))
        self.version = version("prefixcache")
        shape = self._engine.model_config
        names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
        names += ("intermediate_size", "vocab_size")
        kernels = select_kernels(self._engine.config.attention_backend, CPU, torch.float32)
        self.facts = {name: getattr(shape, name) for name in names}
        self.facts["kernels"] = type(kernels).__name__  # the torch fallback must not pass unseen

    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        params = SamplingParams(
            n=n, temperature=1.0 if n > 1 else 0.0, max_tokens=max_tokens, ignore_eos=True
        )
        return self._run(prompts, params)

    def beam(self, prompt: Tokens, width: int, max_tokens: int) -> Result:
        params = BeamSearchParams(num_beams=width, max_tokens=max_tokens, ignore_eos=True)
        return self._run([prompt], params)

    def _run(self, prompts: list[Tokens], params: SamplingParams | BeamSearchParams) -> Result:
        results = self._engine.generate(prompts, params)
        lengths = [len(output.token_ids) for result in results for output in result.outputs]
        return Result(lengths, min(result.num_cached_tokens for result in results))


if __name__ == "__main__":
    serve(Ours)
