"""Whether the schedule tells how long this machine takes: prices fitted on some models, and plans of other ones.

python -m tests.benchmarks.model_validation [PIECE ...] [--fits DIR] [--arm NAME ...] [--quick] [--even-if-busy]

Pieces, each of some minutes, so that a machine need not be quiet for all of them at once: `fp32`, `bf16`, and `ranks`
for two processes in fp32. Each fits a sheet, answers requests in the same rounds, and keeps the sheet in DIR. Without a
piece all are done. Rows of the page that a piece does not measure stay, and all of them where others used the machine.

What `joulebench model fit` measures is measured on models of one half of the shapes. Models of the other half, with
prompts of other lengths, answer requests by each technique; the same plans are priced by the fitted sheet. No point of
the second half enters the fit. Two processes: see `tests.benchmarks.validated_ranks`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from devices.cpu_seconds import usable_cpus
from devices.models.sheet import Sheet
from devices.models.sheet_text import sheet_text
from engines.curves.host import QUICK, THIN, WHOLE, Grid, MadeModel, fit_unit, made_model
from engines.curves.machine import sheet_of_units
from engines.curves.rounds import Measured, Piece, Work
from engines.curves.steps import EngineRun, priced, request_of
from engines.expert_memory import ExpertMemory
from engines.made_models import MadeSizes
from engines.model.quantised import Form
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from engines.techniques.presets import preset_parameters
from results.environments import Road
from tests.benchmarks.measurement import Measurement, merged, read_json, write_page
from tests.benchmarks.measurement import measured as figure
from tests.benchmarks.validated_ranks import PHASES, Ranks, fitted_sheets, ranks_of

PAGE = "model-validation"
HELD_OUT = (
    MadeSizes(896, 512, 16, 2, 8, 14, 2),
    MadeSizes(640, 1024, 8, 2, 8, 10, 2),
    MadeSizes(576, 384, 32, 4, 10, 9, 1, vocabulary=4096),
    MadeSizes(1408, 256, 32, 4, 4, 22, 2),
    MadeSizes(448, 768, 16, 4, 10, 7, 1),
)
"""As large as those of the fit: a token reads 70 MB and more of weights in 16 bits."""
Prompt = tuple[int, int]
"""Tokens, and those of a chunk."""
PROMPTS: tuple[Prompt, ...] = ((160, 64), (352, 192))
QUICK_PROMPTS = PROMPTS[:1]
N_NEW, N_ROUNDS = 13, 5
RANK_PROMPTS, RANK_CHUNK = (40, 96, 256), 128
"""Of the models of the fit, where two processes compute them."""
MEDIAN_AIM, P90_AIM = 10.0, 25.0
WITNESS_BYTES = 1 << 28
"""More than caches hold."""
ARMS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "dropless": ("dropless", {}),
    "tiers, npumoe-t": ("npumoe-t", {}),
    "tiers in groups, npumoe-tg": ("npumoe-tg", {}),
    "blocks, blockwise": ("blockwise", {}),
    "cache, lru of half the experts": ("lru", {}),
}
BF16_ARMS = ("dropless", "blocks, blockwise")
RANKS = "two processes, expert-parallel"


@dataclass(frozen=True)
class Arm:
    """A technique on a model. run: what is measured. sheet_s: seconds of prefill and of a decoded token, as priced."""

    name: str
    run: EngineRun
    price: Callable[[Sheet], Sequence[float]]
    road: Callable[[], Road]


class Witness:
    """`Work` that is the same all the time: it reads memory. It tells how the machine changed, and
    nothing is made of what it tells."""

    pieces = (Piece("witness", "reads memory", {}),)

    def __init__(self) -> None:
        self._read = torch.ones(WITNESS_BYTES // 4)
        self.gigabytes_per_s: list[float] = []

    def seconds(self) -> Sequence[float]:
        begin_s = time.perf_counter()
        self._read.sum()
        took_s = time.perf_counter() - begin_s
        self.gigabytes_per_s.append(WITNESS_BYTES / took_s / 1e9)
        return [took_s]

    def row(self, where: str) -> Measurement:
        read = self.gigabytes_per_s
        note = f"{len(read)} times through the rounds; least {min(read):.0f}, most {max(read):.0f}"
        return figure("memory read", median(read), "GB/s", f"the same sum all the time; {where}", note=note)


def technique_of(name: str, parameters: Mapping[str, object], sizes: MadeSizes) -> TechniqueParameters:
    own = {"slots": sizes.n_experts // 2} if name == "lru" else {}
    return preset_parameters(name).model_validate({**parameters, **own})


def engine_of(made: MadeModel, technique: TechniqueParameters, chunk: int, threads: int, form: Form) -> ReferenceEngine:
    checkpoint, model = made.checkpoint, made.model
    if technique.loads_from_file:
        checkpoint = made.from_file(form)
    memory = ExpertMemory(form=form)
    engine = ReferenceEngine(
        checkpoint,
        technique,
        chunk,
        threads=threads,
        model=None if technique.loads_from_file else model,
        expert_memory=memory,
    )
    if engine.needs_calibration:
        vocabulary = made.shape.vocabulary
        engine.calibrate([request_of(4 * chunk, 2, vocabulary, seed).prompt_ids for seed in (11, 12, 13)])
    return engine


def arms_of(
    made: MadeModel,
    sizes: MadeSizes,
    prompts: Sequence[tuple[int, int]],
    names: Sequence[str],
    threads: int,
    form: Form,
) -> Iterator[Arm]:
    for name in names:
        technique = technique_of(*ARMS[name], sizes)
        for n_prompt, chunk in prompts:
            engine = engine_of(made, technique, chunk, threads, form)
            request = request_of(n_prompt, N_NEW, made.shape.vocabulary, seed=21)
            backbone = getattr(technique, "backbone", "cpu")

            def price(sheet: Sheet, engine=engine, request=request, backbone=backbone) -> Sequence[float]:  # type: ignore[no-untyped-def]
                return priced(engine, sheet, made.shape, backbone, request)

            yield Arm(name, EngineRun(made.name, engine, made.shape, request, chunk), price, engine.take_road)


def rows_of(arms: Sequence[Arm], found: Measured, sheet: Sheet, form: Form) -> list[Measurement]:
    """Of each technique and phase: how far the schedule missed, and each point. found: of the arms' requests."""
    points = iter(found.points)
    by_arm: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    roads: dict[tuple[str, str], set[str]] = {}
    for arm in arms:
        modelled, road = arm.price(sheet), arm.road()
        for phase, modelled_s in zip(PHASES, modelled, strict=True):
            point = next(points)
            by_arm.setdefault((arm.name, phase), []).append((point.piece.shape, modelled_s, point.seconds))
            way = road.prefill if phase == "prefill" else road.decoding
            roads.setdefault((arm.name, phase), set()).add(f"{road.arithmetic}, {way}")
    quiet = f"{found.n_rounds} rounds, {found.n_disturbed} of {found.n_runs} runs disturbed"
    summary, single = [], []
    for (name, phase), own in by_arm.items():
        misses = [abs(modelled_s / measured_s - 1) * 100 for _, modelled_s, measured_s in own]
        where = f"{name}; {phase}; weights in {form}"
        told = f"{len(own)} points; computed by {' and '.join(sorted(roads[name, phase]))}; {quiet}"
        summary += [
            figure("miss, median", median(misses), "%", where, target=MEDIAN_AIM, note=told),
            figure("miss, 90th percentile", float(np.quantile(misses, 0.9)), "%", where, target=P90_AIM),
        ]
        single += [
            figure("time", 1e3 * measured_s, "ms", where, 1e3 * modelled_s, "modelled", note=shape)
            for shape, modelled_s, measured_s in own
        ]
    return [*summary, *single]


class Validated(NamedTuple):
    """is_quiet: whether nobody disturbed what the sheet was fitted on."""

    sheet: Sheet
    rows: list[Measurement]
    is_quiet: bool


def validated(form: Form, names: Sequence[str], grid: Grid, is_quick: bool) -> Validated:
    """The sheet of this machine's CPU, and how far it misses. Fit and requests share their rounds: what the machine's
    memory gives changes by half within a minute, whoever else uses it."""
    began_s = time.perf_counter()
    threads = all_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms: list[Arm] = []
        beside: list[Work] = []
        witness = Witness()
        for seed, sizes in enumerate(HELD_OUT[:3] if is_quick else HELD_OUT, 100):
            made = made_model(folder, sizes, form, seed)
            own = list(arms_of(made, sizes, QUICK_PROMPTS if is_quick else PROMPTS, names, threads, form))
            beside += [witness, *(arm.run for arm in own)]
            arms += own
        found = fit_unit(grid, form, threads, beside=beside)
        sheet = sheet_of_units(f"fit-{form}", form, threads, {"cpu": found})
        points = tuple(point for point in found.beside if point.piece not in Witness.pieces)
        rows = [*rows_of(arms, found.measured._replace(points=points), sheet, form), witness.row(f"weights in {form}")]
    print(f"{form}, {threads} threads: after {time.perf_counter() - began_s:.0f} s", flush=True)
    return Validated(sheet, rows, found.measured.is_quiet)


def validated_ranks(grid: Grid, is_quick: bool) -> Validated:
    """Two processes, in fp32, in the rounds of a fit of their own."""
    threads = all_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def started(sizes: Sequence[MadeSizes], first_seed: int, prompts: Sequence[int], chunk: int) -> list[Ranks]:
            found: list[Ranks] = []
            for seed, own in enumerate(sizes, first_seed):
                ranks = ranks_of(made_model(folder, own, "fp32", seed), prompts, chunk, N_NEW, own is THIN)
                stack.callback(ranks[0].engine.close)
                found += ranks
            return found

        fits = started((*grid.sizes, THIN), 0, RANK_PROMPTS, RANK_CHUNK)
        n_prompt, chunk = PROMPTS[0]
        held_out = started(HELD_OUT[:3] if is_quick else HELD_OUT, 100, (n_prompt,), chunk)
        witness = Witness()
        found = fit_unit(grid, "fp32", threads, beside=[*fits, witness, *held_out])
        cpu = sheet_of_units("fit-ranks", "fp32", threads, {"cpu": found})
        n_fitted = sum(len(one.pieces) for one in fits)
        sheets = fitted_sheets(cpu, fits, found.beside[:n_fitted])

        def price(_: Sheet, one: Ranks) -> Sequence[float]:
            return one.modelled(sheets)

        arms = [Arm(RANKS, one.run, partial(price, one=one), one.engine.take_road) for one in held_out]
        points = found.beside[n_fitted + len(witness.pieces) :]
        rows = rows_of(arms, found.measured._replace(points=points), cpu, "fp32")
        own = witness.row(f"{RANKS}; weights in fp32")
        return Validated(cpu, [*rows, own], found.measured.is_quiet)


def all_threads() -> int:
    return len(usable_cpus() or ()) or torch.get_num_threads()


REMARKS = f"""Prices are fitted on five made models, and on prompts of other lengths than those of this page. Five other
models then answer requests by each technique; the schedule prices the plans that they make. No time of these is in the
fit. Misses are of |modelled / measured - 1|, over models and prompts. Targets are upper bounds. Experts are random, so
that routers choose all of them about as often. All models are larger than the processor's caches, as real ones are: a
token reads 70 MB of weights and more. A token is {N_NEW - 1} decoded ones' median. Fit and requests share their rounds.

Two processes have a fit of their own, whose models two processes compute as well. A process that waits lends its core
to the other (docs/techniques/parallel.md), so that a layer is priced as all of its work over all cores. Beside that:
what they send (messages in prefill, shared memory for a decoded token), in prefill the weights of attention, which each
of them reads, and what a decoded token takes once. One process's wait for the other counts as disturbed.

"Memory read" is a sum that is the same all the time. Nothing is made of it: it shows how the machine changed meanwhile.
It is a virtual machine, and what its memory gives changes by half within a minute. Runs of this page differ:
docs/model-fit.md has others, and the causes that are known."""


PIECES = ("fp32", "bf16", "ranks")


def of_piece(piece: str, asked: argparse.Namespace) -> Validated:
    grid = QUICK if asked.quick else WHOLE._replace(n_rounds=N_ROUNDS)
    if piece == "ranks":
        return validated_ranks(grid, asked.quick)
    form: Form = "bf16" if piece == "bf16" else "fp32"
    names = ARMS if form == "fp32" else BF16_ARMS
    return validated(form, [n for n in names if n in (asked.arm or names)], grid, asked.quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; all without one")
    parser.add_argument("--fits", type=Path, help="the folder that keeps the fitted sheets; without it none is kept")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="this one alone; may be given again")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds, printed and not kept")
    parser.add_argument("--even-if-busy", action="store_true", help="kept although others used the machine")
    asked = parser.parse_args()
    if unknown := set(asked.pieces) - set(PIECES):
        parser.error(f"no piece is called {', '.join(sorted(unknown))}; there are {', '.join(PIECES)}")
    for piece in asked.pieces or PIECES:
        found = of_piece(piece, asked)
        if asked.fits:
            asked.fits.mkdir(parents=True, exist_ok=True)
            (asked.fits / f"fit-{piece}.toml").write_text(sheet_text(found.sheet), encoding="utf-8")
        for row in found.rows:
            told = f"{row.ratio:.2f}" if row.ratio else ""
            print(
                f"{row.metric:24} {row.ours:9.3f} {row.peer or 0:9.3f} {row.unit} {told:6} {row.conditions}; {row.note}"
            )
        if not (found.is_quiet or asked.even_if_busy):
            print(
                f"{piece}: others used the machine meanwhile; its rows of the page stay. Measure it again", flush=True
            )
        elif not asked.quick:
            write_page(PAGE, "The schedule against this machine", merged(read_json(PAGE), found.rows), REMARKS)


if __name__ == "__main__":
    main()
