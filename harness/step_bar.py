"""A command's progress: a bar on a terminal, elsewhere lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from results.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


class StepBar:
    """What such bars share. of_bytes: amounts are bytes, else they are counted."""

    def __init__(self, console: Console, of_bytes: bool = False) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            DownloadColumn() if of_bytes else MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._n = self._n_done = 0

    def _say(self, line: str) -> None:
        """Where there is no terminal."""
        if not self._console.is_terminal:
            self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
