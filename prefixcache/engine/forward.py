"""One step's forward pass and draws: from scheduled rows to what each of them gave.

Changes nothing but KV in the rows' own slots, so the same rows can be run again, together or apart.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from prefixcache.engine.beam import Floats, Ints
from prefixcache.engine.messages import TokenLogprobs
from prefixcache.engine.model_runner import ModelRunner, RowLogits
from prefixcache.engine.philox import derive_key
from prefixcache.engine.sampler import Sampler, SampleRow
from prefixcache.engine.scheduler import ScheduledRow


@dataclass(slots=True)
class RowResult:
    """What a row gave.

    token_ids, logprobs: one a sample that begins or goes on here. prompt_logprobs: of the prompt
    tokens that the row's logits predict. next_token: with max_tokens = 0. continuations: of a beam,
    logprobs and ids of its best next tokens.
    """

    row: ScheduledRow
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    next_token: TokenLogprobs | None = None
    continuations: tuple[Floats, Ints] | None = None


class Forward:
    """Runs rows through the model and the sampler."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def run(self, rows: Seq[ScheduledRow]) -> list[RowResult]:
        """One forward pass; results in the order of the rows."""
        logits, places = self._runner.run(rows)
        results = [RowResult(row) for row in rows]
        pairs = list(zip(results, places, strict=True))
        for result, place in pairs:
            self._score_prompt(result, place, logits)
        ending = [(result, place) for result, place in pairs if result.row.samples]
        for result, place in ending:
            if result.row.sequence.params.max_tokens == 0:
                top = result.row.sequence.params.logprobs or 0
                result.next_token = self._sampler.logprobs(logits, place.last, None, top)
        self._draw([pair for pair in ending if _draws_tokens(pair[0].row)], logits)
        self._search([pair for pair in ending if pair[0].row.group.beam is not None], logits)
        return results

    def _draw(self, pairs: Seq[tuple[RowResult, RowLogits]], logits: torch.Tensor) -> None:
        """Draw a token for each sample: those of one prompt from one row of logits."""
        draws = [draw for result, place in pairs for draw in _sample_rows(result.row, place)]
        sampled = self._sampler.sample(logits, draws)
        drawn = zip(sampled.token_ids, sampled.logprobs, strict=True)
        for result, _ in pairs:
            for _ in range(result.row.group.num_samples):
                token, logprobs = next(drawn)
                result.token_ids.append(token)
                result.logprobs.append(logprobs)

    def _search(self, pairs: Seq[tuple[RowResult, RowLogits]], logits: torch.Tensor) -> None:
        """The best next tokens of each beam: all beams of a width at once."""
        widths: dict[int, list[tuple[RowResult, SampleRow]]] = {}
        for result, place in pairs:
            assert result.row.group.beam is not None
            width = result.row.group.beam.num_candidates
            widths.setdefault(width, []).append((result, _sample_rows(result.row, place)[0]))
        for width, beams in widths.items():
            best = self._sampler.best_continuations(logits, [row for _, row in beams], width)
            for (result, _), continuations in zip(beams, best, strict=True):
                result.continuations = continuations

    def _score_prompt(self, result: RowResult, place: RowLogits, logits: torch.Tensor) -> None:
        """Logprobs of the prompt tokens that the row's logits predict, where they are wanted."""
        row, sequence = result.row, result.row.sequence
        wanted = sequence.next_logprob_position
        if wanted is None:
            return
        last = min(row.stop, sequence.num_prompt_tokens - 1)
        tokens = sequence.tokens.view()[wanted : last + 1].tolist()
        result.prompt_logprobs = self._sampler.logprobs_batch(
            logits[place.first : place.first + len(tokens)], tokens, sequence.top_logprobs
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for want of memory: Python's, torch's on a GPU, or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def device_is_lost(error: Exception) -> bool:
    """Whether the accelerator is in a state in which every pass of this process will fail."""
    return isinstance(error, torch.AcceleratorError)


def _draws_tokens(row: ScheduledRow) -> bool:
    return row.sequence.params.max_tokens != 0 and row.group.beam is None


def _sample_rows(row: ScheduledRow, place: RowLogits) -> list[SampleRow]:
    """One draw a sample: all from the same logits, each from its own random stream."""
    sequence = row.sequence
    branches = range(sequence.next_branch, sequence.next_branch + row.group.num_samples - 1)
    keys = [sequence.stream_key, *(derive_key(sequence.stream_key, b) for b in branches)]
    return [
        SampleRow(
            logits_row=place.last,
            params=sequence.params,
            stream_key=key,
            position=len(sequence.tokens),
            state=sequence.sampler_state,
            num_generated=sequence.num_generated,
            stop_ids=sequence.stop_ids,
        )
        for key in keys
    ]
