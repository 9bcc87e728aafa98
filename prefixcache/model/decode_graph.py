"""Decode steps replayed from a captured graph: on a GPU the host then launches nothing itself.

Owns the graph, its buffers and the padding of a step to its size. What a step is, and which size
serves it, is the caller's. A graph replays the kernels on the same addresses: the plan's buffers
are filled anew for each step, and kernels read the amount of work from them.
"""

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from prefixcache.model.attention import StepInput
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache

if TYPE_CHECKING:
    from prefixcache_kernels.triton_backend import TritonKernels


class DecodeGraph:
    """Steps of one row for each of at most `rows` sequences of at most `blocks` blocks.

    On the CPU (Triton's interpreter) there are no graphs: the same launches are made one by one.
    """

    def __init__(self, decoder: Decoder, kv_cache: KVCache, rows: int, blocks: int) -> None:
        """Run an empty step, which compiles what is not compiled yet, and capture it.

        Raises:
            ValueError: the decoder's kernels cannot be captured (only Triton's can).
        """
        if decoder.kernels.name != "triton":
            raise ValueError(f"decoder: kernels {decoder.kernels.name!r} run from no graph")
        kernels = cast("TritonKernels", decoder.kernels)
        self.rows = rows
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._plan = kernels.reserve(
            kernels.decode_capacity(rows, blocks, kv_cache.block_size),
            heads=decoder.heads,
            rope_table=decoder.rope,
            windows=decoder.windows,
            block_size=kv_cache.block_size,
        )
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._load(pad_step(_EMPTY, rows))
        self._logits = self._launch()
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._launch()

    @torch.inference_mode()
    def run(self, step: StepInput) -> Tensor:
        """Run a step of one row a sequence: write its KV and return the logits of all rows.

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
        self._tokens.copy_(torch.from_numpy(step.token_ids))

    @torch.inference_mode()
    def _launch(self) -> Tensor:
        hidden = self._decoder.run_layers(self._tokens, self._plan, self._kv_cache, None)
        return self._decoder.logits(hidden)


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
