"""Decode steps replayed from captured graphs: on a GPU the host then launches nothing itself.

Owns the graphs, their buffers and the padding of a step to a graph's size. What a step is, is the
caller's. A graph replays the kernels on the same addresses: the plan's buffers are filled anew for
each step, and kernels read the amount of work from them, so a graph serves every step of its number
of rows, however long the sequences are and whatever they share.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.attention import StepInput
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache
from prefixcache_kernels.transfer import fill

if TYPE_CHECKING:
    from prefixcache_kernels.triton_backend import TritonKernels
    from prefixcache_kernels.triton_backend.plan import Capacity, PlanBuffers


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What graphs that take turns share.

    plan: work lists and partials, as large as the largest graph needs. pool: where captured kernels
    keep what lies between them; None gives a graph a pool of its own.
    """

    plan: "PlanBuffers"
    pool: Any


class DecodeGraph:
    """Steps of one row for each of at most `rows` sequences of at most `blocks` blocks.

    On the CPU (Triton's interpreter) there are no graphs: the same launches are made one by one.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        rows: int,
        blocks: int,
        shared: SharedMemory | None = None,
    ) -> None:
        """Run an empty step, which compiles what is not compiled yet, and capture it.

        Raises:
            ValueError: the decoder's kernels cannot be captured (only Triton's can).
        """
        kernels = _capturable(decoder)
        self.rows = rows
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._plan = kernels.reserve(
            kernels.decode_capacity(rows, blocks, kv_cache.block_size),
            heads=decoder.heads,
            rope_table=decoder.rope,
            windows=decoder.windows,
            block_size=kv_cache.block_size,
            buffers=shared.plan if shared else None,
        )
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._load(pad_step(_EMPTY, rows))
        self._logits = self._launch()
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=shared.pool if shared else None):
                self._logits = self._launch()

    @torch.inference_mode()
    def run(self, step: StepInput) -> Tensor:
        """Run a step of one row a sequence: write its KV and return the logits of all rows.

        Waits for nothing: the host may go on while the device computes.

        Returns:
            float32 [S, vocab_size], valid until the next call.

        Raises:
            ValueError: naming the field of `step` that does not fit; nothing was written.
        """
        count = len(step.seq_lens)
        if count > self.rows or len(step.token_ids) != count:
            raise ValueError(f"token_ids: one for each of at most {self.rows} sequences")
        self._load(pad_step(step, self.rows))
        if self._graph is None:
            self._logits = self._launch()
        else:
            self._graph.replay()
        return self._logits[:count]

    def _load(self, step: StepInput) -> None:
        self._plan.load(self._decoder.plan(step, self._kv_cache))
        fill(self._tokens, step.token_ids.astype(np.int64))

    @torch.inference_mode()
    def _launch(self) -> Tensor:
        hidden = self._decoder.run_layers(self._tokens, self._plan, self._kv_cache, None)
        return self._decoder.logits(hidden)


class DecodeGraphs:
    """A graph for each of some batch sizes: every decode step up to the largest is served.

    A step runs in the smallest graph that has a row for each of its sequences.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        *,
        max_rows: int,
        max_tokens: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture all graphs, the largest first, so that the others find their memory there.

        Args:
            decoder, kv_cache: what is captured; both must stay where they are.
            max_rows: most sequences of a step. max_tokens: the longest sequence.
            progress: called with (graphs captured, graphs in all).

        Raises:
            ValueError: the decoder's kernels cannot be captured (only Triton's can).
        """
        from prefixcache_kernels.triton_backend.plan import PlanBuffers  # noqa: PLC0415 (Triton)

        capacity = _capacity(decoder, max_rows, max_tokens, kv_cache.block_size)
        plan = PlanBuffers(
            capacity, heads=decoder.heads, windows=len(decoder.windows), device=decoder.device
        )
        on_gpu = decoder.device.type == "cuda"
        shared = SharedMemory(plan, torch.cuda.graph_pool_handle() if on_gpu else None)
        self._sizes = batch_sizes(max_rows)
        self._graphs: list[DecodeGraph] = []
        blocks = -(-max_tokens // kv_cache.block_size)
        for done, rows in enumerate(reversed(self._sizes)):
            if progress is not None:
                progress(done, len(self._sizes))
            self._graphs.insert(0, DecodeGraph(decoder, kv_cache, rows, blocks, shared))

    def run(self, step: StepInput) -> Tensor | None:
        """Logits of all rows, float32 [S, vocab_size], valid until the next call.

        None where no graph serves the step: it has several rows of a sequence, rows without
        logits, or more sequences than the largest graph.
        """
        count = len(step.seq_lens)
        if not len(step.token_ids) == len(step.logits_rows) == count <= self._sizes[-1]:
            return None
        return self._graphs[bisect_left(self._sizes, count)].run(step)

    @staticmethod
    def bytes_needed(decoder: Decoder, *, max_rows: int, max_tokens: int, block_size: int) -> int:
        """Device memory that graphs will take beside weights and KV cache; from above.

        The plan's buffers, exactly; and for each graph its logits and, at most, what its widest
        layer keeps between kernels (they share one pool, and most of it is the largest one's).
        """
        from prefixcache_kernels.triton_backend.plan import PlanBuffers  # noqa: PLC0415 (Triton)

        capacity = _capacity(decoder, max_rows, max_tokens, block_size)
        config, heads = decoder.config, decoder.heads
        qkv = (2 * heads.query + 2 * heads.kv) * heads.dim
        row = 4 * config.hidden_size + qkv + 3 * config.intermediate_size + 2 * config.vocab_size
        plan = PlanBuffers.bytes_of(capacity, heads=heads, windows=len(decoder.windows))
        return plan + 4 * row * sum(batch_sizes(max_rows))


def batch_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for: powers of two, and the largest itself.

    A step is thus padded to less than twice its rows, which a decode step hardly feels: it waits
    for weights and KV, and padding rows read no KV.
    """
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


def _capturable(decoder: Decoder) -> "TritonKernels":
    if decoder.kernels.name != "triton":
        raise ValueError(f"decoder: kernels {decoder.kernels.name!r} run from no graph")
    return cast("TritonKernels", decoder.kernels)


def _capacity(decoder: Decoder, max_rows: int, max_tokens: int, block_size: int) -> "Capacity":
    blocks = -(-max_tokens // block_size)
    return _capturable(decoder).decode_capacity(max_rows, blocks, block_size)


_EMPTY = StepInput(
    token_ids=np.zeros(0, np.int32),
    positions=np.zeros(0, np.int32),
    slot_mapping=np.zeros(0, np.int64),
    query_start_loc=np.zeros(1, np.int32),
    seq_lens=np.zeros(0, np.int32),
    block_table=np.zeros((0, 1), np.int32),
    logits_rows=np.zeros(0, np.int32),
)


def pad_step(step: StepInput, rows: int) -> StepInput:
    """Add sequences of length 0, one row each, up to `rows`: they see and write nothing."""
    more = rows - len(step.seq_lens)

    def padded(values: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.concatenate((values, np.full((more, *values.shape[1:]), fill, values.dtype)))

    return StepInput(
        token_ids=padded(step.token_ids),
        positions=padded(step.positions),
        slot_mapping=padded(step.slot_mapping, -1),
        query_start_loc=np.arange(rows + 1, dtype=np.int32),
        seq_lens=padded(step.seq_lens),
        block_table=padded(step.block_table),
        logits_rows=np.arange(rows, dtype=np.int32),
    )
