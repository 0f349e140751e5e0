"""Measures the machine at hand and makes a sheet of it: models of several shapes, their pieces, copies, whole requests.

Everything is measured in rounds through all of it, so that a busy moment is not a shape's. Nothing is kept on disk but
a folder of made models, which goes with the measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from devices.base import Unit
from devices.models.figures import Kernel
from devices.models.sheet import Sheet
from engines.curves.copies import copies
from engines.curves.pieces import Bench
from engines.curves.prices import (
    EXPERTS_FEW,
    FEW,
    Known,
    Residual,
    UnitPrices,
    add_engine_prices,
    kernel_prices,
    link_prices,
)
from engines.curves.rounds import Measured, Point, Rounds, Work, measured
from engines.curves.steps import EngineRun, bytes_of_many_rows, fetches, priced, request_of
from engines.expert_memory import ExpertMemory
from engines.made_models import MadeSizes, write_made_model
from engines.model.accelerator import DeviceType, find_backend
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.quantised import PLAIN_DTYPES, Form, Quantisation, plain_form
from engines.model.transformer import Transformer
from engines.pricing.shapes import ModelShape, own_shape, quantised
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters, preset_parameters
from results.scratch import ScratchFolder


class Grid(NamedTuple):
    """What is measured. tokens, past, few, many: of `Bench.pieces`. prompts: of whole requests, with their chunks."""

    sizes: tuple[MadeSizes, ...]
    tokens: tuple[int, ...]
    past: tuple[int, ...]
    few: tuple[int, ...]
    many: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    n_new: int
    n_rounds: int

    @property
    def of_pieces(self) -> tuple[tuple[int, ...], ...]:
        return self.tokens, self.past, self.few, self.many


SIZES = (
    MadeSizes(1024, 512, 16, 2, 8, 16, 2),
    MadeSizes(512, 1024, 16, 4, 8, 8, 4),
    MadeSizes(1536, 384, 16, 2, 4, 24, 4),
    MadeSizes(768, 256, 32, 4, 10, 12, 2, vocabulary=8192),
    MadeSizes(1280, 768, 8, 2, 4, 20, 4),
)
"""A token reads 70 to 110 MB of weights in 16 bits, twice as much in 32: more than the caches of a core's neighbourhood
hold (32 MB are usual), for a model of real size does. A smaller model decodes from them, and faster than any price of
memory."""
TILE_FIELDS: Mapping[Kernel, str] = {"expert_ffn": "row_tile", "scores": "query_tile"}
"""As a sheet calls them."""
CALIBRATED = 3
"""Prompts of a chunk each, of which static shapes are made."""
THIN = MadeSizes(128, 64, 8, 2, 24, 2, 1)
"""Many layers of next to no work: whole requests of it tell what a layer takes from what its products take, and its
experts and attention alone what a call from Python takes. The layers of the others read about as many bytes each, so
that a call and the bytes that it reads grow alike."""
WHOLE = Grid(
    SIZES, (16, 32, 64, 128, 256, 1024), (0, 512, 1536), (1, 2, 4, 8), (512,), ((96, 32), (256, 128), (512, 512)), 9, 7
)
QUICK = Grid(SIZES[1:4], (16, 64, 128, 512), (0, 512), (1, 2, 4, 8), (512,), ((96, 32), (256, 256)), 6, 3)


@dataclass(frozen=True)
class MadeModel:
    """In its folder and loaded. name: its sizes."""

    name: str
    folder: Path
    checkpoint: Checkpoint
    model: Transformer
    shape: ModelShape

    def engine(self, chunk: int, threads: int, torch_device: DeviceType = "cpu") -> ReferenceEngine:
        technique = DroplessParameters.model_validate({})
        return ReferenceEngine(
            self.checkpoint, technique, chunk, threads=threads, model=self.model, torch_device=torch_device
        )

    def from_file(self, form: Form) -> Checkpoint:
        """Its experts in their file, and used by nobody else: pages of it that were copied leave the process."""
        return load_checkpoint(str(self.folder), PLAIN_DTYPES[form], experts_as_filed=True)

    def fetching_engine(self, chunk: int, threads: int, form: Form) -> ReferenceEngine:
        """With slots for half the experts, so that decoding fetches."""
        technique = preset_parameters("lru").model_validate({"slots": self.shape.n_experts // 2})
        memory = ExpertMemory(form=form)
        return ReferenceEngine(self.from_file(form), technique, chunk, threads=threads, expert_memory=memory)

    def padding_engine(self, chunk: int, threads: int) -> ReferenceEngine:
        """With shapes that are static, so that a decoded token's experts get more rows than it has."""
        technique = preset_parameters("npumoe-t").model_validate({})
        engine = ReferenceEngine(self.checkpoint, technique, chunk, threads=threads, model=self.model)
        seeds = range(2, 2 + CALIBRATED)
        engine.calibrate([request_of(chunk, 2, self.shape.vocabulary, seed).prompt_ids for seed in seeds])
        return engine


def made_model(folder: Path, sizes: MadeSizes, form: Form, seed: int, torch_device: DeviceType = "cpu") -> MadeModel:
    """With weights in that form; the embedding and routers are left alone, as in any model. Raises `EngineError`."""
    dtype = PLAIN_DTYPES.get(form, torch.bfloat16)
    own = write_made_model(folder / str(seed), sizes, dtype, seed)
    forms = Quantisation(experts=form, attention=form, head=form)
    checkpoint = load_checkpoint(str(own), dtype, Quantisation() if form in PLAIN_DTYPES else forms)
    backend = find_backend(torch_device, None)
    held = form if backend is None else plain_form(backend.dtype)
    # Activations count as wherever a sheet prices them, whatever they take here: else a plan would ask for half of it.
    shape = quantised(own_shape(str(sizes), checkpoint.config), Quantisation(experts=held, attention=held, head=held))
    return MadeModel(str(sizes), own, checkpoint, Transformer(checkpoint, backend), shape)


class FittedUnit(NamedTuple):
    """What a fit gives. bytes_per_value: of the weights. measured: what prices are fitted on. beside: other work that
    was measured in the same rounds."""

    bytes_per_value: float
    prices: UnitPrices
    link: dict[str, Any] | None
    measured: Measured
    beside: tuple[Point, ...] = ()

    @property
    def residuals(self) -> Sequence[Residual]:
        return self.prices.residuals


def fit_unit(
    grid: Grid,
    form: Form,
    threads: int,
    torch_device: DeviceType = "cpu",
    on_round: Callable[[Rounds], object] = lambda done: None,
    beside: Sequence[Work] = (),
) -> FittedUnit:
    """Measures, and fits prices. on_round: told what is done. beside: work of others, measured in the same
    rounds and in no fit. Raises `FitError` and `EngineError`."""
    unit: Unit = "cpu" if torch_device == "cpu" else "gpu"
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        folder = stack.enter_context(ScratchFolder("fit"))
        sizes = (*grid.sizes, THIN)
        made = [made_model(folder, own, form, seed, torch_device) for seed, own in enumerate(sizes)]
        works: list[Work] = []
        runs: list[tuple[EngineRun, ReferenceEngine]] = []
        for one, own_sizes in zip(made, sizes, strict=True):
            is_thin = own_sizes is THIN
            bench = Bench(one.name, one.model, one.shape, find_backend(torch_device, None))
            works += bench.calls(grid.tokens) if is_thin else bench.pieces(*grid.of_pieces)
            for n_prompt, chunk in grid.prompts:
                request = request_of(n_prompt, grid.n_new, one.shape.vocabulary)
                engine = one.engine(chunk, threads, torch_device)
                runs.append((EngineRun(one.name, engine, one.shape, request, chunk), engine))
            if torch_device == "cpu" and not is_thin:
                engine = one.padding_engine(grid.prompts[0][1], threads)
                request = request_of(grid.prompts[0][0], grid.n_new, one.shape.vocabulary)
                n_bytes = bytes_of_many_rows(engine, request, one.shape)
                name, chunk = f"{one.name}; static shapes", grid.prompts[0][1]
                own = EngineRun(name, engine, one.shape, request, chunk, many_rows_bytes=n_bytes)
                runs.append((own, engine))
            if torch_device == "cpu" and form in PLAIN_DTYPES and not is_thin:
                works += copies(one.name, one.from_file(form))
                engine = one.fetching_engine(grid.prompts[0][1], threads, form)
                request = request_of(grid.prompts[0][0], grid.n_new, one.shape.vocabulary)
                fetched = fetches(engine, request)
                name, chunk = f"{one.name}; lru", grid.prompts[0][1]
                own = EngineRun(name, engine, one.shape, request, chunk, fetched.of_token, fetched.of_prompt)
                runs.append((own, engine))
        own_works = [*works, *(run for run, _ in runs)]
        found = measured([*own_works, *beside], grid.n_rounds, on_round)
        n_points = sum(len(work.pieces) for work in own_works)
        found, others = found._replace(points=found.points[:n_points]), found.points[n_points:]
        prices = kernel_prices(found.points)
        has_copies = any(point.piece.curve == "copy" for point in found.points)
        link = link_prices(prices.residuals, found.points) if has_copies else None
        bytes_per_value = made[0].shape.bytes_of("experts")
        link_table = file_link(link)

        def known_seconds(few: float, lines: str = FEW) -> list[float]:
            """By the prices of kernels, those of few rows multiplied, as of `UnitPrices.with_few`."""
            table = {unit: unit_table(prices.with_few(few, lines), bytes_per_value)}
            stands_in = {"npu": unit} if unit == "cpu" else {}
            sheet = sheet_of("first", "prices of kernels", "measured", table, link_table, stands_in=stands_in)
            return [s for run, engine in runs for s in priced(engine, sheet, run.shape, unit, run.request)]

        of_all = zip(known_seconds(1), known_seconds(2), known_seconds(2, EXPERTS_FEW), strict=True)
        known = [Known(once, twice - once, experts - once) for once, twice, experts in of_all]
        steps = [point for point in found.points if point.piece.curve in ("prefill", "decode")]
        add_engine_prices(prices, steps, known)
    return FittedUnit(bytes_per_value, prices, link, found, others)


def unit_table(prices: UnitPrices, bytes_per_value: float) -> dict[str, Any]:
    """As a sheet has it. bytes_per_value: of the weights."""
    kernels = prices.kernels(bytes_per_value)
    tiles = {
        TILE_FIELDS[kernel]: {"value": float(tile.size), "kind": "fitted", "origin": tile.origin}
        for kernel, tile in prices.tiles.items()
    }
    return {"kernels": kernels, **tiles}


def file_link(copies: Mapping[str, Any] | None) -> dict[str, Any]:
    """As a sheet has it: the engine begins a layer when all of its experts are there."""
    if copies is None:
        return {}
    return {"file": {"source": "file", "target": "cpu", "kind": "shared", "whole_layers": True, **copies}}


def sheet_of(
    name: str, description: str, source: str, units: dict[str, Any], links: dict[str, Any], **more: Any
) -> Sheet:
    """The same, read as a sheet. Raises `ValidationError` for what is none."""
    units = {"cpu": {}, **units}
    content = {"name": name, "description": description, "source": source, "units": units, "links": links, **more}
    return Sheet.model_validate(content)
