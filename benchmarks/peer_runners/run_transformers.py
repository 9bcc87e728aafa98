"""transformers `generate` on float32: beam search behind a prefix that is in its cache already.

It has no cache between calls. So the prompt's keys and values are computed before the clock
starts, copied for each beam likewise, and passed in: only the search itself is timed.
"""

import copy
from typing import Any

import torch
import transformers
from _loop import Result, Server, Tokens, serve


class Transformers(Server):
    def __init__(self, job: dict[str, Any]) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job["safetensors"], dtype=torch.float32
        ).eval()
        self._model.generation_config.eos_token_id = None  # ends are ignored, as everywhere
        self._model.generation_config.pad_token_id = 0
        self._prefix: Tokens = []
        self._cache: Any = None
        self._copies: Any = None
        self.version = str(transformers.__version__)
        self.facts: dict[str, Any] = {}

    @torch.inference_mode()
    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        """Only called to warm a prefix: keep the keys and values of all but the last token."""
        (prompt,) = prompts
        self._prefix = prompt[:-1]
        self._cache = transformers.DynamicCache(config=self._model.config)
        self._model(torch.tensor([self._prefix]), past_key_values=self._cache)
        return Result([max_tokens] * n)

    def prepare(self, row: dict[str, Any]) -> None:
        """The prefix, once for each beam."""
        self._copies = copy.deepcopy(self._cache)
        self._copies.batch_repeat_interleave(row["n"])

    @torch.inference_mode()
    def beam(self, prompt: Tokens, width: int, max_tokens: int) -> Result:
        cache, self._copies = self._copies, None
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            past_key_values=cache,
            num_beams=width,
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        cached = len(self._prefix) if cache is not None else 0
        return Result([output.shape[1] - len(prompt)], cached)


if __name__ == "__main__":
    serve(Transformers)
