"""A tour of prefixcache in half a minute: `python examples/tour.py` starts a server and shows it.

With --server HOST:PORT it uses one that runs already.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefixcache_service import Branch, Client

SYSTEM = "You are the guide of a small museum of seafaring. " + (
    "The museum shows maps, sextants, ship models and letters home. Answer in one sentence. " * 6
)


@contextmanager
def own_server() -> Iterator[str]:
    """Start a server on a free port; its address, once it is ready. Stops it by SIGTERM."""
    command = [sys.executable, "-c", "from prefixcache_service.cli import main; main()", "serve"]
    flags = ["--port", "0", "--no-http", "--log-level", "warning", "--max-model-len", "2048"]
    flags += ["--num-gpu-blocks-override", "1024", "--grace", "5"]
    server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            sys.exit("the server did not start; its message is above")
        say(line.strip())
        yield line.split("gRPC ")[1].split(",")[0]
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=10)
    say(f"SIGTERM: the server has drained and left with exit code {code}")
    if code != 0:
        sys.exit(code)


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def step(title: str) -> None:
    """Begin a part of the tour."""
    say(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n== {title}")


def short(text: str) -> str:
    """One line of a text."""
    return text.rstrip().replace("\n", " ⏎ ")


def shared_prompt(c: Client) -> None:
    step("A shared prompt is computed once")
    for question in ("What is a sextant?", "Who drew the maps?"):
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        began = time.perf_counter()
        out = c.generate(chat, max_tokens=1, temperature=0)
        seconds = time.perf_counter() - began
        say(
            f"  {question:<20} {out.num_cached_tokens:>3} of {out.usage.prompt_tokens} prompt "
            f"tokens cached, first token after {seconds:.2f} s"
        )


def samples(c: Client) -> None:
    step("Four samples behind one prompt share its blocks")
    result = c.generate("My favourite colour is", n=4, max_tokens=8, seed=7)
    for out in result.outputs:
        say(f"  [{out.index}] My favourite colour is{short(out.text)}")
    again = c.generate("My favourite colour is", n=4, max_tokens=8, seed=7)
    same = [a.token_ids == b.token_ids for a, b in zip(result.outputs, again.outputs, strict=True)]
    say(f"  the same seed again gives the same samples: {all(same)}")


def live_fork(c: Client) -> None:
    step("A sequence is forked while it runs")
    stream = c.stream("The old lighthouse keeper", max_tokens=48, temperature=0)
    story = ""
    for delta in stream:
        story += delta.text
        if len(story) > 60:
            break
    say(f"  so far: The old lighthouse keeper{short(story)}")
    twists = [" Suddenly,", " But his daughter"]
    branches = [Branch(stream.sequence_id, text=twist) for twist in twists]
    for twist, out in zip(twists, c.fork(branches, max_tokens=16, temperature=0), strict=True):
        say(
            f"  fork:  {twist}{short(out.text)}   "
            f"[{out.num_forked_tokens} of {out.num_prompt_tokens} tokens taken over]"
        )
    say(f"  meanwhile, the trunk: …{short(stream.result().text[len(story) :])}")


def kept_fork(c: Client) -> None:
    step("A finished sequence is kept, and asked what would come next")
    s = c.generate("The capital of France is", max_tokens=4, temperature=0, keep_seconds=60)
    say(f"  The capital of France is{short(s.text)}")
    (peek,) = c.fork(
        [Branch(s.sequence_id, position=s.usage.prompt_tokens)], max_tokens=0, logprobs=3
    )
    assert peek.next_token is not None
    for entry in peek.next_token.top:
        say(f"    {entry.token.decode(errors='replace')!r:<12} log-probability {entry.logprob:.2f}")
    scores = c.score("The capital of France is", [" Paris", " Lyon", " a cheese"])
    best = [f"{score.sum_logprob:.2f}" for score in scores.scores]
    say(f"  scores of ' Paris', ' Lyon', ' a cheese': {', '.join(best)}")
    fork = c.fork([Branch(s.sequence_id)], max_tokens=8, logprobs=0)[0]
    fresh = c.generate(
        [*c.tokenize("The capital of France is"), *s.token_ids],
        max_tokens=8,
        logprobs=0,
        stream_key=fork.stream_key,
    )
    same = (fork.token_ids, fork.logprobs) == (fresh.token_ids, fresh.logprobs)
    say(f"  the fork and a fresh request with its stream key agree to the bit: {same}")
    if not same:
        sys.exit("the same bits were promised")
    c.release(s.sequence_id, subtree=True)


def figures(c: Client) -> None:
    step("What the cache did")
    stats = c.stats()
    say(
        f"  {stats.prompt_tokens} prompt tokens = {stats.computed_tokens} computed "
        f"+ {stats.cached_tokens} cached + {stats.forked_tokens} taken over by forks"
    )
    say(
        f"  {stats.blocks_total} blocks = {stats.blocks_free} free + {stats.blocks_evictable} "
        f"evictable + {stats.blocks_in_use} in use; {stats.block_copies} copied on write"
    )


def tour(target: str) -> None:
    """All parts, in order."""
    with Client(target, timeout=120) as c:
        for part in (shared_prompt, samples, live_fork, kept_fork, figures):
            part(c)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", metavar="HOST:PORT", help="use this server, start none")
    target = parser.parse_args().server
    if target:
        tour(target)
        return
    with own_server() as target:
        tour(target)


if __name__ == "__main__":
    main()
