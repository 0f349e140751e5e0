"""The systems of the sources, each a named choice of the four decisions with the unit of the backbone.

In a plan, `technique = { name = "npumoe" }` takes a preset, and any parameter of its choices may stand beside the name.
`technique = { name = "custom", place = { kind = ... }, layout = { kind = ... } }` spells the choices out.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import Any, Literal, cast

from pydantic import Field, create_model

from engines.techniques.base import Technique
from engines.techniques.choices import CALIBRATION_PROMPTS, Backbone, Choices
from engines.techniques.context import BuildContext
from engines.techniques.idle import changed
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.parameters import DECISIONS, Composed
from engines.techniques.systems import caches, gpu_ndp, neuron, npumoe, speculating
from engines.techniques.systems.preset import ON_CPU, Preset
from results.records import Record

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "dropless",
            "tokens grouped by expert, nothing dropped; equals the oracle",
            "every source's yardstick",
            Choices(ON_CPU, ExactParameters()),
        ),
        *npumoe.SYSTEMS,
        *neuron.SYSTEMS,
        *speculating.SYSTEMS,
        *gpu_ndp.SYSTEMS,
        *caches.SYSTEMS,
    )
}


@cache
def preset_parameters(name: str) -> type[Composed]:
    """The record of a preset: every parameter of its choices, with the preset's values as defaults."""
    preset = PRESETS[name]
    fields: dict[str, Any] = {}
    for decision in DECISIONS:
        own = cast(Record | None, getattr(preset.choices, decision))
        if own is None:
            continue
        for field_name, field in type(own).model_fields.items():
            if field_name not in ("kind", *preset.fixed):
                changed = field._copy()
                changed.default = getattr(own, field_name)
                fields[field_name] = (field.annotation, changed)
    backbone = preset.choices.backbone
    fields["backbone"] = (Literal[backbone] if "backbone" in preset.fixed else Backbone, backbone)
    if preset.choices.learns and "estimator" not in preset.choices.learns:
        fields["calibration_prompts"] = (int, Field(CALIBRATION_PROMPTS, ge=1, le=100_000))
    made = create_model(f"{name} parameters", __base__=_PresetParameters, **fields)
    made.technique = name
    return made


class _PresetParameters(Composed):
    @property
    def choices(self) -> Choices:
        preset = PRESETS[self.technique]
        chosen: dict[str, Any] = {}
        for decision in DECISIONS:
            own = getattr(preset.choices, decision)
            if own is None:
                continue
            kind = type(own)
            names = [name for name in kind.model_fields if name != "kind"]
            chosen[decision] = kind(**{name: getattr(self, name, getattr(own, name)) for name in names})
        return preset.choices._replace(
            **chosen,
            backbone=self.backbone,
            calibration_prompts=getattr(self, "calibration_prompts", CALIBRATION_PROMPTS),
        )

    def given(self, decision: str) -> Set[str]:
        return changed(self)


DroplessParameters = preset_parameters("dropless")


def dropless() -> Technique:
    """What the model computes of itself, for whoever needs its answers and no arm."""
    return PRESETS["dropless"].choices.build("dropless", BuildContext(chunk=1))
