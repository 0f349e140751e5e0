"""The model of a plan: one that runs, or a shape at which routing is priced while no model runs.

A key of the other kind is refused where it stands, with the reason (`misplaced`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from engines.pricing.routing_specs import RoutingSpec
from engines.pricing.shapes import label_of_shape
from results.records import Record

OF_A_SHAPE = "is of a model that does not run; a model that runs routes by itself: remove the line, or give shape"


class ModelSpec(Record):
    """Which checkpoint, and in what type its weights are held (arithmetic is fp32 on a CPU)."""

    tag: ClassVar[str] = "computed"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(dict.fromkeys(("routing", "recall"), OF_A_SHAPE))

    source: str = Field(min_length=1)
    """A Hugging Face folder, a hub id, or `bundled:NAME`. safetensors only."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.source


class PlayedModelSpec(Record):
    """A model that does not run: its sizes, and where its routing comes from."""

    tag: ClassVar[str] = "played"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "source": "names a model that runs, and shape one that does not; remove one of them",
            "dtype": "is of weights that are loaded, and here are none: they count two bytes a value, or as quantise of"
            " an engine says; remove the line",
        }
    )
    dtype: ClassVar[Literal["bfloat16"]] = "bfloat16"
    """Two bytes a value, as sheets price it."""

    shape: str = Field(min_length=1)
    """A published model by name, or the path of a config.json or of its folder."""
    routing: RoutingSpec | None = None
    """None of a dense model only."""
    recall: float | None = Field(None, ge=0, le=1)
    """Of the predictions of techniques that predict experts: the share of the chosen experts that they name."""

    @property
    def label(self) -> str:
        return label_of_shape(self.shape)

    @property
    def source(self) -> str:
        """What stands for it where models are told apart. Shapes with unlike routing are never compared as one."""
        return f"shape {self.model_dump_json()}"


def _tag_of(raw: object) -> str:
    if isinstance(raw, Mapping):
        return PlayedModelSpec.tag if "shape" in raw else ModelSpec.tag
    return str(getattr(raw, "tag", ModelSpec.tag))


AnyModelSpec = Annotated[
    Annotated[ModelSpec, Tag("computed")] | Annotated[PlayedModelSpec, Tag("played")], Discriminator(_tag_of)
]


def routing_path(spec: PlayedModelSpec) -> Path | None:
    """The file that its routing is read from, or None."""
    path: Any = getattr(spec.routing, "path", None)
    return None if path is None else Path(path).expanduser()
