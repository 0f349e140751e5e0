"""What a folder of converted graphs holds: `manifest.json`, written last, so that a folder which has it is complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from engines.errors import EngineError
from results.records import Record

MANIFEST = "manifest.json"
PLANNED = "conversion.json"
"""The same record, of a conversion that is not complete."""
Weights = Literal["float16", "int8", "int4"]
Role = Literal["attention", "experts", "shared", "dense"]


class GraphFunction(Record):
    """One function of a package: a graph of fixed shapes.

    rows: of each expert, or of the chunk. experts: those whose rows follow one another on the last axis, in their
    order; empty of what is no expert. past: positions that attention sees beside its chunk (stateless), or in all
    (stateful); None of what is no attention.
    """

    name: str = Field(pattern="^[a-z0-9_]+$")
    kind: Literal["attention", "experts", "rows"]
    rows: int = Field(ge=1)
    experts: tuple[int, ...] = ()
    stateful: bool = False
    past: int | None = Field(None, ge=1)


class PackagePlan(Record):
    """One package. Its functions share their weights, which lie once in its file."""

    path: str = Field(pattern=r"^layer-\d+/[a-z]+(-\d+)?\.mlpackage$")
    """From the folder of the manifest."""
    layer: int = Field(ge=0)
    role: Role
    experts: tuple[int, ...] = ()
    functions: tuple[GraphFunction, ...] = Field(min_length=1)
    weight_bytes: int = Field(ge=0)
    """Of its weights, in the form in which they are stored: reckoned before anything is written."""

    @property
    def default_function(self) -> str:
        return self.functions[0].name


class Manifest(Record):
    """A conversion. What stands here decides its packages: another conversion has another manifest."""

    format: Literal[1] = 1
    model: str
    """As it was named."""
    model_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of config and weights."""
    technique: str
    technique_parameters: dict[str, Any]
    profile_sha256: str | None
    """Of the counts that shapes were frozen by; None of a technique that learns nothing."""
    chunk: int = Field(ge=1)
    context: int = Field(ge=1)
    """Positions that attention holds, the most of a sequence."""
    decode_tokens: int = Field(ge=1)
    """Of the attention graph of decode steps."""
    weights: Weights
    converter: str
    packages: tuple[PackagePlan, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(package.weight_bytes for package in self.packages)

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        """Whole or not at all. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.{os.getpid()}"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / name)
        finally:
            temporary.unlink(missing_ok=True)


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Raises `EngineError`: none is there, or it is none."""
    path = folder / name
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        if name == MANIFEST and (folder / PLANNED).is_file():
            raise EngineError(
                f"{folder}: its conversion is not complete; give the same `joulebench coreml convert` again, which goes"
                " on where it was"
            ) from error
        raise EngineError(f"{path}: cannot be read ({error.strerror}); name a folder of `coreml convert`") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}." for part in first["loc"])[:-1]
        told = f"{where}: {first['msg']}" if where else first["msg"]
        raise EngineError(
            f"{path}: is damaged, or of another version of joulebench ({told}); convert into another folder with"
            " `joulebench coreml convert`"
        ) from error
