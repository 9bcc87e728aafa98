"""The engine's thread: the only one that touches the engine.

Commands are queued by any thread and taken in a batch before a step; the events of a step go out
in one call of `deliver`, on this thread.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from prefixcache.engine.engine import Engine
from prefixcache.engine.messages import Command, Event
from prefixcache.errors import Unavailable

logger = logging.getLogger(__name__)

LONGEST_WAIT = 3600.0
"""Seconds to wait for a command at once; a queue refuses to wait for centuries."""

_STOP = object()


class EngineLoop:
    """Runs an engine in a thread of its own.

    deliver: called with all events of a step; must not block, and must not raise.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Sequence[Event]], None]) -> None:
        self.engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command | object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = threading.Event()
        self.fault: BaseException | None = None

    @property
    def healthy(self) -> bool:
        """True while the thread runs; False before it starts, after it stops, and after a fault."""
        return self._thread.is_alive() and not self._stopped.is_set()

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queue a command, from any thread. Raises Unavailable where the engine does not run."""
        if self._stopped.is_set():
            raise Unavailable("the engine has stopped")
        self._commands.put(command)

    def stop(self, timeout: float) -> None:
        """Stop after the current step and wait for the thread; live requests get no more events."""
        self._stopped.set()
        self._commands.put(_STOP)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._take_commands():
                events = self.engine.step() if self.engine.has_work else self._idle_step()
                if events:
                    self._deliver(events)
        except BaseException as error:
            logger.exception("the engine loop failed")
            self.fault = error
        finally:
            self._stopped.set()

    def _idle_step(self) -> list[Event]:
        self.engine.registry.expire()
        return self.engine.take_events()

    def _take_commands(self) -> bool:
        """Execute what is queued; without work, wait for something. False when it is to stop."""
        timeout = None if not self.engine.has_work else 0.0
        if timeout is None:
            timeout = self.engine.registry.next_deadline
            timeout = None if timeout is None else min(timeout, LONGEST_WAIT)
        try:
            while True:
                command = (
                    self._commands.get(timeout=timeout)
                    if timeout != 0.0
                    else self._commands.get_nowait()
                )
                if command is _STOP:
                    return False
                self.engine.execute(command)  # type: ignore[arg-type]
                timeout = 0.0
        except queue.Empty:
            return True
