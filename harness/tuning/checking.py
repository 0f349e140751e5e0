"""The chosen arm beside the planned one: an ordinary run of two arms, in turns, and what their pairs say.

A search takes the best of many figures, and the best of many is lucky. So what it chose is measured again, with the
planned arm in turns, and judged by pairs of repeats alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness.core_sets import ThreadCounts
from harness.external.base import ExternalSpec
from harness.opening import open_run
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts, data_root
from harness.runner import Progress, Runner, are_contended, took_more
from harness.schema import EngineSpec
from harness.tuning.probing import Probe, SessionBrokenOffError, probe_of
from harness.tuning.profile import Check, CheckedRatio
from harness.tuning.space import AS_PLANNED
from results.cells import usable
from results.core_lists import parse_cores
from results.ratios import Ratio, ratio_of_means
from results.records import Phase
from results.report.csv import write_csv
from results.report.html import write_html
from results.run_frames import RunFrames
from results.store import Store
from results.trials import Trial

TUNED_ARM = "tuned"
CHECK_FOLDER = "check"
CHECK_REPORT = "report.html"
"""Written once all pairs are there."""
INDIFFERENCE = 0.02
"""A chosen arm that costs so much more than the planned one is as good."""
VERDICT_WORDS = {"holds": "holds", "does not hold": "does not hold", "not certain": "is not certain"}
MODELLED_WORDS = " The joules are modelled from CPU time: a meter may say otherwise, beyond any interval."
REPLAYED_WORDS = (
    " The joules are replayed from a recording, which does not know which arm runs: one that takes longer gets more of"
    " them, and nothing that follows from them is certain."
)
ITSELF_WORDS = " The chosen arm is the one as planned: what they differ by is noise, and it saves nothing."
DOES = {"prefill": "reading the prompt", "decode": "decoding", "all": "a request"}

Raw = dict[str, Any]
Verdict = Literal["holds", "does not hold", "not certain"]


class NoPairsError(SessionBrokenOffError):
    """All pairs were taken, and none can be used: going on in the same folder would find them again."""


def check_plan(raw: Raw, planned: Raw, tuned: Raw, n_pairs: int) -> Raw:
    """A plan of both arms. planned: the engine as the plan has it."""
    plan = copy.deepcopy(raw)
    plan.pop("sweep", None)
    plan["engine"] = [{**planned, "name": AS_PLANNED}, {**tuned, "name": TUNED_ARM}]
    plan["baseline"] = AS_PLANNED
    protocol = {key: value for key, value in plan.get("protocol", {}).items() if key != "stop"}
    plan["protocol"] = {**protocol, "repeats": n_pairs, "order": "interleaved"}
    plan["name"] = f"{plan['name']} check"[:64]
    return plan


def is_beside_itself(raw: Raw) -> bool:
    """Whether both arms of such a plan are one, however each of them is written."""
    arms = [_in_full(part.spec) for part in draft_plan(raw).parts.engines]
    return len(arms) == 2 and arms[0] == arms[1]


def _in_full(arm: EngineSpec | ExternalSpec) -> Raw:
    """All that it computes with, but for its name. A phase has a thread for each of its cores where none are given."""
    keys = arm.model_dump(exclude={"name"})
    if isinstance(arm, EngineSpec) and arm.cores is not None:
        threads = arm.threads or ThreadCounts.model_construct()
        keys["threads"] = {
            phase: getattr(threads, phase) or (own and len(parse_cores(own))) for phase, own in arm.cores
        }
    return keys


def run_check(
    raw: Raw, folder: Path, run_parts: RunParts, progress: Progress, phases: Sequence[Phase], slowdown: float,
    objective: str,
) -> Check:  # fmt: skip
    """Goes on where it was broken off. Raises what `open_run` raises, `PlanError`, `SessionBrokenOffError`."""
    plan = preflight(draft_plan(raw, data_root()), run_parts)
    with open_run(plan, folder, Store.holds_run(folder), run_parts) as store:
        runner = Runner(plan, store, run_parts, progress)
        runner.run()
        by_arm: dict[str, list[tuple[Trial, ...]]] = {AS_PLANNED: [], TUNED_ARM: []}
        for cell_plan in plan.cells:
            by_arm[cell_plan.engine.name].append(runner.trials_of(cell_plan.cell.cell_id))
    with Store.view(folder) as store:
        derived = RunFrames(store.data(), AS_PLANNED)
        write_csv(derived.run, folder, derived)
        write_html(derived.run, folder / CHECK_REPORT, derived)
    limit = plan.protocol.max_foreign_cpu_share
    pairs = _pairs(by_arm[TUNED_ARM], by_arm[AS_PLANNED])
    if not pairs:
        taken = [trial for side in by_arm.values() for own in side for trial in own]
        raise NoPairsError(_no_pairs(taken, folder / CHECK_REPORT, limit))
    ratios = [ratio for phase in phases for ratio in _ratios(phase, pairs)]
    modelled = all(cell_plan.is_modelled for cell_plan in plan.cells)
    found = verdict_of(ratios, slowdown, objective, modelled)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    words = _words(ratios, found)
    is_known = any(one.quantity == "energy" and one.ratio is not None for one in ratios)
    if is_known and _is_modelled_energy(by_arm[TUNED_ARM]) and not modelled:
        words += MODELLED_WORDS
    if any(one.method == "replayed" for one in ratios):
        words += REPLAYED_WORDS
    if is_beside_itself(raw):
        words += ITSELF_WORDS
    return Check(at=at, n_pairs=len(pairs), ratios=tuple(ratios), verdict=found, words=words)


def _is_modelled_energy(trials: Sequence[Sequence[Trial]]) -> bool:
    methods = {reading.method for own in trials for trial in usable(own) for reading in trial.energy}
    return methods == {"modelled"}


def _pairs(
    chosen: Sequence[Sequence[Trial]], planned: Sequence[Sequence[Trial]]
) -> list[tuple[list[Trial], list[Trial]]]:
    """Repeats in which every workload of both arms can be used. Each argument: by workload, its trials."""
    sides = [[{t.repeat: t for t in usable(own)} for own in side] for side in (chosen, planned)]
    repeats = set.intersection(*(set(own) for side in sides for own in side))
    return [([own[i] for own in sides[0]], [own[i] for own in sides[1]]) for i in sorted(repeats)]


def _no_pairs(taken: Sequence[Trial], report: Path, max_foreign_cpu_share: float) -> str:
    marked = [trial for trial in taken if trial.marks]
    is_shared = are_contended(marked)
    remedy = f"{took_more(max_foreign_cpu_share)}; end them" if is_shared else "put right what disturbed them"
    return (
        f"the check has no pair of trials that can be used ({len(marked)} of {len(taken)} are marked, and {report} says"
        f" by what): {remedy}"
    )


def _ratios(phase: Phase, paired: Sequence[tuple[list[Trial], list[Trial]]]) -> list[CheckedRatio]:
    pairs = [(probe_of(own, phase), probe_of(other, phase)) for own, other in paired]
    times = ratio_of_means([([_token_s(own) for own, _ in pairs], [_token_s(other) for _, other in pairs])])
    found = [_checked(phase, "time", times)]
    joules = [(_token_j(own), _token_j(other)) for own, other in pairs]
    known = [(a, b) for a, b in joules if a is not None and b is not None]
    if len(known) < min(2, len(pairs)):
        why = next(p.why_no_joules for pair in pairs for p in pair if p.joules is None)
        found.append(CheckedRatio(phase=phase, quantity="energy", ratio=None, reason=why))
    else:
        energy = _checked(phase, "energy", ratio_of_means([([a for a, _ in known], [b for _, b in known])]))
        found.append(energy.model_copy(update={"method": pairs[0][0].method}))
    return found


def _token_s(probe: Probe) -> float:
    return probe.seconds / probe.tokens


def _token_j(probe: Probe) -> float | None:
    return None if probe.joules is None else probe.joules / probe.tokens


def _checked(phase: Phase, quantity: Literal["time", "energy"], found: Ratio) -> CheckedRatio:
    return CheckedRatio(
        phase=phase, quantity=quantity, ratio=found.value, low=found.low, high=found.high, reason=found.reason
    )


def verdict_of(ratios: Sequence[CheckedRatio], slowdown: float, objective: str, modelled: bool) -> Verdict:
    """By the quantity of the objective, and for energy also by the time that it may cost at most.

    holds: it surely costs at most 2 % more than the planned arm, and time is within the slowdown, to the best of what
    is known. does not hold: it surely costs more than that, or is surely too slow. Replayed joules are never certain.
    """
    most_time = 1.0 / (1.0 - slowdown)
    judged = "time" if objective == "latency" else "energy"
    verdicts: list[Verdict] = []
    for one in ratios:
        if one.ratio is None or one.method == "replayed":
            verdicts += ["not certain"] if one.quantity == judged else []
            continue
        low, high = (one.ratio, one.ratio) if modelled else (one.low, one.high)
        if one.quantity == judged:
            if low is not None and low > 1.0 + INDIFFERENCE:
                verdicts.append("does not hold")
            else:
                verdicts.append("holds" if high is not None and high <= 1.0 + INDIFFERENCE else "not certain")
        elif one.quantity == "time":
            if low is not None and low > most_time:
                verdicts.append("does not hold")
            elif one.ratio > most_time:
                verdicts.append("not certain")
    order: tuple[Verdict, ...] = ("does not hold", "not certain", "holds")
    return next(verdict for verdict in order if verdict in verdicts)


def _words(ratios: Sequence[CheckedRatio], verdict: Verdict) -> str:
    """A reason why there is no interval that all ratios share is told once, at the end."""
    reason = ratios[0].reason
    if len(ratios) > 1 and reason and all(one.ratio and one.low is None and one.reason == reason for one in ratios):
        without = _words([one.model_copy(update={"reason": None}) for one in ratios], verdict)
        return f"{without} No ratio has an interval: {reason}."
    parts = []
    for phase in dict.fromkeys(one.phase for one in ratios):
        own = {one.quantity: one for one in ratios if one.phase == phase}
        energy, time = own["energy"], own["time"]
        joules = _told(energy, "the joules") if energy.ratio is not None else _unknown("joules that are", energy)
        seconds = _told(time, "the time") if time.ratio is not None else _unknown("a time that is", time)
        parts.append(f"{DOES[phase]} takes {joules} and {seconds}")
    return f"Beside the arm as planned, {'; '.join(parts)}: the choice {VERDICT_WORDS[verdict]}."


def _unknown(what: str, one: CheckedRatio) -> str:
    return f"{what} not known ({one.reason})"


def _told(one: CheckedRatio, what: str) -> str:
    """A ratio without an interval says why: it would read as one that is certain."""
    interval = f" [{one.low:.2f}, {one.high:.2f}]" if one.low is not None and one.high is not None else ""
    why = f" ({one.reason})" if one.reason and not interval else ""
    return f"{one.ratio:.2f}×{interval} {what}{why}"
