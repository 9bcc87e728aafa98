"""Which backends a test runs on, and inputs for them."""

import numpy as np
import pytest
import torch

from prefixcache.model.attention import StepInput
from prefixcache_kernels import Kernels, select_kernels

CPU = torch.device("cpu")
BACKENDS = ("torch", "cpu")

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def kernels_of(backend: str, dtype: torch.dtype = torch.float32) -> Kernels:
    return select_kernels(backend, CPU, dtype)


def rows_step(
    lengths: list[tuple[int, int]], tables: list[list[int]], block_size: int
) -> StepInput:
    """A step of sequences given as (rows, seq_len) and their block ids; every row is written."""
    width = max((len(table) for table in tables), default=0)
    table = np.zeros((len(lengths), width), np.int32)
    for row, ids in zip(table, tables, strict=True):
        row[: len(ids)] = ids
    spans = [np.arange(end - rows, end, dtype=np.int32) for rows, end in lengths]
    positions = np.concatenate([*spans, np.zeros(0, np.int32)])
    slots = [
        ids[span // block_size].astype(np.int64) * block_size + span % block_size
        if end
        else np.full(rows, -1, np.int64)
        for (rows, end), span, ids in zip(lengths, spans, table, strict=True)
    ]
    counts = np.array([rows for rows, _ in lengths], np.int64)
    return StepInput(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slot_mapping=np.concatenate([*slots, np.zeros(0, np.int64)]),
        query_start_loc=np.append(0, np.cumsum(counts)).astype(np.int32),
        seq_lens=np.array([end for _, end in lengths], np.int32),
        block_table=table,
        logits_rows=np.zeros(0, np.int32),
    )
