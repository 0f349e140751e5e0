"""A technique as a plan gives it: the record of its name, read strictly."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from engines.oracle import OracleParameters
from engines.techniques.parameters import Composed
from harness.catalog import TECHNIQUES
from results.records import Record


def _tagged(name: str, parameters: type[Record]) -> type[BaseModel]:
    """A parameters record with its name as the union's tag."""
    tag: Any = (Literal[name], ...)
    return create_model(name, __base__=parameters, name=tag)


class ReadByName:
    """Of a technique: read as the record of its name. Presets have their choices' parameters, so their records are
    made; each is a `Composed` with its name as the tag."""

    records: Any = functools.reduce(
        operator.or_, (_tagged(name, entry.parameters) for name, entry in TECHNIQUES.items())
    )

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Annotated[self.records, Field(discriminator="name")])


TechniqueSpec = Annotated[Composed | OracleParameters, ReadByName()]
"""What a plan's technique is, to the type checker and to whoever asks at run time."""


def technique_changes(technique: TechniqueSpec) -> dict[str, object]:
    """The parameters that are not the technique's own; of a choice that a plan spells out, its kind and what of it."""
    found: dict[str, object] = {}
    for name, value in technique.model_dump(mode="json", exclude={"name"}, exclude_defaults=True).items():
        kind = getattr(getattr(technique, name), "kind", None)
        found |= {name: value} if kind is None else {name: kind, **{f"{name}.{k}": v for k, v in value.items()}}
    return found
