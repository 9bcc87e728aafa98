"""Torch twins that `reference` does not have: attention in its plain form, one softmax a row.

Owns no kernel and no speed; knows neither spans nor sharing, so it tests both. The other kernels'
twins are in `prefixcache_kernels.reference`.
"""

import torch
from torch import Tensor

from prefixcache_kernels.backend import Heads
from prefixcache_kernels.work import Int32


def dense_attention(  # noqa: PLR0917 (arrays of one product)
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    positions: Int32,
    tables: Int32,
    heads: Heads,
    window: int | None,
) -> Tensor:
    """Softmax of each row over all of its keys at once, in float32.

    Args:
        q: [T, query heads · D].
        caches: K [blocks, kv_heads, D, size] and V [blocks, kv_heads, size, D].
        positions: int32 [T], -1 for a row that sees nothing.
        tables: int32 [T, blocks], each row's sequence's block ids.
        heads: of the model.
        window: tokens that a row sees, itself included, or None.

    Returns:
        float32 [T, query heads · D]; zeros for rows that see nothing.
    """
    share, size = heads.query // heads.kv, caches[0].shape[-1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        keys = torch.arange(first, position + 1)
        block, offset = torch.from_numpy(tables[row])[keys // size].long(), keys % size
        k = caches[0][block, :, :, offset].float().repeat_interleave(share, 1)  # [n, heads, D]
        v = caches[1][block, :, offset].float().repeat_interleave(share, 1)
        query = q[row].float().view(heads.query, heads.dim)
        weights = (torch.einsum("hd,nhd->hn", query, k) * heads.dim**-0.5).softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, v).reshape(-1)
    return out
