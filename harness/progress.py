"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from results.cells import mark_words
from results.printable import with_colon
from results.trials import Trial

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


WAIT_LINE_EVERY_S = 60.0


class WaitLines:
    """A line when a wait begins, and one now and then while it goes on: the countdown would fill a log."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._device = ""
        self._told_s = 0.0

    def waiting(self, device: str, reason: str, left_s: float) -> None:
        now_s = time.monotonic()
        if device != self._device or now_s - self._told_s >= WAIT_LINE_EVERY_S:
            self._device, self._told_s = device, now_s
            self._say(f"{with_colon(device)} {reason}; waiting, at most {left_s:.0f} s")

    def ended(self) -> None:
        """The next wait begins anew."""
        self._device = ""


class PlainProgress:
    """One line a finished trial, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._n_trials = 0
        self._n_done = 0
        self._is_open = False
        """Rounds are added one by one: nobody knows yet how many there will be."""
        self._wait_lines = WaitLines(self._say)

    def begin(self, n_trials: int, n_done: int) -> None:
        self._n_trials, self._n_done = n_trials, n_done
        if n_done:
            of_all = f" of {n_trials}" if n_trials > n_done else ""  # how many rounds will follow nobody knows
            self._say(f"resuming: {n_done}{of_all} trials are there")

    def preparing(self, cell: str) -> None:
        """Not worth a line."""

    def waiting(self, device: str, reason: str, left_s: float) -> None:
        self._wait_lines.waiting(device, reason, left_s)

    def trial_started(self, cell: str, repeat: int) -> None:
        self._wait_lines.ended()

    def trial_repeated(self, cell: str, repeat: int, reason: str) -> None:
        self._say(f"{cell} · trial {repeat + 1} · again: {reason}")

    def trial_finished(self, cell: str, trial: Trial) -> None:
        self._n_done += 1
        of_all = "" if self._is_open else f"/{self._n_trials}"
        self._say(f"[{self._n_done}{of_all}] {cell} · trial {trial.repeat + 1} · {outcome(trial)}")

    def cell_finished(self, cell: str, n_trials_left_out: int) -> None:
        self._n_trials -= n_trials_left_out
        trials = "trial" if n_trials_left_out == 1 else "trials"
        self._say(f"{cell}: interval is narrow enough, {n_trials_left_out} {trials} not needed")

    def trials_added(self, n: int) -> None:
        self._n_trials += n
        self._is_open = True

    def warned(self, line: str) -> None:
        self._say(f"warning: {line}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to take down."""


class LiveProgress:
    """A bar with the cell, the trial and the time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._console = console
        # There before the run begins: a device that is opened may have to be waited for.
        self._task: TaskID = self._bar.add_task("opening the devices", total=None, left="")
        self._n_left = 0
        self._finished = 0
        self._started_s = time.monotonic()

    def begin(self, n_trials: int, n_done: int) -> None:
        self._n_left = n_trials - n_done
        self._bar.update(self._task, description="starting", total=n_trials, completed=n_done)

    def preparing(self, cell: str) -> None:
        self._describe(f"{cell}: preparing")

    def waiting(self, device: str, reason: str, left_s: float) -> None:
        minutes, seconds = divmod(round(left_s), 60)
        self._describe(f"{device} · gives up in {minutes}:{seconds:02d} · {reason}")

    def trial_started(self, cell: str, repeat: int) -> None:
        self._describe(f"{cell} · trial {repeat + 1}")

    def trial_repeated(self, cell: str, repeat: int, reason: str) -> None:
        self._describe(f"{cell} · trial {repeat + 1} · again: {reason}")

    def trial_finished(self, cell: str, trial: Trial) -> None:
        self._finished += 1
        self._advance(1)
        if trial.failure is not None:
            failed = "failed: " if trial.has_failed else ""
            self._console.print(
                f"{failed}{cell} · trial {trial.repeat + 1}: {trial.failure.error}", markup=False, highlight=False
            )

    def cell_finished(self, cell: str, n_trials_left_out: int) -> None:
        self._advance(n_trials_left_out)

    def trials_added(self, n: int) -> None:
        self._n_left += n
        task = self._bar.tasks[0]
        self._bar.update(self._task, total=(task.total or 0) + n)

    def warned(self, line: str) -> None:
        self._console.print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)

    def _advance(self, n: int) -> None:
        self._n_left -= n
        per_trial_s = (time.monotonic() - self._started_s) / max(1, self._finished)
        left_s = round(per_trial_s * self._n_left)
        self._bar.update(self._task, advance=n, left=f"{left_s // 60}:{left_s % 60:02d} left")

    def _describe(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def outcome(trial: Trial) -> str:
    """A finished trial in a few words."""
    if trial.failure is not None:
        tried = f" after {trial.attempts} attempts" if trial.attempts > 1 else ""
        return f"FAILED{tried}: {trial.failure.error}" if trial.has_failed else trial.failure.error
    window_s = (trial.window_end_s or 0.0) - (trial.window_start_s or 0.0)
    energy = next((r for r in trial.energy if r.phase == "all" and r.component == "total"), None)
    if energy is None:
        joules = "no meter"
    elif energy.energy_j is None:
        joules = f"no energy: {energy.reason}"
    else:
        joules = f"{energy.energy_j:.3g} J {energy.method}"
    kind = "" if trial.time_method == "measured" else " modelled"
    tainted = f" · left out: {mark_words(trial)}" if trial.marks else ""
    n = len(trial.completions)
    requests = f"{n} request{'s' if n != 1 else ''}"
    return f"{window_s:.3g} s{kind} · {requests} · {joules}{tainted}"
