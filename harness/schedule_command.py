"""`joulebench schedule`: plans that run by themselves, again and again."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from harness.interrupts import raise_in_command
from harness.run_commands import AllowCode, Devices, PlanPath, Settings
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NOT_WRITTEN,
    EXIT_SOME_FAILED,
    AsJson,
    check_out,
    console_of,
    end_interrupted,
    fail,
    print_rows,
)
from harness.variables import CARRIED, is_carried
from results.printable import printable

if TYPE_CHECKING:
    from harness.schedule.due import Happened, World
    from harness.schedule.entries import Book, Entry, Kept

PLACE = "(the message comes in its input, in JOULEBENCH_MESSAGE, and in the place of an argument {})"
T = TypeVar("T")

schedule_app = typer.Typer(no_args_is_help=True, help="Run plans by themselves, again and again.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the entry; `joulebench schedule list` shows it.")]


@schedule_app.command()
def add(
    plan_path: PlanPath,
    every: Annotated[
        str, typer.Option(metavar="1d|12h|30m|1w", help="How often. Days and weeks go by the wall clock.")
    ],
    at: Annotated[
        str | None, typer.Option(metavar="HH:MM", help="Of days and weeks: the time of day; default: now.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option(metavar="AREA/CITY", help="Whose wall clock; default: this machine's.")
    ] = None,
    devices: Devices = None,
    quiet: Annotated[
        list[str] | None,
        typer.Option(metavar="22-06", help="Hours in which no run starts; one that goes on is left alone. Repeatable."),
    ] = None,
    settings: Settings = None,
    allow_code: AllowCode = False,
    out: Annotated[Path, typer.Option(help="The folder for its runs, each in a folder of its own.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Of the entry; default: the plan's.")] = None,
    notify: Annotated[str | None, typer.Option(metavar="COMMAND", help=f"Run when a run fails {PLACE}.")] = None,
    charge_to: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Of phones: no run starts below this charge.")
    ] = None,
    charge_on: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Switches a phone's charger on, such as 'uhubctl -l 1-1 -p 2 -a on'."),
    ] = None,
    charge_off: Annotated[str | None, typer.Option(metavar="COMMAND", help="Switches it off, before a run.")] = None,
) -> None:
    """Add a plan to the schedule. `install` makes this computer look by itself; `run-due` looks once."""
    from engines import environment_for_others
    from harness.schedule.entries import Charging, Entry, EntryError, Kept
    from harness.schedule.times import (
        TimeError,
        are_all_day,
        local_zone,
        parse_clock,
        parse_every,
        parse_quiet,
        rhythm,
        zone_of,
    )

    problems: list[str] = []

    def read(option: str, parse: Callable[[str], T], text: str) -> T | None:
        try:
            return parse(text)
        except TimeError as error:
            problems.append(f"{option} {error}")
            return None

    interval = read("--every", parse_every, every)
    wall = None if at is None else read("--at", parse_clock, at)
    hours = [found for one in quiet or () if (found := read("--quiet", parse_quiet, one)) is not None]
    if are_all_day(hours):
        problems.append(f"--quiet {', '.join(map(str, hours))}: leave no time at which a run may start; shorten one")
    zone_name = zone or local_zone()
    if zone_name is None:
        problems.append("--zone: this machine's time zone has no name; give one, such as --zone Europe/Berlin")
    else:
        read("--zone", zone_of, zone_name)
    if interval is not None and not interval.is_of_days and at is not None:
        problems.append(
            f"--at {at[:40]}: goes with days and weeks, and --every is {every}; leave it out, or --every 1d"
        )
    if charge_to is not None and not 0 < charge_to <= 100:
        problems.append(f"--charge-to {charge_to:g}: must be above 0 and at most 100")
    if charge_to is None and (charge_on or charge_off):
        problems.append("--charge-on, --charge-off: to which charge is not said; add --charge-to 80")
    if (charge_on is None) != (charge_off is None):
        problems.append("--charge-on and --charge-off go together; give both, or neither")
    notified = _argv("--notify", notify, problems)
    on, off = _argv("--charge-on", charge_on, problems), _argv("--charge-off", charge_off, problems)
    for problem in problems:
        typer.echo(f"error: {printable(problem)}", err=True)
    plan_name, plan_devices = _checked(plan_path, settings, allow_code, devices, bool(problems))
    if charge_to is not None and not any(one.startswith(("adb:", "ios:")) for one in plan_devices):
        fail(f"--charge-to: is for phones, and the plan runs on {', '.join(plan_devices)}; leave it out", EXIT_BAD_PLAN)
    assert interval is not None
    assert zone_name is not None
    told_name = name or "-".join([plan_name, *(devices or ())])
    _check_name(told_name)
    check_out(out)  # nobody is there when a run is refused
    book, now = _book(), datetime.now(UTC)
    entry = Entry(
        name=told_name,
        plan=str(plan_path.absolute()),
        plan_sha256=_digest(plan_path),
        devices=tuple(devices or ()),
        settings=tuple(settings or ()),
        allow_code=allow_code,
        folder=str(Path.cwd()),
        out=str(out.absolute()),
        carried=CARRIED,
        environment={key: value for key, value in environment_for_others().items() if is_carried(key)},
        rhythm=rhythm(interval, wall, zone_name, now),
        quiet=tuple(hours),
        notify=notified,
        charging=None if charge_to is None else Charging(to_percent=charge_to, on=on, off=off),
    )
    try:
        with book.lock(told_name):
            if told_name in book.names():
                fail(
                    f"{told_name}: is in the schedule already; give another --name, or `joulebench schedule remove"
                    f" {shlex.quote(told_name)}`",
                    EXIT_BAD_PLAN,
                )
            book.write(Kept(entry=entry))
    except EntryError as error:
        fail(str(error), EXIT_BAD_PLAN)
    except OSError as error:
        _fail_unwritten(book, error)
    _print_added(entry, now)


def _print_added(entry: Entry, now: datetime) -> None:
    from harness.schedule.due import next_at
    from harness.schedule.entries import Progress

    console = console_of()
    first = next_at(entry, Progress(), now)
    when = "at the next `run-due`" if first <= now else f"from {_wall(entry, first)} on"
    lines = [f"{entry.name}: {entry.rhythm}, {when}; runs in {entry.out}"]
    for hours in entry.quiet:
        lines.append(f"no run starts from {hours} ({entry.rhythm.zone}); one that goes on then is left alone")
    if entry.rhythm.every.is_of_days and (until := _quiet_at(entry)) is not None:
        lines.append(f"its time lies in the quiet hours: each run waits until {until}")
    if entry.charging is not None and entry.charging.on is None:
        lines.append("no command switches the charger: put the phone on it, and take it off, yourself")
    lines.append(
        "`joulebench schedule run-due` runs what is due; `joulebench schedule install` makes this computer ask"
    )
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _quiet_at(entry: Entry) -> str | None:
    from harness.schedule.times import quiet_until

    return quiet_until(entry.quiet, entry.rhythm.zone, entry.rhythm.at(0))


@schedule_app.command("list")
def list_entries(as_json: AsJson = False) -> None:
    """Show the entries: when each is due, and how its last run ended."""
    from harness.schedule.entries import EntryError
    from harness.schedule.world import RealWorld
    from harness.state import state_folder

    book = _book()
    world = RealWorld(state_folder(), book, lambda text: None)
    rows: list[dict[str, Any]] = []
    broken = []
    for name in _names(book):
        try:
            rows.append(_row(book, book.read(name), world))
        except EntryError as error:
            broken.append(str(error))
    if rows or as_json:
        print_rows(rows, as_json, "Schedule")
    elif not broken:
        typer.echo("nothing is scheduled; `joulebench schedule add PLAN --every 1d` adds a plan")
    for line in broken:
        typer.echo(f"error: {printable(line)}", err=True)
    if broken:
        raise typer.Exit(EXIT_BAD_PLAN)


def _row(book: Book, kept: Kept, world: World) -> dict[str, Any]:
    from harness.schedule.due import as_of, next_at
    from harness.schedule.times import quiet_until

    entry, last = kept.entry, kept.progress.last
    progress, now = as_of(kept, world), world.now()
    next_ = next_at(entry, progress, now)
    until = quiet_until(entry.quiet, entry.rhythm.zone, now)
    due = "now" if until is None else f"now; quiet until {until}"
    if progress.unfinished is not None:
        due = f"{due}: goes on with {progress.unfinished.folder}"
    if progress.owed is not None:
        due = f"{due}; {'could not run' if progress.unfinished is None else 'last'}: {progress.owed}"
    if book.is_locked(entry.name):
        due = "runs now"
    later = quiet_until(entry.quiet, entry.rhythm.zone, next_)
    wall = _wall(entry, next_) if later is None else f"{_wall(entry, next_)}; quiet until {later}"
    ended = None if last is None else f"{last.folder}: {last.failure or 'done'}"
    return {
        "name": entry.name,
        "plan": entry.plan,
        "devices": ", ".join(entry.devices) or "the plan's",
        "when": str(entry.rhythm),
        "no_start": ", ".join(map(str, entry.quiet)) or None,
        "next": due if next_ <= now else wall,
        "last": ended,
    }


@schedule_app.command("run-due")
def run_due() -> None:
    """Run what is due, the oldest first; go on with what was broken off. Says nothing where nothing is due."""
    from harness.schedule.due import run_due as one_pass
    from harness.schedule.world import RealWorld
    from harness.state import state_folder

    raise_in_command(is_long=True)
    console = console_of()
    book = _book()

    def echo(text: str) -> None:
        console.print(printable_lines(text), markup=False, highlight=False, soft_wrap=True, end="")

    def told(one: Happened) -> None:
        line = printable(f"{one.name}: {one.words}")
        if one.kind == "failed":
            typer.echo(f"error: {line}", err=True)
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        happened = one_pass(book, RealWorld(state_folder(), book, echo), told)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "finished trials are kept, the next `run-due` goes on with them")
    except OSError as error:
        _fail_unwritten(book, error)
    codes = {one.code for one in happened if one.kind == "failed"}
    if not happened and console.is_terminal:
        console.print("nothing is due; `joulebench schedule list` says when", markup=False, highlight=False)
    if codes:
        raise typer.Exit(codes.pop() if len(codes) == 1 else EXIT_SOME_FAILED)


@schedule_app.command()
def remove(name: Name) -> None:
    """Take an entry out of the schedule. Its runs stay."""
    from harness.schedule.entries import EntryError

    book = _book()
    try:
        book.remove(name)
    except EntryError as error:
        fail(str(error), EXIT_BAD_PLAN)
    except OSError as error:
        _fail_unwritten(book, error)
    typer.echo(f"{printable(name)}: removed; its runs stay where they are")


@schedule_app.command()
def install(
    system: Annotated[
        str | None, typer.Option("--with", metavar="systemd|launchd|cron", help="Default: what this computer has.")
    ] = None,
    every_min: Annotated[
        int, typer.Option("--minutes", min=1, max=1440, help="How often to look whether a run is due.")
    ] = 15,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files, and write none.")] = False,
) -> None:
    """Write what makes this computer call `run-due` by itself, and say how it is switched on and off."""
    from harness.schedule.units import MADE_BY, SYSTEMS, UnitError, fitting, units
    from harness.state import state_folder
    from results.report.files import replace_text

    if system is not None and system not in SYSTEMS:
        fail(f"--with {system}: no such system; take one of {', '.join(SYSTEMS)}", EXIT_BAD_PLAN)
    chosen = fitting() if system is None else next(one for one in SYSTEMS if one == system)
    if chosen == "cron" and not _is_cron_interval(every_min):
        fail(f"--minutes {every_min}: cron counts by the hour; take a divisor of 60, or whole hours", EXIT_BAD_PLAN)
    try:
        found = units(chosen, every_min, state_folder().absolute())
    except UnitError as error:
        fail(str(error), EXIT_BAD_PLAN)
    typer.echo(f"{found.what} ({chosen})")
    for unit in found.files:
        try:
            foreign = unit.path.exists() and MADE_BY not in unit.path.read_text(encoding="utf-8", errors="replace")
            if foreign:
                fail(f"{unit.path}: is there and not ours; move it away", EXIT_BAD_PLAN)
            if not dry_run:
                replace_text(unit.path, unit.text)
        except OSError as error:
            remedy = "make its folder writable, or write what --dry-run shows yourself"
            fail(f"{unit.path}: cannot be written ({error.strerror or error}); {remedy}", EXIT_NOT_WRITTEN)
        typer.echo(f"\n{printable(str(unit.path))}{' (not written)' if dry_run else ''}")
        typer.echo("".join(f"  {line}\n" for line in unit.text.splitlines()))
    typer.echo("Then:")
    for command, what in found.steps:
        typer.echo(f"  {command}\n      # {what}")


def _is_cron_interval(every_min: int) -> bool:
    return 60 % every_min == 0 or (every_min % 60 == 0 and 24 % (every_min // 60) == 0)


def printable_lines(text: str) -> str:
    """What a run says, line by line."""
    return "".join(f"{printable(line)}\n" for line in text.splitlines())


def _checked(
    plan_path: Path, settings: list[str] | None, allow_code: bool, devices: Sequence[str] | None, has_problems: bool
) -> tuple[str, list[str]]:
    """(the plan's name, its devices). Ends the command where the plan has problems, or options had."""
    from harness.run_commands import prepared
    from harness.sweep import MAX_CELLS

    with prepared(plan_path, settings, allow_code, MAX_CELLS, None, devices or ()) as (plan, _):
        if has_problems:
            raise typer.Exit(EXIT_BAD_PLAN)
        return plan.name, list(dict.fromkeys(cell.cell.device for cell in plan.cells))


def _argv(option: str, text: str | None, problems: list[str]) -> tuple[str, ...] | None:
    """A command as its words, its program by its whole path: timers look in other places."""
    if text is None:
        return None
    try:
        words = shlex.split(text)
    except ValueError as error:
        problems.append(f"{option} {text[:60]!r}: is no command ({error}); close the quotes")
        return None
    program = shutil.which(words[0]) if words else None
    if program is None:
        problems.append(f"{option} {text[:60]!r}: there is no such program; install it, or give its path")
        return None
    return (os.path.abspath(program), *words[1:])


def _check_name(name: str) -> None:
    from harness.plan_values import MAX_NAME
    from harness.schedule.entries import MOST_NAME, in_files

    is_long = len(name) > MAX_NAME or len(in_files(name)) > MOST_NAME
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable() or is_long:
        fail(
            f"--name {name[:60]!r}: names folders, so no slash, no leading dot, one line and at most {MAX_NAME}"
            f" characters, of which those that are not ASCII count six or more of {MOST_NAME}; give another",
            EXIT_BAD_PLAN,
        )


def _digest(plan: Path) -> str:
    from harness.schedule.due import sha256_of

    found = sha256_of(plan)
    if found is None:
        fail(f"{plan}: cannot be read any more", EXIT_BAD_PLAN)
    return found


def _book() -> Book:
    from harness.schedule.entries import Book
    from harness.state import state_folder

    return Book(state_folder())


def _names(book: Book) -> list[str]:
    try:
        return book.names()
    except OSError as error:
        _fail_unwritten(book, error)


def _wall(entry: Entry, at: datetime) -> str:
    from harness.schedule.times import zone_of

    return f"{at.astimezone(zone_of(entry.rhythm.zone)):%Y-%m-%d %H:%M}"


def _fail_unwritten(book: Book, error: OSError) -> NoReturn:
    fail(
        f"{error.filename or book.folder}: {error.strerror or error}; the schedule is kept there, make it writable or"
        " name another folder with JOULEBENCH_STATE",
        EXIT_NOT_WRITTEN,
    )
