"""The arithmetic of `distribution.py` over whole batches in torch, for logits on an accelerator.

The twin of the host version: same weights, same order, same cut, same inversion, all in integers,
so that for equal weights the tokens are equal. Never synchronises: the caller reads the results
back once. Each operation is elementwise, or exact in any order, along one row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from prefixcache.engine.distribution import (
    ID_BITS,
    ID_MASK,
    NO_TOKEN,
    WEIGHT_BITS,
    min_p_weight,
)
from prefixcache.params import SamplingParams
from prefixcache_kernels.transfer import upload


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    owners: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Token d from row owners[d], greedy or with uniforms[d]; NO_TOKEN where there is none.

    logits: float32 [G, V]. params: G. owners: int64 [D]. uniforms: float64 [D]. Returns int64 [D].
    """
    if all(p.greedy for p in params):
        return greedy(logits).index_select(0, owners)
    # A greedy row among sampled ones takes part with temperature 1, and its draw is dropped.
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    divisors = upload(np.array(temperatures, np.float32), logits.device).unsqueeze(-1)  # [G, 1]
    drawn = draw(keep(weigh(logits, divisors), params), owners, uniforms)
    if not any(p.greedy for p in params):
        return drawn
    is_greedy = upload(np.array([p.greedy for p in params]), logits.device)
    best = greedy(logits).index_select(0, owners)
    return torch.where(is_greedy.index_select(0, owners), best, drawn)


def weigh(logits: torch.Tensor, temperatures: torch.Tensor | float) -> torch.Tensor:
    """Integer weights, the greatest of a row 2**40; all 0 where a row's maximum is not finite.

    logits: float32 [G, V]. temperatures: float32 [G, 1], or one for all. Returns int64 [G, V].
    """
    top = logits.amax(-1, keepdim=True)
    weights = (torch.exp((logits - top) / temperatures) * 2.0**WEIGHT_BITS).nan_to_num(0.0)
    return torch.where(torch.isfinite(top), weights, 0.0).to(torch.int64)


def keep(weights: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights with those that min_p, top_k and top_p drop set to 0. int64 [G, V], G params."""
    size = weights.shape[-1]
    if all(not 0 < p.top_k < size and p.top_p >= 1.0 and p.min_p == 0.0 for p in params):
        return weights
    device = weights.device
    limits = [p.top_k if 0 < p.top_k < size else size for p in params]
    limit = upload(np.array(limits, np.int64), device).unsqueeze(-1)  # [G, 1]
    weight = [max(1, min_p_weight(p.min_p)) for p in params]
    least = upload(np.array(weight, np.int64), device)
    top_p = upload(np.array([p.top_p for p in params], np.float64), device)

    ids = torch.arange(size, device=device)
    keys = (weights << ID_BITS) | (ID_MASK - ids)  # [G, V]: weight, then lower id; all distinct
    ranked = keys.sort(-1, descending=True).values
    candidates = ranked >> ID_BITS
    candidates = torch.where((ids < limit) & (candidates >= least.unsqueeze(-1)), candidates, 0)
    reached = candidates.cumsum(-1)  # [G, V]
    total = reached[:, -1]
    target = torch.ceil(top_p * total.double()).to(torch.int64)  # [G]
    target = torch.minimum(target.clamp(min=1), total)
    last = (reached < target.unsqueeze(-1)).sum(-1, keepdim=True)  # [G, 1]: rank of the last kept
    return torch.where(keys >= ranked.gather(-1, last.clamp(max=size - 1)), weights, 0)


def draw(weights: torch.Tensor, owners: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw token d from row owners[d] with uniforms[d]; NO_TOKEN where a row's weights are all 0.

    weights: int64 [G, V]. owners: int64 [D]. uniforms: float64 [D]. Returns int64 [D].
    """
    cumulative = weights.cumsum(-1).index_select(0, owners)  # [D, V]
    total = cumulative[:, -1]
    points = (uniforms * total.double()).to(torch.int64)
    found = torch.searchsorted(cumulative, points.unsqueeze(-1), right=True).squeeze(-1)
    return torch.where(total > 0, found, NO_TOKEN)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The lowest id of each row's greatest logit, or NO_TOKEN. float32 [G, V] to int64 [G]."""
    _, ids = top_logits(logits, 1)  # where a negative NaN would rank last: amax passes any on
    return torch.where(torch.isfinite(logits.amax(-1)), ids[:, 0], NO_TOKEN)


def log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(logits))) of each row; not finite where it has no distribution. float64 [R]."""
    total = weigh(logits, 1.0).sum(-1).double() * 2.0**-WEIGHT_BITS
    return logits.amax(-1).double() + torch.log(total)


def top_logits(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` greatest logits and their ids, best first, ties by lower id. Both [R, count].

    topk does not promise an order among equals, so it runs on keys that hold logit and id.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)  # sorts as the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    best = ((ordered << 32) | (ID_MASK - ids)).topk(count, dim=-1).values
    best = ID_MASK - (best & ID_MASK)
    return logits.gather(-1, best), best
