"""Problems of a plan's workloads with each model: data that is absent, prompts that are too long."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from engines.model.checkpoints import CheckpointFacts
from harness.matrix import Part
from harness.run_parts import RunParts
from harness.workload_specs import WorkloadSpec
from workloads.base import TellsEarly, Workload, WorkloadError
from workloads.fitting import reasons_for_none


def all_workload_problems(
    parts: list[Part[WorkloadSpec]],
    facts: CheckpointFacts,
    techniques: dict[str, int],
    run_parts: RunParts,
    empty: dict[tuple[str, str], tuple[str, ...]],
) -> list[str]:
    """In the order of the plan. Of workloads that differ in their limit alone, the largest tells of all.

    A smaller limit asks some of the same items, and keeps more of them for calibration.
    """
    sound: set[str] = set()
    problems: dict[str, list[str]] = {}
    for part in sorted(parts, key=_n_asked, reverse=True):
        rest = part.spec.model_dump_json(exclude={"limit", "label"})
        if rest in sound:
            continue
        own = problems[part.label] = list(_workload_problems(part, facts, techniques, run_parts, empty))
        if not own and (part.label, facts.source) not in empty and part.spec.smaller_is_part:
            one_size = isinstance(run_parts.workload_named(part.label, part.spec), TellsEarly)
            if one_size or part.spec.too_long == "fail":
                sound.add(rest)
    return [problem for part in parts for problem in problems.get(part.label, ())]


def _n_asked(part: Part[WorkloadSpec]) -> float:
    return math.inf if part.spec.limit is None else part.spec.limit


def _workload_problems(
    part: Part[WorkloadSpec],
    facts: CheckpointFacts,
    techniques: dict[str, int],
    run_parts: RunParts,
    empty: dict[tuple[str, str], tuple[str, ...]],
) -> Iterator[str]:
    """Builds the requests, which finds absent data, other schemas, and prompts that are too long.

    They are kept, but where one sample tells of all: those are built when they are asked.

    empty: takes the workload and the model, with the reasons why it has nothing to ask of it.
    """
    max_length = facts.config.max_length
    try:
        workload = run_parts.workload_named(part.label, part.spec)
        asks = workload.has_requests if isinstance(workload, TellsEarly) else workload.requests
        if not asks(facts.tokenizer, max_length):
            empty[part.label, facts.source] = reasons_for_none(workload, part.label, max_length)
            return
        for technique, wanted in techniques.items():
            if not _can_calibrate(workload, facts, wanted):
                yield (
                    f"workload {part.label}: technique {technique} is calibrated, and no item kept for that fits the "
                    f"model's {max_length} tokens; give the data shorter items,{_shorter_answers(part.spec)} or take a "
                    "technique without calibration"
                )
    except WorkloadError as error:
        yield problem_of(part.label, error)


def problem_of(label: str, error: WorkloadError) -> str:
    """With the workload's name once: some errors begin with it."""
    return f"workload {label}: {str(error).removeprefix(f'{label}: ')}"


def _can_calibrate(workload: Workload, facts: CheckpointFacts, wanted: int) -> bool:
    """One prompt shows it where all are of one size; where that one does not fit, others may."""
    if isinstance(workload, TellsEarly):
        with contextlib.suppress(WorkloadError):
            if workload.calibration_prompts(facts.tokenizer, facts.config.max_length, 1):
                return True
    return bool(workload.calibration_prompts(facts.tokenizer, facts.config.max_length, wanted))


def _shorter_answers(spec: WorkloadSpec) -> str:
    return " lower max_new_tokens," if "max_new_tokens" in type(spec).model_fields else ""
