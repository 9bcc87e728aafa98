"""Inputs that were kept: those that once found a fault, and those near the edge of what is."""

from collections.abc import Iterator

import pytest

from tests.fuzz.target import CORPUS, Check, limited
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module", params=TARGETS)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[str, Check]]:
    with TARGETS[request.param].open() as check:
        yield request.param, check


def test_every_input_that_was_kept_still_does_no_harm(opened: tuple[str, Check]) -> None:
    name, check = opened
    files = TARGETS[name].corpus()
    assert len(files) >= 5
    for file in files:
        with limited():
            try:
                check(TARGETS[name].load(file.read_bytes()))
            except BaseException as error:
                error.add_note(f"with {file.relative_to(CORPUS)}")
                raise


@pytest.mark.parametrize("name", TARGETS)
def test_an_input_that_is_written_is_read_again_as_it_was(name: str) -> None:
    target = TARGETS[name]
    for file in target.corpus():
        one = target.load(file.read_bytes())
        assert target.load(target.dump(one)) == one


def test_each_folder_of_the_corpus_belongs_to_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
