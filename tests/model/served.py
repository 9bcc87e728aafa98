"""A decoder with a pool of its own, for tests: sequences are given as tokens and block ids."""

from pathlib import Path

import numpy as np
import torch
import transformers

from prefixcache.model.attention import StepInput
from prefixcache.model.decoder import Decoder
from prefixcache.model.kv_cache import KVCache
from prefixcache.model.loader import Checkpoint, load_checkpoint

CPU = torch.device("cpu")


def transformers_model(directory: Path) -> transformers.PreTrainedModel:
    """The reference: transformers' own model in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


class Served:
    """A decoder over `blocks` blocks, all slots NaN until written."""

    def __init__(
        self,
        model: str | Path | Checkpoint,
        backend: str,
        *,
        blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 512,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(str(model))
        self.config = checkpoint.config
        self.decoder = Decoder.from_checkpoint(
            checkpoint,
            device=CPU,
            dtype=torch.float32,
            max_model_len=max_model_len,
            backend=backend,
        )
        self.block_size = block_size
        self.cache = KVCache(
            self.config, blocks, block_size, kv_dtype, CPU, kernels=self.decoder.kernels
        )
        self.cache.keys.fill_(torch.nan)
        self.cache.values.fill_(torch.nan)
        if self.cache.scales is not None:
            self.cache.scales.fill_(torch.nan)

    def run(self, *rows: tuple[list[int], int, list[int]], write: bool = True) -> torch.Tensor:
        """One step of (tokens, first position, block ids) each; logits of every row."""
        return self.decoder.forward(self.step(*rows, write=write), self.cache)

    def step(self, *rows: tuple[list[int], int, list[int]], write: bool = True) -> StepInput:
        width = max(len(ids) for _, _, ids in rows)
        table = np.array([ids + [0] * (width - len(ids)) for _, _, ids in rows], np.int32)
        positions = [np.arange(first, first + len(tokens)) for tokens, first, _ in rows]
        slots = [
            ids[at // self.block_size].astype(np.int64) * self.block_size + at % self.block_size
            for ids, at in zip(table, positions, strict=True)
        ]
        counts = [len(tokens) for tokens, _, _ in rows]
        slot_mapping = np.concatenate(slots)
        return StepInput(
            token_ids=np.concatenate([tokens for tokens, _, _ in rows]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slot_mapping=slot_mapping if write else np.full_like(slot_mapping, -1),
            query_start_loc=np.append(0, np.cumsum(counts)).astype(np.int32),
            seq_lens=np.array([first + len(t) for t, first, _ in rows], np.int32),
            block_table=table,
            logits_rows=np.arange(sum(counts), dtype=np.int32),
        )

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.config.vocab_size, count).tolist()
