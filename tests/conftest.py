"""Every test leaves the process as it found it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No thread and no open file outlives the test that made it; those of fixtures for a module or
    the session are there before it begins."""
    from tests.leaks import nothing_leaks  # noqa: PLC0415 (Triton's cases need no engine)

    with nothing_leaks():
        yield
