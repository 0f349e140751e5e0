"""Blocks that a schedule keeps, against blocks that are made anew for every layer of every step: the same seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, PricedCell, parameters, price_cell
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.schedule import Schedule

SHAPE = replace(PHI_3_5_MOE, n_layers=8)


def seconds(priced: PricedCell) -> list[float]:
    assert priced.prefill is not None
    assert priced.decode is not None
    return [priced.prefill.seconds, priced.decode.seconds]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("name", "recall"),
    [
        ("prefetch-hint", 0.4),
        ("router-pf", 0.4),
        ("router-pf", 0.7),
        ("on-demand", None),
        ("ndp", None),
        ("monde", None),
    ],
)
def test_kept_blocks_wait_for_what_blocks_made_anew_wait_for(
    name: str, recall: float | None, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer waits for was sent for so many operations before, which differs with what the layers between
    called."""
    technique = parameters(name)
    cell = Cell(load_sheet("rtx5080-ndp"), SHAPE, technique, UniformRouting(), 16, 24, 8, recall=recall, batch=batch)
    kept = seconds(price_cell(cell))
    monkeypatch.setattr(Schedule, "_key", lambda *_: None)
    assert kept == pytest.approx(seconds(price_cell(cell)), rel=1e-9)
