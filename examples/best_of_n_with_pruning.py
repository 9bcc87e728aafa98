"""Best of n, where the worse half is given up at half length and its room goes to others.

    python examples/best_of_n_with_pruning.py --server localhost:50051

One call draws n samples behind one prompt. When all of them are half done, the less likely half is
released: the server stops working on it within a step, and the others do not notice.
"""

import argparse
from contextlib import suppress
from statistics import fmean

from prefixcache.errors import NotFound
from prefixcache_service import Client, Completion


def best_of_n(
    c: Client, prompt: str | list[int], *, n: int, max_tokens: int, seed: int | None = None
) -> list[Completion]:
    """The better half of n samples, ranked by mean log-probability a token, best first."""
    logprobs: list[list[float]] = [[] for _ in range(n)]
    ids = [""] * n
    behind_half = set(range(n))
    with c.stream(prompt, n=n, max_tokens=max_tokens, seed=seed, logprobs=0) as stream:
        for delta in stream:
            i = delta.index
            ids[i] = delta.sequence_id
            logprobs[i] += [entry.chosen.logprob for entry in delta.logprobs if entry.chosen]
            if len(logprobs[i]) >= max_tokens // 2 or delta.finish_reason:
                behind_half.discard(i)
            if not behind_half:
                break
        # The first half of each counts, however far it has come since.
        order = sorted(range(n), key=lambda i: -fmean(logprobs[i][: max_tokens // 2]))
        with suppress(NotFound):  # all have ended by themselves
            c.release(*(ids[i] for i in order[n // 2 :]))
        outputs = stream.result().outputs
    return sorted((outputs[i] for i in order[: n // 2]), key=lambda out: -mean_logprob(out))


def mean_logprob(out: Completion) -> float:
    """Log-probability a token, so that samples of different lengths compare."""
    return (out.cumulative_logprob or 0.0) / max(len(out.token_ids), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    with Client(parser.parse_args().server) as c:
        for out in best_of_n(c, "The secret of a good soup is", n=8, max_tokens=32, seed=1):
            print(f"{mean_logprob(out):7.3f}  {out.text!r}")


if __name__ == "__main__":
    main()
