"""Meters that see unlike units of a machine stand beside each other, and are not told as two readings of one thing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.summary import print_summary
from results.report.html import page_context
from results.run_frames import RunFrames
from results.runs import RunData
from tests.run_builders import cell, reading, run, trial

PHASES = ("prefill", "decode", "all")
OF_ONE = "also read by another meter or method: "
SEEN = "nvml sees the GPU alone; of the CPU, rapl: "
OF_TWO = (
    "host: joules in the tables are those of nvml, which sees the GPU alone. Those of the CPU, by rapl, stand in the"
    " notes of the report's tables. Neither is the whole machine, and they are not added."
)


def read_by(*meters: str) -> RunData:
    """The n-th meter read n times 6 J in each phase, in 5 tokens of the whole window."""
    energy = tuple(reading(p, 6.0 * n, meter=meter) for n, meter in enumerate(meters, 1) for p in PHASES)
    return run([cell()], [trial(repeat=i, energy=energy) for i in range(2)])


def energy_notes(data: RunData) -> list[str]:
    (table,) = [t for t in page_context(data)["figure_tables"] if t.title == "Energy and power"]
    return list(table.notes)


def test_a_gpu_and_a_cpu_are_not_told_as_two_readings_of_one_thing() -> None:
    """A reader thought that the two should agree, and nobody saw that neither is the whole machine."""
    data = read_by("nvml", "rapl")
    notes = energy_notes(data)
    assert f"{SEEN}12.0 J/response; neither is the whole machine, and they are not added" in notes
    assert not any(OF_ONE in note for note in notes)
    assert OF_TWO in page_context(data)["warnings"]
    output = io.StringIO()
    print_summary(RunFrames(data), Console(file=output, width=1000))
    assert OF_TWO in output.getvalue()


@pytest.mark.parametrize("second", ["zeus", "powermetrics"])
def test_meters_that_may_see_the_same_unit_are_told_as_before(second: str) -> None:
    data = read_by("nvml", second)
    notes = energy_notes(data)
    assert f"{OF_ONE}{second}: 12.0 J/response" in notes
    assert not any("whole machine" in text for text in (*notes, *page_context(data)["warnings"]))


def test_a_third_meter_of_the_first_one_s_unit_stands_apart() -> None:
    notes = energy_notes(read_by("rapl", "nvml", "perf"))
    assert (
        "rapl sees the CPU alone; of the GPU, nvml: 12.0 J/response; neither is the whole machine, and they are not"
        f" added; {OF_ONE}perf: 18.0 J/response"
    ) in notes


@pytest.mark.parametrize("silent", ["nvml", "rapl"])
def test_of_a_meter_that_has_no_joules_nobody_says_where_its_joules_stand(silent: str) -> None:
    other = {"nvml": "rapl", "rapl": "nvml"}[silent]
    energy = tuple(
        reading(p, None if meter == silent else 6.0, meter=meter, reason="no readings" if meter == silent else None)
        for meter in ("nvml", "rapl")
        for p in PHASES
    )
    warnings = page_context(run([cell()], [trial(energy=energy)]))["warnings"]
    assert not any(f"those of {other}" in text or f"those of {silent}" in text for text in warnings)
