"""Inputs that Hypothesis makes: the same ones in each run, more of them in `make test-all`.

`python -m tests.fuzz` goes on with others for as long as one likes.
"""

import pytest

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs_do_no_harm(name: str) -> None:
    target = TARGETS[name]
    with target.open() as check:
        target.explore(check, target.few)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs_do_no_harm(name: str) -> None:
    target = TARGETS[name]
    with target.open() as check:
        target.explore(check, target.many)
