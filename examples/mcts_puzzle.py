"""Monte Carlo tree search over a toy puzzle, each node a kept sequence on the server.

    python examples/mcts_puzzle.py --server localhost:50051

The puzzle: a number of four digits that rise from left to right and add up to a target. The model
proposes digits (its probabilities are the priors, as in AlphaZero), a rollout of the model finishes
the number, a rule scores it. One simulation is one Fork of two branches: the node with its priors,
and the rollout behind it.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from prefixcache_service import Branch, Client, Completion, Sampling

DIGITS = 4
KEEP_SECONDS = 120.0
EXPLORE = 1.5


@dataclass
class Node:
    """A prefix of the number. priors: probability of each digit that may come next."""

    digits: str
    sequence_id: str
    priors: Mapping[str, float]
    children: dict[str, "Node"] = field(default_factory=dict)
    visits: int = 0
    value: float = 0.0

    def best_move(self) -> str:
        """The digit with the greatest upper bound (PUCT)."""

        def bound(digit: str) -> float:
            child = self.children.get(digit)
            visits, mean = (child.visits, child.value / child.visits) if child else (0, 0.0)
            return mean + EXPLORE * self.priors[digit] * math.sqrt(self.visits) / (1 + visits)

        return max(self.priors, key=bound)


def reward(digits: str, target: int) -> float:
    """1 for a solution, 1/2 beside it, 1/3 and so on; 0 where the digits do not rise."""
    if len(digits) != DIGITS or list(digits) != sorted(set(digits)):
        return 0.0
    return 1 / (1 + abs(sum(map(int, digits)) - target))


def search(c: Client, target: int, *, simulations: int, seed: int = 0) -> tuple[str, int]:
    """The best number found, and after how many simulations. Stops at a solution."""
    tokens = {digit: c.tokenize(digit, add_special_tokens=False)[0] for digit in "0123456789"}
    prompt = f"Four digits from small to large with a sum of {target}: "
    start = c.generate(prompt, max_tokens=0, logprobs=64, keep_seconds=KEEP_SECONDS, seed=seed)
    root = _node("", start.outputs[0])
    best, found_at = "", 0
    try:
        for simulation in range(1, simulations + 1):
            path = select(root)
            leaf = path[-1]
            if len(leaf.digits) < DIGITS:
                move = leaf.best_move()
                digits = leaf.digits + move
                own = Branch(leaf.sequence_id, token_ids=[tokens[move]], keep_seconds=KEEP_SECONDS)
                peek = Sampling(max_tokens=0, logprobs=64)
                rollout = Sampling(
                    max_tokens=DIGITS - len(digits),
                    logit_bias=dict.fromkeys(tokens.values(), 100.0),
                )
                node_out, rollout_out = c.fork(
                    [replace(own, sampling=peek), replace(own, sampling=rollout, keep_seconds=0)]
                )
                leaf.children[move] = _node(digits, node_out)
                path.append(leaf.children[move])
                number = digits + rollout_out.text
            else:
                number = leaf.digits  # a whole number again: nothing is left to ask
            for node in path:
                node.visits += 1
                node.value += reward(number, target)
            if reward(number, target) > reward(best, target):
                best, found_at = number, simulation
            if reward(best, target) == 1.0:
                break
    finally:
        c.release(root.sequence_id, subtree=True)
    return best, found_at


def select(root: Node) -> list[Node]:
    """From the root along best moves to a node whose best move was never tried, or to the end."""
    path = [root]
    while len(path[-1].digits) < DIGITS:
        child = path[-1].children.get(path[-1].best_move())
        if child is None:
            break
        path.append(child)
    return path


def _node(digits: str, out: Completion) -> Node:
    """Priors of the digits that leave room to rise, from the model's log-probabilities."""
    assert out.next_token is not None
    likely = {entry.token.decode(errors="replace"): entry.logprob for entry in out.next_token.top}
    lowest = int(digits[-1]) + 1 if digits else 0
    highest = 10 - (DIGITS - len(digits))
    weights = {  # the root of the probability: a small model is surer than it should be
        str(digit): math.exp(likely.get(str(digit), -7.0) / 2)
        for digit in range(lowest, highest + 1)
    }
    total = sum(weights.values())
    priors = {digit: weight / total for digit, weight in weights.items()}
    return Node(digits, out.sequence_id, priors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    parser.add_argument("--target", type=int, default=23, help="sum of the four digits, 6 to 30")
    arguments = parser.parse_args()
    with Client(arguments.server) as c:
        number, simulations = search(c, arguments.target, simulations=200)
    print(f"{' + '.join(number)} = {sum(map(int, number))}, after {simulations} simulations")


if __name__ == "__main__":
    main()
