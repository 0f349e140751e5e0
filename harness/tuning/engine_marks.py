"""What of an engine a tuned profile is of: which engine, its weights, and another engine's program and files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from engines.errors import EngineError
from harness.external.base import ExternalSpec
from harness.external.catalog import EXTERNAL
from harness.external_parts import files_of, found_build
from harness.file_digests import file_digests
from harness.state import state_folder

DTYPE = "float32"
"""Of weights, where a plan names none."""


class EngineMark(NamedTuple):
    """is_ours: joulebench's own engine, which torch and our kernels decide. program_sha256: of another's; None where it
    cannot be read."""

    engine: str
    weights: str
    is_ours: bool
    program_sha256: str | None
    program_version: str | None = None


def engine_mark(engine: Mapping[str, Any], model: Mapping[str, Any]) -> EngineMark:
    """engine, model: as a plan writes them. What a plan's check would refuse is told as it stands."""
    dtype = str(model.get("dtype", DTYPE))
    spec = EXTERNAL.get(str(engine.get("runs")))
    if spec is None:
        technique, quantise = engine.get("technique"), engine.get("quantise")
        name = technique.get("name") if isinstance(technique, Mapping) else technique
        forms = [f"{key} {form}" for key, form in sorted(quantise.items())] if isinstance(quantise, Mapping) else []
        return EngineMark(str(name), ", ".join([dtype, *forms]), True, None)
    try:
        read = spec.model_validate({"name": spec.tag, **on_any_cores(engine)})
    except ValidationError:
        return EngineMark(spec.tag, dtype, False, None)
    own = getattr(read, "weights", dtype)
    weights = str(own) if read.model_file is None else f"of {Path(read.model_file).name}"
    return EngineMark(spec.tag, weights, False, *_program(read))


def on_any_cores(engine: Mapping[str, Any]) -> dict[str, Any]:
    """An arm of another engine without its cores, which may be `tuned` and not known yet. Some must be told a number of
    threads: one."""
    rest = {key: value for key, value in engine.items() if key not in ("cores", "threads")}
    spec = EXTERNAL.get(str(engine.get("runs")))
    return rest if spec is None or spec.abilities.threads == "no" else {**rest, "threads": 1}


def _program(spec: ExternalSpec) -> tuple[str | None, str | None]:
    """(of its version and the digests of its files, wherever they lie; its version)."""
    try:
        version, files = found_build(spec).version, files_of(spec)
        digests = file_digests(list(files.values()), state_folder(), lambda note: None)
    except (EngineError, OSError):
        return None, None
    rows = [str(version), *sorted(digests.values())]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest(), version
