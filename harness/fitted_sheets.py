"""What a sheet that was fitted on a machine is asked for, and was not fitted on."""

from __future__ import annotations

from collections.abc import Iterator

from devices.models.sheet import Sheet
from engines.errors import EngineError
from engines.model.checkpoints import CheckpointFacts
from engines.model.model_config import ModelConfig
from engines.model.quantised import FORMS, Quantisation, bits_of_value, plain_form
from engines.pricing.model_shape import ModelShape, WeightBits
from engines.pricing.shapes import own_shape, priced_shape, quantised
from harness.combinations import mismatch, prices_as_held, sheet_of
from harness.device_problems import sheet_problems
from harness.device_specs import DeviceSpec, ModelledSpec
from harness.external.base import ExternalSpec
from harness.matrix import CellPlan
from harness.model_specs import ModelSpec
from harness.played_parts import PlayedFacts, quantised_shape
from harness.schema import EngineSpec

SAME_WIDTH = 0.05
"""Of the bits of a value: scales of a row take a little more in one model than in another."""


def other_weights(sheet: Sheet, shape: ModelShape) -> str | None:
    """That the sheet was fitted with weights of another width than these; None where it was not."""
    form = sheet.fitted_weights
    if form not in FORMS:
        return None
    asked, fitted = 8 * shape.bytes_of("experts"), bits_of_value(form, shape.hidden)
    if abs(asked / fitted - 1) < SAME_WIDTH:
        return None
    return (
        f"its prices were fitted with weights in {form}, and experts of {asked:.4g} bits are asked: another arithmetic"
        " may compute them, so these times are a guess"
    )


def older_fit(sheet: Sheet, shape: ModelShape) -> str | None:
    """That another `model fit` than this one made the sheet, by whose prices rows of activations, keys and values are
    priced too cheap or too dear; None where it was this one, or none."""
    if not sheet.is_fitted_here or sheet.fitted_value_bytes == shape.bytes_per_value:
        return None
    return (
        "an older `joulebench model fit` made it, which counted other bytes of activations, keys and values than plans"
        " price: these times are a guess; fit again"
    )


def fit_warning(device: DeviceSpec, shape: ModelShape) -> str | None:
    """Of a device of a plan whose sheet an older fit made, or that prices other weights than it was fitted with. Its
    sheet has no problems."""
    if not isinstance(device, ModelledSpec):
        return None
    if (older := older_fit(sheet_of(device), shape)) is not None:
        return f"device {device.name}: {older}"
    if (doubt := other_weights(sheet_of(device), shape)) is None:
        return None
    return f"device {device.name}: {doubt}; fit a sheet with such weights (`joulebench model fit --weights FORM`)"


def fit_warning_with_model(
    device: DeviceSpec, engine: EngineSpec, model: ModelSpec, facts: CheckpointFacts
) -> str | None:
    """The same of a model that runs."""
    if not isinstance(device, ModelledSpec) or sheet_problems(device) or mismatch(engine, device) is not None:
        return None
    try:
        return fit_warning(device, shape_on(device, engine, model, facts.config))
    except (EngineError, KeyError):
        return None  # told as a problem


def cell_doubts(plan: CellPlan, found: PlayedFacts | CheckpointFacts) -> Iterator[str]:
    """The same of a cell, for its trials: a report outlives what the check told."""
    if isinstance(plan.engine, ExternalSpec) or not plan.device.is_modelled:
        return
    if isinstance(found, PlayedFacts):
        shape = quantised_shape(found, plan.engine)
    else:
        assert isinstance(plan.model, ModelSpec)  # a model that runs has these facts
        shape = shape_on(plan.device, plan.engine, plan.model, found.config)
    if (doubt := fit_warning(plan.device, shape)) is not None:
        yield doubt


def shape_on(device: DeviceSpec, engine: EngineSpec, model: ModelSpec, config: ModelConfig) -> ModelShape:
    """At which a modelled device prices a model that runs; its sheet has no problems. Raises `EngineError`."""
    name = device.priced_as
    shape = priced_shape(name, config) if name else own_shape(model.source, config)
    if not prices_as_held(device):
        return shape
    held = dict.fromkeys(WeightBits._fields, plain_form(model.dtype)) | engine.quantise.asked
    return quantised(shape, Quantisation(**held))
