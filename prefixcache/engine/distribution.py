"""One row of logits as an exact integer distribution: weigh, filter, draw, normalise. Host memory.

Owns the arithmetic of a draw. Never draws a random number itself, never sees a batch: each row is
worked on alone, by one thread, so its bits cannot depend on its neighbours.

Weights are integers: trunc(exp((x - max) / temperature) * 2**40). Sums of integers are exact in
any order, so a cumulative sum, a top-p cut or a normaliser is the same on every device and in
every tiling; only exp rounds. What is cut off (tokens 2**-40 times as likely as the best one) is
at most V * 2**-40 of the mass: 5e-8 for 49,152 tokens, below a rounding of float32.

Order, for every tie: greater weight first, then lower id. A key holds both in one integer, so
sorting keys needs no stable sort.
"""

import math

import numpy as np
import numpy.typing as npt

from prefixcache.params import SamplingParams

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

WEIGHT_BITS = 40
ID_BITS = 22  # key = weight << 22 | (2**22 - 1 - id): 63 bits with the sign left alone
ID_MASK = 2**ID_BITS - 1
NO_TOKEN = -1
_ONE = np.float32(2.0**WEIGHT_BITS)


class RowDistribution:
    """Scratch memory for rows of one width. Not shared between threads."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size > ID_MASK:
            raise ValueError(f"{vocab_size} tokens; a key holds at most {ID_MASK}")
        self._floats = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.int64)

    def weigh(self, logits: Float32Array, temperature: float) -> Int64Array | None:
        """Integer weights of a row, the greatest 2**40; None where the maximum is not finite.

        logits: float32 [W], W up to vocab_size. Returns int64 [W] in scratch memory.
        """
        top = logits.max()  # NaN wins
        if not np.isfinite(top):
            return None
        floats, weights = self._floats[: len(logits)], self._weights[: len(logits)]
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(logits, top, out=floats)  # first, so that no division can overflow (SM-01)
            if temperature != 1.0:
                np.divide(floats, np.float32(temperature), out=floats)
            np.exp(floats, out=floats)
            np.multiply(floats, _ONE, out=floats)
        np.copyto(weights, floats, casting="unsafe")
        return weights

    def draw(
        self, logits: Float32Array, params: SamplingParams, uniforms: Float64Array
    ) -> list[int]:
        """Draw one token a uniform; NO_TOKEN where the row has no distribution.

        The token is the lowest id whose cumulative weight, over the kept tokens in order of id,
        exceeds u * total: one of weight 0 never does so first (SM-06).
        """
        weights = self.weigh(logits, params.temperature)
        if weights is None:
            return [NO_TOKEN] * len(uniforms)
        kept = _kept(weights, params)
        if kept is None:
            drawn = _invert(np.cumsum(weights, out=weights), uniforms)
        else:
            drawn = kept[_invert(np.cumsum(weights.take(kept)), uniforms)]
        return [int(token) for token in drawn]

    def log_normalizer(self, logits: Float32Array) -> float:
        """log(sum(exp(logits))) of a row; NaN where it has no distribution."""
        weights = self.weigh(logits, 1.0)
        if weights is None:
            return math.nan
        return float(logits.max()) + math.log(int(weights.sum()) * 2.0**-WEIGHT_BITS)


def greedy(logits: Float32Array) -> int:
    """The lowest id of the greatest logit; NO_TOKEN where that is not finite."""
    best = int(logits.argmax())  # the first of equals; a NaN counts as the greatest
    return best if np.isfinite(logits[best]) else NO_TOKEN


def top_ids(logits: Float32Array, count: int) -> Int64Array:
    """The `count` greatest logits' ids, best first, ties by lower id. int64 [min(count, W)]."""
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def min_p_weight(min_p: float) -> int:
    """The least weight that min_p keeps: min_p times the greatest one, exactly."""
    return math.ceil(min_p * 2.0**WEIGHT_BITS)


def top_p_weight(top_p: float, total: int) -> int:
    """The weight that the most probable tokens must reach together."""
    return min(max(1, math.ceil(top_p * float(total))), total)


def _kept(weights: Int64Array, params: SamplingParams) -> Int64Array | None:
    """Ids that min_p, top_k and top_p keep, in order of id; None where all filters are off."""
    limit = params.top_k if 0 < params.top_k < len(weights) else 0
    if not limit and params.min_p == 0.0:
        return _nucleus(weights, weights, None, params.top_p) if params.top_p < 1.0 else None
    least = max(1, min_p_weight(params.min_p))
    if limit:
        least = max(least, int(np.partition(weights, len(weights) - limit)[-limit]))
    ids = np.flatnonzero(weights >= least)
    if limit and len(ids) > limit:
        ids = np.sort(_by_rank(weights, ids)[:limit])
    return _nucleus(weights, weights.take(ids), ids, params.top_p) if params.top_p < 1.0 else ids


def _nucleus(
    weights: Int64Array, candidates: Int64Array, ids: Int64Array | None, top_p: float
) -> Int64Array:
    """The fewest candidates, best first, that reach top_p of their weight (arXiv:1904.09751).

    candidates: the weights of `ids`, of all tokens where that is None. Result in order of id.
    """
    total = int(candidates.sum())
    target = top_p_weight(top_p, total)
    # Tokens of weight <= spare / n are together within the spare weight, so the nucleus lies in
    # the others: there is no need to sort the long tail.
    likely = np.flatnonzero(candidates > (total - target) // len(candidates))
    ranked = _by_rank(weights, likely if ids is None else ids.take(likely))
    count = int(np.searchsorted(np.cumsum(weights.take(ranked)), target)) + 1
    return np.sort(ranked[:count])


def _by_rank(weights: Int64Array, ids: Int64Array) -> Int64Array:
    """Ids sorted by weight, greatest first, then by id."""
    keys = (weights.take(ids) << ID_BITS) | (ID_MASK - ids)
    keys.sort()
    ranked: Int64Array = ID_MASK - (keys[::-1] & ID_MASK)
    return ranked


def _invert(cumulative: Int64Array, uniforms: Float64Array) -> Int64Array:
    """Index of the first cumulative weight above u * total. int64 [len(uniforms)]."""
    # u <= 1 - 2**-53 keeps the product below the total, also where that is rounded up to a float.
    points = (uniforms * float(cumulative[-1])).astype(np.int64)
    found: Int64Array = np.searchsorted(cumulative, points, side="right")
    return found
