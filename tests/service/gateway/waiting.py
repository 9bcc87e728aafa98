"""Waiting for what other processes do."""

import time


def until(condition, seconds=20.0):
    """Until it holds; AssertionError where it does not in this time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
