"""What a person sees of a fleet: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from harness.fleet.state import DeviceState, FleetState
from harness.progress import outcome
from results.printable import printable
from results.trials import Trial

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 30
"""Of the live table. Devices that are doing nothing are left out first."""
STALE_S = 30.0
ORDER = ("refused", "offered twice", "not in the plan", "absent", "working", "describing", "idle", "finished")
WORDS = {
    "absent": "no worker has joined",
    "describing": "looks at its device",
    "idle": "ready",
    "finished": "has nothing more to do",
}


def seconds_told(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def doing_told(device: DeviceState) -> str:
    if device.state == "working":
        attempt = f", attempt {device.attempt}" if (device.attempt or 1) > 1 else ""
        words = f": {device.words}" if device.words else ""
        return f"{device.cell} · trial {(device.repeat or 0) + 1}{attempt}{words}"
    told = WORDS.get(device.state, device.state)
    return f"{told}: {device.words}" if device.words else told


def age_told(state: FleetState) -> str:
    """How old what is known is: a coordinator that was killed tells nothing more."""
    if state.is_over:
        return f"over since {state.written_at}"
    age_s = (datetime.now(UTC) - datetime.fromisoformat(state.written_at)).total_seconds()
    told = f"{seconds_told(max(0.0, age_s))} ago"
    return told if age_s < STALE_S else f"{told}; it tells nothing any more: `fleet start --resume` goes on"


def fleet_table(state: FleetState, rate_per_s: float | None = None, most_rows: int | None = MOST_ROWS) -> Table:
    """One row a device, those that need somebody first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    left = state.n_trials - state.n_done
    title = f"{state.name}: {state.n_done} of {state.n_trials} trials"
    if state.n_failed:
        title += f", {state.n_failed} failed"
    if state.is_over:
        title += ", over"
    elif rate_per_s:
        title += f", {rate_per_s * 60:.3g} a minute, about {seconds_told(left / rate_per_s)} left"
    table = Table(title=Text(printable(title), style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", overflow="fold", min_width=8)
    table.add_column("on", overflow="fold")
    table.add_column("done", justify="right")
    table.add_column("lost", justify="right")
    table.add_column("for", justify="right")
    table.add_column("doing", overflow="fold")
    devices = sorted(state.devices, key=lambda d: ORDER.index(d.state))
    for device in devices[:most_rows]:
        needs_somebody = device.state in ("refused", "offered twice", "not in the plan")
        table.add_row(
            Text(printable(device.device)),
            Text(printable(device.host or "")),
            str(device.n_done),
            str(device.n_lost) if device.n_lost else "",
            "" if device.since_s is None else seconds_told(device.since_s),
            Text(printable(doing_told(device)), style="bold red" if needs_somebody else ""),
        )
    if most_rows is not None and len(devices) > most_rows:
        table.caption = Text(f"and {len(devices) - most_rows} devices more: joulebench fleet status")
    return table


class FleetView:
    """`show` draws the table where there is a terminal; `say` prints a line everywhere."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> FleetView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def show(self, state: FleetState, rate_per_s: float | None) -> None:
        if self._live is not None:
            self._live.update(fleet_table(state, rate_per_s), refresh=True)

    def trial(self, n_done: int, n_trials: int, cell: str, trial: Trial) -> None:
        """A line for logs; on a terminal the table shows it, and failures alone have a line."""
        if self._live is None or trial.has_failed:
            self.say(f"[{n_done}/{n_trials}] {cell} · trial {trial.repeat + 1} · {outcome(trial)}")
