"""llama.cpp in this process, through the shared library that the wheel xllamacpp carries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from engines.errors import EngineError
from engines.external.base import Found

WHEEL = "xllamacpp"
REMEDY = "install it with `pip install joulebench[llama-cpp]`"


def find_wheel() -> Found:
    """The wheel, without loading it. Raises `EngineError`."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise EngineError(f"llama.cpp is not here: no Python package {WHEEL}; {REMEDY}")
    folder = Path(spec.origin).parent
    libraries = sorted(folder.glob(f"{WHEEL}*.so"))
    if not libraries:
        raise EngineError(f"llama.cpp is not here: {folder} holds no library; {REMEDY}")
    library = libraries[0]
    return Found(str(library), f"{WHEEL} {importlib.metadata.version(WHEEL)}", {f"{WHEEL} library": library})
