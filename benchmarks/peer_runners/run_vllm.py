"""vLLM on the CPU: prefix caching on, all cores, weights as safetensors."""

from typing import Any

import vllm
from _loop import Result, Server, Tokens, serve
from vllm.sampling_params import BeamSearchParams

MAX_LOGPROBS = 256  # its beam search asks for twice the width


class VLLM(Server):
    def __init__(self, job: dict[str, Any]) -> None:
        self._llm = vllm.LLM(
            model=job["safetensors"],
            max_model_len=4096,
            enable_prefix_caching=True,
            max_num_seqs=64,
            max_logprobs=MAX_LOGPROBS,
            **job["settings"],
        )
        self.version = str(vllm.__version__)
        self.facts: dict[str, Any] = {}

    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        params = vllm.SamplingParams(
            n=n, temperature=1.0 if n > 1 else 0.0, max_tokens=max_tokens, ignore_eos=True
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, params, use_tqdm=False)
        lengths = [len(output.token_ids) for result in results for output in result.outputs]
        return Result(lengths, min(result.num_cached_tokens or 0 for result in results))

    def beam(self, prompt: Tokens, width: int, max_tokens: int) -> Result:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        (result,) = self._llm.beam_search([{"prompt_token_ids": prompt}], params)
        return Result([len(result.sequences[0].tokens) - len(prompt)])


if __name__ == "__main__":
    serve(VLLM)
