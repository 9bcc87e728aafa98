"""From logits to tokens and logprobs. Owns the order of the steps and the grouping of the batch.

Order: logit_bias, penalties, bans, temperature, min_p, top_k, top_p, draw. Logprobs are those of
the model: of the logits as they came, over all their columns.

Keeps no random state and touches no global one: a draw is a function of the row's logits, its
parameters, its stream key and the token's position, and of nothing else (design.md §5.2).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.engine import distribution_torch as device_twin
from prefixcache.engine.distribution import (
    NO_TOKEN,
    Float64Array,
    Int64Array,
    RowDistribution,
    greedy,
    top_ids,
)
from prefixcache.engine.messages import TokenLogprobs
from prefixcache.engine.penalties import SamplerState, edit_logits
from prefixcache.engine.philox import uniform
from prefixcache.params import SamplingParams

__all__ = ["NO_TOKEN", "SampleRow", "Sampled", "Sampler", "SamplerState"]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token wanted this step.

    logits_row: row of the logits; samples of one prompt may share one.
    stream_key, position: of the token to be drawn; position is absolute, the prompt's first is 0.
    state: token counts, where `SamplerState.needed(params)`; else None.
    num_generated, stop_ids: while fewer than params.min_tokens are generated, stop_ids (the end
        and stop tokens) are banned.
    """

    logits_row: int
    params: SamplingParams
    stream_key: int
    position: int
    state: SamplerState | None = None
    num_generated: int = 0
    stop_ids: frozenset[int] = frozenset()

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not come out now."""
        return self.stop_ids if self.num_generated < self.params.min_tokens else frozenset()


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a batch of rows drew, in their order.

    token_ids: NO_TOKEN (-1) where nothing can be drawn: the row's greatest logit is NaN or
        infinite, or every token is banned. Only that request is wrong, the others stand.
    logprobs: None where the row did not ask for them or drew nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass(slots=True)
class _Group:
    """Draws that share one distribution: same logits, same edits, same parameters."""

    row: SampleRow
    draws: list[int] = field(default_factory=list)

    @property
    def edited(self) -> bool:
        """True where the logits are not taken as they are."""
        row = self.row
        return row.state is not None or bool(row.params.logit_bias) or bool(row.banned)


class Sampler:
    """Draws tokens for the rows of a step. One owner, one thread: it holds scratch memory.

    vocab_size: columns of the logits. tokenizer_vocab_size: ids from there on do not exist for
    the tokenizer; they are never sampled nor listed as top tokens (SM-16).
    """

    def __init__(self, vocab_size: int, tokenizer_vocab_size: int) -> None:
        self._num_ids = min(vocab_size, tokenizer_vocab_size)
        self._host = RowDistribution(vocab_size)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """Draw one token a row.

        logits: float32 [R, vocab_size], on any device; not changed.
        """
        if not rows:
            return Sampled([], [])
        groups = _grouped(rows)
        distributions = self._distributions(logits, groups)
        uniforms = uniform(
            np.array([row.stream_key for row in rows], np.uint64),
            np.array([row.position for row in rows], np.int64),
        )
        if logits.device.type == "cpu":
            token_ids = self._draw_on_host(distributions, groups, uniforms)
        else:
            token_ids = _draw_on_device(distributions, groups, uniforms)
        return Sampled(token_ids, self._logprobs_of(logits, rows, token_ids))

    def logprobs(
        self, logits: torch.Tensor, row: int, token_id: int | None, top_k: int
    ) -> TokenLogprobs:
        """Log-probability of one token behind logits [R, V], row `row`, and the top_k best ones.

        A token_id of None stands for the most probable token.
        """
        return self.logprobs_batch(logits[row : row + 1], [token_id], top_k)[0]

    def logprobs_batch(
        self, logits: torch.Tensor, token_ids: Sequence[int | None], top_k: int
    ) -> list[TokenLogprobs]:
        """The same for token_ids[r] behind each row of float32 logits [R, vocab_size]."""
        wanted = [(row, token, top_k) for row, token in enumerate(token_ids)]
        if logits.device.type == "cpu":
            return self._logprobs_on_host(logits, wanted)
        return self._logprobs_on_device(logits, wanted)

    def best_continuations(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], count: int
    ) -> list[tuple[npt.NDArray[np.float32], Int64Array]]:
        """The `count` best tokens of each row for a beam search: (logprobs, ids), best first.

        Penalties, bias and bans act on the log-probabilities, as in Hugging Face's `generate`.
        """
        scores = _copy_rows(logits, [row.logits_row for row in rows]).cpu()  # [N, V]
        for values in scores.numpy():
            np.subtract(values, self._host.log_normalizer(values), out=values)
        edit_logits(
            scores,
            [row.params for row in rows],
            [row.state for row in rows],
            [row.banned for row in rows],
        )
        allowed = scores.numpy()[:, : self._num_ids]
        tops = [top_ids(values, count) for values in allowed]
        return [(values[top], top) for values, top in zip(allowed, tops, strict=True)]

    # ------------------------------------------------------------------ drawing

    def _distributions(self, logits: torch.Tensor, groups: Sequence[_Group]) -> list[torch.Tensor]:
        """Each group's logits, edited where it must be: float32 [num_ids], one a group."""
        edited = [group.row for group in groups if group.edited]
        if edited:
            copies = _copy_rows(logits, [row.logits_row for row in edited])  # [E, V]
            edit_logits(
                copies,
                [row.params for row in edited],
                [row.state for row in edited],
                [row.banned for row in edited],
            )
        take = iter(range(len(edited)))
        return [
            (copies[next(take)] if group.edited else logits[group.row.logits_row])[: self._num_ids]
            for group in groups
        ]

    def _draw_on_host(
        self, distributions: list[torch.Tensor], groups: list[_Group], uniforms: Float64Array
    ) -> list[int]:
        token_ids = [NO_TOKEN] * len(uniforms)
        for tensor, group in zip(distributions, groups, strict=True):
            values = tensor.numpy()
            if group.row.params.greedy:
                drawn = [greedy(values)] * len(group.draws)
            else:
                drawn = self._host.draw(values, group.row.params, uniforms[group.draws])
            for draw, token in zip(group.draws, drawn, strict=True):
                token_ids[draw] = token
        return token_ids

    # ------------------------------------------------------------------ logprobs

    def _logprobs_of(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(rows)
        asked = [
            draw
            for draw, row in enumerate(rows)
            if row.params.logprobs is not None and token_ids[draw] != NO_TOKEN
        ]
        wanted = [
            (rows[draw].logits_row, token_ids[draw], rows[draw].params.logprobs or 0)
            for draw in asked
        ]
        on_host = logits.device.type == "cpu"
        compute = self._logprobs_on_host if on_host else self._logprobs_on_device
        for draw, logprobs in zip(asked, compute(logits, wanted), strict=True):
            found[draw] = logprobs
        return found

    def _logprobs_on_host(
        self, logits: torch.Tensor, wanted: Iterable[tuple[int, int | None, int]]
    ) -> list[TokenLogprobs]:
        matrix = logits.numpy()
        normalizers: dict[int, float] = {}  # samples of one prompt share a row
        tops: dict[tuple[int, int], Int64Array] = {}
        found = []
        for row, token, top_k in wanted:
            values = matrix[row]
            if row not in normalizers:
                normalizers[row] = self._host.log_normalizer(values)
            key = (row, max(top_k, 1) if token is None else top_k)
            if key not in tops:
                tops[key] = top_ids(values[: self._num_ids], key[1])
            top = tops[key]
            chosen = _first(top) if token is None else token
            ids = np.concatenate([[chosen], top[:top_k]])
            found.append(_pack(ids.tolist(), _logprobs(values[ids], normalizers[row])))
        return found

    def _logprobs_on_device(
        self, logits: torch.Tensor, wanted: Sequence[tuple[int, int | None, int]]
    ) -> list[TokenLogprobs]:
        if not wanted:
            return []
        values = _copy_rows(logits, [w[0] for w in wanted])  # [W, V]
        most = min(max(1, *(w[2] for w in wanted)), self._num_ids)
        _, top = device_twin.top_logits(values[:, : self._num_ids], most)  # [W, most]
        chosen = torch.tensor([-1 if w[1] is None else w[1] for w in wanted], device=values.device)
        chosen = torch.where(chosen < 0, top[:, 0], chosen)
        ids = torch.cat([chosen.unsqueeze(-1), top], dim=-1)  # [W, 1 + most]
        host_ids = ids.cpu().numpy()
        host_values = values.gather(-1, ids).cpu().numpy()
        normalizers = device_twin.log_normalizer(values).tolist()
        return [
            _pack(host_ids[i, : w[2] + 1].tolist(), _logprobs(host_values[i, : w[2] + 1], norm))
            for i, (w, norm) in enumerate(zip(wanted, normalizers, strict=True))
        ]


def _grouped(rows: Sequence[SampleRow]) -> list[_Group]:
    """Gather the draws that share a distribution: the first tokens of n samples, above all."""
    groups: dict[tuple[int, int, int, frozenset[int]], _Group] = {}
    for draw, row in enumerate(rows):
        # By identity: samples of a request share their parameters, and never a live state.
        key = (row.logits_row, id(row.params), id(row.state), row.banned)
        groups.setdefault(key, _Group(row)).draws.append(draw)
    return list(groups.values())


def _draw_on_device(
    distributions: list[torch.Tensor], groups: list[_Group], uniforms: Float64Array
) -> list[int]:
    owners = np.empty(len(uniforms), np.int64)
    for number, group in enumerate(groups):
        owners[group.draws] = number
    device = distributions[0].device
    token_ids: list[int] = device_twin.sample(
        torch.stack(distributions),
        [group.row.params for group in groups],
        torch.from_numpy(owners).to(device),
        torch.from_numpy(uniforms).to(device),
    ).tolist()
    return token_ids


def _copy_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if logits.device.type == "cpu":  # by one thread: quicker for a few rows than waking a team
        return torch.from_numpy(logits.numpy()[rows])
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _first(ids: Int64Array) -> int:
    """The most probable token, or 0 for a row of NaN, whose logprobs are NaN anyway."""
    return int(ids[0]) if len(ids) else 0


def _logprobs(values: npt.NDArray[np.float32], normalizer: float) -> list[float]:
    """Float32 log-probabilities of some logits of a row, rounded once."""
    exact = values.astype(np.float64) - normalizer
    logprobs: list[float] = exact.astype(np.float32).tolist()
    return logprobs


def _pack(ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    """The first entry is the token itself, the rest are the best ones."""
    return TokenLogprobs(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True)))
