"""Two processes of one thread each, for `tests.benchmarks.model_validation`: their prices, and what is measured.

The prices of kernels are those of one process with all threads. A rank that waits lends its core to the other, so that
a layer takes what its work takes over all cores, and the machine's unit stands in for the ranks. What an exchange costs
is fitted on requests of the models of the fit, answered by two processes: seconds of each thing that is sent, and of
its bytes. In prefill these are messages (gloo). What a decoded token sends goes through memory that both share, which
takes a tenth of the time: it has a price of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from devices.models.fit import Amounts, checked_fit
from devices.models.operation import TRANSFER
from devices.models.sheet import Sheet
from devices.models.timeline import Timeline
from engines.base import unheard
from engines.curves.host import MadeModel, sheet_of
from engines.curves.prices import origin_of
from engines.curves.rounds import measured
from engines.curves.steps import EngineRun, Phases, phases_of, request_of
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.pricing.modelled import ModelledEngine
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from results.records import Request

N_RANKS = 2
TECHNIQUE = "expert-parallel"
PHASES = ("prefill", "decode")
SENT = {"prefill": ("launches", "moved_bytes"), "decode": ("launches",)}
"""What is fitted of it. The few kilobytes of a decoded token take a microsecond of the memory."""
ENDLESS = {"value": 1e18, "kind": "assumed", "origin": "nothing, before it is fitted"}


@dataclass(frozen=True)
class Ranks:
    """A made model in two processes, and the same plans in one. `close` ends them."""

    run: EngineRun
    engine: ParallelEngine
    plans: ReferenceEngine
    made: MadeModel

    def modelled(self, sheets: RankSheets) -> Phases:
        """Each phase by its sheet."""
        return Phases(self.priced(sheets.prefill)[0].prefill_s, self.priced(sheets.decode)[0].decode_s)

    def priced(self, sheet: Sheet) -> tuple[Phases, tuple[Amounts, Amounts]]:
        """Seconds, and what is sent in prefill and for one decoded token: how many things, and how many bytes."""
        timeline = Timeline(sheet)
        self.plans.reset()
        modelled = ModelledEngine(self.plans, timeline, "cpu", self.made.shape)
        completion = modelled.run(self.run.request, unheard)
        assert completion.prefill_end_s is not None  # it generated
        starts_s, places, distinct = timeline.operations(0)
        sent: list[dict[str, float]] = [{"launches": 0.0, "moved_bytes": 0.0} for _ in range(2)]
        n_decoded = completion.n_generated - 1
        for start_s, place in zip(starts_s.tolist(), places.tolist(), strict=True):
            operation = distinct[place][0]
            if operation.kernel == TRANSFER:
                decodes = start_s >= completion.prefill_end_s
                share = 1 / n_decoded if decodes else 1.0
                sent[decodes]["launches"] += share
                sent[decodes]["moved_bytes"] += share * operation.moved_bytes
        return phases_of(completion), (sent[0], sent[1])


def ranks_of(made: MadeModel, n_prompt: int, chunk: int, n_new: int) -> Ranks:
    technique: Any = preset_parameters(TECHNIQUE).model_validate({})
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(str(made.folder)), technique, N_RANKS, prefill_chunk=chunk, threads=1)
    )
    plans = ReferenceEngine(made.checkpoint, technique, chunk, threads=1, model=made.model, ranks=N_RANKS)
    request: Request = request_of(n_prompt, n_new, made.shape.vocabulary, seed=21)
    return Ranks(EngineRun(made.name, engine, made.shape, request, chunk), engine, plans, made)


class RankSheets(NamedTuple):
    """The machine with two ranks, and what lies between them in each phase."""

    prefill: Sheet
    decode: Sheet


def sheet_with(cpu: Sheet, link: dict[str, Any]) -> Sheet:
    """The sheet of the machine, which stands in for its ranks, and what lies between them."""
    whole = cpu.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    ranks = {f"rank:{rank}": "cpu" for rank in range(N_RANKS)}
    between = {"source": ["rank"], "target": ["rank"], "kind": "shared", **link}
    links = {"ranks": between, **whole.get("links", {})}
    stands_in = {**whole.get("stands_in", {}), **ranks}
    return sheet_of("ranks", "two processes", "measured", whole["units"], links, stands_in=stands_in)


def fitted_sheets(cpu: Sheet, runs: Sequence[Ranks], n_rounds: int) -> RankSheets:
    """runs: of the models of the fit."""
    free = sheet_with(cpu, {"bytes_per_s": ENDLESS})
    seconds = [point.seconds for point in measured([one.run for one in runs], n_rounds).points]
    sheets = []
    found = [one.priced(free) for one in runs]
    for number, phase in enumerate(PHASES):
        known = [phases[number] for phases, _ in found]
        sent = [amounts[number] for _, amounts in found]
        sheets.append(sheet_with(cpu, _between(phase, sent, seconds[number :: len(PHASES)], known)))
    return RankSheets(*sheets)


def _between(phase: str, sent: Sequence[Amounts], seconds: Sequence[float], known: Sequence[float]) -> dict[str, Any]:
    """known: seconds of all that is not sent."""
    fit = checked_fit(f"exchanges of {phase}", SENT[phase], sent, seconds, known)
    told = {"kind": "fitted", "origin": origin_of(fit)}
    each_s, byte_s = (*fit.constants, 0.0)[:2]
    print(f"{phase}: {each_s * 1e6:.0f} us each, {byte_s * 1e9:.3f} s/GB; {told['origin']}", flush=True)
    rate = {"value": 1 / byte_s, **told} if byte_s else ENDLESS
    return {"latency_s": {"value": each_s, **told}, "bytes_per_s": rate}
