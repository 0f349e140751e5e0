"""What `joulebench schedule install` writes for systemd, launchd and cron, read as they read it."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.schedule.units import UnitError, units

ODD = "a b%c$d\"e\\f'g;h"


@pytest.mark.parametrize("folder", ["a b%c;d", ODD])
def test_systemd_takes_the_units_with_odd_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    home = tmp_path / folder
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(home / "bin" / "python"))
    found = units("systemd", 15, home / "state", {"HOME": str(tmp_path), "PATH": "/usr/bin"})
    for unit in found.files:
        (tmp_path / unit.path.name).write_text(unit.text)
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze, which checks units, is not installed")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", *(str(tmp_path / unit.path.name) for unit in found.files)],
        capture_output=True, text=True, check=False, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    # It looks the program up: a path that it misread would not be there. The machine's own units have sockets, whose
    # paths are too long in some folders.
    told = [line for line in done.stderr.splitlines() if any(unit.path.name in line for unit in found.files)]
    assert (done.returncode, told) == (0, [])


def test_launchd_gets_a_list_of_words(tmp_path: Path) -> None:
    found = units("launchd", 20, tmp_path / ODD, {"HOME": str(tmp_path), "PATH": "/usr/bin"})
    [unit] = found.files
    read = plistlib.loads(unit.text.encode())
    assert read["ProgramArguments"] == [sys.executable, "-P", "-m", "joulebench", "schedule", "run-due"]
    assert read["EnvironmentVariables"] == {"JOULEBENCH_STATE": str(tmp_path / ODD), "PATH": "/usr/bin"}
    assert read["StartInterval"] == 1200
    assert read["ProcessType"] == "Interactive"
    assert unit.path == tmp_path / "Library" / "LaunchAgents" / "org.joulebench.schedule.plist"


def test_cron_gives_the_shell_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / ODD / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$JOULEBENCH_STATE" "$@" >"$0.said"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = units("cron", 15, tmp_path / "st%ate", {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    line = found.files[0].text.splitlines()[-1]
    assert line.startswith("*/15 * * * * ")
    # crontab(5): "\\%" is a %, and the rest goes to /bin/sh.
    command = line.removeprefix("*/15 * * * * ").replace("\\%", "%")
    assert "%" not in line.replace("\\%", "")
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert (program.parent / "python.said").read_text().splitlines() == [
        str(tmp_path / "st%ate"), "-P", "-m", "joulebench", "schedule", "run-due"
    ]  # fmt: skip


def test_cron_gets_one_line_however_often_it_is_installed(tmp_path: Path) -> None:
    """By a crontab that keeps what it is given. Two lines looked twice as often as was asked."""
    kept = tmp_path / "kept"
    program = tmp_path / "bin" / "crontab"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1" = -l ] && exec cat "{kept}"\nin=$(cat)\nprintf "%s\\n" "$in" >"{kept}"\n')
    program.chmod(0o755)
    path = f"{program.parent}:/usr/bin:/bin"
    own = "0 3 * * * /home/me/mine --joulebench"
    for n, before in enumerate((None, own, f"# mine\n{own}")):
        if before is not None:
            kept.write_text(f"{before}\n")
        for every_min in (15, 30, 60):
            found = units("cron", every_min, tmp_path / "st'ate", {"HOME": str(tmp_path), "PATH": f"/of/{every_min}"})
            found.files[0].path.parent.mkdir(exist_ok=True, parents=True)
            found.files[0].path.write_text(found.files[0].text)
            subprocess.run(["/bin/sh", "-c", found.steps[0][0]], check=True, env={"PATH": path})
        lines = kept.read_text().splitlines()
        assert lines[:n] == ([] if before is None else before.splitlines())
        assert lines[n:] == found.files[0].text.splitlines()


def test_a_line_that_crons_would_cut_is_refused(tmp_path: Path) -> None:
    """The rest of a command of more than 998 characters is lost without a word: what is left looks at nothing."""
    path = ":".join(f"/a/folder/of/another/operating/system/{i}" for i in range(40))
    with pytest.raises(UnitError, match=r"^the line for cron has \d{4} characters, and crons cut it after 998"):
        units("cron", 15, tmp_path, {"HOME": str(tmp_path), "PATH": path})
    units("systemd", 15, tmp_path, {"HOME": str(tmp_path), "PATH": path})
