"""From logits to tokens and logprobs. Owns the order of the steps and the grouping of the batch.

Order: logit_bias, penalties, bans, temperature, min_p, top_k, top_p, draw. Logprobs are those of
the model: of the logits as they came, over all their columns.

Keeps no random state and touches no global one: a draw is a function of the row's logits, its
parameters, its stream key and the token's position, and of nothing else (design.md §5.2).

Logits in host memory are worked on row by row (`distribution`), those on an accelerator all at once
there (`distribution_torch`): the host prepares the draws while the forward pass still runs, and
waits once, for tokens and logprobs in one copy. Only penalties and logit_bias, which are edited on
the host, wait for the logits before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from prefixcache_kernels.transfer import read_back, upload

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

    @property
    def edited(self) -> bool:
        """True where the logits are not taken as they are."""
        return self.state is not None or bool(self.params.logit_bias) or bool(self.banned)


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


class Sampler:
    """Draws tokens for the rows of a step. One owner, one thread: it holds scratch memory.

    vocab_size: columns of the logits. tokenizer_vocab_size: ids from there on do not exist for
    the tokenizer; they are never sampled nor listed as top tokens (SM-16). batched: work on all
    rows at once with torch's operations; on the CPU that is slower, and for tests.
    """

    def __init__(
        self, vocab_size: int, tokenizer_vocab_size: int, *, batched: bool = False
    ) -> None:
        self._num_ids = min(vocab_size, tokenizer_vocab_size)
        self._host = RowDistribution(vocab_size)
        self._batched = batched

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """Draw one token a row.

        logits: float32 [R, vocab_size], on any device; not changed.
        """
        if not rows:
            return Sampled([], [])
        groups = _grouped(rows)
        uniforms = uniform(
            np.array([row.stream_key for row in rows], np.uint64),
            np.array([row.position for row in rows], np.int64),
        )
        if not self._on_host(logits):
            return self._sample_batched(logits, rows, groups, uniforms)
        token_ids = self._draw_on_host(self._distributions(logits, groups), groups, uniforms)
        return Sampled(token_ids, self._logprobs_of(logits, rows, token_ids))

    def _on_host(self, logits: torch.Tensor) -> bool:
        return logits.device.type == "cpu" and not self._batched

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
        if self._on_host(logits):
            return self._logprobs_on_host(logits, wanted)
        given = np.array([NO_TOKEN if token is None else token for token in token_ids], np.int64)
        found = self._rank(logits, upload(given, logits.device), top_k)
        return _unpack(read_back(found), [top_k] * len(given))

    def best_continuations(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], count: int
    ) -> list[tuple[npt.NDArray[np.float32], Int64Array]]:
        """The `count` best tokens of each row for a beam search: (logprobs, ids), best first.

        Penalties, bias and bans act on the log-probabilities, as in Hugging Face's `generate`.
        """
        if not self._on_host(logits) and not any(row.edited for row in rows):
            best = upload(np.full(len(rows), NO_TOKEN), logits.device)
            ids, values, norms = read_back(self._rank(_copy_rows(logits, rows), best, count))
            exact = values.astype(np.float64) - norms[:, None]
            return [(exact[i, 1:].astype(np.float32), ids[i, 1:]) for i in range(len(rows))]
        scores = _copy_rows(logits, rows).cpu()  # [N, V]
        for values in scores.numpy():
            np.subtract(values, self._host.log_normalizer(values), out=values)
        _edited(scores, rows)
        allowed = scores.numpy()[:, : self._num_ids]
        tops = [top_ids(values, count) for values in allowed]
        return [(values[top], top) for values, top in zip(allowed, tops, strict=True)]

    # ------------------------------------------------------------------ drawing

    def _distributions(
        self, logits: torch.Tensor, groups: Sequence[_Group]
    ) -> list[npt.NDArray[np.float32]]:
        """Each group's logits, edited where it must be: float32 [num_ids], one a group."""
        matrix = logits.numpy()
        edited = [group.row for group in groups if group.row.edited]
        copies = iter(_edited(_copy_rows(logits, edited), edited).numpy() if edited else ())
        return [
            (next(copies) if group.row.edited else matrix[group.row.logits_row])[: self._num_ids]
            for group in groups
        ]

    def _draw_on_host(
        self,
        distributions: list[npt.NDArray[np.float32]],
        groups: list[_Group],
        uniforms: Float64Array,
    ) -> list[int]:
        token_ids = [NO_TOKEN] * len(uniforms)
        for values, group in zip(distributions, groups, strict=True):
            if group.row.params.greedy:
                drawn = [greedy(values)] * len(group.draws)
            else:
                drawn = self._host.draw(values, group.row.params, uniforms[group.draws])
            for draw, token in zip(group.draws, drawn, strict=True):
                token_ids[draw] = token
        return token_ids

    def _sample_batched(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        groups: list[_Group],
        uniforms: Float64Array,
    ) -> Sampled:
        """All draws and their logprobs on the logits' device, read back in one copy."""
        device = logits.device
        values = logits
        representatives = [group.row for group in groups]
        if any(row.edited for row in representatives):
            values = _edited(_copy_rows(logits, representatives), representatives)
        elif [row.logits_row for row in representatives] != list(range(len(logits))):
            values = _copy_rows(logits, representatives)
        owners = np.empty(len(uniforms), np.int64)
        for number, group in enumerate(groups):
            owners[group.draws] = number
        tokens = device_twin.sample(
            values[:, : self._num_ids],
            [row.params for row in representatives],
            upload(owners, device),
            upload(uniforms, device),
        )
        asked = [draw for draw, row in enumerate(rows) if row.params.logprobs is not None]
        if not asked:
            return Sampled(read_back([tokens])[0].tolist(), [None] * len(rows))
        most = [rows[draw].params.logprobs or 0 for draw in asked]
        drawn = tokens.index_select(0, upload(np.array(asked, np.int64), device))
        ranked = self._rank(_copy_rows(logits, [rows[draw] for draw in asked]), drawn, max(most))
        token_ids, *found = read_back([tokens, *ranked])
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        for draw, entry in zip(asked, _unpack(found, most), strict=True):
            if token_ids[draw] != NO_TOKEN:
                logprobs[draw] = entry
        return Sampled(token_ids.tolist(), logprobs)

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
        for draw, logprobs in zip(asked, self._logprobs_on_host(logits, wanted), strict=True):
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

    def _rank(
        self, logits: torch.Tensor, tokens: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each row: ids [R, 1 + count], the given one first, then the best; logits; normaliser.

        logits: float32 [R, V]. tokens: int64 [R]; NO_TOKEN stands for the best one.
        """
        best = min(max(count, 1), self._num_ids)
        _, top = device_twin.top_logits(logits[:, : self._num_ids], best)  # [R, best]
        first = torch.where(tokens < 0, top[:, 0], tokens)
        ids = torch.cat([first.unsqueeze(-1), top], dim=-1)
        return ids, logits.gather(-1, ids), device_twin.log_normalizer(logits)


def _grouped(rows: Sequence[SampleRow]) -> list[_Group]:
    """Gather the draws that share a distribution: the first tokens of n samples, above all."""
    groups: dict[tuple[int, int, int, frozenset[int]], _Group] = {}
    for draw, row in enumerate(rows):
        # By identity: samples of a request share their parameters, and never a live state.
        key = (row.logits_row, id(row.params), id(row.state), row.banned)
        groups.setdefault(key, _Group(row)).draws.append(draw)
    return list(groups.values())


def _copy_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The logits behind each draw, float32 [len(rows), V]."""
    wanted = np.array([row.logits_row for row in rows], np.int64)
    if logits.device.type == "cpu":  # by one thread: quicker for a few rows than waking a team
        return torch.from_numpy(logits.numpy()[wanted])
    return logits.index_select(0, upload(wanted, logits.device))


def _edited(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The same matrix, edited in place as each row's draw wants it."""
    edit_logits(
        logits,
        [row.params for row in rows],
        [row.state for row in rows],
        [row.banned for row in rows],
    )
    return logits


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


def _unpack(found: Sequence[npt.NDArray[Any]], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `_rank` found, read back; counts: how many of the best ones each row wants."""
    ids, values, normalizers = found
    return [
        _pack(ids[i, : count + 1].tolist(), _logprobs(values[i, : count + 1], normalizers[i]))
        for i, count in enumerate(counts)
    ]
