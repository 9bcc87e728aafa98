"""Tree of thought: propose several next thoughts, let a judge score them, go on from the best.

    python examples/tree_of_thought.py --server localhost:50051

A level of the tree is two calls, whatever its width: one Fork proposes thoughts behind each kept
node, one Fork puts a question behind each thought and reads how likely "yes" comes next. All nodes
share the blocks of what they have in common; what is given up is released.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefixcache_service import Branch, Client

Scorer = Callable[[Client, Sequence["Thought"]], list[float]]

KEEP_SECONDS = 120.0
QUESTION = "\n(Is this a good plan so far? Answer yes or no:"


@dataclass(frozen=True)
class Thought:
    """A node of the tree: a sequence on the server, and all thoughts up to it."""

    sequence_id: str
    text: str


def would_say_yes(c: Client, thoughts: Sequence[Thought]) -> list[float]:
    """A scorer: the probability of "yes" behind a question. The model judges itself, in one call.

    Any other will do: a checker, a reward model, a person. It sees the texts.
    """
    branches = [Branch(thought.sequence_id, text=QUESTION) for thought in thoughts]
    scores = []
    for out in c.fork(branches, max_tokens=0, logprobs=64):
        assert out.next_token is not None
        likely = {e.token.decode(errors="replace").strip(): e.logprob for e in out.next_token.top}
        scores.append(likely.get("yes", -20.0))
    return scores


def tree_of_thought(
    c: Client,
    prompt: str,
    *,
    depth: int,
    proposals: int,
    width: int,
    scorer: Scorer = would_say_yes,
    seed: int | None = None,
) -> list[tuple[float, str]]:
    """The best `width` chains of `depth` thoughts with their scores, best first.

    Each kept node gets `proposals` children, one line each; the best `width` of a level are kept.
    """
    root = c.generate(prompt, max_tokens=0, keep_seconds=KEEP_SECONDS)
    kept = [Thought(root.sequence_id, "")]
    ranked: list[tuple[float, Thought]] = []
    try:
        for level in range(depth):
            begin = f"\n{level + 1}." if level else " 1."
            parents = [thought for thought in kept for _ in range(proposals)]
            outs = c.fork(
                [Branch(parent.sequence_id, text=begin) for parent in parents],
                max_tokens=24,
                temperature=0.8,
                stop="\n",
                seed=seed,
                keep_seconds=KEEP_SECONDS,
            )
            thoughts = [
                Thought(out.sequence_id, parent.text + begin + out.text)
                for parent, out in zip(parents, outs, strict=True)
            ]
            scores = scorer(c, thoughts)
            ranked = sorted(zip(scores, thoughts, strict=True), key=lambda pair: -pair[0])
            if ranked[width:]:
                c.release(*(thought.sequence_id for _, thought in ranked[width:]))
            ranked = ranked[:width]
            kept = [thought for _, thought in ranked]
    finally:
        c.release(root.sequence_id, subtree=True)
    return [(score, thought.text) for score, thought in ranked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    prompt = "A plan in three short steps to learn the names of the stars:\n"
    with Client(parser.parse_args().server) as c:
        for score, text in tree_of_thought(c, prompt, depth=3, proposals=4, width=2, seed=1):
            print(f"log P(yes) = {score:.2f}\n{text.strip()}\n")


if __name__ == "__main__":
    main()
