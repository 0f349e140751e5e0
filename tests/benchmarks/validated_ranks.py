"""Two processes of one thread each, for `tests.benchmarks.model_validation`: their prices, and what is measured.

The prices of kernels are those of one process with all threads. A rank that waits lends its core to the other, so that
a layer takes what its work takes over all cores, and the machine's unit stands in for the ranks. The rest is fitted on
requests of the models of the fit, answered by two processes in the same rounds:

    each thing that is sent, and its bytes   in prefill messages (gloo). What a decoded token sends goes through memory
                                             that both share, which takes a tenth of the time: it has its own price
    weights of attention, in prefill         each process reads all of them for its tokens, with one thread. What that
                                             takes longer than one process with all threads takes for as many bytes
    a decoded token                          once, however many layers: Python calls each process's layers one by one,
                                             where one process alone has a single call of the kernels for all of them

One of these models has next to no work, so that messages alone take its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from devices.models.fit import Amounts, checked_fit
from devices.models.operation import TRANSFER
from devices.models.sheet import Sheet
from devices.models.timeline import Timeline
from engines.base import unheard
from engines.curves.host import MadeModel, sheet_of
from engines.curves.prices import origin_of
from engines.curves.rounds import Piece, Point
from engines.curves.steps import EngineRun, Phases, phases_of, request_of
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.pricing.modelled import ModelledEngine
from engines.pricing.shapes import ModelShape
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters

N_RANKS = 2
TECHNIQUE = "expert-parallel"
PHASES = ("prefill", "decode")
FITTED = {"prefill": ("launches", "moved_bytes", "attention_bytes"), "decode": ("launches", "tokens")}
"""By phase, of `Priced.amounts`. The few kilobytes that a decoded token sends take a microsecond of the memory."""
AMOUNTS = tuple(dict.fromkeys(name for names in FITTED.values() for name in names))
ENDLESS = {"value": 1e18, "kind": "assumed", "origin": "nothing, before it is fitted"}


class Priced(NamedTuple):
    """Seconds of a request. amounts: of its prefill and of a decoded token, things that are sent and their bytes,
    weights of attention that are read, and tokens that are decoded."""

    phases: Phases
    amounts: tuple[Amounts, Amounts]


@dataclass(frozen=True)
class Ranks:
    """`engines.curves.rounds.Work`: a request that two processes answer; closing the engine ends them. folder: of the
    model. sends_alone: whether it has next to no work, so that what is sent takes its time."""

    run: EngineRun
    engine: ParallelEngine
    folder: Path
    shape: ModelShape
    sends_alone: bool

    @property
    def pieces(self) -> Sequence[Piece]:
        return self.run.pieces

    def seconds(self) -> Sequence[float]:
        """Pieces of one process, which take turns with it, have all threads again afterwards."""
        n_threads = torch.get_num_threads()
        try:
            return self.run.seconds()
        finally:
            torch.set_num_threads(n_threads)

    def modelled(self, sheets: RankSheets) -> Phases:
        """Each phase by its sheet."""
        prefill, decode = self.priced(sheets)
        return Phases(prefill.phases.prefill_s, decode.phases.decode_s)

    def priced(self, sheets: Sequence[Sheet]) -> list[Priced]:
        """By each of the sheets. The plans are made in one process, which reads the model for it: nobody needs it
        whole while ranks are measured."""
        technique, n_threads = preset_parameters(TECHNIQUE).model_validate({}), torch.get_num_threads()
        checkpoint = load_checkpoint(str(self.folder), torch.float32)
        plans = ReferenceEngine(checkpoint, technique, self.run.chunk, threads=n_threads, ranks=N_RANKS)
        return [self._priced(plans, sheet) for sheet in sheets]

    def _priced(self, plans: ReferenceEngine, sheet: Sheet) -> Priced:
        timeline = Timeline(sheet)
        plans.reset()
        completion = ModelledEngine(plans, timeline, "cpu", self.shape).run(self.run.request, unheard)
        assert completion.prefill_end_s is not None  # it generated
        starts_s, places, distinct = timeline.operations(0)
        found = [dict.fromkeys(AMOUNTS, 0.0) for _ in PHASES]
        found[1]["tokens"] = 1.0
        n_decoded = completion.n_generated - 1
        for start_s, place in zip(starts_s.tolist(), places.tolist(), strict=True):
            operation = distinct[place][0]
            decodes = start_s >= completion.prefill_end_s
            own, share = found[decodes], 1 / n_decoded if decodes else 1.0
            if operation.kernel == TRANSFER:
                own["launches"] += share
                own["moved_bytes"] += share * operation.moved_bytes
            elif operation.kernel == "attention":
                own["attention_bytes"] += share * operation.weight_bytes
        return Priced(phases_of(completion), (found[0], found[1]))


def ranks_of(made: MadeModel, prompts: Sequence[int], chunk: int, n_new: int, sends_alone: bool = False) -> list[Ranks]:
    """A request of each length, of the same two processes. sends_alone: as of `Ranks`."""
    technique: Any = preset_parameters(TECHNIQUE).model_validate({})
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(str(made.folder)), technique, N_RANKS, prefill_chunk=chunk, threads=1)
    )
    requests = [request_of(n, n_new, made.shape.vocabulary, seed=21) for n in prompts]
    runs = [EngineRun(made.name, engine, made.shape, request, chunk) for request in requests]
    return [Ranks(run, engine, made.folder, made.shape, sends_alone) for run in runs]


class RankSheets(NamedTuple):
    """The machine with two ranks, and what lies between them in each phase."""

    prefill: Sheet
    decode: Sheet


def sheet_with(
    cpu: Sheet, link: dict[str, Any], attention: dict[str, Any] | None = None, token: dict[str, Any] | None = None
) -> Sheet:
    """The sheet of the machine, which stands in for its ranks, and what lies between them. attention: a figure that is
    added to what a byte of its weights takes. token: to what a decoded token takes once."""
    whole = cpu.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    ranks = {f"rank:{rank}": "cpu" for rank in range(N_RANKS)}
    between = {"source": ["rank"], "target": ["rank"], "kind": "shared", **link}
    links = {"ranks": between, **whole.get("links", {})}
    stands_in = {**whole.get("stands_in", {}), **ranks}
    kernels = whole["units"]["cpu"]["kernels"]
    for kernel, price, more in (("attention", "s_per_weight_byte", attention), ("decode_step", "s_per_launch", token)):
        if more is not None:
            line = kernels.setdefault(kernel, {})
            before_s = line.get(price, {}).get("value", 0.0)
            line[price] = {**more, "value": before_s + more["value"]}
    return sheet_of("ranks", "two processes", "measured", whole["units"], links, stands_in=stands_in)


def fitted_sheets(cpu: Sheet, runs: Sequence[Ranks], points: Sequence[Point]) -> RankSheets:
    """runs: of the models of the fit. points: of their pieces."""
    free = sheet_with(cpu, {"bytes_per_s": ENDLESS})
    found, sheets = [one.priced([free])[0] for one in runs], []
    for number, phase in enumerate(PHASES):
        # A token of that model sends less in a layer: its attention is too small to be split.
        own = [i for i, one in enumerate(runs) if phase == "prefill" or not one.sends_alone]
        known = [found[i].phases[number] for i in own]
        amounts = [found[i].amounts[number] for i in own]
        took = [points[len(PHASES) * i + number].seconds for i in own]
        sheets.append(_sheet(cpu, phase, amounts, took, known))
    return RankSheets(*sheets)


def _sheet(
    cpu: Sheet, phase: str, amounts: Sequence[Amounts], seconds: Sequence[float], known: Sequence[float]
) -> Sheet:
    """known: seconds of all that the prices of one process have."""
    fit = checked_fit(f"ranks in {phase}", FITTED[phase], amounts, seconds, known)
    told = {"kind": "fitted", "origin": origin_of(fit)}
    found = dict.fromkeys(AMOUNTS, 0.0) | dict(zip(FITTED[phase], fit.constants, strict=True))
    each_s, byte_s = found["launches"], found["moved_bytes"]
    weight_s, token_s = found["attention_bytes"], found["tokens"]
    price = f"{each_s * 1e6:.0f} us each, {byte_s * 1e9:.3f} s/GB, weights of attention {weight_s * 1e9:.3f} s/GB more"
    price += f", {token_s * 1e6:.0f} us a decoded token"
    print(f"{phase}: {price}; {told['origin']}", flush=True)
    rate = {"value": 1 / byte_s, **told} if byte_s else ENDLESS
    link = {"latency_s": {"value": each_s, **told}, "bytes_per_s": rate}
    weight, token = ({"value": value, **told} if value else None for value in (weight_s, token_s))
    return sheet_with(cpu, link, weight, token)
