# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0917 (a kernel's parameters are its arrays, strides and sizes)
"""Whole blocks copied within a pool: copy-on-write, and moves.

    cache[target_i] ← cache[source_i], for all i at once

Owns this kernel and the choice of what is staged. A block that is a source and also a target is
read into a staging buffer first, in a launch of its own; the others are copied straight. Ids are
widened before they meet a stride. Twin: `reference.copy_blocks`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from prefixcache_kernels.checks import check_copies, require
from prefixcache_kernels.transfer import upload
from prefixcache_kernels.triton_backend.launch import Launch

_CHUNK = 1024

Ids = npt.NDArray[np.int64]


@triton.jit
def _copy_blocks(
    from_cache,
    to_cache,
    pairs,
    from_layer,
    from_block,
    to_layer,
    to_block,
    from_0,
    from_1,
    from_2,
    to_0,
    to_1,
    to_2,
    size_1: tl.constexpr,
    size_2: tl.constexpr,
    elements: tl.constexpr,
    chunk: tl.constexpr,
):
    """Copy one piece of one block of one layer; pairs: int64 [n, 2], source and target."""
    pair, piece, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    e = (piece * chunk + tl.arange(0, chunk)).to(tl.int64)  # strides may be anything
    live = e < elements
    i, j, k = e // (size_1 * size_2), e // size_2 % size_1, e % size_2
    from_place = from_cache + layer * from_layer + source * from_block
    to_place = to_cache + layer * to_layer + target * to_block
    value = tl.load(from_place + i * from_0 + j * from_1 + k * from_2, mask=live)
    tl.store(to_place + i * to_0 + j * to_1 + k * to_2, value, mask=live)


def copy_blocks(caches: Sequence[Tensor], sources: Ids, targets: Ids) -> None:
    """Copy blocks within each cache; what is copied is what was there before the call.

    Args:
        caches: [layers, blocks, a, b, c] each, of any strides.
        sources, targets: int64 [n] block ids, on the host: which sources must be staged is decided
            there, and checking them costs no synchronisation. A target occurs once.

    Raises:
        ValueError: naming the argument: an id out of range, a target twice, a wrong shape or dtype.
    """
    for cache in caches:
        require(cache.ndim == 5, "caches", f"need 5 dimensions, not {cache.ndim}")
        check_copies(sources, targets, cache.shape[1])
    if not len(sources):
        return
    staged = np.isin(sources, targets) & (sources != targets)
    for cache in caches:
        _copy(cache, sources, targets, staged)


def _copy(cache: Tensor, sources: Ids, targets: Ids, staged: npt.NDArray[np.bool_]) -> None:
    if staged.any():
        places = np.arange(int(staged.sum()))
        shape = (cache.shape[0], len(places), *cache.shape[2:])
        staging = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        _run(cache, staging, sources[staged], places)
        _run(cache, cache, sources[~staged], targets[~staged])
        _run(staging, cache, places, targets[staged])
    else:
        _run(cache, cache, sources, targets)


def _run(source: Tensor, target: Tensor, sources: Ids, targets: Ids) -> None:
    if len(sources):
        pairs = upload(np.stack((sources, targets), 1), source.device)
        copy_launch(source, target, pairs).run()


def copy_launch(source: Tensor, target: Tensor, pairs: Tensor) -> Launch:
    """Return the launch of checked arguments; pairs: int64 [n, 2]."""
    layers, _, *inner = source.shape
    elements = inner[0] * inner[1] * inner[2]
    strides = {
        f"{side}_{name}": stride
        for side, tensor in (("from", source), ("to", target))
        for name, stride in zip(("layer", "block", "0", "1", "2"), tensor.stride(), strict=True)
    }
    return Launch(
        _copy_blocks,
        (len(pairs), triton.cdiv(elements, _CHUNK), layers),
        {"from_cache": source, "to_cache": target, "pairs": pairs, **strides},
        {"size_1": inner[1], "size_2": inner[2], "elements": elements, "chunk": _CHUNK},
    )
