"""A sheet of the machine at hand, with the points that it was fitted on."""

from __future__ import annotations

import csv
import datetime
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil
import torch

from devices.base import Unit
from devices.conditions import host_environment
from devices.cpu_seconds import usable_cpus
from devices.models.sheet import FITTED_BY, Sheet
from devices.models.sheet_text import sheet_text
from engines.curves.host import QUICK, WHOLE, FittedUnit, file_link, fit_unit, sheet_of, unit_table
from engines.curves.prices import Residual
from engines.curves.rounds import Measured, Rounds
from engines.model.accelerator import DeviceType, find_backend
from engines.model.quantised import Form
from engines.pricing.model_shape import VALUE_BYTES
from engines.road import build
from results.units import format_share

Asked = Literal["auto", "cpu", "cuda"]
WHOLE_REQUESTS = {"prefill": "prompts", "decode": "decoded tokens"}
"""Curves of whole requests of the engine, in a reader's words."""
DOUBTFUL = 0.15
"""Median miss of whole requests beyond which the prices are not to be trusted: a schedule's aim is below a tenth."""
LACKING = ("npu", "gpu")
"""Units of plans that a machine without them computes on its CPU."""
RoundListener = Callable[[str, Rounds, int], object]


class FittedMachine(NamedTuple):
    """remarks: of how it was fitted, at the top of its file. fitted: by unit."""

    sheet: Sheet
    remarks: tuple[str, ...]
    fitted: Mapping[str, FittedUnit]

    @property
    def measured(self) -> Mapping[str, Measured]:
        return {unit: one.measured for unit, one in self.fitted.items()}

    def text(self, name: str) -> str:
        """As a file, which has to be called as the sheet is."""
        return sheet_text(self.sheet.model_copy(update={"name": name}), self.remarks)


def fit_machine(
    name: str,
    form: Form,
    quick: bool,
    threads: int | None = None,
    device: Asked = "auto",
    on_round: RoundListener = lambda unit, done, n_rounds: None,
) -> FittedMachine:
    """name: of the sheet. Raises `EngineError`, `FitError`, `OSError`."""
    n_threads = threads or len(usable_cpus() or ()) or torch.get_num_threads()
    grid = QUICK if quick else WHOLE
    if device == "cuda":
        find_backend(device, None)  # raises where there is none, before anything is measured
    has_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    fitted: dict[str, FittedUnit] = {}
    before = torch.get_num_threads()
    try:
        asked: tuple[tuple[Unit, DeviceType], ...] = (("cpu", "cpu"), ("gpu", "cuda"))
        for unit, torch_device in asked[: 1 + has_cuda]:
            told = partial(_told, on_round, unit, grid.n_rounds)
            fitted[unit] = fit_unit(grid, form, n_threads, torch_device, told)
    finally:
        torch.set_num_threads(before)
    sheet = sheet_of_units(name, form, n_threads, fitted)
    return FittedMachine(sheet, _remarks(quick, fitted), fitted)


def _told(on_round: RoundListener, unit: Unit, n_rounds: int, done: Rounds) -> None:
    on_round(unit, done, n_rounds)


def sheet_of_units(name: str, form: Form, n_threads: int, fitted: Mapping[str, FittedUnit]) -> Sheet:
    """fitted: `cpu`, and `gpu` where there is one."""
    environment = host_environment()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    built = build()
    road = (
        f"kernels for {built.instruction_set}" if built.road == "kernels" else f"torch, {built.torch_instruction_set}"
    )
    units = {unit: unit_table(one.prices, one.bytes_per_value) for unit, one in fitted.items()}
    gpu = f", {torch.cuda.get_device_name()}" if "gpu" in fitted else ""
    links = file_link(fitted["cpu"].link)
    if "gpu" in fitted and (moved := fitted["gpu"].link) is not None:
        links["host"] = {"source": "cpu", "target": "gpu", "kind": "duplex", **moved}
    stated = {"value": float(psutil.virtual_memory().total), "kind": "stated", "origin": "the system's own figure"}
    return sheet_of(
        name,
        f"{environment.cpu_model}{gpu}, {n_threads} threads, {road}; weights in {form}",
        f"{FITTED_BY}, {today}, torch {torch.__version__}, {environment.os.split()[0]}",
        units,
        links,
        fitted_weights=form,
        fitted_value_bytes=VALUE_BYTES,
        fit_misses={unit: found for unit, one in fitted.items() if (found := _fit_misses(one.residuals))},
        stands_in={unit: "cpu" for unit in LACKING if unit not in fitted},
        memories={"cpu": stated},
    )


def _remarks(quick: bool, fitted: Mapping[str, FittedUnit]) -> tuple[str, ...]:
    lines = ["Measured on this machine. Units: s, B, FLOP. No meter was read: watts and joules are missing."]
    for unit, one in fitted.items():
        found = one.measured
        share = "not told by this system" if found.foreign_share is None else format_share(found.foreign_share, ".1f")
        lines.append(
            f"{unit}: {len(one.residuals)} points, {found.n_rounds} rounds{' (quick)' if quick else ''}, of whose"
            f" {found.n_runs} runs {found.n_disturbed} were disturbed; CPU time that others took: {share}."
        )
        if not found.is_quiet:
            lines.append(f"{unit}: MADE ON A BUSY MACHINE. Fit again when it is quiet.")
    return (*lines, *doubts({unit: one.residuals for unit, one in fitted.items()}))


def doubts(residuals: Mapping[str, Sequence[Residual]]) -> tuple[str, ...]:
    """Where the prices miss the whole requests that they were fitted on. residuals: by unit.

    What slows some runs, such as a neighbour who reads much memory in little CPU time, shows nowhere else.
    """
    found = []
    for unit, of_unit in residuals.items():
        for curve, own in _by_curve(of_unit).items():
            miss = median(abs(residual.miss) for residual in own)
            if curve in WHOLE_REQUESTS and miss > DOUBTFUL:
                found.append(
                    f"{unit}: the fitted prices miss {WHOLE_REQUESTS[curve]} by {format_share(miss)} (median of"
                    f" {len(own)}); DO NOT TRUST THIS SHEET. Something slowed some of the runs; fit again."
                )
    return tuple(found)


def _fit_misses(residuals: Sequence[Residual]) -> dict[str, dict[str, Any]]:
    """Of whole requests, as a sheet has them: by phase."""
    found = {}
    for curve, own in _by_curve(residuals).items():
        if curve in WHOLE_REQUESTS:
            misses = [abs(one.miss) for one in own]
            median_miss, p90 = (float(f"{np.quantile(misses, share):.3g}") for share in (0.5, 0.9))
            found[curve] = {"requests": len(own), "median": median_miss, "p90": p90}
    return found


def _by_curve(residuals: Sequence[Residual]) -> dict[str, list[Residual]]:
    curves: dict[str, list[Residual]] = defaultdict(list)
    for residual in residuals:
        curves[residual.point.piece.curve].append(residual)
    return curves


def residual_rows(found: FittedMachine) -> list[dict[str, Any]]:
    """By unit and curve, for the terminal."""
    rows = []
    for unit, one in found.fitted.items():
        for curve, own in _by_curve(one.residuals).items():
            misses = [abs(residual.miss) for residual in own]
            rows.append(
                {
                    "unit": unit,
                    "curve": curve,
                    "points": len(own),
                    "median_miss": round(median(misses), 4),
                    "p90_miss": round(float(np.quantile(misses, 0.9)), 4),
                    "least_s": float(f"{min(residual.point.seconds for residual in own):.4g}"),
                    "most_s": float(f"{max(residual.point.seconds for residual in own):.4g}"),
                }
            )
    return rows


def points_text(found: FittedMachine) -> str:
    """Every point as CSV: what was measured, its amounts, what the fitted prices make of it, and the residual."""
    residuals = [(unit, one) for unit, fitted in found.fitted.items() for one in fitted.residuals]
    names = sorted({name for _, one in residuals for name in one.point.piece.amounts})
    head = ["unit", "curve", "shape", "measured_s", "predicted_s", "residual", "beside_s", "runs", "quiet"]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*head, *names])
    for unit, one in residuals:
        point = one.point
        piece, what = point.piece, (point.seconds, one.predicted_s, one.miss, one.beside_s)
        amounts = [piece.amounts.get(name, "") for name in names]
        rows.writerow([unit, piece.curve, piece.shape, *what, point.n_runs, point.is_quiet, *amounts])
    return text.getvalue()
