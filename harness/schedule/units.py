"""What makes a computer call `joulebench schedule run-due` by itself: systemd timers, launchd, cron.

Each kind quotes in a way of its own. systemd.service(5): in double quotes a backslash and " are escaped, and %% and $$
stand for % and $. crontab(5): the command goes to sh, and before that an unescaped % ends it. launchd.plist(5) is XML.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from results.home import home_folder
from results.own_python import own_module

System = Literal["systemd", "launchd", "cron"]
SYSTEMS: tuple[System, ...] = ("systemd", "launchd", "cron")
NAME = "joulebench-schedule"
LABEL = "org.joulebench.schedule"
MADE_BY = "made by `joulebench schedule install`"
CARRIED = ("JOULEBENCH_STATE", "PATH")
"""Of the environment: where the schedule is, and where programs are. An entry knows the rest itself."""
HOUR_MIN = 60
MOST_CRON = 998
"""Characters of a command: Vixie's MAX_COMMAND is 1000, with the end of the line and of the text."""
UNREADABLE_IN_PROGRAM = "\"'\\$"
"""What systemd takes in the path of no program, though it takes it in an argument."""


class UnitError(ValueError):
    """What cannot be written into a unit."""


class Unit(NamedTuple):
    path: Path
    text: str


class Units(NamedTuple):
    """Files, and what their owner does with them."""

    files: tuple[Unit, ...]
    what: str
    steps: tuple[tuple[str, str], ...]
    """(command, what it does)."""


def fitting(platform: str = sys.platform, run_folder: Path = Path("/run/systemd/system")) -> System:
    """systemd is running where that folder is (sd_booted(3))."""
    if platform == "darwin":
        return "launchd"
    return "systemd" if run_folder.is_dir() else "cron"


def units(system: System, every_min: int, state: Path, environment: Mapping[str, str] = os.environ) -> Units:
    """Raises `UnitError`."""
    home = home_folder(environment)
    if home is None:
        raise UnitError("this user has no home folder, where such files belong; set HOME")
    command = (*own_module("joulebench"), "schedule", "run-due")
    carried = {"JOULEBENCH_STATE": str(state), "PATH": environment.get("PATH", os.defpath)}
    for text in (*command, *carried.values(), str(home)):
        if any(not character.isprintable() for character in text):
            raise UnitError(f"{text[:80]!r} has a character that no {system} file can hold; rename that folder")
    named = environment.get("XDG_CONFIG_HOME", "")
    config = Path(named) if os.path.isabs(named) else home / ".config"
    if system == "systemd":
        return _systemd(config / "systemd" / "user", command, carried, every_min)
    if system == "launchd":
        return _launchd(home, command, carried, every_min, state)
    return _cron(state, command, carried, every_min)


# --- systemd ---------------------------------------------------------------------------------------------------------


def _systemd(folder: Path, command: Sequence[str], environment: Mapping[str, str], every_min: int) -> Units:
    if set(command[0]) & set(UNREADABLE_IN_PROGRAM):
        command = ("/bin/sh", "-c", 'exec "$0" "$@"', *command)
    words = [_quoted(command[0]), *(_quoted(word, of_argument=True) for word in command[1:])]
    own = "\n".join(f"Environment={_quoted(f'{key}={value}')}" for key, value in environment.items())
    service = f"""# {MADE_BY}
[Unit]
Description=joulebench: the run that is due

[Service]
Type=oneshot
ExecStart={" ".join(words)}
{own}
# A run may take hours. When it is stopped, it has this long to keep what it finished.
TimeoutStartSec=infinity
TimeoutStopSec=300
KillMode=mixed
"""
    timer = f"""# {MADE_BY}
[Unit]
Description=joulebench: looks every {every_min} minutes whether a run is due

[Timer]
OnBootSec=2min
OnUnitInactiveSec={every_min}min
AccuracySec=1min

[Install]
WantedBy=timers.target
"""
    return Units(
        (Unit(folder / f"{NAME}.service", service), Unit(folder / f"{NAME}.timer", timer)),
        "two files of systemd, for your user: what is called, and when",
        (
            ("systemctl --user daemon-reload", "reads them"),
            (f"systemctl --user enable --now {NAME}.timer", "starts it, now and at each login"),
            ("loginctl enable-linger", "keeps it running while you are not logged in"),
            (
                f"systemctl --user status {NAME}.service",
                "says how the last call ended: a run that failed is a failed unit",
            ),
            (f"journalctl --user -u {NAME}", "shows what it said"),
            (f"systemctl --user disable --now {NAME}.timer", "ends it; then delete both files"),
        ),
    )


def _quoted(text: str, of_argument: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if of_argument else text}"'


# --- launchd ---------------------------------------------------------------------------------------------------------


def _launchd(home: Path, command: Sequence[str], environment: Mapping[str, str], every_min: int, state: Path) -> Units:
    path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    log = state / "schedule" / "launchd.log"
    content = {
        "Label": LABEL,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(environment),
        "StartInterval": every_min * 60,
        "RunAtLoad": True,
        # Any other type is held back by the system, and would be measured so.
        "ProcessType": "Interactive",
        # A run that is stopped has this long to keep what it finished.
        "ExitTimeOut": 300,
        # What runs say stands in the log of each entry.
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": str(log),
    }
    text = plistlib.dumps(content, sort_keys=False).decode()
    head, _, rest = text.partition("\n")
    shown = shlex.quote(str(path))
    return Units(
        (Unit(path, f"{head}\n<!-- {MADE_BY} -->\n{rest}"),),
        "a file of launchd, for your user: what is called, and when",
        (
            (f"launchctl bootstrap gui/$(id -u) {shown}", "starts it, now and at each login"),
            (f"launchctl print gui/$(id -u)/{LABEL}", "says how the last call ended (last exit code)"),
            (f"less {shlex.quote(str(log))}", "shows what went wrong"),
            (f"launchctl bootout gui/$(id -u)/{LABEL}", "ends it; then delete the file"),
        ),
    )


# --- cron ------------------------------------------------------------------------------------------------------------


def _cron(state: Path, command: Sequence[str], environment: Mapping[str, str], every_min: int) -> Units:
    if every_min < HOUR_MIN:
        when = f"*/{every_min} * * * *"
    else:
        when = f"0 */{every_min // HOUR_MIN} * * *" if every_min < 24 * HOUR_MIN else "0 0 * * *"
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    line = f"{settings} {shlex.join(command)} >/dev/null".replace("%", "\\%")
    if len(line) > MOST_CRON:
        raise UnitError(
            f"the line for cron has {len(line)} characters, and crons cut it after {MOST_CRON} without a word; give"
            " this command a shorter PATH: PATH=/usr/bin:/bin, or what your plans need"
        )
    path = state / "schedule" / "crontab"
    shown = shlex.quote(str(path))
    others = f"crontab -l 2>/dev/null | grep -vF -e {shlex.quote(shlex.join(command[2:]))} -e {shlex.quote(MADE_BY)}"
    return Units(
        (Unit(path, f"# {MADE_BY}\n{when} {line}\n"),),
        "a line for your crontab; cron mails what goes wrong, and nothing else",
        (
            (f"( {others}; cat {shown} ) | crontab -", "puts it into your crontab, in the place of an earlier one"),
            ("crontab -l", "shows your crontab"),
            ("crontab -e", "opens it: delete the line, and it has ended"),
        ),
    )
