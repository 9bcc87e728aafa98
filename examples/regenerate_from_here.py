"""Regenerate an answer of a chat from a place in the middle of it.

    python examples/regenerate_from_here.py --server localhost:50051

The answer is kept for a while. A click on a word is a character offset; the token that starts there
is a position; a Fork at that position draws other continuations. Nothing is computed again: neither
the conversation nor the part of the answer that stays.
"""

import argparse

from prefixcache_service import Branch, Client, Completion, TokenLogprobs

KEEP_SECONDS = 300.0


def ask(c: Client, chat: list[dict[str, str]], *, max_tokens: int, seed: int) -> Completion:
    """An answer that can be forked later; with logprobs, which carry each token's bytes."""
    return c.generate(
        chat, max_tokens=max_tokens, seed=seed, logprobs=0, keep_seconds=KEEP_SECONDS
    ).outputs[0]


def regenerate(
    c: Client, answer: Completion, offset: int, *, n: int, max_tokens: int, seed: int
) -> list[str]:
    """n other texts of an answer whose first `offset` characters stay.

    They are cut at the last token that ends there or before: a word is redone as a whole.
    """
    tokens, characters = tokens_within(answer.logprobs, offset)
    position = answer.num_prompt_tokens + tokens
    outs = c.fork(
        [Branch(answer.sequence_id, position=position)] * n, max_tokens=max_tokens, seed=seed
    )
    return [answer.text[:characters] + out.text for out in outs]


def tokens_within(logprobs: tuple[TokenLogprobs, ...], offset: int) -> tuple[int, int]:
    """How many tokens lie within the first `offset` characters, and how many characters they are.

    A character of several tokens counts where its last one is.
    """
    data, best = b"", (0, 0)
    for count, entry in enumerate(logprobs, start=1):
        assert entry.chosen is not None
        data += entry.chosen.token
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue  # in the middle of a character
        if len(text) > offset:
            break
        best = (count, len(text))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="localhost:50051", metavar="HOST:PORT")
    chat = [{"role": "user", "content": "Why do cats purr? Answer in two sentences."}]
    with Client(parser.parse_args().server) as c:
        answer = ask(c, chat, max_tokens=48, seed=3)
        print(answer.text)
        here = len(answer.text) // 3
        for text in regenerate(c, answer, here, n=3, max_tokens=32, seed=4):
            print(f"\n{text[:here]}|{text[here:]}")
        c.release(answer.sequence_id)


if __name__ == "__main__":
    main()
