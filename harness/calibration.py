"""`joulebench calibrate`: a profile counted over prompts that workloads keep for it, and that they never ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from engines.errors import EngineError
from engines.model.checkpoints import decisive_files, load_checkpoint
from engines.profile import Profile, ProfiledData, ProfileOrigin
from harness.file_digests import file_digests
from harness.input_watch import MOST_TOLD, InputWatch
from harness.plan import PlanError, read_draft
from harness.problems import told
from harness.profiles import model_digests, sha256_of
from harness.run_parts import data_root
from harness.schema import WORKLOAD, ModelSpec
from harness.state import state_folder
from harness.workload_specs import WorkloadSpec
from results.file_state import file_state
from workloads import files_read
from workloads.base import WorkloadError

PLAN_SUFFIX = ".toml"


class CalibrationError(Exception):
    """What was asked for cannot be counted. `problems`: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class CalibrationProgress(Protocol):
    """Who sees how far it is."""

    def note(self, what: str) -> None: ...
    def begin(self, n_prompts: int) -> None: ...
    def advance(self) -> None: ...


def calibrate(
    model: ModelSpec, names: Sequence[str], n_prompts: int, prefill_chunk: int, progress: CalibrationProgress
) -> Profile:
    """Counts a profile over prompts that the workloads keep for it.

    names: of workloads, each taken with its own defaults, or of plan files, whose workloads are taken as they stand.
    n_prompts: of each workload, where it has so many. Raises `CalibrationError`, `EngineError`, `OSError`.
    """
    import torch

    from engines.model.transformer import Transformer
    from engines.profiling import profile_of

    workloads = _workloads(names)
    progress.note(f"loading {model.source}")
    watch = InputWatch()
    for path in decisive_files(model.source):
        watch.add(str(path), path, file_state(path))
    checkpoint = load_checkpoint(model.source, getattr(torch, model.dtype))
    if checkpoint.config.moe is None:
        raise EngineError(f"{model.source} is dense, so there is no expert to count; take a model with experts")
    data_files: files_read.FilesRead = {}
    files_read.note_into(data_files)
    prompts: list[Sequence[int]] = []
    data: list[ProfiledData] = []
    asked: list[object] = []
    problems: list[str] = []
    for label, spec in workloads:
        progress.note(f"{label}: building prompts")
        try:
            workload = spec.build(data_root(), allow_code=True)  # none is scored, so none is run
            own = workload.calibration_prompts(checkpoint.tokenizer, checkpoint.config.max_length, n_prompts)
        except WorkloadError as error:
            problems.append(f"--data {label}: {error}")
            continue
        if not own:
            problems.append(f"--data {label}: no item kept for calibration fits the model; name another workload")
            continue
        prompts += own
        data.append(ProfiledData(workload=label, source=workload.data_source, n_prompts=len(own)))
        asked.append([spec.model_dump(mode="json"), [list(prompt) for prompt in own]])
    if problems:
        raise CalibrationError(problems)
    digests = model_digests(checkpoint, progress.note)
    assert digests.model is not None  # its weights were just read
    files = sorted(data_files)
    read = file_digests(files, state_folder(), progress.note)
    progress.begin(len(prompts))
    transformer = Transformer(checkpoint)
    found = profile_of(transformer, transformer.new_cache(), prompts, prefill_chunk, True, progress.advance)
    watch.add_read_later(data_files)
    if changed := watch.changes():
        raise EngineError(f"{'; '.join(changed[:MOST_TOLD])} while it was counted; calibrate again")
    origin = ProfileOrigin(
        model=model.source,
        model_sha256=digests.model,
        tokenizer_sha256=digests.tokenizer,
        data_sha256=sha256_of([asked, [[path.name, read[path]] for path in files]]),
        data=tuple(data),
        dtype=model.dtype,
    )
    return replace(found, origin=origin)


def _workloads(names: Sequence[str]) -> list[tuple[str, WorkloadSpec]]:
    """What tables call each, and its spec."""
    found: list[tuple[str, WorkloadSpec]] = []
    problems: list[str] = []
    for name in dict.fromkeys(names):
        try:
            if name.endswith(PLAN_SUFFIX):
                draft = read_draft(Path(name), (), data_root())
                problems += [f"--data {name}: {problem}" for problem in draft.problems]
                found += [(part.label, part.spec) for part in draft.parts.workloads]
            else:
                found.append((name, WORKLOAD.read({"name": name})))
        except ValidationError as error:
            problems += told("--data", error, WORKLOAD.schema)
        except PlanError as error:
            problems += [f"--data {problem}" for problem in error.problems]
    if problems or not found:
        raise CalibrationError(problems or ["--data names no workload; `joulebench list workloads` shows them"])
    return found
