"""How a command ends behind a run whose trials failed, or of which none can be used: in words, and by its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.terminal import EXIT_NONE_USABLE, EXIT_SOME_FAILED, fail

if TYPE_CHECKING:
    from harness.runner import RunOutcome

REMEDY = "report.html says what disturbed them; put that right, and run the plan again with another --out"
CONTENDED_REMEDY = (
    "{took_more}: end them, or raise that key and accept that they disturb times and joules; then run the plan again"
    " with another --out"
)
PLACED_REMEDY = (
    "placement.csv says where Core ML put each graph, and `joulebench coreml lint` which operations the Neural Engine"
    " does not take; mend these, convert again, and run the plan with another --out"
)
PLACEMENT_REMEDY = (
    "placement.csv says why Core ML did not tell where the experts lie; a joule of the Neural Engine counts only where"
    " it does"
)
INTERPRETED_REMEDY = (
    "the interpreter's answers count where they are scored, and its times say nothing of a Mac; for these run the plan"
    ' on a Mac with predictor = "macos"'
)


def tell_outcome(outcome: RunOutcome, max_foreign_cpu_share: float) -> None:
    """Ends the command where trials failed, or none can be used."""
    if outcome.n_ok and outcome.n_marked == outcome.n_ok:
        remedy = _remedy(outcome.marks, max_foreign_cpu_share)
        fail(
            f"no trial can be used: {outcome.n_marked} of {outcome.n_ok + outcome.n_failed} are marked"
            f" ({', '.join(outcome.marks)}) and {outcome.n_failed} failed, so no table has a time or a joule; {remedy}",
            EXIT_NONE_USABLE,
        )
    if outcome.n_failed:
        fail(
            f"{outcome.n_failed} of {outcome.n_ok + outcome.n_failed} trials failed; their reasons are in report.html"
            f" and trials.csv. {_again(outcome)}",
            EXIT_SOME_FAILED,
        )


def _again(outcome: RunOutcome) -> str:
    """Which of those that failed a resume measures again."""
    if not outcome.n_lost and not outcome.n_spare:
        return "`--resume` measures none of them again: give the plan another --out"
    told = []
    for n, what in (
        (outcome.n_lost, "once it is back, `--resume` measures {} again"),
        (outcome.n_spare, "`protocol.stop` has enough without {}"),
    ):
        who, whom = ("They", "them") if n == outcome.n_failed else (f"{n} of them", "these")
        if n:
            told.append(f"{who} lost their device, a meter or a server: {what.format(whom)}")
    if outcome.n_lost + outcome.n_spare < outcome.n_failed:
        told.append("The others need another --out")
    return ". ".join(told)


def _remedy(marks: tuple[str, ...], max_foreign_cpu_share: float) -> str:
    """What to do where every trial has one of these marks."""
    from harness.runner import took_more
    from results.cells import CONTENDED, INTERPRETED
    from results.graph_placement import EXPERTS_NOT_ON_ANE, PLACEMENT_NOT_TOLD

    if len(marks) > 1:
        return REMEDY
    remedies = {
        CONTENDED: CONTENDED_REMEDY.format(took_more=took_more(max_foreign_cpu_share)),
        EXPERTS_NOT_ON_ANE: PLACED_REMEDY,
        PLACEMENT_NOT_TOLD: PLACEMENT_REMEDY,
        INTERPRETED: INTERPRETED_REMEDY,
    }
    return remedies.get(marks[0], REMEDY)
