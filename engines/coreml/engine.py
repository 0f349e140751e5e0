"""Core ML graphs as an engine: our own request loop, router and plans, and a predictor for what the plans call.

Its answers are those of `engines.reference` with the same technique; what computes attention and experts differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from engines.base import PhaseListener
from engines.coreml.eligibility import MOST_GRAPHS
from engines.coreml.manifest import Manifest, PackagePlan
from engines.coreml.predictor import ComputeUnits, Placement, Predictor
from engines.coreml.transformer import CoremlTransformer, Ran, Variant
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint
from engines.profile import Profile
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from results.cells import INTERPRETED
from results.counters import EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.graph_placement import GraphPlacement
from results.records import Completion, Request


class CoremlEngine:
    """An `engines.base.Engine`."""

    device = "host"
    time_method: Literal["measured", "modelled"] = "measured"
    needs_calibration = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        technique: TechniqueParameters,
        profile: Profile | None,
        manifest: Manifest,
        predictor: Predictor,
        variant: Variant,
        now_s: Callable[[], float],
        units: ComputeUnits = "cpu_and_ne",
        threads: int | None = None,
    ) -> None:
        """profile: the one that the graphs' shapes were frozen by. threads: of what the host computes.

        Raises `EngineError`.
        """
        self._predictor, self._units, self._manifest = predictor, units, manifest
        self._model = CoremlTransformer(checkpoint, manifest, predictor, variant, units)
        self._own = ReferenceEngine(checkpoint, technique, manifest.chunk, now_s, threads, model=self._model)
        if self._own.needs_calibration:
            if profile is None:
                raise EngineError(f"technique {technique.technique} has no profile; give it one")
            self._own.use_profile(profile)
        self.tokenizer, self.max_length = self._own.tokenizer, min(self._own.max_length, self._longest)
        self._packages = {package.path: package for package in manifest.packages}
        self._placed: dict[tuple[str, str], Placement | str] = {}
        # All that a plan may call: a window compiles nothing and has no first prediction, also without a warm-up.
        for package, function in self._model.graphs():
            try:
                predictor.load(package, function.name, units)
            except EngineError as error:
                n_held = predictor.n_held()
                limit = f"; about {MOST_GRAPHS} graphs are reported to fit in a process, and this one holds {n_held}"
                raise EngineError(f"{error}{limit if n_held >= MOST_GRAPHS else ''}") from error

    @property
    def _longest(self) -> int:
        return self._manifest.context if self._model.attends_by_graphs else self._own.max_length

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        raise EngineError("shapes of these graphs are frozen; give a profile, and convert with it")

    def use_profile(self, profile: Profile) -> None:
        raise EngineError("shapes of these graphs are frozen by the profile that they were converted with")

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        return self._own.run(request, on_phase)

    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        self._own.show_log_probabilities(request, listener)

    def reset(self) -> None:
        """What ran before is in no count, and its placement is not asked for."""
        self._own.reset()
        self._model.ran, self._model.not_placed = Ran(), Counter()

    def take_counters(self) -> EngineCounters | None:
        return self._own.take_counters()

    def take_heat(self) -> ExpertHeat | None:
        return self._own.take_heat()

    def take_road(self) -> Road | None:
        """What multiplies is the predictor; the rest is what computes on this host."""
        own = self._own.take_road()
        arithmetic = "Core ML" if self._predictor.is_a_mac else f"Core ML: {self._predictor.name}"
        return None if own is None else own.model_copy(update={"arithmetic": arithmetic})

    def take_marks(self) -> tuple[str, ...]:
        return () if self._predictor.is_a_mac else (INTERPRETED,)

    def take_remarks(self) -> tuple[str, ...]:
        """How many predictions there were, and where Core ML says that their operations lie."""
        ran, self._model.ran = self._model.ran, Ran()
        if not ran.predictions:
            return ("no prediction: nothing lay on the npu, and all was computed as in joulebench's own engine",)
        found = [f"{ran.predictions} predictions of {len(ran.used)} graphs by {self._predictor.name}"]
        if ran.filled_rows:
            found.append(f"{ran.filled_rows} rows of zeros beyond the plan's, in graphs larger than their call")
        if (n_held := self._predictor.n_held()) > MOST_GRAPHS:
            found.append(
                f"this process holds {n_held} graphs of all arms, and about {MOST_GRAPHS} are reported to fit: give"
                " each arm a run of its own, or convert larger groups"
            )
        if not self._predictor.is_a_mac:
            found.append("times and joules are of numpy on this machine, and say nothing of a Mac")
        return tuple(found)

    def take_placement(self) -> tuple[GraphPlacement, ...]:
        """Empty of a predictor that has no units."""
        if not self._predictor.is_a_mac:
            return ()
        placed, self._model.not_placed = self._model.not_placed, Counter()
        return tuple(self._placed_graph(path, function, n) for (path, function), n in placed.items())

    def _placed_graph(self, path: str, function: str, n_predictions: int) -> GraphPlacement:
        package: PackagePlan = self._packages[path]
        key = path, function
        if key not in self._placed:
            # Asked once: that takes as long as loading.
            try:
                found = self._predictor.placement(package, function, self._units)
            except EngineError as error:
                self._placed[key] = str(error)
            else:
                self._placed[key] = found or "Core ML's plan does not have this graph"
        told = self._placed[key]
        graph = {"package": path, "function": function, "role": package.role, "predictions": n_predictions}
        if isinstance(told, str):
            return GraphPlacement.model_validate({**graph, "reason": told})
        return GraphPlacement.model_validate({**graph, **told._asdict()})
