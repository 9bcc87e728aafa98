"""Beam search over one prompt: which beams go on, which hypotheses are kept, when to stop.

Pure: takes scored candidates, answers with what to continue; knows no table, model or tokenizer.
The semantics are those of Hugging Face's `generate` (transformers 5), which follows Wu et al.,
arXiv:1609.08144, in dividing a finished score by length ** length_penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache.params import BeamSearchParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Running beam number `parent`, continued by a token; score: the sum of its logprobs."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. score: the sum of its logprobs / length ** length_penalty."""

    ending: "Ending"
    score: float


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a hypothesis ends: all its generated tokens, and what ended it (None: its length)."""

    tokens: tuple[int, ...]
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearch:
    """The search of one request.

    num_end_tokens: end and stop tokens. scores: float32 [beams that run], sums of logprobs, best
    first. finished: the best hypotheses so far, best first, at most num_beams.
    """

    params: BeamSearchParams
    num_end_tokens: int
    length: int = 0
    scores: Floats = field(default_factory=lambda: np.zeros(1, np.float32))
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    @property
    def num_candidates(self) -> int:
        """Best continuations that a step looks at: num_beams can go on even if all others end."""
        return max(2, 1 + self.num_end_tokens) * self.params.num_beams

    def best(self, beams: Sequence[tuple[Floats, Ints]]) -> list[Continuation]:
        """The num_candidates best continuations over all beams; of equals, the earlier beam's.

        beams: for each running beam the logprobs and ids of its own best tokens, best first.
        """
        sums = np.concatenate([s + scored[0] for s, scored in zip(self.scores, beams, strict=True)])
        tokens = np.concatenate([scored[1] for scored in beams])
        parents = np.repeat(np.arange(len(beams)), [len(scored[1]) for scored in beams])
        order = np.argsort(-sums, kind="stable")[: self.num_candidates]
        return [
            Continuation(parent, token, score)
            for parent, token, score in zip(
                parents[order].tolist(), tokens[order].tolist(), sums[order].tolist(), strict=True
            )
        ]

    def advance(
        self, candidates: Sequence[Continuation], endings: Sequence[Ending | None]
    ) -> list[Continuation]:
        """One step: returns the beams that run on, best first; none where the search is done.

        candidates: of `best`. endings: for each, how it ends its hypothesis, or None if it runs on.
        """
        self.length += 1
        beams = self.params.num_beams
        pairs = list(zip(candidates, endings, strict=True))
        running = [candidate for candidate, ending in pairs if ending is None][:beams]
        if not self._is_full():
            self._keep(
                [
                    Hypothesis(ending, self._normalised(candidate.score))
                    for candidate, ending in pairs[:beams]  # those behind are there to run on
                    if ending is not None
                ]
            )
        self.scores = np.array([candidate.score for candidate in running], np.float32)
        self.done = not running or self._is_full() or self._cannot_improve()
        return [] if self.done else running

    def _keep(self, hypotheses: list[Hypothesis]) -> None:
        """Keep the best; of equals, the earlier one."""
        self.finished = sorted(self.finished + hypotheses, key=lambda h: -h.score)
        del self.finished[self.params.num_beams :]

    def _normalised(self, score: float) -> float:
        return float(np.float32(score) / np.float32(self.length**self.params.length_penalty))

    def _is_full(self) -> bool:
        full = len(self.finished) == self.params.num_beams
        return full and self.params.early_stopping is True

    def _cannot_improve(self) -> bool:
        """True where no running beam can beat the worst of a full set of hypotheses.

        With early_stopping = "never" and a positive penalty the best that a beam can come to is
        reckoned at the longest length; else, by the reference's heuristic, at the present one.
        """
        if len(self.finished) < self.params.num_beams:
            return False
        penalty = self.params.length_penalty
        longest = self.params.early_stopping == "never" and penalty > 0
        length = self.params.max_tokens if longest else self.length
        best = self.scores[0] / np.float32(length**penalty)
        return not best > np.float32(self.finished[-1].score)
