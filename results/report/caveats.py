"""What a device's figures are of, and what a reader must know before believing its verdicts, in a few words each."""

from __future__ import annotations

from dataclasses import dataclass

from results.cells import model_name, shared_cpu, trials_of, usable
from results.records import MODEL_PREFIX
from results.roads import comparable_roads
from results.run_notes import parts_seen
from results.runs import RunData
from results.sittings import sittings_of, told_apart, told_in_turn
from results.units import format_share

SHOWN_MODELS = 2


@dataclass(frozen=True)
class Caveat:
    """target: the id of the place on the page that tells more."""

    text: str
    target: str


def subject_of(run: RunData, device: str) -> str:
    """Models with their notes, and the machine: "tiny (trained on generated text) on EPYC 7B13, 2 cores"."""
    models = list(dict.fromkeys(model_name(c) for c in run.cells if c.device == device))
    named = ", ".join(models) if len(models) <= SHOWN_MODELS else f"{len(models)} models"
    if device.startswith(MODEL_PREFIX):
        return f"{named}; the machine is modelled"
    machine = run.info.environments.get(device)
    if machine is None:
        return named
    cores = f", {machine.n_cores} core{'s' if machine.n_cores != 1 else ''}" if machine.n_cores else ""
    gpus = f", with {', '.join(machine.gpus)}" if machine.gpus else ""
    return f"{named} on {machine.cpu_model}{cores}{gpus}"


def caveats_of(run: RunData, device: str) -> tuple[Caveat, ...]:
    trials = trials_of(run)
    cells = [c for c in run.cells if c.device == device]
    own = [t for c in cells for t in trials[c.cell_id]]
    found = []
    if device in run.info.only_for:
        found.append(Caveat(f"a sheet only for {run.info.only_for[device]}", "know"))
    failed = sum(t.has_failed for t in own)
    if failed:
        found.append(Caveat(f"{failed} of {len(own)} trials failed", "failures"))
    if (shared := shared_cpu([t for t in own if t.time_method == "measured"])) is not None:
        found.append(
            Caveat(
                f"{shared.n} of {shared.n_of} trials shared the CPU, up to {format_share(shared.most)} of it", "know"
            )
        )
    if n_doubted := sum(bool(t.disagreements) for t in own):
        found.append(Caveat(f"in {n_doubted} of {len(own)} trials two readings of the same joules disagree", "know"))
    if any(len(sets) > 1 for sets in parts_seen(usable(own)).values()):
        found.append(Caveat("joules are of other parts in some trials than in others", "know"))
    sittings = sittings_of(own)
    if told_apart(cells, sittings):
        found.append(Caveat("arms were measured in different sittings", "know"))
    if told_in_turn(run.info.plan, cells, sittings):
        found.append(Caveat("arms were measured one after the other", "know"))
    for workload in dict.fromkeys(c.workload for c in cells):
        roads = {comparable_roads(trials[c.cell_id]) for c in cells if c.workload == workload} - {frozenset()}
        if len(roads) > 1:
            found.append(Caveat("arms were computed in unlike ways", "know"))
            break
    return tuple(found)
