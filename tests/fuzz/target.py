"""What a target of fuzzing is, and how its inputs are explored."""

import contextlib
import reprlib
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

CORPUS = Path(__file__).parents[1] / "corpus"
SECONDS = 60
"""How long one input may take: what is tried here ends in milliseconds, or never."""

Check = Callable[[Any], None]


def load_named(data: bytes) -> tuple[str, bytes]:
    """A name and what belongs to it: in a file of the corpus, the first line and the rest."""
    name, _, content = data.partition(b"\n")
    return name.decode(), content


def dump_named(one: tuple[str, bytes]) -> bytes:
    """The file that `load_named` reads."""
    return one[0].encode() + b"\n" + one[1]


@dataclass(frozen=True)
class Target:
    """Something that strangers give inputs to.

    inputs: what is tried. open: gives the check of one input, which raises where it finds a fault.
    few, many: how many inputs `make test` and `make test-all` try.
    load, dump: an input from and to the bytes of a file of the corpus.
    """

    name: str
    inputs: SearchStrategy[Any]
    open: Callable[[], AbstractContextManager[Check]]
    few: int
    many: int
    load: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]

    def corpus(self) -> list[Path]:
        """Inputs that are tried first: those that once found something, and those near the edge."""
        return sorted((CORPUS / self.name).iterdir())

    def explore(self, check: Check, count: int, seed: int | None = None) -> None:
        """Try so many inputs; the same ones each time, but with a seed those of the seed.

        Raises what the check raised for the smallest input that was found.
        """

        @settings(
            max_examples=count,
            derandomize=seed is None,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(self.inputs.map(_Input))
        def run(one: _Input) -> None:
            with limited():
                check(one.value)

        (run if seed is None else hypothesis.seed(seed)(run))()


@dataclass(frozen=True)
class _Input:
    """Shown in short: a file would fill many pages."""

    value: Any

    def __repr__(self) -> str:
        return reprlib.repr(self.value)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends what does not end by itself. On the main thread only."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
