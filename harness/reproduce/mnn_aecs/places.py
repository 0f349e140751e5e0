"""Where source 002 states what: claim ids by phone, engine, model and quantity. No figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from harness.reproduce.ledger import Ledger, ledger

SOURCE = "002"
Quantity = Literal["speed", "energy", "battery"]
ANDROID = ("Mate 40 Pro", "Honor V30 Pro", "Galaxy A56", "Meizu 21", "Xiaomi 15 Pro")
IPHONES = ("iPhone 12", "iPhone 15")
PHONES = (*ANDROID, *IPHONES)
ENGINES = ("executorch", "llama.cpp", "MediaPipe", "mllm", "MNN", "MNN-AECS")
OTHERS = ("executorch", "llama.cpp", "MediaPipe", "mllm")
"""Engines that are no version of MNN."""
MODELS = ("Qwen2.5-1.5B", "Qwen2.5-3B", "Llama3.2-1B", "Llama3.2-3B", "Gemma2-2B")
ANCHOR_MODEL = MODELS[0]
SHEETS: Mapping[str, str] = {phone: phone.lower().replace(" ", "-") for phone in PHONES}
"""Of devices/models/sheets, by phone."""
TUNED: Mapping[str, str] = dict(zip(PHONES, (f"002-{n:03d}" for n in range(75, 82)), strict=True))
"""Rows of Table 7."""
FIRST_OF_TABLE_8 = 82
_CELL = re.compile(rf"(.+) ({'|'.join(map(re.escape, (*OTHERS, 'MNN-AECS', 'MNN')))}) (\S+) (?:decode )?(\w+)")


class Cell(NamedTuple):
    """A place in Tables 9 and 10."""

    phone: str
    engine: str
    model: str
    quantity: Quantity


@cache
def cells() -> Mapping[Cell, str]:
    """Claim ids of Tables 9 and 10."""
    return cells_of(ledger())


def cells_of(book: Ledger) -> dict[Cell, str]:
    found: dict[Cell, str] = {}
    for claim in book.of_source(SOURCE):
        match = _CELL.fullmatch(claim.quantity) if claim.location in ("Table9", "Table10") else None
        if match:
            found[Cell(match[1], match[2], match[3], match[4])] = claim.id  # type: ignore[arg-type]
    return found


def anchor_model(phone: str, engine: str) -> str | None:
    """The model from which others are predicted: Qwen2.5-1.5B, or the first that the engine runs there."""
    return next((model for model in MODELS if Cell(phone, engine, model, "energy") in cells()), None)


def cores_row(engine: str, phone: str) -> str:
    """The claim of Table 8 with the cores, or threads, on which an engine decodes."""
    return f"{SOURCE}-{FIRST_OF_TABLE_8 + len(PHONES) * ENGINES.index(engine) + PHONES.index(phone):03d}"
