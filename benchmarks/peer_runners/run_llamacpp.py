"""llama.cpp through its Python bindings: one stream, greedy, its prefix kept in the context."""

import os
from typing import Any

import llama_cpp
from _loop import Result, Server, Tokens, serve


class LlamaCpp(Server):
    def __init__(self, job: dict[str, Any]) -> None:
        threads = len(os.sched_getaffinity(0))
        self._llama = llama_cpp.Llama(
            job["gguf"],
            n_ctx=4096,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
            **job["settings"],
        )
        self._before: Tokens = []
        self.version = str(llama_cpp.__version__)
        self.facts: dict[str, Any] = {}

    def sample(self, prompts: list[Tokens], n: int, max_tokens: int) -> Result:
        """Its `generate` keeps what the context has in common with the prompt."""
        (prompt,) = prompts
        if n != 1:
            raise NotImplementedError("its Python bindings run one sequence")
        common = next(
            (
                i
                for i, pair in enumerate(zip(self._before, prompt, strict=False))
                if len({*pair}) > 1
            ),
            min(len(self._before), len(prompt)),
        )
        tokens: Tokens = []
        for token in self._llama.generate(prompt, temp=0.0):
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
        self._before = prompt + tokens[:-1]
        return Result([len(tokens)], common)


if __name__ == "__main__":
    serve(LlamaCpp)
