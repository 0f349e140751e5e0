"""The gate of a run: engines that are not ours are asked a few questions before any number is taken.

Once for each engine and model on a device, whatever their cores and threads. Our own answers come from the plan's
weights on this host's CPU, where those are here and fit; the memory is given back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from devices.memory import available_bytes
from engines.base import Engine
from engines.errors import EngineError
from engines.external import gate
from engines.external.base import AnswersAside
from engines.model.checkpoints import Checkpoint, CheckpointFacts, tensor_shapes
from engines.reference import ReferenceEngine
from harness.external.base import ExternalSpec
from harness.matrix import CellPlan
from harness.references import as_lossless
from harness.session import Passed
from results.units import format_bytes

OF_A_PLACE = {"name", "devices", "threads", "cores"}
"""Keys of an engine that decide nothing of what it answers."""
SPARE = 0.8
"""Of the memory that is free: the most that our weights may take."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Ours:
    """Answers of our engine to the gate's questions, or why there are none."""

    answers: list[tuple[int, ...]] | None = None
    why_none: str = ""


class AnswersGate:
    """Of one run. load: the weights of a cell's model, as they are kept for arms of ours or read for this."""

    def __init__(self, load: Callable[[CellPlan], Checkpoint]) -> None:
        self._load = load
        self._passed: dict[tuple[str, ...], Passed] = {}
        self._ours: dict[str, Ours] = {}

    def passed(self, plan: CellPlan, engine: Engine, facts: CheckpointFacts) -> Passed:
        """Raises `EngineError`, `DeviceError` where it does not answer at all."""
        spec = plan.engine
        if not isinstance(spec, ExternalSpec):
            return Passed()
        name, model = plan.cell.engine, f"{plan.model.source}, {plan.model.dtype}"
        if isinstance(engine, AnswersAside) and engine.why_silent is not None:
            file = "its model" if spec.model_file is None else Path(spec.model_file).name
            unseen = f"whether it answers right is not seen, nor that {file} is {plan.model.source}"
            return Passed(notes=(f"{unseen}: {engine.why_silent}",))
        key = (spec.model_dump_json(exclude=OF_A_PLACE), model, plan.cell.device)
        if key not in self._passed:
            asked = gate.requests_of(engine.tokenizer.encode_prompt)
            theirs = gate.answers_of(engine, asked)
            reads = gate.ReadsText(engine.tokenizer.encode, engine.tokenizer.decode)
            if model not in self._ours:
                self._ours[model] = self._answered(plan, facts)
            ours = self._ours[model]
            if ours.answers is not None:
                self._passed[key] = Passed(gate.faults(ours.answers, theirs, reads, spec.is_lossless))
            else:
                note = f"its answers were held against what is known, and not against ours: {ours.why_none}"
                self._passed[key] = Passed(gate.faults_alone(theirs, reads), (note,))
        found = self._passed[key]
        return found._replace(faults=tuple(f"{name}: {one}" for one in found.faults))

    def _answered(self, plan: CellPlan, facts: CheckpointFacts) -> Ours:
        if why := _why_not_ours(facts, BYTES[plan.model.dtype]):
            return Ours(why_none=why)
        try:
            engine = ReferenceEngine(self._load(plan), as_lossless(plan).own_engine.technique)
        except EngineError as error:  # such as tensors that are no numbers
            return Ours(why_none=str(error))
        asked = gate.requests_of(engine.tokenizer.encode_prompt)
        return Ours(gate.run_answers(engine, asked))


def _why_not_ours(facts: CheckpointFacts, bytes_per_value: int) -> str | None:
    if not any(facts.folder.glob("*.safetensors")):
        return f"the weights of {facts.source} are not on this machine"
    n_bytes = bytes_per_value * sum(map(math.prod, tensor_shapes(facts.config).values()))
    free = available_bytes()
    if n_bytes > SPARE * free:
        return f"its weights take {format_bytes(n_bytes)}, and {format_bytes(free)} of memory are free here"
    return None
