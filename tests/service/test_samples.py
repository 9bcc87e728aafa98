"""n samples over a real channel that end at different tokens, as a stream and as one reply."""

from itertools import count

import pytest

PROMPT = list(range(10, 40))


def samples_that_end_at(client, ends):
    """Settings of n samples that end at these tokens, and what they are when nothing ends them.

    The ends are stop tokens: of each sample the one at its place, where none comes before.
    """
    for seed in count():
        settings = {"n": len(ends), "max_tokens": max(ends), "seed": seed, "ignore_eos": True,
                    "logprobs": 1}  # fmt: skip
        free = client.generate(PROMPT, **settings).outputs
        stops = {output.token_ids[end - 1] for output, end in zip(free, ends, strict=True)}
        found = [next(i for i, t in enumerate(o.token_ids, 1) if t in stops) for o in free]
        if tuple(found) == ends:
            return {**settings, "stop_token_ids": sorted(stops)}, free
    raise AssertionError


@pytest.fixture(params=[(2, 4, 6, 8), (1, 5, 9)], ids=str)
def samples(request, client):
    return (request.param, *samples_that_end_at(client, request.param))


def test_a_reply_holds_every_sample_in_full(client, samples):
    """PS-03: n = 4, ends at 2, 4, 6 and 8: exactly the indices 0 to 3, each with all its text."""
    ends, settings, free = samples
    outputs = client.generate(PROMPT, **settings).outputs
    assert [output.index for output in outputs] == list(range(len(ends)))
    for output, whole, end in zip(outputs, free, ends, strict=True):
        assert output.token_ids == whole.token_ids[:end]
        assert output.logprobs == whole.logprobs[:end]
        assert output.finish_reason == "stop"
        assert output.text == client.detokenize(whole.token_ids[: end - 1])
        assert output.usage.completion_tokens == end


def test_a_stream_ends_with_its_last_sample_and_equals_the_reply(client, samples):
    """PS-05: ends at tokens 1, 5 and 9; one finish an index, deltas merged by index."""
    ends, settings, _ = samples
    whole = client.generate(PROMPT, **settings)
    deltas = list(client.stream(PROMPT, **settings))
    finished = [delta.index for delta in deltas if delta.finish_reason]
    assert finished == sorted(range(len(ends)), key=ends.__getitem__)
    assert deltas[-1].finish_reason
    for output in whole.outputs:
        own = [delta for delta in deltas if delta.index == output.index]
        assert own[-1].finish_reason == output.finish_reason
        assert "".join(delta.text for delta in own) == output.text
        assert tuple(t for delta in own for t in delta.token_ids) == output.token_ids
        assert tuple(e for delta in own for e in delta.logprobs) == output.logprobs


def test_text_comes_from_the_decoder_and_entries_carry_bytes(client):
    """DT-08: a character over several tokens, with log-probabilities: of a prompt, of scores."""
    text = "x 😀 naïve 日"
    ids = client.tokenize(text)
    assert len(ids) > len(text)
    output = client.generate(ids, max_tokens=1, prompt_logprobs=0).outputs[0]
    pieces = [entry.chosen.token for entry in output.prompt_logprobs[1:]]
    assert b"".join(pieces).decode() == text[1:]
    assert "\ufffd" in "".join(piece.decode(errors="replace") for piece in pieces)
    score = client.score("x", [text[1:]], top_logprobs=0).scores[0]
    assert b"".join(entry.chosen.token for entry in score.logprobs).decode() == text[1:]


def test_generated_characters_over_several_tokens_are_whole(client):
    """DT-03, DT-08: only the two bytes of "¥" can be drawn, in any order."""
    first, second = client.tokenize("¥")
    bias = {first: 100.0, second: 100.0}
    whole = False
    for seed in range(20):
        settings = {"max_tokens": 12, "seed": seed, "temperature": 5.0, "logit_bias": bias}
        result = client.generate(PROMPT, logprobs=0, **settings)
        assert set(result.token_ids) <= {first, second}
        data = b"".join(entry.chosen.token for entry in result.logprobs)
        assert result.text == data.decode(errors="replace")
        assert "".join(d.text for d in client.stream(PROMPT, **settings)) == result.text
        whole = whole or "¥" in result.text
    assert whole
