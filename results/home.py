"""The home folder of the user that the program runs as."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def home_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """HOME, else what the system knows of the user; None for a user without one."""
    # A relative path would follow the current folder.
    named = environment.get("HOME", "")
    if not os.path.isabs(named):
        with suppress(KeyError):
            named = pwd.getpwuid(os.geteuid()).pw_dir
    return Path(named) if os.path.isabs(named) else None
