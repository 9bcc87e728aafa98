"""Same bits with `batch_invariant`: one sequence served in every way that the promise names.

A small random model on the device. On the CPU the kernels run in the interpreter, whose products
are numpy's: there only closeness is checked.
"""

import torch
from torch import Tensor

from benchmarks._report import Report
from benchmarks.gpu_check.device import (
    BLOCK,
    SMALL,
    TOY,
    Row,
    Target,
    chunks,
    make_step,
    random_decoder,
)
from prefixcache.model.decode_graph import DecodeGraph
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache

_CLOSE = {"rtol": 0.0, "atol": 1e-3}


class _Server:
    """A decoder and a pool of its own, all of it NaN until it is written."""

    def __init__(self, target: Target) -> None:
        self.config = TOY if target.toy else SMALL
        self.length = 40 if target.toy else 1_300  # more than two spans on a GPU
        self.new_tokens = 2 if target.toy else 16
        self.others = 2 if target.toy else 15
        self.width = -(-(self.length + self.new_tokens + BLOCK) // BLOCK)
        self.decoder: Decoder = random_decoder(
            self.config, target, batch_invariant=True, max_model_len=self.width * BLOCK
        )
        self.cache = KVCache(
            self.config,
            self.width * (self.others + 3),
            BLOCK,
            target.dtype,
            target.device,
            kernels=self.decoder.kernels,
        )
        generator = torch.Generator().manual_seed(3)
        shape = (self.others + 1, self.length)
        drawn = torch.randint(0, self.config.vocab_size, shape, generator=generator)
        self.prompt: list[int] = drawn[0].tolist()
        self.neighbours: list[list[int]] = drawn[1:].tolist()

    def blocks(self, sequence: int) -> list[int]:
        """Blocks of a sequence, in an order of their own."""
        ids = list(range(sequence * self.width, (sequence + 1) * self.width))
        return ids[::-1] if sequence % 2 else ids

    def forget(self) -> None:
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)

    def logits(self, *rows: Row) -> Tensor:
        return self.decoder.forward(make_step(rows), self.cache)

    def alone(
        self, prompt: list[int], sequence: int, sizes: list[int], first: int = 0
    ) -> tuple[list[int], Tensor]:
        """Prefill from `first` in chunks, then decode greedily: tokens, and logits of each."""
        ids, tokens = self.blocks(sequence), list(prompt)
        for begin, end in chunks(sizes, len(prompt) - first):
            last = self.logits(Row(prompt[first + begin : first + end], first + begin, ids))
        rows = [last]
        for _ in range(self.new_tokens):
            tokens.append(int(rows[-1][0].argmax()))
            rows.append(self.logits(Row(tokens[-1:], len(tokens) - 1, ids)))
        return tokens, torch.cat(rows)

    def batched(self) -> Tensor:
        """The prompt beside others: its last chunk and every decode step are shared with them.

        Every other neighbour begins with the prompt's own first half, in the prompt's blocks.
        """
        ids, half = self.blocks(0), self.length // 2 // BLOCK * BLOCK
        self.logits(Row(self.prompt[:half], 0, ids))
        sequences, tables = [list(self.prompt)], [ids]
        for number, tokens in enumerate(self.neighbours):
            own = self.blocks(number + 1)
            sharer = number % 2 == 0
            sequences.append((self.prompt[:half] if sharer else tokens[:half]) + tokens[half:])
            tables.append([*ids[: half // BLOCK], *own[half // BLOCK :]] if sharer else own)
        firsts = [half if n == 0 or n % 2 else 0 for n in range(len(sequences))]
        rows = [
            Row(tokens[first:], first, table)
            for tokens, first, table in zip(sequences, firsts, tables, strict=True)
        ]
        states = [self.logits(*rows)]
        for _ in range(self.new_tokens):
            for tokens, row in zip(sequences, states[-1], strict=True):
                tokens.append(int(row.argmax()))
            decode = [
                Row(tokens[-1:], len(tokens) - 1, table)
                for tokens, table in zip(sequences, tables, strict=True)
            ]
            states.append(self.logits(*decode))
        return torch.stack([state[0] for state in states])

    def captured(self, tokens: list[int]) -> Tensor:
        """The decode steps of `alone` again, padded to four rows and replayed from a graph."""
        graph = DecodeGraph(self.decoder, self.cache, rows=4, blocks=self.width)
        ids = self.blocks(0)
        steps = (make_step([Row([tokens[at]], at, ids)]) for at in range(self.length, len(tokens)))
        return torch.cat([graph.run(step).clone() for step in steps])

    def fork(self, kept: int, text: list[int]) -> Tensor:
        """Behind the first `kept` tokens of sequence 0, in the middle of a block: copy it, go on.

        Must follow `alone` on sequence 0.
        """
        full, own = kept // BLOCK, self.blocks(1)
        parent = self.blocks(0)
        self.cache.copy_blocks([(parent[full], own[full])])
        ids = [*parent[:full], *own[full:]]
        return self.logits(Row(text, kept, ids))


@torch.inference_mode()
def same_bits(report: Report, target: Target) -> None:
    """Record for each way of serving whether it gave the bits of the prompt alone in one piece."""
    server = _Server(target)

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        assert torch.isfinite(expected).all(), "unwritten slots leaked"
        if target.toy:
            torch.testing.assert_close(actual, expected, **_CLOSE)
            report.add(name, True, unit="(close only: the interpreter)")
        else:
            different = int((actual != expected).sum())
            report.add(f"{name}_differing_logits", different, at_most=0)

    server.forget()
    tokens, expected = server.alone(server.prompt, 0, [])
    compare("bits_captured_vs_launched", server.captured(tokens), expected[1:])
    kept = server.length - 5
    text = [7, 11, 13]
    forked = server.fork(kept, text)
    server.forget()
    again = server.logits(Row(server.prompt[:kept] + text, 0, server.blocks(2)))
    compare("bits_forked_vs_prefilled_again", forked, again)
    server.forget()
    sizes = [3, 8, 17] if target.toy else [7, 64, 500]
    _, chunked = server.alone(server.prompt, 1, sizes)
    compare("bits_chunked_vs_whole", chunked, expected)
    server.forget()
    compare("bits_batched_vs_alone", server.batched(), expected)
    server.forget()
    whole = server.logits(Row(tokens[:-1], 0, server.blocks(0)))
    compare("bits_prefilled_vs_decoded", whole[0], expected[-2])
