"""What the sheets of source 002's phones hold as fitted, and how it comes out of the source's tables.

For each phone the speed and power of MNN (its four biggest cores, Table 8) and of MNN-AECS (Table 7's cores) with
Qwen2.5-1.5B, Tables 9 and 10, power being energy times speed. Four figures fix four constants: the ceiling and the loss
of speed, the static power and the power of a unit of load. The fifth, the share of the ceiling that one core reaches
alone, is one for all phones: of a grid, the share with which the search finds most of Table 7. So what the search
finds of Table 7 is consistent with it, and predicts nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from devices.models.core_clusters import CoreCluster, DecodeModel, Selection, clusters_of
from devices.models.sheet import load_sheet
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.places import ANCHOR_MODEL, ANDROID, PHONES, SHEETS, TUNED, Cell, cells
from harness.tuning.aecs import PRESETS, AecsParameters, search
from harness.tuning.race import Reading
from harness.tuning.selections import all_selections, selection_words

N_MNN = 4
"""Cores, or threads, with which MNN decodes on every phone (Table 8). The four biggest, as §3.2 says of the first."""
MOST_LOSS = 0.5
ALONE = tuple(round(0.5 + 0.05 * n, 2) for n in range(10))
"""The grid: 0.5 to 0.95."""


class Fitted(NamedTuple):
    """A phone's constants, and the root mean square of the four relative residuals."""

    model: DecodeModel
    rms: float


def rows_of_fit(phone: str) -> tuple[str, ...]:
    """The four claims that a phone's constants are fitted on."""
    places = (Cell(phone, engine, ANCHOR_MODEL, q) for engine in ("MNN", "MNN-AECS") for q in ("speed", "energy"))
    return tuple(cells()[place] for place in places)


def clusters(phone: str) -> tuple[CoreCluster, ...]:
    """As its sheet states them."""
    return clusters_of(load_sheet(SHEETS[phone]).clusters)


def fit(phone: str, alone: float) -> Fitted:
    """Least squares of relative residuals, nothing below 0; the loss within 0 and 0.5."""
    book = ledger()
    speeds_energies = [book.calibration(row) for row in rows_of_fit(phone)]
    speeds = np.array(speeds_energies[::2])
    scale = 1e-3 if phone in ANDROID else 1.0
    powers = speeds * np.array(speeds_energies[1::2]) * scale
    bare = DecodeModel(clusters(phone), phone in ANDROID, 1.0, alone, 0.0, 0.0, 1.0)
    seen = (mnn_selection(bare), tuned_selection(phone, bare))

    def shares(loss: float) -> tuple[float, np.ndarray]:
        """(the best ceiling at this loss, relative residuals)."""
        relative = np.array([replace(bare, loss=loss).tokens_per_s(one) for one in seen]) / speeds
        ceiling = float(relative.sum() / (relative @ relative))
        return ceiling, ceiling * relative - 1.0

    loss = float(minimize_scalar(lambda x: float((shares(x)[1] ** 2).sum()), bounds=(0, MOST_LOSS), method="bounded").x)
    if float((shares(0.0)[1] ** 2).sum()) <= float((shares(loss)[1] ** 2).sum()):
        loss = 0.0
    ceiling, speed_residuals = shares(loss)
    loads = np.array([[1.0, bare.power(one)] for one in seen]) / powers[:, None]
    (static, per_load), _ = nnls(loads, np.ones(len(seen)))
    residuals = np.concatenate([speed_residuals, loads @ (static, per_load) - 1.0])
    model = replace(
        bare,
        ceiling_tokens_per_s=ceiling,
        loss=loss,
        static_power=float(static),
        power_per_load=float(per_load),
    )
    return Fitted(model, math.sqrt(float((residuals**2).mean())))


def mnn_selection(model: DecodeModel) -> Selection:
    """MNN's four: the biggest cores, or four threads."""
    taken: list[int] = []
    for cluster in model.selectable:
        taken.append(min(cluster.n_cores, N_MNN - sum(taken)))
    return tuple(taken)


def tuned_selection(phone: str, model: DecodeModel) -> Selection:
    """Table 7's."""
    printed = ledger().calibration_text(TUNED[phone])
    found = [one for one in all_selections(model.selectable) if as_table_7(model, one) == printed]
    (only,) = found
    return only


def as_table_7(model: DecodeModel, selection: Selection) -> str:
    """`1*X4(3.3GHz)+1*A720(2.96GHz)` or `2 thread`."""
    if not model.binds_threads:
        return f"{selection[0]} thread"
    return selection_words(model.clusters, selection).replace(" ", "")


def preset_for(phone: str, name: str = "aecs") -> AecsParameters:
    """iPhones have no meter and no affinity, whatever the preset."""
    return PRESETS[name] if phone in ANDROID else PRESETS["ios"]


def found_by_search(phone: str, alone: float) -> str:
    """What the paper's search chooses on the modelled phone, without noise."""
    model = fit(phone, alone).model
    result = search(model.selectable, lambda s: Reading(model.tokens_per_s(s), model.power(s)), preset_for(phone))
    return as_table_7(model, result.chosen)


@cache
def fit_alone() -> float:
    """Of the grid: most of Table 7, then the least residual of the phones' constants."""
    book = ledger()

    def merit(alone: float) -> tuple[int, float]:
        printed = {phone: book.calibration_text(TUNED[phone]) for phone in PHONES}
        n_found = sum(found_by_search(phone, alone) == printed[phone] for phone in PHONES)
        return n_found, -sum(fit(phone, alone).rms ** 2 for phone in PHONES)

    return max(ALONE, key=merit)
