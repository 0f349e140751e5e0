"""Builds what a plan names, and keeps what cells share: a checkpoint is loaded once, a prompt built once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from devices.base import Device, DeviceError
from devices.clock import MonotonicClock
from devices.models.device import ModelDevice
from engines.base import Engine
from engines.cores import PhaseCores, phase_setting
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.external.base import Closes, MakesRoom
from engines.model.checkpoints import Checkpoint, CheckpointFacts, inspect_checkpoint, load_checkpoint
from engines.model.generation_config import notes_on_choices
from engines.model.quantised import AS_THE_MODEL, Quantisation, plain_form
from engines.model.tokenizer import Tokenizer
from engines.model.transformer import Transformer, model_of
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.parallel.torchrun import Meeting
from engines.pricing.costs import SheetCosts
from engines.pricing.modelled import ModelledEngine
from engines.pricing.playing import PlayedModelEngine, most_tokens
from engines.pricing.shapes import sizes_of
from engines.profile import Learnt, Profile
from engines.profile_files import profile_folder, read_profile
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.context import Costs, ModelSizes
from engines.techniques.parameters import Composed
from harness.answers_gate import AnswersGate
from harness.device_building import WaitListener, build_device, clock_of, log_waiting, seen_device
from harness.device_problems import blind_doubts
from harness.external.base import ExternalSpec
from harness.external_parts import external_engine, most_positions, refuse_requests, requests_of
from harness.fidelity import KeptDistributions, distribution_scores
from harness.fitted_sheets import cell_doubts, shape_on
from harness.input_watch import InputWatch
from harness.matrix import CellPlan
from harness.model_specs import AnyModelSpec, PlayedModelSpec
from harness.played_parts import NO_TEXT, PlayedFacts, played_cell, played_facts
from harness.profiles import mismatch_with
from harness.references import as_lossless
from harness.samples import samples_of
from harness.schema import EngineSpec, TrialProtocol
from harness.session import ArmScores, Passed, PreparedCell
from harness.technique_problems import lacks_room_on
from harness.workload_specs import WorkloadSpec
from results.environments import Environment
from results.records import NO_MODEL, Request, Sample
from workloads import files_read, kept
from workloads.base import ComparesDistributions, Workload

if TYPE_CHECKING:
    import torch

DATA_FOLDER_VARIABLE = "JOULEBENCH_DATA"

log = logging.getLogger(__name__)


def data_root() -> Path | None:
    """The folder of data sets, from the environment."""
    folder = os.environ.get(DATA_FOLDER_VARIABLE)
    return Path(folder).expanduser().absolute() if folder else None


class RunParts:
    """The parts of one run. `close` gives the devices back."""

    def __init__(self, protocol: TrialProtocol, allow_code: bool = False, meeting: Meeting | None = None) -> None:
        """allow_code: workloads that run code which a model wrote may be built. meeting: of ranks that torchrun
        started; whoever opened it closes it."""
        self.meeting = meeting
        self._protocol = protocol
        self._allow_code = allow_code
        self._host_clock = MonotonicClock()
        self._facts: dict[str, CheckpointFacts] = {}
        self._played: dict[PlayedModelSpec, PlayedFacts] = {}
        self._checkpoints: dict[tuple[AnyModelSpec, Quantisation, bool], Checkpoint] = {}
        self._models: dict[tuple[AnyModelSpec, Quantisation, bool, str, str], Transformer] = {}
        self._workloads: dict[str, Workload] = {}
        self._shared = kept.Kept()
        """By the workloads: a plan that sweeps a seed reads its data once."""
        self._devices: dict[str, Device] = {}
        self._engines: dict[tuple[object, ...], Engine] = {}
        self._profiles: dict[str, Profile | EngineError] = {}
        self._kept = KeptDistributions()
        self._arm_scores: dict[str, ArmScores] = {}
        self._gate = AnswersGate(self._checkpoint_for_gate)
        self.on_wait: WaitListener = log_waiting
        self.on_note: Callable[[str], None] = log.info
        """Told what takes long before the first trial."""
        self.data_files: files_read.FilesRead = {}
        """What the items of the workloads were read from, so far."""
        self.watch = InputWatch()

    def _told_waiting(self, device: str, reason: str, left_s: float) -> None:
        """To whoever listens when it happens: the display of a run is there later than its devices."""
        self.on_wait(device, reason, left_s)

    def arm(self, plan: CellPlan) -> PreparedCell:
        """Everything one cell needs. Heavy the first time, then shared."""
        device = self.device(plan)
        engine = self._engine(plan, device)
        workload = self.workload(plan)
        requests = requests_of(plan, engine, workload, self._reads(plan.model)[1])
        refuse_requests(plan, requests)
        clock = clock_of(device, self._host_clock)
        if isinstance(engine, MakesRoom):
            engine.make_room(most_positions(requests))
        if engine.needs_calibration:
            self._calibrate(plan, engine, workload)
        return PreparedCell(
            cell_id=plan.cell.cell_id,
            engine=engine,
            workload=workload,
            device=seen_device(device, engine, clock),
            clock=clock,
            requests=requests,
            max_batch=plan.engine.max_batch,
            unmeasured=self._unmeasured(plan, engine, workload, requests).with_notes(
                (*cell_doubts(plan, self._found(plan.model)), *blind_doubts(plan))
            ),
            gate=self._passed_gate(plan, engine),
        )

    def _passed_gate(self, plan: CellPlan, engine: Engine) -> Passed:
        if isinstance(plan.model, PlayedModelSpec):
            return Passed()
        return self._gate.passed(plan, engine, self.facts(plan.model.source))

    def _checkpoint_for_gate(self, plan: CellPlan) -> Checkpoint:
        """Kept only where an arm of ours keeps it."""
        assert not isinstance(plan.model, PlayedModelSpec)  # it has no answers
        held = self._checkpoints.get((plan.model, AS_THE_MODEL, False))
        return held or load_checkpoint(plan.model.source, torch_dtype(plan.model.dtype))

    def _calibrate(self, plan: CellPlan, engine: Engine, workload: Workload) -> None:
        if plan.own_engine.profile is None:
            wanted = plan.own_engine.technique.wanted_prompts
            engine.calibrate(workload.calibration_prompts(engine.tokenizer, engine.max_length, wanted))
            return
        # Again: the weights of a hub model may not have been here when the plan was checked.
        reason = self.profile_mismatch(plan.own_engine.profile, self._with_weights(plan))
        if reason:
            raise EngineError(reason)
        engine.use_profile(self.profile(plan.own_engine.profile))

    def _with_weights(self, plan: CellPlan) -> CheckpointFacts:
        """Of a model whose files are here. Ranks read their own shards of them."""
        if plan.own_engine.ranks is not None:
            return self.facts(plan.model.source)
        return self._checkpoint(plan)

    def profile(self, folder: str) -> Profile:
        """Read once, damaged ones too: many arms may name it. Raises `EngineError`."""
        if folder not in self._profiles:
            try:
                self._profiles[folder] = read_profile(profile_folder(folder))
            except EngineError as error:
                self._profiles[folder] = error
        found = self._profiles[folder]
        if isinstance(found, EngineError):
            raise EngineError(str(found))
        return found

    def profile_mismatch(self, folder: str, facts: CheckpointFacts) -> str | None:
        """What is wrong with a profile, or why it does not serve a model; None where it does."""
        try:
            reason = mismatch_with(self.profile(folder), facts, self.on_note)
        except (EngineError, OSError) as error:
            return str(error)
        return reason and f"profile {folder}: {reason}; calibrate this model: `joulebench calibrate`"

    def profile_lacks(self, folder: str, learns: frozenset[Learnt]) -> str | None:
        """What a profile that serves the model was made without; None where it has all. Raises `EngineError`."""
        reason = self.profile(folder).lacks(learns)
        return reason and f"profile {folder}: {reason}"

    def requests(self, plan: CellPlan) -> Sequence[Request]:
        """What a cell asks, without loading its weights. Raises `EngineError`, `WorkloadError`."""
        tokenizer, max_length = self._reads(plan.model)
        return self.workload(plan).requests(tokenizer, max_length)

    def samples(self, plan: CellPlan) -> tuple[Sample, ...]:
        """What a cell asks in words, with the right answers, without loading its weights."""
        return samples_of(self.workload(plan), self.requests(plan), self._reads(plan.model)[0])

    def device(self, plan: CellPlan) -> Device:
        """Opened. Raises `DeviceError`."""
        if plan.cell.device not in self._devices:
            device = build_device(plan.device, self._protocol, self._host_clock, self._told_waiting)
            try:
                device.open()
            except DeviceError:
                device.close()  # the meters before the one that does not open
                raise
            self._devices[plan.cell.device] = device
        return self._devices[plan.cell.device]

    def environment(self, plan: CellPlan) -> Environment:
        """Of a cell's device, with what engines compute by on this host's CPU. Raises `DeviceError`."""
        found = self.device(plan).environment()
        if plan.device.is_phone or plan.device.computes != "cpu" or isinstance(plan.model, PlayedModelSpec):
            return found
        from engines.road import build

        return found.model_copy(update={"build": build()})

    def workload(self, plan: CellPlan) -> Workload:
        return self.workload_named(plan.cell.workload, plan.workload)

    def workload_named(self, label: str, spec: WorkloadSpec) -> Workload:
        """Built once for each label. Raises `WorkloadError`."""
        files_read.note_into(self.data_files)
        kept.keep_in(self._shared)
        if label not in self._workloads:
            self._workloads[label] = spec.build(data_root(), self._allow_code)
        return self._workloads[label]

    def facts(self, source: str) -> CheckpointFacts:
        """Config and tokenizer, without weights. Raises `EngineError`."""
        if source not in self._facts:
            self._facts[source] = inspect_checkpoint(source)
        return self._facts[source]

    def played(self, spec: PlayedModelSpec) -> PlayedFacts:
        """Of a model that does not run. Raises `EngineError`."""
        if spec not in self._played:
            self._played[spec] = played_facts(spec)
        return self._played[spec]

    def _reads(self, model: AnyModelSpec) -> tuple[Tokenizer, int]:
        """Its tokenizer, and the most tokens of a request."""
        found = self._found(model)
        if isinstance(found, PlayedFacts):
            return NO_TEXT, most_tokens(found.shape)
        return found.tokenizer, found.config.max_length

    def _found(self, model: AnyModelSpec) -> PlayedFacts | CheckpointFacts:
        return self.played(model) if isinstance(model, PlayedModelSpec) else self.facts(model.source)

    def _engine(self, plan: CellPlan, device: Device) -> Engine:
        """One a cell, for calibration belongs to a workload, and counters to a device; but one for all workloads of an
        arm that holds slots or processes and learns nothing of them: each window begins with its `reset`."""
        key = _engine_key(plan)
        if key not in self._engines:
            engine: Engine
            if isinstance(plan.model, PlayedModelSpec):
                assert isinstance(device, ModelDevice)  # `preflight` refuses others
                cell = played_cell(plan.model, self.played(plan.model), plan.own_engine, device.timeline.sheet)
                engine = PlayedModelEngine(cell, device.timeline, NO_TEXT)
            elif isinstance(plan.engine, ExternalSpec):
                facts = self.facts(plan.model.source)
                engine = external_engine(plan, plan.engine, facts, device, self._host_clock.now_s, self.on_note)
            elif plan.engine.ranks is not None:
                engine = self._parallel_engine(plan)
            elif not isinstance(device, ModelDevice):
                engine = self._reference_engine(plan)
            else:
                checkpoint = self._checkpoint(plan)
                config = checkpoint.config
                shape = shape_on(plan.device, plan.own_engine, plan.model, config)
                backbone, own = plan.own_engine.technique.backbone, own_sizes(config)
                if why := lacks_room_on(device.timeline.sheet, shape, plan.own_engine, own):
                    raise why
                sizes = sizes_of(shape)
                costs = None if sizes is None else SheetCosts(device.timeline.sheet, sizes)
                reference = self._reference_engine(plan, sizes, costs)
                engine = ModelledEngine(reference, device.timeline, backbone, shape, own)
            self._engines[key] = engine
        return self._engines[key]

    def _parallel_engine(self, plan: CellPlan) -> ParallelEngine:
        spec, technique = plan.own_engine, plan.own_engine.technique
        assert isinstance(technique, Composed)  # `preflight` refuses ranks of others
        assert spec.ranks is not None
        asked = RanksAsked(
            self.facts(plan.model.source),
            technique,
            spec.ranks,
            plan.model.dtype,
            spec.quantise,
            spec.prefill_chunk,
            threads_of_rank(spec),
            spec.long_rope,
            "nccl" if plan.device.computes == "cuda" else "gloo",
            self.meeting,
        )
        return ParallelEngine(asked, self._host_clock.now_s, spec.reuse_prefix)

    def _reference_engine(
        self, plan: CellPlan, sizes: ModelSizes | None = None, costs: Costs | None = None
    ) -> ReferenceEngine:
        return ReferenceEngine(
            self._checkpoint(plan),
            plan.own_engine.technique,
            plan.own_engine.prefill_chunk,
            self._host_clock.now_s,
            reuse_prefix=plan.own_engine.reuse_prefix,
            torch_device=plan.device.computes,
            cores=phase_cores(plan.own_engine),
            long_rope=plan.own_engine.long_rope,
            model=self._model(plan),
            sizes=sizes,
            costs=costs,
            expert_memory=expert_memory(plan.own_engine, plan.model),
            plans_first=plan.own_engine.decoding == "plan by plan",
            last_layer=plan.own_engine.last_layer,
        )

    def _model(self, plan: CellPlan) -> Transformer:
        """One for all arms that compute with the same weights in the same place."""
        in_file = experts_in_file(plan.own_engine)
        key = (plan.model, plan.own_engine.quantise, in_file, plan.device.computes, plan.own_engine.long_rope)
        if key not in self._models:
            checkpoint = self._checkpoint(plan)
            self._models[key] = model_of(
                checkpoint, plan.device.computes, long_rope=plan.own_engine.long_rope, experts_stay=in_file
            )
        return self._models[key]

    def _unmeasured(self, plan: CellPlan, engine: Engine, workload: Workload, requests: Sequence[Request]) -> ArmScores:
        """Scores that no window gives: of distributions against the reference arm's. Computed once a cell."""
        if isinstance(plan.model, PlayedModelSpec):
            return ArmScores((), (f"not scored: {NO_MODEL}",))
        if not isinstance(workload, ComparesDistributions):
            facts = self.facts(plan.model.source)
            return ArmScores((), notes_on_choices(facts.folder, requests, facts.tokenizer.asks_to_clean))
        if plan.cell.cell_id not in self._arm_scores:
            against = plan.reference or as_lossless(plan)
            key = f"{plan.cell.workload}/{against.cell.cell_id}"
            rows = self.facts(plan.model.source).config.vocabulary_size
            files = self._kept.files(key, requests, partial(self._reference_engine, against), rows)
            told = f"{against.own_engine.technique.technique}, {against.model.dtype}"
            self._arm_scores[plan.cell.cell_id] = distribution_scores(engine, workload, requests, files, told)
        return self._arm_scores[plan.cell.cell_id]

    def _checkpoint(self, plan: CellPlan) -> Checkpoint:
        model, quantise, in_file = plan.model, plan.own_engine.quantise, experts_in_file(plan.own_engine)
        key = (model, quantise, in_file)
        if key not in self._checkpoints:
            dtype = torch_dtype(model.dtype)
            self._checkpoints[key] = load_checkpoint(model.source, dtype, quantise, experts_as_filed=in_file)
        return self._checkpoints[key]

    def close(self) -> None:
        for engine in self._engines.values():
            if isinstance(engine, Closes):
                engine.close()
        for device in self._devices.values():
            device.close()
        self._devices.clear()
        self._kept.close()


def _engine_key(plan: CellPlan) -> tuple[object, ...]:
    """Cells that have the same one share an engine. A budget of memory is an arm's, however many workloads it has."""
    if isinstance(plan.model, PlayedModelSpec) or isinstance(plan.engine, ExternalSpec) or plan.device.is_modelled:
        return (plan.cell.cell_id,)
    own = plan.own_engine
    holds = own.ranks is not None or experts_in_file(own)
    learns = own.technique.wanted_prompts > 0 and own.profile is None
    return (plan.cell.engine, plan.model, plan.cell.device) if holds and not learns else (plan.cell.cell_id,)


def torch_dtype(name: str) -> torch.dtype:
    """Of a plan's model."""
    import torch  # after `engines`, which lets its threads sleep

    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def threads_of_rank(engine: EngineSpec) -> int | None:
    """`preflight` refuses ranks with other threads in each phase."""
    return None if engine.threads is None else engine.threads.prefill


def phase_cores(engine: EngineSpec) -> PhaseCores:
    """The cores and threads of an arm's phases. Raises `EngineError` for cores that cannot be had."""
    settings = [
        phase_setting(getattr(engine.cores, phase, None), getattr(engine.threads, phase, None))
        for phase in ("prefill", "decode")
    ]
    return PhaseCores(*settings)


def expert_memory(engine: EngineSpec, model: AnyModelSpec) -> ExpertMemory:
    form = engine.quantise.experts or plain_form(model.dtype)
    return ExpertMemory(engine.expert_memory, form, engine.copy_bytes_per_s)


def experts_in_file(engine: EngineSpec) -> bool:
    """Whether experts stay in a file, from which they are copied."""
    return ExpertMemory(engine.expert_memory).loads(engine.technique)
