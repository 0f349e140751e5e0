"""`--weights` of a command: one form for every component, or the table that `quantise` is in a plan."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from engines.model.quantised import Quantisation

Weights = Literal["fp32", "bf16", "fp16", "int8", "int4-g32", "int4-g64", "int4-g128", "fp8", "mxfp4"]
Arithmetic = Literal["fp32", "int8", "bf16"]
"""`Form` and `Arithmetic` of `engines.model.quantised`, which imports too much for `--help`."""


def table_of(text: str, components: Iterable[str]) -> dict[str, Any]:
    """components: those that one form is for. Raises `ValueError` in one line."""
    from engines.model.quantised import FORMS

    if text in FORMS:
        return dict.fromkeys(components, text)
    if not text.lstrip().startswith("{"):
        raise ValueError(f"no such form; take one of {', '.join(FORMS)}, or a table by component")
    found: dict[str, Any] = tomllib.loads(f"forms = {text}")["forms"]
    return found


def quantisation_of(table: Mapping[str, Any]) -> Quantisation:
    """Raises `ValueError` in one line."""
    from pydantic import ValidationError

    from devices.toml_records import told
    from engines.model.quantised import Quantisation

    try:
        return Quantisation.model_validate(table)
    except ValidationError as error:
        raise ValueError("; ".join(told(one) for one in error.errors(include_url=False))) from error
