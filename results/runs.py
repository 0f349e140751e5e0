"""A whole run: what identifies it, and all that its tables are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pydantic import Field

from results.environments import Environment
from results.expert_heat import ExpertHeat
from results.records import Cell, PowerTrace, Record, Sample
from results.self_tests import SelfTest
from results.trials import Trial

HARDWARE_SHEET = "hardware sheet "
"""Of a modelled device's: before its name, in the name of the input."""
OWN_CODE = "joulebench's own code"
"""Of an input: all that computes figures."""
OF_MODEL = " of model "
OF_PROFILE = " of profile "
"""Behind the name of a file: before the model, or the profile's folder, in the name of the input."""
OF_WORKER = ", worker of "
"""In the name of a setting that one worker of a fleet has: before its device."""
SHA256 = "sha256:"
"""Before the digest, in an input's value."""
SHOWN_DIGITS = 12
"""Of a hash, for people; the tables as CSV have all 64."""


def shown_value(value: str) -> str:
    """Of an input, for people: a digest cut, or a setting."""
    return f"sha256 {value.removeprefix(SHA256)[:SHOWN_DIGITS]}" if value.startswith(SHA256) else value


class Input(Record):
    """Something besides the plan that decides a run's numbers."""

    name: str
    """What it is: "model.safetensors of model bundled:tiny-qwen3-moe", "watts sheet generic", "OMP_NUM_THREADS"."""
    value: str
    """Of a file "sha256:" and its digest, else what a setting says."""


class OwnSheet(Record):
    """A hardware sheet that a user wrote, as it was when the run was made."""

    path: str
    text: str


class RunInfo(Record):
    """What identifies a run and what it ran on."""

    run_id: str
    name: str
    created_at: str
    """UTC, ISO 8601."""
    plan: dict[str, Any]
    plan_hash: str
    environments: dict[str, Environment]
    """By device name. For a modelled device: the host that computed."""
    self_tests: dict[str, SelfTest] = Field(default_factory=dict)
    """By device name: the last one made on the same machine before the run began."""
    inputs: tuple[Input, ...] = ()
    """Weights, sheets, recordings, data files, thread settings. Empty in runs from before they were kept."""
    left_out: tuple[str, ...] = ()
    """Cells of the matrix that were not run, and why: prompts longer than the model's context, an arm whose arithmetic
    the processor does not have, ..."""
    own_sheets: dict[str, OwnSheet] = Field(default_factory=dict)
    """By modelled device whose sheet is no part of joulebench."""
    only_for: dict[str, str] = Field(default_factory=dict)
    """By modelled device: the one thing that its sheet is good for, where it does not stand for its machine."""

    @property
    def is_of_fleet(self) -> bool:
        """Whether workers of a fleet measured it: the settings of each stand in it."""
        return any(OF_WORKER in one.name for one in self.inputs)


@dataclass(frozen=True)
class RunData:
    """All that tables and reports are made from.

    load_traces: reads one trial's raw traces, by trial id. Raises `TraceFileError`; `results.trial_traces` catches it.
    """

    info: RunInfo
    cells: tuple[Cell, ...]
    trials: tuple[Trial, ...]
    load_traces: Callable[[str], tuple[PowerTrace, ...]]
    _: KW_ONLY
    load_heat: Callable[[str], ExpertHeat | None] = lambda _: None
    """Reads what one trial's routers chose, by trial id; None of models without experts, of engines that do not tell,
    and in runs from before it was kept."""
    samples: Mapping[tuple[str, str], tuple[Sample, ...]] = field(default_factory=dict)
    """By workload and model, as cells name them: a prompt may depend on the model's tokenizer."""
    lost_traces: dict[str, str] = field(default_factory=dict)
    """Trials whose traces cannot be read, and why; filled as they are read."""
    load_parts: Callable[[str], Mapping[str, tuple[PowerTrace, ...]]] = lambda _: {}
    """Reads all raw records of one trial by part (`results.trace_files`), by trial id; empty where it has none. Raises
    `TraceFileError`."""
    replaced: tuple[Trial, ...] = ()
    """Trials that failed because a device, a meter or a server was lost, and that a resume measured again: those have
    their place in `trials`. In no count and in no mean."""
    derived_again: frozenset[str] = frozenset()
    """Trials whose figures were derived from raw records for these tables, and not when they ran."""
    remarks: tuple[str, ...] = ()
    """What a reader must know of how these tables were made: which sheet priced them, where that is not the run's; that
    the run has not come to its end, that rows of it are gone, or that its clock was set back."""
    is_unfinished: bool = False
    """It goes on, or was broken off."""
