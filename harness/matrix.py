"""What a plan expands to: each engine asked each workload on each device, with the specs that a cell is built from."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, cast

from harness.catalog import technique_line
from harness.combinations import mismatch, placement
from harness.core_sets import in_words
from harness.device_specs import DeviceSpec
from harness.external.base import ExternalSpec
from harness.model_specs import AnyModelSpec, PlayedModelSpec
from harness.schema import AnyEngineSpec, Element, EngineSpec
from harness.technique_specs import technique_changes
from harness.workload_specs import WorkloadSpec
from results.records import PRICED_AS, Cell


@dataclass(frozen=True)
class CellPlan:
    """A cell with the specs it is built from."""

    cell: Cell
    model: AnyModelSpec
    engine: AnyEngineSpec
    workload: WorkloadSpec
    device: DeviceSpec
    reference: CellPlan | None = None
    """The cell that `Cell.reference_id` names."""

    @property
    def is_modelled(self) -> bool:
        return self.device.is_modelled

    @property
    def own_engine(self) -> EngineSpec:
        """For whoever computes or prices with a technique: not of a cell that another engine computes."""
        assert isinstance(self.engine, EngineSpec)
        return self.engine


class Part(NamedTuple, Generic[Element]):
    """An element of the expanded plan, with where it stands in the file."""

    path: str
    suffix: str
    spec: Element
    label: str
    """What tables call it."""
    wrong: frozenset[str] = frozenset()
    """Keys that were given and left out here, for they are wrong and told: no line may say that they are missing."""


class Parts(NamedTuple):
    models: list[Part[AnyModelSpec]]
    engines: list[Part[AnyEngineSpec]]
    workloads: list[Part[WorkloadSpec]]
    devices: list[Part[DeviceSpec]]


def own_engines(engines: list[Part[AnyEngineSpec]]) -> list[Part[EngineSpec]]:
    """Those of joulebench itself, which have a technique."""
    return [cast(Part[EngineSpec], part) for part in engines if isinstance(part.spec, EngineSpec)]


def external_engines(engines: list[Part[AnyEngineSpec]]) -> list[Part[ExternalSpec]]:
    """Those that are not ours."""
    return [cast(Part[ExternalSpec], part) for part in engines if isinstance(part.spec, ExternalSpec)]


def told_apart(workloads: list[Part[WorkloadSpec]]) -> list[Part[WorkloadSpec]]:
    """Workloads of one name are numbered."""
    counts = Counter(part.label for part in workloads)
    return [
        part._replace(label=f"{part.label}#{i + 1}") if counts[part.label] > 1 else part
        for i, part in enumerate(workloads)
    ]


def matrix(parts: Parts, data_root: Path | None) -> tuple[list[CellPlan], list[str]]:
    """The cells, and what makes none, in words. data_root: of data sets, which decides what is asked."""
    cells: list[CellPlan] = []
    skipped: dict[tuple[str, str], dict[str, None]] = {}
    build = _CellBuilder(data_root)
    for device, model, workload, engine in itertools.product(
        parts.devices, parts.models, parts.workloads, parts.engines
    ):
        reason = mismatch(engine.spec, device.spec, isinstance(model.spec, PlayedModelSpec))
        if reason:
            skipped.setdefault((device.spec.name, reason), {})[engine.label] = None
        else:
            cells.append(build.cell_plan(model, engine, workload, device))
    return cells, [f"{device}: {', '.join(own)}: {why}" for (device, why), own in skipped.items()]


class _CellBuilder:
    """Keeps what cells share: the JSON of a part is the same in all of them."""

    def __init__(self, data_root: Path | None) -> None:
        self._data_root = json.dumps(str(data_root))
        self._json: dict[int, str] = {}

    def _json_of(self, part: Part[Element]) -> str:
        if id(part) not in self._json:
            self._json[id(part)] = json.dumps(part.spec.model_dump(mode="json"), sort_keys=True)
        return self._json[id(part)]

    def cell_plan(
        self,
        model: Part[AnyModelSpec],
        engine: Part[AnyEngineSpec],
        workload: Part[WorkloadSpec],
        device: Part[DeviceSpec],
    ) -> CellPlan:
        specs = (self._json_of(model), self._json_of(engine), self._json_of(workload), self._json_of(device))
        # The JSON of a list, put together of the JSON of its items.
        content = f"[{', '.join([json.dumps(workload.label), self._data_root, *specs])}]"
        model_label = model.label
        if device.spec.priced_as:
            model_label += f"{PRICED_AS}{device.spec.priced_as}"
        cell = Cell(
            cell_id=hashlib.sha256(content.encode()).hexdigest()[:12],
            label=" · ".join(filter(None, (engine.label, model.suffix, workload.label, device.label))),
            engine=engine.label,
            model=model_label,
            workload=workload.label,
            workload_parameters=workload.spec.model_dump(mode="json", exclude={"name", "label"}),
            device=device.label,
            **_computed_by(engine.spec, model.spec, device.spec),
        )
        return CellPlan(cell, model.spec, engine.spec, workload.spec, device.spec)


def _computed_by(engine: AnyEngineSpec, model: AnyModelSpec, device: DeviceSpec) -> dict[str, Any]:
    """What a cell says of its engine: technique and placement, and its settings."""
    settings: dict[str, Any] = {
        **({"threads": in_words(engine.threads)} if engine.threads else {}),
        **({"cores": in_words(engine.cores)} if engine.cores else {}),
        **({"max_batch": engine.max_batch} if engine.max_batch > 1 else {}),
        **({"computes": device.computes} if device.computes != "cpu" else {}),
    }
    if isinstance(engine, ExternalSpec):
        return {
            "technique": engine.runs,
            "technique_line": engine.what,
            "technique_parameters": engine.options,
            "technique_changes": engine.changed_options,
            "placement": "host" if device.tag == "host" else device.name,
            "engine_parameters": settings,
        }
    return {
        "technique": engine.technique.technique,
        "technique_line": technique_line(engine.technique.technique),
        "technique_parameters": engine.technique.model_dump(mode="json", exclude={"name"}),
        "technique_changes": technique_changes(engine.technique),
        "placement": placement(engine) if device.is_modelled else "host",
        "engine_parameters": {
            "prefill_chunk": engine.prefill_chunk,
            "dtype": model.dtype,
            **({"profile": engine.profile} if engine.profile is not None else {}),
            **({"reuse_prefix": True} if engine.reuse_prefix else {}),
            **({"last_layer": engine.last_layer} if engine.last_layer is not None else {}),
            **({"decoding": engine.decoding} if engine.decoding is not None else {}),
            **engine.quantise.asked,
            **engine.quantise.rounding,
            **settings,
        },
    }
