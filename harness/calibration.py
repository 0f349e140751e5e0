"""`joulebench calibrate`: a profile counted over prompts that workloads keep for it, and that they never ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from engines.errors import EngineError
from engines.estimator import EstimatorRecipe
from engines.model.checkpoints import Checkpoint, decisive_files, load_checkpoint
from engines.model.transformer import Transformer
from engines.prediction import KnownState, next_routers
from engines.prediction_accuracy import StateKeeper, foreseen, keep_every
from engines.profile import DataName, Profile, ProfiledData, ProfiledPredictions, ProfileOrigin
from engines.profiling import profile_of, read_prompts
from harness.file_digests import file_digests
from harness.input_watch import MOST_TOLD, InputWatch
from harness.model_specs import ModelSpec
from harness.plan import PlanError, read_draft
from harness.problems import told
from harness.profiles import model_digests, sha256_of
from harness.run_parts import data_root
from harness.schema import WORKLOAD
from harness.state import state_folder
from harness.workload_specs import WorkloadSpec
from results.file_state import file_state
from workloads import files_read
from workloads.base import Workload, WorkloadError

PLAN_SUFFIX = ".toml"
HELD_OUT_PART = 4
"""One prompt is held out for so many that are counted."""


class CalibrationError(Exception):
    """What was asked for cannot be counted. `problems`: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


class CalibrationProgress(Protocol):
    """Who sees how far it is."""

    def note(self, what: str) -> None: ...
    def begin(self, n: int, of: str) -> None: ...
    def advance(self) -> None: ...


class _HeldOut(NamedTuple):
    """Prompts that are neither counted nor learnt from, and whose they are."""

    prompts: list[Sequence[int]]
    data: list[ProfiledData]


def calibrate(
    model: ModelSpec,
    names: Sequence[str],
    n_prompts: int,
    prefill_chunk: int,
    progress: CalibrationProgress,
    recipe: EstimatorRecipe | None = None,
) -> Profile:
    """Counts a profile over prompts that the workloads keep for it, and says how well the next layer's experts can be
    told from it; on prompts too that were not counted, a quarter as many, where the workloads have them.

    names: of workloads, each taken with its own defaults, or of plan files, whose workloads are taken as they stand.
    n_prompts: of each workload, where it has so many. recipe: of an estimator to train. Raises `CalibrationError`,
    `EngineError`, `OSError`.
    """
    import torch

    workloads = _workloads(names)
    progress.note(f"loading {model.source}")
    watch = InputWatch()
    for path in decisive_files(model.source):
        watch.add(str(path), path, file_state(path))
    checkpoint = load_checkpoint(model.source, getattr(torch, model.dtype))
    if checkpoint.config.moe is None:
        raise EngineError(f"{model.source} is dense, so there is no expert to count; take a model with experts")
    transformer = Transformer(checkpoint)
    try:
        next_routers(checkpoint.config, transformer.weights)
        can_predict = True
    except EngineError as error:
        if recipe is not None:
            raise
        can_predict = False
        progress.note(f"no predictions: {error}")
    data_files: files_read.FilesRead = {}
    files_read.note_into(data_files)
    prompts: list[Sequence[int]] = []
    held_out = _HeldOut([], [])
    data: list[ProfiledData] = []
    asked: list[object] = []
    problems: list[str] = []
    for label, spec in workloads:
        progress.note(f"{label}: building prompts")
        try:
            workload = spec.build(data_root(), allow_code=True)  # none is scored, so none is run
            own, others = _prompts_of(workload, checkpoint, n_prompts, can_predict)
        except WorkloadError as error:
            problems.append(f"--data {label}: {error}")
            continue
        if not own:
            problems.append(f"--data {label}: no item kept for calibration fits the model; name another workload")
            continue
        prompts += own
        held_out.prompts.extend(others)
        data.append(ProfiledData(workload=label, source=workload.data_source, n_prompts=len(own)))
        if others:
            held_out.data.append(data[-1].model_copy(update={"n_prompts": len(others)}))
        asked.append([spec.model_dump(mode="json"), [list(prompt) for prompt in own]])
    if problems:
        raise CalibrationError(problems)
    digests = model_digests(checkpoint, progress.note)
    assert digests.model is not None  # its weights were just read
    files = sorted(data_files)
    read = file_digests(files, state_folder(), progress.note)
    progress.begin(len(prompts), "prompts")
    cache, keepers = transformer.new_cache(), _keepers(checkpoint, [*prompts, *held_out.prompts])
    also = keepers["calibration"] if can_predict else None
    found = profile_of(transformer, cache, prompts, prefill_chunk, True, progress.advance, also)
    if held_out.prompts:
        progress.begin(len(held_out.prompts), "held-out prompts")
        read_prompts(transformer, cache, held_out.prompts, prefill_chunk, [keepers["held out"]], progress.advance)
    if can_predict:
        found = _with_predictions(found, transformer, keepers, held_out, recipe, progress)
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


def _prompts_of(
    workload: Workload, checkpoint: Checkpoint, n_prompts: int, hold_out: bool
) -> tuple[Sequence[Sequence[int]], list[Sequence[int]]]:
    """Those that are counted, and a quarter as many others to hold out, where there are as many."""
    tokenizer, max_length = checkpoint.tokenizer, checkpoint.config.max_length
    own = workload.calibration_prompts(tokenizer, max_length, n_prompts)
    if not hold_out or len(own) < n_prompts:
        return own, []
    counted, n_others = {tuple(prompt) for prompt in own}, -(-n_prompts // HELD_OUT_PART)
    more = workload.calibration_prompts(tokenizer, max_length, n_prompts + n_others)
    return own, [prompt for prompt in more if tuple(prompt) not in counted][:n_others]


def _keepers(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]) -> dict[DataName, StateKeeper]:
    """prompts: all that are read."""
    moe = checkpoint.config.moe
    assert moe is not None  # a dense model is refused before
    n_tokens = sum(map(len, prompts))
    every = keep_every(n_tokens, len(moe.sparse_layers), checkpoint.config.hidden, moe.shared is not None)
    return {"calibration": StateKeeper(every), "held out": StateKeeper(every)}


def _with_predictions(
    profile: Profile,
    transformer: Transformer,
    keepers: Mapping[DataName, StateKeeper],
    held_out: _HeldOut,
    recipe: EstimatorRecipe | None,
    progress: CalibrationProgress,
) -> Profile:
    states: dict[DataName, dict[int, KnownState]] = {data: keeper.states() for data, keeper in keepers.items()}
    if recipe is not None:
        progress.begin(recipe.n_steps, "steps of the estimator")
    seen = foreseen(profile, transformer, states, recipe, progress.advance)
    predictions = ProfiledPredictions(
        every=keepers["calibration"].every,
        held_out=tuple(held_out.data),
        held_out_sha256=sha256_of([list(prompt) for prompt in held_out.prompts]) if held_out.prompts else None,
        accuracies=seen.accuracies,
        estimator=seen.origin,
        estimated_layers=seen.estimated_layers,
    )
    return replace(profile, predictions=predictions, estimator=seen.estimator)


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
            lacking = [str(one["loc"][-1]) for one in error.errors() if one["type"] == "missing"]
            if lacking:
                told_as = f"needs {' and '.join(lacking)}, which a [[workload]] of a plan gives; name that plan's file"
                problems.append(f"--data {name}: {told_as}")
            else:
                problems += told("--data", error, WORKLOAD.schema)
        except PlanError as error:
            problems += [f"--data {problem}" for problem in error.problems]
    if problems or not found:
        raise CalibrationError(problems or ["--data names no workload; `joulebench list workloads` shows them"])
    return found
