"""The border to a library that is not ours: whatever it raises comes out as our error, so that its device keeps a row.

A library's own errors are told apart first, each with its remedy; this is for what is left: a bug of the library, or an
answer that it did not expect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from devices.base import DeviceError

log = logging.getLogger(__name__)


@contextmanager
def library_errors(subject: str, library: str, error_type: type[DeviceError] = DeviceError) -> Iterator[None]:
    """Raises `error_type` for whatever is raised inside. Our own errors pass; Ctrl-C and the end of the program too."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        log.debug("%s: %s failed", subject, library, exc_info=error)
        raise error_type(f"{subject}: {library} failed ({said(error)})") from error


def said(error: BaseException) -> str:
    """The first line of what an error says, behind its name."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
