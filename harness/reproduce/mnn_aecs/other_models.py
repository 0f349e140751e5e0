"""Speed and energy of a model from those of another on the same phone with the same engine: the ratio of parameters.

Decoding reads every weight once a token, and all models but Gemma have 4 bits a weight, so a token should cost in
proportion to the parameters, in seconds and in joules. Each engine and phone starts at one row, its anchor:
Qwen2.5-1.5B, or the first model that the engine runs there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.findings import Finding
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.places import Cell, Quantity, anchor_model, cells

SHAPES: Mapping[str, str] = {
    "Qwen2.5-1.5B": "qwen2.5-1.5b",
    "Qwen2.5-3B": "qwen2.5-3b",
    "Llama3.2-1B": "llama-3.2-1b",
    "Llama3.2-3B": "llama-3.2-3b",
    "Gemma2-2B": "gemma-2-2b",
}
"""Published shapes, by the source's names."""


def parameters(model: str) -> int:
    """Of all matrices."""
    return NAMED_SHAPES[SHAPES[model]].parameters.total


def anchor(phone: str, engine: str, quantity: Quantity) -> float | None:
    """The row that predictions start from, as printed; None where the engine runs nothing there."""
    model = anchor_model(phone, engine)
    return None if model is None else ledger().calibration(cells()[Cell(phone, engine, model, quantity)])


def predicted(phone: str, engine: str, model: str, quantity: Quantity) -> float | None:
    """Token/s, or mJ a token (a gauge's units on iPhones); the anchor itself where it is that model."""
    start, own = anchor(phone, engine, quantity), anchor_model(phone, engine)
    if start is None or own is None:
        return None
    ratio = parameters(model) / parameters(own)
    return start / ratio if quantity == "speed" else start * ratio


def is_anchor(cell: Cell) -> bool:
    return cell.model == anchor_model(cell.phone, cell.engine)


def findings() -> Iterable[Finding]:
    """Of speed and energy of every model that is no anchor."""
    for cell, claim in cells().items():
        if cell.quantity == "battery" or is_anchor(cell):
            continue
        ours = predicted(*cell)
        assert ours is not None
        own = anchor_model(cell.phone, cell.engine)
        note = f"{own} on the same phone and engine, times the ratio of parameters"
        yield Finding(claim, ours, "shape", note=note)
