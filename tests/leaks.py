"""What no test may leave behind: threads and open files of the process; all that an engine holds.

Cheap: two listings a test. Where something is new, garbage is collected and gRPC gets time to close
its sockets before that counts.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefixcache import Engine

SECONDS = 5.0
"""How long a channel that was closed may take to let go of its sockets."""

_FOR_THE_SESSION = ("tokenize_", "tqdm_monitor")
"""Threads that stay: a server's pool makes its own when it first needs them, and tqdm has one."""


_FONTS = "/matplotlib/mpl-data/fonts/"
"""Files that stay: matplotlib keeps the fonts that it has drawn with."""


def open_files() -> frozenset[str]:
    """What this process has open, by name: a socket's says which one it is.

    Without gRPC's own event counters, of which it keeps a pool.
    """
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the listing itself
            continue
    return frozenset(
        name for name in names if not name.startswith("anon_inode:") and _FONTS not in name
    )


def live_threads() -> frozenset[threading.Thread]:
    """Threads of Python, but for those that stay with the session."""
    return frozenset(
        thread for thread in threading.enumerate() if not thread.name.startswith(_FOR_THE_SESSION)
    )


@contextmanager
def nothing_leaks() -> Iterator[None]:
    """Raises AssertionError, naming them, where threads or files stay open behind the block."""
    files, threads = open_files(), live_threads()
    yield
    deadline = time.monotonic() + SECONDS
    collected = False
    while True:
        more = sorted(open_files() - files)
        started = sorted(thread.name for thread in live_threads() - threads)
        if not more and not started:
            return
        assert time.monotonic() < deadline, f"left open: {more}; left running: {started}"
        if not collected:
            gc.collect()
            collected = True
        time.sleep(0.01)


def check_idle(engine: Engine) -> None:
    """Nothing runs or waits, and whatever is held belongs to a handle that a client has."""
    engine.check_integrity()
    manager, registry = engine.manager, engine.registry
    assert not engine.has_work
    assert not engine._groups
    assert not engine.scheduler._group_of
    assert not manager.tables
    assert len(manager.in_flight) == 0
    kept = [entry.lease for entry in registry.entries(None)]
    assert all(lease is not None for lease in kept)
    assert manager.leases == set(kept)
    assert registry.num_kept == len(kept)
    assert manager.pins == {entry.pin for entry in registry.pins()}
    assert manager.num_in_use == manager.num_pinned()


def check_nothing_is_lost(engine: Engine) -> None:
    """`check_idle`; and once clients have given all back, every block is free."""
    check_idle(engine)
    for entry in list(engine.registry.entries(None)):
        engine.registry.drop(entry)
    for pin in engine.registry.pins():
        engine.registry.unpin(pin.id, None)
    engine.manager.flush()
    assert not engine.manager.leases
    assert not engine.manager.idle_tails
    assert engine.manager.num_free == engine.num_blocks
    engine.check_integrity()
