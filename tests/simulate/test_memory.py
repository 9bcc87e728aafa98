"""Memory that is reserved and not used, against sums made token by token."""

import math

import numpy as np
import pytest

from prefixcache.errors import TraceError
from prefixcache.simulate.memory import compare_schemes
from prefixcache.simulate.trace import SequenceRecord

LENGTHS = [(5, 3), (16, 1), (7, 40), (100, 0), (31, 9)]


def records(lengths: list[tuple[int, int]]) -> list[SequenceRecord]:
    none = np.empty(0, np.uint64)
    return [SequenceRecord(p, out, p + out, none, 0) for p, out in lengths]


def token_by_token(room) -> tuple[float, float, float]:
    """room(prompt, output, now) -> tokens reserved; unused at the end, running, and mean room."""
    at_end = sum(room(p, out, p + out) for p, out in LENGTHS)
    steps = [(p, out, p + t) for p, out in LENGTHS for t in range(1, out + 1)]
    held = sum(room(*step) for step in steps)
    used_at_end, used = sum(p + out for p, out in LENGTHS), sum(now for _, _, now in steps)
    return 1 - used_at_end / at_end, 1 - used / held, held / len(steps)


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("longest of the trace", lambda p, out, now: 100),
        ("exact, known beforehand", lambda p, out, now: p + out),
        ("output rounded up to 2^n", lambda p, out, now: p + 2 ** math.ceil(math.log2(out or 1))),
        ("blocks of 8", lambda p, out, now: -(-now // 8) * 8),
        ("blocks of 128", lambda p, out, now: 128),
    ],
)
def test_each_scheme_is_what_counting_token_by_token_gives(name, room):
    schemes = {scheme.name: scheme for scheme in compare_schemes(records(LENGTHS))}
    found = schemes[name]
    at_end, running, held = token_by_token(room)
    assert found.unused_at_end == pytest.approx(at_end)
    assert found.unused_running == pytest.approx(running)
    assert found.tokens_held == pytest.approx(held)
    assert found.batch == pytest.approx(100 / held)


def test_reserving_the_longest_is_what_batches_are_compared_with():
    assert compare_schemes(records(LENGTHS))[0].batch == pytest.approx(1.0)


def test_a_trace_that_generates_nothing_has_no_batch():
    with pytest.raises(TraceError, match="generates no token"):
        compare_schemes(records([(10, 0)]))
