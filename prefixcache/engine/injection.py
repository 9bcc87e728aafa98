"""The seam through which tests put faults, arrivals and aborts into a running engine.

An engine calls its `Injection` at two moments of each step. This one does nothing; a test's own,
driven by a seed, makes any failure replay from it, and the engine under test is the real one.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from prefixcache.engine.scheduler import ScheduledRow

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine


class Injection:
    """Called on the engine's thread; does nothing."""

    def before_step(self, engine: "Engine") -> None:
        """A step is about to be scheduled. May execute commands; what it raises stops the loop."""

    def before_forward(self, rows: Seq[ScheduledRow]) -> None:
        """Rows are about to be run. What it raises is treated as if the model had raised it."""
