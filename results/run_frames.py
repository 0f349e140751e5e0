"""What tables, report and terminal say of a run stands on the same few frames; here each is computed once.

Joules of every sample are integrated from the traces of every trial: that is not for twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from results import tables
from results.accuracy_energy import accuracy_energy
from results.answers import Answered, answered_samples
from results.asked_tables import AskedTable, asked_tables
from results.endurance import Series, endurance_of
from results.expert_heat import ExpertHeat
from results.heat import MOST_CHOSEN, heat_of_cells, layers_of, overlaps
from results.operations import operations_table
from results.report.standings import Group, device_groups
from results.resources import resources_table
from results.runs import RunData
from results.summary import summary


@dataclass(frozen=True)
class RunFrames:
    """Frames of a run, each made when it is first asked for, while the run's traces can be read."""

    run: RunData
    baseline: str | None = None
    """The arm that the others are told as times of; None: the plan's, else the reference."""
    overlap_k: tuple[int, ...] = MOST_CHOSEN
    """Each K of Overlap@K."""

    @cached_property
    def tidy(self) -> pd.DataFrame:
        return tables.tidy(self.run)

    @cached_property
    def summary(self) -> pd.DataFrame:
        return summary(self.run, self.tidy)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """Accuracy beside energy."""
        return accuracy_energy(self.run, self.tidy)

    @cached_property
    def heats(self) -> dict[str, ExpertHeat]:
        """What the routers of each cell chose, where it was kept."""
        return heat_of_cells(self.run)

    @cached_property
    def experts(self) -> pd.DataFrame:
        """Layers of experts, and how unevenly each cell's router chose there."""
        return layers_of(self.run, self.heats)

    @cached_property
    def overlaps(self) -> pd.DataFrame:
        """Whether what one text chooses tells of another."""
        return overlaps(self.run, self.heats, self.overlap_k)

    @cached_property
    def endurance(self) -> list[Series]:
        """Rounds that follow each other, and the steps in their speed."""
        return endurance_of(self.run)

    @cached_property
    def operations(self) -> pd.DataFrame:
        """What modelled windows were spent on."""
        return operations_table(self.run)

    @cached_property
    def resources(self) -> pd.DataFrame:
        """How busy units and links of modelled machines were."""
        return resources_table(self.run)

    @cached_property
    def answered(self) -> list[Answered]:
        return answered_samples(self.run)

    @cached_property
    def asked_tables(self) -> list[AskedTable]:
        """Those that the plan asks for."""
        return asked_tables(self.run, self.tidy, self.operations)

    @cached_property
    def standings(self) -> list[tuple[Group, list[Group]]]:
        """By device: all workloads together, and each."""
        return device_groups(self.run, self.tidy, self.baseline, self.operations)
