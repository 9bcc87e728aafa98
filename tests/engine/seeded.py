"""An injection that fails forward passes by chance, the same way again from the same seed."""

import random
from collections.abc import Sequence

from prefixcache.engine.injection import Injection
from prefixcache.engine.scheduler import ScheduledRow


class InjectedFault(RuntimeError):
    """What an injected exception of the model is."""


class SeededFaults(Injection):
    """Raises before a forward pass: an exception of the model, or a lack of memory.

    exceptions, out_of_memory: probability of each, for each forward pass. A pass of several
        requests that fails is run again for each alone, and each of those may fail in its turn.
    failed: requests whose own pass has failed, with what was raised; the others must not notice.
    """

    def __init__(self, seed: int, *, exceptions: float = 0.0, out_of_memory: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.failed: dict[str, type[Exception]] = {}
        self.num_raised = 0
        self._exceptions = exceptions
        self._out_of_memory = out_of_memory

    def before_forward(self, rows: Sequence[ScheduledRow]) -> None:
        drawn = self.random.random()
        if drawn >= self._exceptions + self._out_of_memory:
            return
        lacks_memory = drawn < self._out_of_memory
        error = MemoryError("injected") if lacks_memory else InjectedFault("injected")
        self.num_raised += 1
        requests = {row.group.request_id for row in rows}
        if len(requests) == 1:
            self.failed[requests.pop()] = type(error)
        raise error
