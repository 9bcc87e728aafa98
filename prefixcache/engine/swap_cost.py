"""Whether it is quicker to move preempted blocks to the host and back than to compute them again.

Owns the estimate: a running mean of what prefill takes a token, watched step by step, against the
time to move a block, measured at start.
"""

from prefixcache.engine.observer import EngineObserver

_WEIGHT = 0.2
"""Of the newest step in the mean: a slow one, such as one that compiles, is soon forgotten."""


class SwapCost(EngineObserver):
    """Seconds of both ways, for whole blocks.

    move_seconds: to move a block out and in again.
    """

    def __init__(self, block_size: int, move_seconds: float) -> None:
        self._block_size = block_size
        self._move_seconds = move_seconds
        self._token_seconds = 0.0

    def stepped(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learn from steps that mostly prefill."""
        if num_tokens < 2 * num_rows or not num_rows:
            return
        taken = seconds / num_tokens
        first = self._token_seconds == 0.0
        self._token_seconds += (taken - self._token_seconds) * (1.0 if first else _WEIGHT)

    def worth_moving(self, num_blocks: int) -> bool:
        """Whether moving so many blocks takes less time than computing their tokens again.

        Both grow with the number of blocks alike. Before the first prefill there is nothing to
        move.
        """
        compute = num_blocks * self._block_size * self._token_seconds
        return num_blocks * self._move_seconds < compute
