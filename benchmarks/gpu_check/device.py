"""The device under test: sizes that suit it, how its work is timed, and models made on it.

Owns no figure. On the CPU everything is a toy and runs in Triton's interpreter: that the script
runs is all that it shows there.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.attention import StepInput
from prefixcache.model.config import ModelConfig
from prefixcache.model.decoder import Decoder
from prefixcache.model.weights import expected_tensors

BLOCK = 16

LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4_096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
SMALL = replace(
    LLAMA_8B,
    vocab_size=4_096,
    hidden_size=512,
    intermediate_size=1_024,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
)
TOY = replace(
    SMALL,
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    head_dim=16,
)


@dataclass(frozen=True)
class Target:
    """A device and what is run on it. toy: the CPU, in the interpreter."""

    device: torch.device
    dtype: torch.dtype

    @property
    def toy(self) -> bool:
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        return "interpreter" if self.toy else torch.cuda.get_device_name(self.device)

    def free_bytes(self) -> int:
        """Memory that may still be taken."""
        return 64 << 20 if self.toy else int(torch.cuda.mem_get_info(self.device)[0])

    def l2_bytes(self) -> int:
        """The last-level cache, which inputs that are used again must not fit into."""
        if self.toy:
            return 0
        properties = torch.cuda.get_device_properties(self.device)
        return int(getattr(properties, "L2_cache_size", 64 << 20))

    def synchronize(self) -> None:
        if not self.toy:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], rounds: int = 20) -> float:
        """Median device time of one call of `work`, replayed from a captured graph.

        `work` must not wait for the device. Its first call compiles what it launches.
        """
        if self.toy:
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)


class RandomWeights:
    """The tensors that a configuration implies, drawn on the device when they are asked for.

    The same name gives the same numbers, so two decoders of one configuration are equal.
    """

    def __init__(self, config: ModelConfig, target: Target) -> None:
        self._shapes = dict(expected_tensors(config))
        self._numbers = {name: number for number, name in enumerate(self._shapes)}
        self._target = target

    def get(self, name: str) -> Tensor:
        generator = torch.Generator(self._target.device).manual_seed(self._numbers[name])
        shape = self._shapes[name]
        where = {"device": self._target.device, "dtype": self._target.dtype}
        noise = torch.randn(shape, generator=generator, **where)
        return 1 + 0.1 * noise if len(shape) == 1 else noise.mul_(shape[-1] ** -0.5)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def storage_type(self, name: str) -> str:
        return {torch.float32: "F32", torch.bfloat16: "BF16"}[self._target.dtype]

    def raw(self, name: str) -> None:
        return None


def random_decoder(
    config: ModelConfig, target: Target, *, batch_invariant: bool, max_model_len: int
) -> Decoder:
    """A decoder on the Triton kernels with random weights made on the device."""
    checkpoint = SimpleNamespace(config=config, weights=RandomWeights(config, target))
    return Decoder.from_checkpoint(
        checkpoint,  # type: ignore[arg-type]
        device=target.device,
        dtype=target.dtype,
        max_model_len=max_model_len,
        backend="triton",
        batch_invariant=batch_invariant,
    )


@dataclass(frozen=True)
class Row:
    """Tokens of one sequence in a step, from position `first`; ids: the sequence's blocks."""

    tokens: Sequence[int]
    first: int
    ids: Sequence[int]
    writes: bool = True

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


def make_step(rows: Sequence[Row]) -> StepInput:
    """A step that wants the logits of each row's last token."""
    table = np.zeros((len(rows), max(-(-row.end // BLOCK) for row in rows)), np.int32)
    for line, row in zip(table, rows, strict=True):
        count = -(-row.end // BLOCK)
        line[:count] = row.ids[:count]
    starts = np.cumsum([0, *(len(row.tokens) for row in rows)])
    return StepInput(
        token_ids=np.concatenate([np.asarray(row.tokens, np.int32) for row in rows]),
        positions=np.concatenate([np.arange(row.first, row.end, dtype=np.int32) for row in rows]),
        slot_mapping=np.concatenate([_slots(row) for row in rows]),
        query_start_loc=starts.astype(np.int32),
        seq_lens=np.array([row.end for row in rows], np.int32),
        block_table=table,
        logits_rows=(starts[1:] - 1).astype(np.int32),
    )


def _slots(row: Row) -> np.ndarray:
    at = np.arange(row.first, row.end)
    if not row.writes:
        return np.full(len(at), -1, np.int64)
    return np.asarray(row.ids, np.int64)[at // BLOCK] * BLOCK + at % BLOCK


def chunks(sizes: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """First and last position of the pieces of `length` tokens: of these sizes, then the rest."""
    first = 0
    for size in [*sizes, length]:
        end = min(first + size, length)
        if end > first:
            yield first, end
        first = end
