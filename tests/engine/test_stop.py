import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.engine.stop import StopChecker, StopStrings
from prefixcache.limits import DEFAULTS


def run(stops, deltas, min_tokens=0):
    """Text, stop string and number of tokens taken, one delta a token."""
    checker = StopChecker(StopStrings(stops))
    text = ""
    for count, delta in enumerate(deltas, start=1):
        emit, matched = checker.push(delta, may_stop=count >= min_tokens)
        text += emit
        if matched is not None:
            return text, matched, count
    return text + checker.flush(), None, len(deltas)


def reference(stops, text, allowed_from=0):
    """The match that ends first, behind `allowed_from`; of several, the first given."""
    for end in range(allowed_from + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def test_stop_string_across_token_edges():
    """DT-01: 'ban' + 'ana' hold 'anan'; the text is 'b', and two tokens were generated."""
    assert run(["anan"], ["ban", "ana", "s"]) == ("b", "anan", 2)


def test_text_that_may_begin_a_stop_string_is_held_back():
    checker = StopChecker(StopStrings(["\n\nUser:"]))
    assert checker.push("Yes.\n") == ("Yes.", None)
    assert checker.push("\nUse") == ("", None)
    assert checker.push(" it") == ("\n\nUse it", None)
    assert checker.push("!\n\n") == ("!", None)
    assert checker.flush() == "\n\n"
    assert checker.flush() == ""


def test_stop_string_inside_one_delta_drops_the_rest():
    assert run(["b"], ["abc", "d"]) == ("a", "b", 1)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["nan", "anan"], "banana", ("ba", "nan")),  # complete at one character: order given
        (["anan", "nan"], "banana", ("b", "anan")),
        (["abcd", "bc"], "abcd", ("a", "bc")),  # 'bc' is complete first
        (["aab"], "aaab", ("a", "aab")),
        (["abac"], "ababac", ("ab", "abac")),
        (["x"], "", ("", None)),
        (["😀"], "hi 😀", ("hi ", "😀")),
    ],
)
def test_first_complete_match_wins(stops, text, expected):
    for size in (1, 2, len(text) or 1):
        deltas = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(stops, deltas)[:2] == expected


def test_no_stop_strings_pass_everything_through():
    assert run([], ["a", "", "b"]) == ("ab", None, 3)


def test_stop_string_before_min_tokens_is_text():
    """SM-14: it occurs at token 2 and at token 7; with min_tokens = 5 the output ends at 7."""
    deltas = ["a", "END", "b", "c", "d", "e", "END", "f"]
    assert run(["END"], deltas, min_tokens=5) == ("aENDbcde", "END", 7)
    assert run(["END"], deltas) == ("a", "END", 2)


def test_stop_string_that_begins_before_min_tokens_and_ends_after():
    """SM-14: what counts is the token in which it ends."""
    assert run(["END"], ["aE", "N", "D", "b"], min_tokens=3) == ("a", "END", 3)
    assert run(["END"], ["aE", "N", "D", "b"], min_tokens=4) == ("aENDb", None, 4)
    assert run(["aa"], ["aa", "a"], min_tokens=2) == ("a", "aa", 2)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.integers(0, 12),
)
def test_any_cut_of_any_text_gives_the_first_match(stops, deltas, min_tokens):
    early = "".join(deltas[: max(0, min_tokens - 1)])
    text, matched, _ = run(stops, deltas, min_tokens)
    assert (text, matched) == reference(stops, "".join(deltas), len(early))


@settings(derandomize=True, deadline=None)
@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=30))
def test_no_more_is_held_back_than_could_match(stop, text):
    checker = StopChecker(StopStrings([stop]))
    sent = ""
    for index, character in enumerate(text):
        emit, matched = checker.push(character)
        sent += emit
        if matched:
            return
        held = text[len(sent) : index + 1]
        longest = max(n for n in range(len(stop)) if text[: index + 1].endswith(stop[:n]))
        assert len(held) == longest


def test_work_per_character_is_bounded_for_the_largest_stop_lists():
    """SE-06: 64 strings of 1,024 characters against text made to fall back as often as possible.

    Counted in automaton steps, not in time: comparisons are at most twice the characters.
    """
    stops = StopStrings(
        ["a" * (DEFAULTS.stop_chars - 1) + chr(200 + i) for i in range(DEFAULTS.stop)]
    )
    counted = [_Counting(string) for string in stops.strings]
    stops.strings = tuple(counted)
    checker = StopChecker(stops)
    text = ("a" * (DEFAULTS.stop_chars - 1) + "b") * 3
    for start in range(0, len(text), 4):
        checker.push(text[start : start + 4])
    assert sum(string.reads for string in counted) <= 4 * len(text) * len(counted)


class _Counting(str):
    """A string that counts how often one of its characters is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)


def test_random_text_with_many_strings_matches_the_reference():
    rng = random.Random(5)
    for _ in range(200):
        stops = ["".join(rng.choices("xyz", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 8))]
        text = "".join(rng.choices("xyzw", k=40))
        assert run(stops, list(text))[:2] == reference(stops, text)
