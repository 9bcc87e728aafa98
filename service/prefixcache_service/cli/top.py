"""`prefixcache top`: a running server's figures in the terminal, anew every second.

Owns the loop, the keys and what happens while the server is away; `frame` makes the picture.
"""

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

from prefixcache.engine.messages import CacheStats
from prefixcache.errors import PrefixCacheError
from prefixcache_service.cli.client import Ca, Certificate, Salt, Server, Token
from prefixcache_service.cli.config import ConfigFile, flag
from prefixcache_service.cli.frame import Moment, frame, no_answer
from prefixcache_service.client import Client
from prefixcache_service.limits import DEFAULT_TARGET

RECENT_SECONDS = 60.0
PATIENCE_SECONDS = 5.0
NO_TERMINAL = 120, 60  # columns and lines

Interval = Annotated[float, flag("Seconds between two looks.", min=0.1, max=3600.0)]
Once = Annotated[bool, flag("Print one picture and exit.")]


def top(  # noqa: PLR0917 (each is a flag)
    interval: Interval = 1.0,
    once: Once = False,
    salt: Salt = "",
    server: Server = DEFAULT_TARGET,
    token: Token = "",
    ca: Ca = "",
    certificate: Certificate = "",
    config: ConfigFile = None,
) -> None:
    """Watch hit rate, misses, the pool and the sequences live. q quits.

    \b
      prefixcache top
      prefixcache top --server 10.0.0.7:50051 --interval 5
      prefixcache top --once                       # one picture, for scripts
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.size = ConsoleDimensions(*NO_TERMINAL)
    with Client(
        server,
        cache_salt=salt,
        timeout=PATIENCE_SECONDS,
        token=token,
        ca=ca,
        certificate=certificate,
    ) as client:
        look = _Look(client, server, console)
        if once or not console.is_terminal:
            console.print(look.now())
        else:
            with suppress(KeyboardInterrupt):
                _watch(look, interval, console)


class _Look:
    """Asks the server, and remembers a minute."""

    def __init__(self, client: Client, server: str, console: Console) -> None:
        self._client = client
        self._server = server
        self._console = console
        self._past: deque[tuple[float, CacheStats]] = deque()

    def now(self) -> RenderableType:
        """The picture of this moment. Raises what the server answers with."""
        stats, sequences = self._client.stats(), self._client.sequences()
        clock = time.strftime("%H:%M:%S")
        size = self._console.size
        recent = self._recent(stats)
        return frame(Moment(self._server, clock, stats, sequences, recent, size.width, size.height))

    def or_why_not(self) -> RenderableType:
        """The same, or why there is none: the server may come back."""
        try:
            return self.now()
        except PrefixCacheError as error:
            self._past.clear()
            return no_answer(self._server, str(error))

    def _recent(self, stats: CacheStats) -> float | None:
        """Hit rate since a minute ago, or since the first look."""
        now = time.monotonic()
        self._past.append((now, stats))
        while self._past[0][0] < now - RECENT_SECONDS:
            self._past.popleft()
        first = self._past[0][1]
        if (
            first.cached_tokens + first.computed_tokens
            > stats.cached_tokens + stats.computed_tokens
        ):
            self._past.clear()  # another server answers now
            return None
        cached = stats.cached_tokens - first.cached_tokens
        looked_up = cached + stats.computed_tokens - first.computed_tokens
        return cached / looked_up if looked_up else None


def _watch(look: _Look, interval: float, console: Console) -> None:
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(look.or_why_not(), refresh=True)
            if "q" in pressed(interval).lower():
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read keys at once: a function that waits so many seconds for some, and gives "" without.

    Where keys cannot be read one by one (no terminal, or a system without termios), Ctrl-C ends.
    """
    try:
        import termios  # noqa: PLC0415 (not on every system)
        import tty  # noqa: PLC0415

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, termios.error, ValueError):
        yield _sleep
        return
    tty.setcbreak(sys.stdin)
    try:
        yield _key_within
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _key_within(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if ready else ""
