"""Speed and energy of a model from those of another on the same phone with the same engine: the ratio of parameters.

Decoding reads every weight once a token, and all models but Gemma have 4 bits a weight, so a token should cost in
proportion to the parameters, in seconds and in joules. Each engine and phone starts at one row, its anchor:
Qwen2.5-1.5B, or the first model that the engine runs there.

llama.cpp divides products over unlike cores in a way that hangs on their width (`llama_cpp`): there a token costs in
proportion to that time, and to joules likewise, for threads that wait spin. This was found after twelve rows of
llama.cpp had missed by the ratio of parameters; what that gives is kept beside it, as what came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.findings import Finding
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs import llama_cpp
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


def cost_ratio(phone: str, engine: str, model: str) -> float | None:
    """Of a token over one of the anchor's model; None where the engine runs nothing there."""
    own = anchor_model(phone, engine)
    if own is None:
        return None
    if engine != llama_cpp.ENGINE:
        return parameters(model) / parameters(own)
    token_s, own_s = (llama_cpp.token_seconds(phone, NAMED_SHAPES[SHAPES[one]]) for one in (model, own))
    return token_s / own_s


def predicted(phone: str, engine: str, model: str, quantity: Quantity) -> float | None:
    """Token/s, or mJ a token (a gauge's units on iPhones); the anchor itself where it is that model."""
    return _scaled(anchor(phone, engine, quantity), cost_ratio(phone, engine, model), quantity)


def _scaled(start: float | None, ratio: float | None, quantity: Quantity) -> float | None:
    if start is None or ratio is None:
        return None
    return start / ratio if quantity == "speed" else start * ratio


def is_anchor(cell: Cell) -> bool:
    return cell.model == anchor_model(cell.phone, cell.engine)


DIVIDED = (
    "llama.cpp deals the rows of narrow matrices out evenly over all cores, efficiency cores too, and waits for the"
    " slowest; only Qwen2.5-1.5B, from which ours starts, is so narrow"
)


def findings() -> Iterable[Finding]:
    """Of speed and energy of every model that is no anchor."""
    for cell, claim in cells().items():
        if cell.quantity == "battery" or is_anchor(cell):
            continue
        ours = predicted(*cell)
        assert ours is not None
        own = anchor_model(cell.phone, cell.engine)
        assert own is not None
        by_parameters = f"{own} on the same phone and engine, times the ratio of parameters"
        if cell.engine != llama_cpp.ENGINE:
            yield Finding(claim, ours, "shape", note=by_parameters)
            continue
        note = f"{own} on the same phone and engine, times the ratio of times that llama.cpp's products take"
        yield Finding(claim, ours, "shape", note=note)
        first = _scaled(
            anchor(cell.phone, cell.engine, cell.quantity), parameters(cell.model) / parameters(own), cell.quantity
        )
        assert first is not None
        yield Finding(claim, first, "shape", note=by_parameters, replaced=DIVIDED)
