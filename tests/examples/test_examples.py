"""Each example does what its first lines say, on the real model, and leaves nothing behind."""

import runpy
import sys
from pathlib import Path

import pytest

from examples import (
    best_of_n_with_pruning,
    client_beam_search,
    mcts_puzzle,
    regenerate_from_here,
    tree_of_thought,
)
from prefixcache_service import Branch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    "name", ["best_of_n_with_pruning", "client_beam_search", "regenerate_from_here"]
)
def test_it_runs_from_the_command_line(real, client, capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name, "--server", real.target])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.parametrize(
    ("beams", "length_penalty", "ignore_eos"), [(4, 1.0, False), (8, 0.0, True), (3, -1.0, False)]
)
def test_the_clients_beam_search_equals_the_engines(client, beams, length_penalty, ignore_eos):
    search = {
        "num_beams": beams,
        "max_tokens": 12,
        "length_penalty": length_penalty,
        "ignore_eos": ignore_eos,
    }
    for prompt in ("The capital of France is", "Q: Is the sky blue?\nA:"):
        found = client_beam_search.beam_search(client, prompt, **search)
        wanted = client.beam(prompt, num_return_sequences=beams, **search).outputs
        assert [h.tokens for h in found] == [out.token_ids for out in wanted]
        assert [h.score for h in found] == pytest.approx([out.score for out in wanted], abs=1e-4)


def test_hypotheses_that_end_early_are_kept_apart(client):
    """A chat's answer ends: hypotheses of different lengths compete."""
    chat = client.tokenize([{"role": "user", "content": "Hi!"}])
    search = {"num_beams": 4, "max_tokens": 12}
    found = client_beam_search.beam_search(client, chat, **search)
    wanted = client.beam(chat, num_return_sequences=4, **search).outputs
    assert [h.tokens for h in found] == [out.token_ids for out in wanted]
    assert len({len(h.tokens) for h in found}) > 1


def test_pruning_keeps_the_better_half_as_it_would_have_been(client):
    prompt, asked = "The secret of a good soup is", {"n": 6, "max_tokens": 24, "seed": 1}
    kept = best_of_n_with_pruning.best_of_n(client, prompt, **asked)
    whole = client.generate(prompt, logprobs=0, **asked).outputs

    def at_half(out):
        half = out.logprobs[:12]
        return sum(entry.chosen.logprob for entry in half) / len(half)

    better = sorted(whole, key=lambda out: -at_half(out))[:3]
    assert {out.index: out.token_ids for out in kept} == {
        out.index: out.token_ids for out in better
    }
    means = [best_of_n_with_pruning.mean_logprob(out) for out in kept]
    assert means == sorted(means, reverse=True)


def test_a_tree_of_thought_keeps_what_its_scorer_likes(client):
    seen = []

    def shortest(c, thoughts):
        assert len(c.sequences()) > len(thoughts)
        seen.append([thought.text for thought in thoughts])
        return [-float(len(thought.text)) for thought in thoughts]

    best = tree_of_thought.tree_of_thought(
        client, "To bake bread:\n", depth=2, proposals=3, width=2, scorer=shortest, seed=2
    )
    assert [len(level) for level in seen] == [3, 6]
    assert [text for _, text in best] == sorted(seen[1], key=len)[:2]
    roots = sorted(seen[0], key=len)[:2]
    assert all(text.startswith(tuple(f"{root}\n2." for root in roots)) for text in seen[1])
    judged = tree_of_thought.tree_of_thought(
        client, "To bake bread:\n", depth=2, proposals=2, width=1, seed=2
    )
    assert -20 <= judged[0][0] < 0


def test_a_regenerated_answer_begins_alike_and_goes_on_by_itself(client):
    chat = [{"role": "user", "content": "Why do cats purr? Answer in two sentences."}]
    answer = regenerate_from_here.ask(client, chat, max_tokens=24, seed=3)
    here = len(answer.text) // 2
    tokens, characters = regenerate_from_here.tokens_within(answer.logprobs, here)
    assert 0 < characters <= here
    assert client.detokenize(answer.token_ids[:tokens]) == answer.text[:characters]
    texts = regenerate_from_here.regenerate(client, answer, here, n=3, max_tokens=12, seed=4)
    assert len(set(texts)) == 3
    assert all(text.startswith(answer.text[:characters]) for text in texts)
    position = answer.num_prompt_tokens + tokens
    (out,) = client.fork([Branch(answer.sequence_id, position=position)], max_tokens=1)
    assert out.num_forked_tokens == position - 1  # nothing that stays is computed again
    client.release(answer.sequence_id)


def test_mcts_solves_its_puzzle(client):
    number, simulations = mcts_puzzle.search(client, 20, simulations=100)
    assert mcts_puzzle.reward(number, 20) == 1.0
    assert 1 <= simulations <= 100
    assert mcts_puzzle.reward("9910", 19) == mcts_puzzle.reward("12", 3) == 0.0
