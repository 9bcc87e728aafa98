"""Stop strings. Owns the text that may yet turn out to be the beginning of one.

Works on text, not on tokens: a stop string is found wherever it ends (DT-01). Each string is
followed by a Knuth-Morris-Pratt automaton, so a character costs one step a string however long
the strings are, and the state of the furthest one says how much text to hold back.
"""

from collections.abc import Iterable
from typing import NamedTuple


class StopStrings:
    """Stop strings compiled once a request; its samples share them. Immutable."""

    __slots__ = ("borders", "strings")

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self.borders = tuple(_borders(string) for string in self.strings)


class StopResult(NamedTuple):
    """Text that may be sent, and the stop string that ended the output, if any."""

    emit: str
    matched: str | None


class StopChecker:
    """Passes the text of one sequence on, up to a stop string, which is left out.

    The match that is complete first wins; of several complete at one character, the first in the
    order given. So the result does not depend on how the text is cut into deltas.

    >>> checker = StopChecker(StopStrings(["anan"]))
    >>> checker.push("ban"), checker.push("ana"), checker.push("s")
    (StopResult(emit='b', matched=None), StopResult(emit='', matched='anan'), ...)
    """

    __slots__ = ("_held", "_reached", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._reached = [0] * len(stops.strings)  # characters of each string matched so far
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> StopResult:
        """Take the next text. After a match no more is to be pushed.

        may_stop: False while fewer than min_tokens tokens are generated, the one that brought
            this text included: a string that ends in it does not match, one that begins in it
            and ends in later text does (SM-14).
        """
        if not self._reached:
            return StopResult(text, None)
        for index, character in enumerate(text):
            matched = self._step(character, may_stop)
            if matched is not None:
                end = len(self._held) + index + 1 - len(matched)
                emit = (self._held + text)[:end]
                self._held = ""
                return StopResult(emit, matched)
        text = self._held + text
        ready = len(text) - max(self._reached)
        self._held = text[ready:]
        return StopResult(text[:ready], None)

    def fork(self) -> "StopChecker":
        """A checker of its own that has seen the same text."""
        child = StopChecker(self._stops)
        child._reached, child._held = self._reached.copy(), self._held
        return child

    def flush(self) -> str:
        """The text held back, once no more will come."""
        text, self._held = self._held, ""
        self._reached = [0] * len(self._reached)
        return text

    def _step(self, character: str, may_stop: bool) -> str | None:
        """Advance all automata by a character; the first string that is complete with it."""
        matched = None
        for number, string in enumerate(self._stops.strings):
            borders = self._stops.borders[number]
            length = self._reached[number]
            while length and string[length] != character:
                length = borders[length - 1]
            if string[length] == character:
                length += 1
            if length == len(string):
                if may_stop and matched is None:
                    matched = string
                length = borders[length - 1]
            self._reached[number] = length
        return matched


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        if string[index] == string[length]:
            length += 1
        borders[index] = length
    return borders
