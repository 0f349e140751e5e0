"""What a run needs of engines that are not ours: the build that is here, its files and digests, and the engine itself.

The digests of a build and of a model file given by the plan belong to a cell's identity, so that a run is not resumed
with others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from devices.base import Device
from engines.base import Engine
from engines.errors import EngineError, lines_of
from engines.external.base import Found, Surroundings, refuse_what_it_cannot
from engines.model.checkpoints import CheckpointFacts
from harness.external.base import ExternalSpec
from harness.file_digests import file_digests
from harness.matrix import CellPlan, Part
from harness.state import state_folder
from results.records import Request
from workloads.base import Workload, WorkloadError
from workloads.fitting import most_prompt_tokens

DIGITS = 12
MODELS_FOLDER = "models"
"""In the state folder: models in forms of other engines."""


@functools.cache
def found_build(spec: ExternalSpec) -> Found:
    """Looked for once. Raises `EngineError`."""
    return spec.find()


def files_of(spec: ExternalSpec) -> dict[str, Path]:
    """All that decides its figures besides the plan's model, by what each is called. Raises `EngineError`."""
    return {f"{name} of {spec.runs}": path for name, path in found_build(spec).files.items()} | spec.own_files()


PLACES = {"program", "environment", "url"}
"""Keys that say where an engine is. What is wrong with one is told by its name, and the engine is not looked for."""


def external_problems(engine: Part[ExternalSpec]) -> Iterator[str]:
    """That it is not here, or a file of it."""
    told_places = {problem.partition(":")[0] for problem in engine.spec.problems()} & PLACES
    try:
        files = _named_files(engine.spec) if told_places else files_of(engine.spec)
    except EngineError as error:
        yield from (f"engine {engine.label}: {problem}" for problem in lines_of(error))
        files = _named_files(engine.spec)
    for name, path in files.items():
        if not path.is_file():
            yield f"engine {engine.label}: {name}: no file {path}; paths start where joulebench is called"
    yield from _no_model(engine)


def _named_files(spec: ExternalSpec) -> dict[str, Path]:
    """Of an engine that is not here."""
    with suppress(EngineError):
        return spec.own_files()
    return {}


def _no_model(engine: Part[ExternalSpec]) -> Iterator[str]:
    """A model file that is there and that the engine cannot read."""
    spec = engine.spec
    if spec.model_file is None or not spec.model_begins or not Path(spec.model_file).expanduser().is_file():
        return
    try:
        with Path(spec.model_file).expanduser().open("rb") as file:
            begins = file.read(len(spec.model_begins))
    except OSError as error:
        yield f"engine {engine.label}: model_file {spec.model_file}: cannot be read ({error.strerror})"
        return
    if begins != spec.model_begins:
        yield (
            f"engine {engine.label}: model_file {spec.model_file}: begins with {begins!r}, and a model that"
            f" {spec.runs} reads with {spec.model_begins!r}; name a GGUF file"
        )


def noted(cell_plan: CellPlan, spec: ExternalSpec) -> dict[str, object]:
    """Of a cell: which build answers, in its settings, and the digests of its files in its identity."""
    files = files_of(spec)
    digests = file_digests(list(files.values()), state_folder(), lambda note: None)
    told = {name: digests[path] for name, path in files.items()}
    said: dict[str, object] = dict(cell_plan.cell.engine_parameters)
    said["build"] = found_build(spec).version or "tells no version"
    said |= {name: f"sha256 {digest[:DIGITS]}" for name, digest in told.items()}
    whole = " ".join([cell_plan.cell.cell_id, str(said["build"]), *(f"{n} {d}" for n, d in sorted(told.items()))])
    cell_id = hashlib.sha256(whole.encode()).hexdigest()[: len(cell_plan.cell.cell_id)]
    return {"cell_id": cell_id, "engine_parameters": said}


def external_engine(
    cell_plan: CellPlan,
    spec: ExternalSpec,
    facts: CheckpointFacts,
    device: Device,
    now_s: Callable[[], float],
    on_note: Callable[[str], None],
) -> Engine:
    """Raises `NotSupportedError`, `EngineError`, `DeviceError`."""
    around = Surroundings(cell_plan.model.source, facts, device, now_s, state_folder() / MODELS_FOLDER, on_note)
    return spec.build(around)


def requests_of(cell_plan: CellPlan, engine: Engine, workload: Workload, model_holds: int) -> Sequence[Request]:
    """What a cell asks. model_holds: tokens. Raises `WorkloadError`, with what helps where the engine holds fewer."""
    try:
        return workload.requests(engine.tokenizer, engine.max_length)
    except WorkloadError as error:
        if engine.max_length >= model_holds:
            raise
        raise WorkloadError(
            f"{error}; {cell_plan.cell.engine} holds {engine.max_length} tokens of the model's {model_holds}: a larger"
            " context of that arm helps too"
        ) from error


def refuse_requests(cell_plan: CellPlan, requests: Sequence[Request]) -> None:
    """What an engine that is not ours cannot answer as ours does. Raises `NotSupportedError`."""
    if isinstance(cell_plan.engine, ExternalSpec):
        made_up = cell_plan.workload.asks_lengths
        refuse_what_it_cannot(cell_plan.engine.abilities, cell_plan.engine.runs, requests, made_up)


def most_positions(requests: Sequence[Request]) -> int:
    """Of the longest sequence: a prompt, and what is added to it."""
    prompts = most_prompt_tokens(requests)
    added = (max(r.max_new_tokens, len(r.continuation_ids) - 1) for r in requests)
    return max(prompt + more for prompt, more in zip(prompts, added, strict=True))
