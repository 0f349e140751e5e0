"""What a meter sees, where it is one unit alone on any machine, and what is said of two meters that see unlike units:
their joules are not to agree, and nothing here is the whole machine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from results.cells import trials_of
from results.packed import column_of
from results.runs import RunData
from results.trials import Trial

SEE_NO_CPU: Final = frozenset({"nvml"})
SEE_NO_GPU: Final = frozenset({"rapl", "perf", "modelled"})


def unit_of(meter: str | None) -> str | None:
    """None where it may see several, or is of the whole device."""
    return "GPU" if meter in SEE_NO_CPU else "CPU" if meter in SEE_NO_GPU else None


def see_unlike(first: str | None, second: str | None) -> bool:
    units = unit_of(first), unit_of(second)
    return None not in units and units[0] != units[1]


def _that_have_joules(trial: Trial) -> Iterator[str]:
    meters, joules = (column_of(trial.energy, name) for name in ("meter", "energy_j"))
    return (meter for meter, energy_j in zip(meters, joules, strict=True) if energy_j is not None)


def unlike_unit_notes(run: RunData) -> list[str]:
    """By device: whose joules stand in the tables, and whose beside them. Of meters that have joules."""
    trials = trials_of(run)
    found: dict[str, tuple[str, Sequence[str]]] = {}
    for cell in run.cells:
        meters = dict.fromkeys(meter for trial in trials[cell.cell_id] for meter in _that_have_joules(trial))
        first, *others = meters or ("",)
        unlike = [meter for meter in others if see_unlike(first, meter)]
        if unlike:
            found.setdefault(cell.device, (first, unlike))
    return [
        f"{device}: joules in the tables are those of {first}, which sees the {unit_of(first)} alone. Those of the"
        f" {unit_of(others[0])}, by {' and '.join(others)}, stand in the notes of the report's tables. Neither is the"
        " whole machine, and they are not added."
        for device, (first, others) in found.items()
    ]
