"""What joulebench keeps between runs, for its user: the last self-test of each device.

In JOULEBENCH_STATE, else where the system keeps such things: $XDG_STATE_HOME/joulebench or ~/.local/state/joulebench,
on a Mac ~/Library/Application Support/joulebench. A run copies what holds for its devices, so that its report can be
made again anywhere.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from results.environments import Environment
from results.home import home_folder
from results.report.files import replace_text
from results.self_tests import SelfTest

STATE_VARIABLE = "JOULEBENCH_STATE"
SAME_MACHINE = ("machine", "cpu_model", "n_threads", "memory_bytes")
"""A home folder may be shared by machines: a self-test holds for the one that it was made on."""

log = logging.getLogger(__name__)


def state_folder(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    if environment.get(STATE_VARIABLE):
        return Path(environment[STATE_VARIABLE]).expanduser()
    # Nothing can be kept for a user without a home: writing there fails, and says so.
    home = home_folder(environment) or Path("/")
    if platform == "darwin":
        return home / "Library" / "Application Support" / "joulebench"
    # A relative path is to be ignored (XDG Base Directory Specification): it would follow the current folder.
    named = environment.get("XDG_STATE_HOME", "")
    return (Path(named) if os.path.isabs(named) else home / ".local" / "state") / "joulebench"


def keep_self_test(found: SelfTest, folder: Path) -> Path:
    """Replaces the one before of this device. Raises `OSError`."""
    path = _path(found.device, folder)
    replace_text(path, found.model_dump_json(indent=1) + "\n")
    return path


def last_self_test(device: str, environment: Environment, folder: Path) -> SelfTest | None:
    """The last one of a device, where it was made on the same machine and can still be read."""
    path = _path(device, folder)
    try:
        found = SelfTest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.warning("%s cannot be read (%s); make it anew: joulebench doctor --device %s", path, error, device)
        return None
    then = found.environment
    if then is None or any(getattr(then, key) != getattr(environment, key) for key in SAME_MACHINE):
        return None
    return None if environment.is_another_unit(then) or environment.other_gpus(then) else found


def _path(device: str, folder: Path) -> Path:
    return folder / "doctor" / f"{quote(device, safe='')}.json"
