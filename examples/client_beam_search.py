"""Beam search on the client's side, through Fork: one call a step.

    python examples/client_beam_search.py --server localhost:50051

Each call forks the beams that go on, with one forced token each, samples nothing (max_tokens=0) and
brings back the likeliest next tokens. The result is that of `Client.beam`, which is faster; start
from this one where a step needs something that the server cannot know: a grammar, a vote of another
model, a rule of your own.
"""

import argparse
from dataclasses import dataclass

from prefixcache_service import Branch, Client, Completion, TokenLogprob

KEEP_SECONDS = 60.0  # how long a beam may wait for its next step


@dataclass(frozen=True)
class Beam:
    """A sequence on the server, what was generated in it, and what may come next, best first."""

    sequence_id: str
    tokens: tuple[int, ...]
    logprob: float
    next_tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam; score: log-probability / length ** length_penalty."""

    tokens: tuple[int, ...]
    score: float


def beam_search(
    c: Client,
    prompt: str | list[int],
    *,
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    ignore_eos: bool = False,
) -> list[Hypothesis]:
    """The num_beams best continuations, best first.

    Up to 32 beams: the server sends at most 64 log-probabilities a position, and two a beam are
    needed.
    """
    ends = () if ignore_eos else c.model_info().eos_token_ids
    looks = max(2, 1 + len(ends)) * num_beams  # so many that num_beams go on even if others end
    root = c.generate(prompt, max_tokens=0, logprobs=looks, keep_seconds=KEEP_SECONDS).outputs[0]
    beams = [_beam(root, (), 0.0)]
    finished: list[Hypothesis] = []
    while True:
        length = len(beams[0].tokens) + 1
        candidates = sorted(
            (
                (beam, entry.token_id, beam.logprob + entry.logprob)
                for beam in beams
                for entry in beam.next_tokens
            ),
            key=lambda candidate: -candidate[2],
        )[:looks]
        going_on = []
        for rank, (beam, token, logprob) in enumerate(candidates):
            if token not in ends and length < max_tokens:
                going_on.append((beam, token, logprob))
            elif rank < num_beams:
                score = logprob / length**length_penalty
                finished.append(Hypothesis((*beam.tokens, token), score))
        finished = sorted(finished, key=lambda h: -h.score)[:num_beams]
        going_on = going_on[:num_beams]
        full = len(finished) == num_beams
        if not going_on or (full and going_on[0][2] / length**length_penalty <= finished[-1].score):
            break
        outs = c.fork(
            [Branch(beam.sequence_id, token_ids=[token]) for beam, token, _ in going_on],
            max_tokens=0,
            logprobs=looks,
            keep_seconds=KEEP_SECONDS,
        )
        _release(c, beams)
        beams = [
            _beam(out, (*beam.tokens, token), logprob)
            for out, (beam, token, logprob) in zip(outs, going_on, strict=True)
        ]
    _release(c, beams)
    return finished


def _beam(out: Completion, tokens: tuple[int, ...], logprob: float) -> Beam:
    assert out.next_token is not None  # max_tokens was 0
    return Beam(out.sequence_id, tokens, logprob, out.next_token.top)


def _release(c: Client, beams: list[Beam]) -> None:
    c.release(*(beam.sequence_id for beam in beams))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    with Client(parser.parse_args().server) as c:
        for found in beam_search(c, "The capital of France is", num_beams=4, max_tokens=12):
            print(f"{found.score:7.3f}  {c.detokenize(found.tokens)!r}")


if __name__ == "__main__":
    main()
