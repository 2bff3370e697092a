"""Progress on stderr: a bar with elapsed time and ETA in a terminal, plain lines in a log file.

Library code receives a :data:`Progress` and calls it; it never prints.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: ``done`` of ``total`` steps of a stage are finished; total 0: not known."""

PLAIN_SECONDS = 10.0  # between two lines of the same stage


def no_progress(stage: str, done: int, total: int) -> None:
    """A :data:`Progress` that says nothing."""


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress while the block runs.

    Args:
        stream: where; stderr by default. A terminal gets bars, everything else plain lines.

    Yields:
        The callback for the library.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield PlainLines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = ("{task.description}", BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(file=stream)) as bars:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or 1)
            bars.update(tasks[stage], completed=done, total=total or max(done, 1))

        yield update


class PlainLines:
    """One line when a stage begins, when it ends, and at most every ``PLAIN_SECONDS`` between."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()
        self._last_call = clock()
        self._last_line = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Write a line if one is due."""
        now = self._clock()
        is_first = stage not in self._begun
        is_last = total > 0 and done >= total
        begun = self._begun.setdefault(stage, self._last_call if done else now)  # it may speak late for the first time
        self._last_call = now
        if (is_last and stage in self._ended) or not (is_first or is_last or now - self._last_line >= PLAIN_SECONDS):
            return
        if is_last:
            self._ended.add(stage)
        self._last_line = now
        elapsed = now - begun
        count = f"{done}/{total}" if total else str(done)
        eta = f", about {_clock(elapsed / done * (total - done))} left" if 0 < done < total else ""
        print(f"{stage}: {count} after {_clock(elapsed)}{eta}", file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
