"""The modelled engine: the host computes, a hardware sheet says how long it would have taken there.

Tokens, routing, drops and log-likelihoods are the reference engine's own. Each of its forward chunks is priced as it is
observed, so that tokens kept from the request before cost nothing; the completion's stamps are taken from the timeline:
how long the host took appears nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from devices.base import Unit
from devices.models.timeline import Timeline
from engines.base import EngineError, PhaseListener, unheard
from engines.dispatch import DispatchPlan
from engines.model.tokenizer import Tokenizer
from engines.observers import StepObserver, StepPhase
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import Schedule, lm_head, unit_of_rest
from engines.pricing.shapes import ModelShape
from engines.pricing.travels import Travels
from engines.profile import Profile
from engines.techniques.context import ModelSizes
from results.counters import CountedLayers, EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.records import MODEL_PREFIX, Completion, Request


class ObservedEngine(Protocol):
    """What is asked of the engine that computes; `engines.reference.ReferenceEngine` is one."""

    tokenizer: Tokenizer
    max_length: int
    observer: StepObserver | None

    @property
    def needs_calibration(self) -> bool: ...
    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None: ...
    def use_profile(self, profile: Profile) -> None: ...
    def run(self, request: Request, on_phase: PhaseListener) -> Completion: ...
    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None: ...
    def reset(self) -> None: ...
    def take_counters(self) -> EngineCounters: ...
    def take_heat(self) -> ExpertHeat | None: ...
    def take_road(self) -> Road | None: ...


class ModelledEngine:
    """An `engines.base.Engine` on virtual time. `shape` may be another model's of the same E and K (`priced_shape`);
    computed: the sizes of the one that computes then; None where they are the same."""

    time_method: Literal["measured", "modelled"] = "modelled"

    def __init__(
        self,
        reference: ObservedEngine,
        timeline: Timeline,
        backbone: Unit,
        shape: ModelShape,
        computed: ModelSizes | None = None,
    ) -> None:
        self.device = f"{MODEL_PREFIX}{timeline.sheet.name}"
        self._reference = reference
        self._timeline = timeline
        self._backbone = backbone
        self._shape = shape
        self._n_run = shape.n_layers
        limit = timeline.sheet.graph_bytes_limit
        travels = Travels(timeline.sheet, computed)
        self._schedule = Schedule(shape, backbone, None if limit is None else limit.value, travels)
        self.tokenizer = reference.tokenizer
        self.max_length = reference.max_length

    @property
    def needs_calibration(self) -> bool:
        return self._reference.needs_calibration

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Offline, so it costs no virtual time."""
        self._reference.calibrate(prompts)

    def use_profile(self, profile: Profile) -> None:
        self._reference.use_profile(profile)

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        pricing = _RequestPricing(request, self._timeline, self._backbone, self._shape, self._schedule, on_phase)
        self._reference.observer = pricing
        try:
            computed = self._reference.run(request, unheard)
        finally:
            self._reference.observer = None
        self._n_run = pricing.n_layers or self._n_run
        return pricing.completed(computed)

    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        """Outside any window, so it costs no virtual time."""
        self._reference.show_log_probabilities(request, listener)

    def reset(self) -> None:
        self._reference.reset()

    def take_counters(self) -> EngineCounters:
        """Of the layers that ran, which are named where others are priced: their plans were priced again and again."""
        counters = self._reference.take_counters()
        if self._n_run == self._shape.n_layers:
            return counters
        layers = CountedLayers(n_run=self._n_run, n_priced=self._shape.n_layers)
        return counters.model_copy(update={"counted_layers": layers})

    def take_heat(self) -> ExpertHeat | None:
        return self._reference.take_heat()

    def take_road(self) -> Road | None:
        """Of the host that computes, None where none does; the time of the road has no part in the timeline."""
        return self._reference.take_road()


class _RequestPricing:
    """Prices the steps of one request as they are observed, and stamps the phase edges at the virtual time reached."""

    def __init__(
        self,
        request: Request,
        timeline: Timeline,
        backbone: Unit,
        shape: ModelShape,
        schedule: Schedule,
        on_phase: PhaseListener,
    ) -> None:
        self._timeline = timeline
        self._shape = shape
        self._schedule = schedule
        self._rest = unit_of_rest(timeline.sheet, backbone)
        self._on_phase = on_phase
        self._prefill_head_rows = 1 if request.kind == "generate" else len(request.continuation_ids)
        self._prefill_end_s: float | None = None
        self._decode_ends_s: list[float] = []
        self._start_s = timeline.now_s()
        self.n_layers = 0
        """Of the model that ran; 0 before its first step."""
        on_phase("request start", self._start_s)

    def step(self, n_tokens: int, kv_length: int, phase: StepPhase, plans: Sequence[DispatchPlan | None]) -> None:
        self.n_layers = len(plans)
        if phase != "prefill":
            self._end_prefill()
        step = PricedStep(n_tokens, kv_length, "decode" if phase == "decode" else "prefill")
        for part in self._schedule.parts(step, plans, self._timeline.n_run):
            self._timeline.run(part)
        if phase == "decode":
            self._timeline.run([lm_head(1, self._shape, self._rest)])
            self._decode_ends_s.append(self._timeline.now_s())

    def completed(self, computed: Completion) -> Completion:
        """The completion as computed, on virtual time: token i stands at the end of the step that produced it."""
        prefill_end_s = self._end_prefill()
        token_ends_s = [prefill_end_s, *self._decode_ends_s]
        if len(token_ends_s) < computed.n_generated:
            raise EngineError(
                f"request {computed.request_id}: {computed.n_generated} tokens but {len(self._decode_ends_s)} decode "
                "steps observed; the engine must report every forward chunk to its observer"
            )
        end_s = self._timeline.now_s()
        self._on_phase("request end", end_s)
        return computed.model_copy(
            update={
                "start_s": self._start_s,
                "prefill_end_s": prefill_end_s,
                "end_s": end_s,
                "token_times_s": tuple(token_ends_s[: computed.n_generated]),
            }
        )

    def _end_prefill(self) -> float:
        """Once: prices the head over the prefill's last rows and tells the listener. Returns the stamp."""
        if self._prefill_end_s is None:
            self._timeline.run([lm_head(self._prefill_head_rows, self._shape, self._rest)])
            self._prefill_end_s = self._timeline.now_s()
            self._on_phase("prefill end", self._prefill_end_s)
        return self._prefill_end_s
