"""Progress of long work: bars on a terminal, plain lines elsewhere. Always on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""Called with the step's name, how much is done, and the total; a total of 0 is unknown."""


@contextmanager
def progress() -> Iterator[Report]:
    """Show what is reported inside the block."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(console)
        return
    columns = (TextColumn("{task.description:>15}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _bars(bars)


def _bars(bars: Progress) -> Report:
    """One bar, of the step at hand."""
    task = bars.add_task("")

    def report(step: str, done: int, total: int) -> None:
        bars.update(task, description=step, completed=done, total=total or None)

    return report


def _plain(console: Console) -> Report:
    """One line when a step begins, and one for each further quarter of it."""
    quarters: dict[str, int] = {}

    def report(step: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 0
        if step not in quarters:
            console.print(f"{step} ...", highlight=False)
        elif quarters[step] < quarter:
            console.print(f"{step}: {25 * quarter} %", highlight=False)
        quarters[step] = quarter

    return report
