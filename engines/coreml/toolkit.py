"""coremltools, loaded when it is needed: its import takes seconds and prints."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from engines.errors import EngineError

REMEDY = "install it with `pip install 'joulebench[coreml]'`"
NOT_CONVERTED = "sklearn"
"""A library whose models coremltools converts and we do not: to import it takes half of the time of the whole."""
_LOCK = threading.Lock()


def installed_version() -> str:
    """Without loading it. Raises `EngineError` where it is not installed."""
    try:
        return importlib.metadata.version("coremltools")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(f"coremltools is not installed, which reads and writes Core ML packages; {REMEDY}") from error


@contextmanager
def _without(library: str) -> Iterator[None]:
    """What is imported meanwhile finds it not installed, unless it was imported already. For a process in which one
    thread imports: others would not find it either."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.modules.get(library, ...) is None:  # what was imported may have put another there, or taken it out
            sys.modules.pop(library, None)


def load_coremltools() -> Any:
    """The package. Raises `EngineError` where it is not installed, or does not load."""
    installed_version()
    with _LOCK:
        # It warns of every library newer than itself and, off macOS, of every part that only macOS has.
        logger = logging.getLogger("coremltools")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with _without(NOT_CONVERTED):
                found: ModuleType = importlib.import_module("coremltools")
            _ = found.__version__  # a folder that an installation left behind has none
        except Exception as error:
            raise EngineError(
                f"coremltools is installed and does not load ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        finally:
            logger.setLevel(max(level, logging.ERROR))
    return found
