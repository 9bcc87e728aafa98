"""Beam search over one prompt: which beams go on, which hypotheses are kept, when to stop.

Pure: takes scored candidates, answers with what to continue; knows no table, model or tokenizer.
The semantics are those of Hugging Face's `generate`, which follows Wu et al., arXiv:1609.08144, in
dividing a finished score by length ** length_penalty; groups follow Vijayakumar et al.,
arXiv:1610.02424.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixcache.params import BeamSearchParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Scored = tuple[Floats, Ints]
"""Logprobs and ids of a beam's best next tokens, best first."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Running beam number `parent`, continued by a token; score: the sum of its logprobs."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a hypothesis ends: all its generated tokens, and what ended it (None: its length)."""

    tokens: tuple[int, ...]
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. score: the sum of its logprobs / length ** length_penalty."""

    ending: Ending
    score: float


Ends = Callable[[int, int], Ending | None]
"""(number of a running beam, next token) -> how that ends its hypothesis, or None."""


@dataclass(slots=True)
class BeamGroup:
    """Beams that compete with each other: all of a plain search.

    scores: float32 [beams that run], sums of logprobs, best first. finished: the best hypotheses so
    far, best first, at most group_size.
    """

    params: BeamSearchParams
    num_candidates: int
    length: int = 0
    scores: Floats = field(default_factory=lambda: np.zeros(1, np.float32))
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def best(self, beams: Sequence[Scored]) -> list[Continuation]:
        """The num_candidates best continuations over all beams; of equals, the earlier beam's."""
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
        """One step: returns the beams that would run on, best first, even where the group is done.

        candidates: of `best`. endings: for each, how it ends its hypothesis, or None if it runs on.
        """
        self.length += 1
        size = self.params.group_size
        pairs = list(zip(candidates, endings, strict=True))
        running = [candidate for candidate, ending in pairs if ending is None][:size]
        if not self._is_full():
            self._keep(
                [
                    Hypothesis(ending, self._normalised(candidate.score))
                    for candidate, ending in pairs[:size]  # those behind are there to run on
                    if ending is not None
                ]
            )
        self.scores = np.array([candidate.score for candidate in running], np.float32)
        self.done = not running or self._is_full() or self._cannot_improve(candidates)
        return running

    def _keep(self, hypotheses: list[Hypothesis]) -> None:
        """Keep the best; of equals, the earlier one."""
        self.finished = sorted(self.finished + hypotheses, key=lambda h: -h.score)
        del self.finished[self.params.group_size :]

    def _normalised(self, score: float) -> float:
        return float(np.float32(score) / np.float32(self.length**self.params.length_penalty))

    def _is_full(self) -> bool:
        full = len(self.finished) == self.params.group_size
        return full and self.params.early_stopping is True

    def _cannot_improve(self, candidates: Sequence[Continuation]) -> bool:
        """True where no running beam can beat the worst of a full set of hypotheses.

        With early_stopping = "never" and a positive penalty the best that a beam can come to is
        reckoned at the longest length; else, by the reference's heuristic, at the present one. For
        diverse groups the reference reckons with the best candidate, even if it has just ended.
        """
        if len(self.finished) < self.params.group_size:
            return False
        penalty = self.params.length_penalty
        longest = self.params.early_stopping == "never" and penalty > 0
        length = self.params.max_tokens if longest else self.length
        diverse = self.params.num_beam_groups > 1
        best = np.float32(candidates[0].score) if diverse else self.scores[0]
        return not best / np.float32(length**penalty) > np.float32(self.finished[-1].score)


class BeamSearch:
    """The search of one request: its groups, one after another in each step.

    num_end_tokens: end and stop tokens. num_candidates: how many best tokens of each beam `step`
    must be given: enough that a group can go on even if all its best ones end, and that those which
    earlier groups have taken can be passed over.
    """

    def __init__(self, params: BeamSearchParams, num_end_tokens: int) -> None:
        self.params = params
        wanted = max(2, 1 + num_end_tokens) * params.group_size
        self.num_candidates = wanted + params.num_beams - params.group_size
        self._groups = [BeamGroup(params, wanted) for _ in range(params.num_beam_groups)]
        self._began = False

    @property
    def done(self) -> bool:
        """True where every group is."""
        return all(group.done for group in self._groups)

    @property
    def finished(self) -> list[Hypothesis]:
        """The hypotheses of all groups, best first."""
        found = [hypothesis for group in self._groups for hypothesis in group.finished]
        return sorted(found, key=lambda hypothesis: -hypothesis.score)

    def step(self, beams: Sequence[Scored], ends: Ends) -> list[Continuation]:
        """One step: returns the beams that run on, group by group; none where the search is done.

        beams: the num_candidates best tokens of each running beam, in the order in which the last
        step returned them; at first of the prompt, with which every group begins.
        """
        chosen: Counter[int] = Counter()
        running: list[Continuation] = []
        at = 0
        for group in self._groups:
            if group.done:
                continue
            count = len(group.scores)
            own = [_less(scored, chosen, self.params) for scored in beams[at : at + count]]
            offset = at
            at += count if self._began else 0
            candidates = [
                Continuation(c.parent + offset, c.token, c.score) for c in group.best(own)
            ]
            endings = [ends(candidate.parent, candidate.token) for candidate in candidates]
            continued = group.advance(candidates, endings)
            chosen.update(continuation.token for continuation in continued)
            if not group.done:
                running += continued
        self._began = True
        return running


def _less(scored: Scored, chosen: Counter[int], params: BeamSearchParams) -> Scored:
    """Logprobs less what earlier groups' choices take from them, best first again."""
    if not chosen:
        return scored
    logprobs, tokens = scored
    counts = np.array([chosen[token] for token in tokens.tolist()], np.float32)
    reduced = logprobs - np.float32(params.diversity_penalty) * counts
    order = np.lexsort((tokens, -reduced))
    return reduced[order], tokens[order]
