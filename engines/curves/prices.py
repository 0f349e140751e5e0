"""From measured points to the prices of a unit: which amounts each kernel's line has, and how far it misses its points.

A call from Python costs what no kernel does; it is fitted beside the line and left out of the kernel's price, for a
decode step is one call. What the engine takes for each step and layer is fitted on whole steps (`engine_prices`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from devices.models.figures import TERMS, Kernel
from devices.models.fit import Fit, FitError, checked_fit
from engines.curves.pieces import CALLS, QUERY_TILES, TILES, most_few_flops, tiled
from engines.curves.rounds import Point
from results.units import format_share

TERM_OF = {"launches": TERMS[0], "weight_bytes": TERMS[1], "moved_bytes": TERMS[2], "flops": TERMS[3]}
ROW_KERNELS = ("gather_dynamic", "gather_static", "padding", "scatter")
LINES: Mapping[str, Sequence[str]] = {
    "norm": ("norm.moved_bytes",),
    "residual": ("residual.moved_bytes",),
    "router": ("router.flops",),
    "head": ("lm_head.few.weight_bytes", "lm_head.few.flops", "lm_head.flops"),
}
"""Amounts that have a price, by curve."""


class Tiled(NamedTuple):
    """A line in which some amounts of a kernel depend on the tile that fits best: by_tile. names: the others. tiles:
    that are tried. of: what a tile takes at once. beside: another curve whose points it fits too."""

    kernel: Kernel
    by_tile: Sequence[str]
    names: Sequence[str]
    tiles: Sequence[int]
    of: str
    beside: str | None = None


EXPERTS = (
    "expert_ffn.weight_bytes",
    "rows.moved_bytes",
    "expert_ffn.few.weight_bytes",
    "expert_ffn.few.flops",
)
"""Experts with few rows stand beside others in a layer, and their line is fitted with that of the others."""
ATTENTION = ("attention.weight_bytes", "attention.flops", "attention.moved_bytes", "attention.few.weight_bytes")
TILED: Mapping[str, Tiled] = {
    "experts": Tiled(
        "expert_ffn",
        ("expert_ffn.flops", "expert_ffn.moved_bytes"),
        EXPERTS,
        TILES,
        "rows",
        "few rows",
    ),
    "attention": Tiled("scores", ("scores.flops",), (*ATTENTION, "scores.moved_bytes"), QUERY_TILES, "queries"),
}
"""Of other curves."""
FEW = ".few."
"""In the name of an amount of such a line."""


class Residual(NamedTuple):
    """A point, and what the fit makes of it. beside_s: of that, what the prices of its own curve do not have: of a
    piece the calls from Python and what few rows take longer alone, of a whole step what was priced before."""

    point: Point
    predicted_s: float
    beside_s: float = 0.0

    @property
    def miss(self) -> float:
        return self.predicted_s / self.point.seconds - 1


class Tile(NamedTuple):
    """That fits best, and what is said of it."""

    size: int
    origin: str


@dataclass
class UnitPrices:
    """Of one unit: constants by "kernel.amount", what is said of where they come from, and the residuals."""

    constants: dict[str, float] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    tiles: dict[Kernel, Tile] = field(default_factory=dict)
    residuals: list[Residual] = field(default_factory=list)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of FLOP per weight byte, by kernel and "kernel.few"."""

    def add(
        self, names: Sequence[str], fit: Fit, points: Sequence[Point], beside: Sequence[float] | None = None
    ) -> None:
        """beside: of each point, as `Residual.beside_s`; None: the calls from Python."""
        told = origin_of(fit)
        for name, constant in zip(names, fit.constants, strict=True):
            if name != CALLS:
                self.constants[name] = constant
                self.origins[name] = told
        constants = dict(zip(names, fit.constants, strict=True))
        beside = beside or [constants.get(CALLS, 0.0) * point.piece.amounts.get(CALLS, 0.0) for point in points]
        self.residuals += [
            Residual(point, (1 + miss) * point.seconds, own)
            for point, miss, own in zip(points, fit.residuals, beside, strict=True)
        ]

    def with_few(self, factor: float, lines: str = FEW) -> UnitPrices:
        """The same, the lines of few rows multiplied. lines: what is in their names."""
        constants = {name: value * (factor if lines in name else 1.0) for name, value in self.constants.items()}
        return replace(self, constants=constants)

    def kernels(self, bytes_per_value: float) -> dict[str, Any]:
        """As a sheet has them."""
        found: dict[str, Any] = {}
        for name, constant in self.constants.items():
            kernel, _, amount = name.rpartition(".")
            figure = {"value": _rounded(constant), "kind": "fitted", "origin": self.origins[name]}
            kernels = ROW_KERNELS if kernel == "rows" else (kernel.removesuffix(".few"),)
            for own in kernels:
                line = found.setdefault(own, {})
                if kernel.endswith(".few"):
                    most = most_few_flops(own, bytes_per_value)
                    line = line.setdefault("few_rows", {"most_flops_per_weight_byte": most})
                line[TERM_OF[amount]] = figure
        for kernel, line in found.items():
            for key, terms in ((kernel, line), (f"{kernel}.few", line.get("few_rows"))):
                if terms is None:
                    continue
                _without_zeros(terms)
                if key in self.spans:
                    least, most = self.spans[key]
                    terms["fitted_flops_per_weight_byte"] = {"least": least, "most": most}
        return found


def _rounded(value: float) -> float:
    """To digits that a reader can compare; more than any residual has."""
    return float(f"{value:.6g}")


def _without_zeros(line: dict[str, Any]) -> None:
    """A term that came out as 0 says nothing; the last one stays."""
    terms = [term for term in TERMS if term in line]
    for term in terms:
        if line[term]["value"] == 0 and sum(one in line for one in terms) > 1:
            del line[term]


def origin_of(fit: Fit) -> str:
    n = len(fit.residuals)
    median, p90 = format_share(fit.median_miss, ".1f"), format_share(fit.p90_miss, ".1f")
    return f"fitted on {n} shapes, median residual {median}, p90 {p90}"


def kernel_prices(points: Sequence[Point]) -> UnitPrices:
    """Of the curves of `engines.curves.pieces`. Raises `FitError` that lists every curve that cannot be fitted."""
    found, problems = UnitPrices(), []
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point.piece.curve, []).append(point)
    for curve in (*TILED, *LINES):
        own = curves.get(curve, [])
        try:
            if curve in TILED:
                _add_tiled(found, curve, [*own, *curves.get(TILED[curve].beside or "", [])])
            else:
                names = (*LINES[curve], CALLS)
                found.add(names, _fit(curve, names, own), own)
        except FitError as error:
            problems.append(str(error))
    if problems:
        raise FitError("; ".join(problems))
    found.spans = _spans(points, found.tiles["expert_ffn"].size)
    return found


def _fit(curve: str, names: Sequence[str], points: Sequence[Point], known: Sequence[float] | None = None) -> Fit:
    return checked_fit(curve, names, [p.piece.amounts for p in points], [p.seconds for p in points], known)


def _add_tiled(found: UnitPrices, curve: str, points: Sequence[Point]) -> None:
    """With the tile whose line misses least."""
    own = TILED[curve]
    fits = {}
    for size in own.tiles:
        try:
            by_tile = [tiled(size, name) for name in own.by_tile]
            fits[size] = _fit(curve, (*by_tile, *own.names, CALLS), points)
        except FitError:
            if size == own.tiles[0]:  # in large ones these shapes are all alike
                raise
    chosen = min(fits, key=lambda size: fits[size].rms)
    best = fits[chosen]
    found.add((*own.by_tile, *own.names, CALLS), best, points)
    others = ", ".join(f"{size}: {format_share(fit.rms, '.1f')}" for size, fit in fits.items())
    found.tiles[own.kernel] = Tile(chosen, f"{origin_of(best)}; RMS residual by {own.of} of a tile {others}")


def _spans(points: Sequence[Point], tile: int) -> dict[str, tuple[float, float]]:
    """FLOP per weight byte of each kernel, and of its line of few rows, over the points of its curve."""
    found: dict[str, tuple[float, float]] = {}
    for point in points:
        amounts = point.piece.amounts
        for name, weight_bytes in amounts.items():
            kernel, _, amount = name.rpartition(".")
            if amount != "weight_bytes":
                continue
            flops = amounts.get(tiled(tile) if kernel == "expert_ffn" else f"{kernel}.flops", 0.0)
            ratio = flops / weight_bytes
            least, most = found.get(kernel, (ratio, ratio))
            found[kernel] = min(least, ratio), max(most, ratio)
    return found


def link_prices(residuals: list[Residual], points: Sequence[Point]) -> dict[str, Any]:
    """Of copies, as a sheet has them: seconds of each, and bytes a second. residuals: theirs are added.

    What waking their thread takes, once for all that are asked for together, is beside that: a layer that fetches has
    it in its own price.
    """
    own = [point for point in points if point.piece.curve == "copy"]
    names = ("copy.launches", "copy.moved_bytes", CALLS)
    fit = _fit("copy", names, own)
    if fit.constants[1] == 0:  # times that noise rules: its residual shows it
        alone = _fit("copy", names[1:2], own)
        fit = Fit((0.0, *alone.constants, 0.0), alone.residuals)
    each_s, byte_s, call_s = fit.constants
    residuals += [
        Residual(point, (1 + miss) * point.seconds, call_s * point.piece.amounts[CALLS])
        for point, miss in zip(own, fit.residuals, strict=True)
    ]
    told = {"kind": "fitted", "origin": origin_of(fit)}
    found: dict[str, Any] = {"bytes_per_s": {"value": _rounded(1 / byte_s), **told}}
    return found | ({"latency_s": {"value": _rounded(each_s), **told}} if each_s else {})


PREFILL_LINE = ("step.launches", "layer.launches", "layer.moved_bytes", "prompt_fetch.launches")
DECODE_LINE = ("decode_step.launches", "decode_layer.launches", "fetching_layer.launches", "many_rows.moved_bytes")
WITHIN_A_STEP = "few rows within a step"


EXPERTS_FEW = "expert_ffn.few."
OF_PROMPT = {f"{EXPERTS_FEW}{amount}": f"prompt_few_rows.{amount}" for amount in ("weight_bytes", "flops")}
"""What a prompt's experts with few rows take longer than a token's, by the names of their line."""


class Known(NamedTuple):
    """Seconds of a whole step by the prices of kernels; few_s of these by their lines of few rows, and of these
    experts_few_s by that of experts."""

    seconds: float
    few_s: float
    experts_few_s: float


def add_engine_prices(found: UnitPrices, points: Sequence[Point], known: Sequence[Known]) -> None:
    """Of whole steps, what the kernels do not take, and what few rows take within a step. Raises `FitError`.

    A call of few rows is short. Alone it wakes threads that slept, and reads memory that nothing asked for ahead; in a
    decoded token, which is one call of the kernels, it does not. So lines of few rows are fitted for what they cost
    beside each other, and one factor of all of them on whole decoded tokens. A prompt's experts are calls alone: what
    the factor takes off them is a price of its own there.
    """
    of_decode = _of_curve("decode", points, known)
    amounts = [{**point.piece.amounts, WITHIN_A_STEP: own.few_s} for point, own in of_decode]
    rest = [own.seconds - own.few_s for _, own in of_decode]
    names = (WITHIN_A_STEP, *DECODE_LINE)
    fit = checked_fit("decode", names, amounts, [point.seconds for point, _ in of_decode], rest)
    factor = fit.constants[0]
    if factor <= 0:
        raise FitError("decode: whole decoded tokens take no longer than what is not their products; nothing is fitted")
    _scale_few(found, factor, origin_of(fit))
    engine_alone = Fit(fit.constants[1:], fit.residuals)
    beside = [own.seconds - (1 - factor) * own.few_s for _, own in of_decode]
    found.add(DECODE_LINE, engine_alone, [point for point, _ in of_decode], beside)
    of_prefill = _of_curve("prefill", points, known)
    in_calls = max(1 - factor, 0.0)
    for name, of_prompt in OF_PROMPT.items():
        if in_calls and (within := found.constants.get(name)):
            found.constants[of_prompt] = in_calls / factor * within
            found.origins[of_prompt] = f"what a call alone takes longer than within a token: {found.origins[name]}"
    beside = [own.seconds - (1 - factor) * own.few_s + in_calls * own.experts_few_s for _, own in of_prefill]
    own_points = [point for point, _ in of_prefill]
    found.add(PREFILL_LINE, _fit("prefill", PREFILL_LINE, own_points, beside), own_points, beside)


def _of_curve(curve: str, points: Sequence[Point], known: Sequence[Known]) -> list[tuple[Point, Known]]:
    return [(point, own) for point, own in zip(points, known, strict=True) if point.piece.curve == curve]


def _scale_few(found: UnitPrices, factor: float, told: str) -> None:
    """What a call alone took longer is beside its line from now on, as the call from Python is."""
    few = {name: constant for name, constant in found.constants.items() if FEW in name}
    for name, constant in few.items():
        found.constants[name] = factor * constant
        found.origins[name] += f"; times {factor:.3g}, what they take within decoded tokens ({told})"
    for i, residual in enumerate(found.residuals):
        amounts = residual.point.piece.amounts
        alone_s = (1 - factor) * sum(constant * amounts.get(name, 0.0) for name, constant in few.items())
        found.residuals[i] = residual._replace(beside_s=residual.beside_s + alone_s)
