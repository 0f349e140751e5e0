"""The transformer with its graphs on Core ML: one `ExpertCall` on the npu is one prediction.

What the host keeps is computed as everywhere: norms, router, top-k, gather, weighted scatter, residuals, head, and the
calls that the plan places on the CPU. Attention, and what every token passes through, are graphs where the technique's
backbone is the npu.

Legend: T tokens, H hidden, R rows of the row space, M key/value heads, D features of a head, P pairs of turned
features, S positions, E experts of a call, C rows of each, X values of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from engines.calls import Calls, ExpertCall
from engines.coreml.contents import MASKED
from engines.coreml.manifest import GraphFunction, Manifest, PackagePlan, Role
from engines.coreml.planned import aligned
from engines.coreml.predictor import ComputeUnits, Predictor
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.architecture import ModelConfig
from engines.model.checkpoints import Checkpoint
from engines.model.experts import ExpertWeights, GatedWeights, execute, gather_rows
from engines.model.key_value_cache import Chunk, KeyValueCache, Step
from engines.model.rope import Turns
from engines.model.said_layouts import SaidLayouts
from engines.model.transformer import Transformer
from engines.shown import Shown
from engines.techniques.base import Technique

Variant = Literal["stateless", "stateful"]


class GraphCache(KeyValueCache):
    """Keys and values as graphs take them, [M * D, S] of each layer; or the states of a predictor, which hold them."""

    def __init__(self, config: ModelConfig, context: int, dtype: torch.dtype, has_states: bool) -> None:
        super().__init__(config, dtype=dtype)
        self._context = context
        self._shape = (1 if has_states else config.n_kv_heads * config.head_dim, aligned(context))
        self.states: dict[int, object] = {}

    def start(self, n_positions: int, n_kept: int = 0, turned_for: int | None = None) -> None:
        context = self._context
        if n_kept > self.length:
            raise EngineError(f"cache holds {self.length} positions and cannot keep {n_kept}; keep fewer")
        if n_positions > context:
            raise EngineError(
                f"a prompt and its answer of {n_positions} tokens are longer than the {context} positions of these"
                " graphs; convert with a larger context, or ask for less"
            )
        if not self.keys:
            self.keys, self.values = (
                [torch.zeros(self._shape, dtype=self._dtype) for _ in range(self._config.n_layers)] for _ in range(2)
            )
        self.length, self.n_positions = n_kept, n_positions
        self.turned_for = n_positions if turned_for is None else turned_for
        self.turns = Turns(self._config.rope, self.turned_for)


@dataclass
class Ran:
    """What ran since it was last taken. used: functions, by package path. filled_rows: of graphs larger than their
    call."""

    predictions: int = 0
    filled_rows: int = 0
    used: set[tuple[str, str]] = field(default_factory=set)


class CoremlTransformer(Transformer):
    """A `Transformer` whose graphs are predictions."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        predictor: Predictor,
        variant: Variant,
        units: ComputeUnits = "cpu_and_ne",
    ) -> None:
        super().__init__(checkpoint)
        # Each layer waits for its plan, which says what is predicted.
        self._decoder = None
        self._predictor, self._variant, self._units = predictor, variant, units
        self._manifest = manifest
        self._of_role: dict[tuple[int, Role], PackagePlan] = {}
        self._of_experts: dict[tuple[int, tuple[int, ...]], tuple[PackagePlan, list[GraphFunction]]] = {}
        for package in manifest.packages:
            if package.role != "experts":
                self._of_role[package.layer, package.role] = package
                continue
            for function in package.functions:
                _, own = self._of_experts.setdefault((package.layer, function.experts), (package, []))
                own.append(function)
                own.sort(key=lambda one: one.rows)
        self.attends_by_graphs = any(role == "attention" for _, role in self._of_role)
        if self.attends_by_graphs and not any(self._attention_functions(0)):
            raise EngineError(f"these packages have no {variant} attention; convert them with it")
        self.ran = Ran()
        self.not_placed: Counter[tuple[str, str]] = Counter()
        """Predictions by package path and function, of which nobody has asked yet where they lie."""

    def graphs(self) -> Iterator[tuple[PackagePlan, GraphFunction]]:
        """All that a plan may call: of attention the variant that this model takes."""
        is_stateful = self._variant == "stateful"
        for package in self._manifest.packages:
            for function in package.functions:
                if package.role != "attention" or function.stateful == is_stateful:
                    yield package, function

    def new_cache(self) -> KeyValueCache:
        if not self.attends_by_graphs:
            return super().new_cache()
        dtype = torch.float16 if self._predictor.dtype is np.float16 else torch.float32
        return GraphCache(self.config, self._manifest.context, dtype, self._variant == "stateful")

    def _said(self, technique: Technique, shown: Shown) -> SaidLayouts | None:
        return None

    def _predicted(
        self, package: PackagePlan, function: GraphFunction, state: object | None = None, **given: Any
    ) -> Any:
        self.ran.predictions += 1
        self.ran.used.add((package.path, function.name))
        self.not_placed[package.path, function.name] += 1
        return self._predictor.predict(package, function.name, given, state, self._units)

    # --- experts ------------------------------------------------------------------------------------------------------

    def _execute(self, plan: DispatchPlan, normed_TH: Tensor, experts: ExpertWeights, layer: int) -> Tensor:
        calls = list(plan.calls)
        on_npu = [call for call in calls if call.unit == "npu"]
        elsewhere = [call for call in calls if call.unit != "npu"]
        if others := sorted({call.unit for call in elsewhere} - {"cpu"}):
            raise EngineError(f"the plan computes experts on {', '.join(others)}; Core ML graphs run on npu and cpu")
        if not on_npu:
            return execute(plan, normed_TH, experts)
        out_TH = execute(_of_calls(plan, elsewhere), normed_TH, experts) if elsewhere else torch.zeros_like(normed_TH)
        rows_RH = gather_rows(plan, normed_TH)
        if experts.weights_input:
            rows_RH = rows_RH * plan.weight_R[:, None]
        result_RH, is_here_R = torch.zeros_like(rows_RH), torch.zeros(len(rows_RH), dtype=torch.bool)
        for call in on_npu:
            rows = slice(call.first_row, call.first_row + call.n_rows)
            result_RH[rows] = self._call(call, rows_RH[rows], layer)
            is_here_R[rows] = True
        if not experts.weights_input:
            result_RH *= plan.weight_R[:, None]
        valid_R = is_here_R & (plan.token_R >= 0)
        return out_TH.index_add_(0, plan.token_R[valid_R], result_RH[valid_R])

    def _call(self, call: ExpertCall, rows_RH: Tensor, layer: int) -> Tensor:
        """One prediction. A call that is smaller than its graph has rows of zeros after its own."""
        (n_rows,) = set(call.rows_per_expert)
        package, functions = self._of_experts.get((layer, call.experts), (None, []))
        function = next((one for one in functions if one.rows >= n_rows), None)
        if package is None or function is None:
            raise EngineError(
                f"layer {layer}: the plan calls experts {', '.join(map(str, call.experts))} with {n_rows} rows each,"
                " and no graph does; convert with this technique, profile and chunk"
            )
        hidden = rows_RH.shape[1]
        x_EHC = np.zeros((len(call.experts), function.rows, hidden), self._predictor.dtype)
        x_EHC[:, :n_rows] = rows_RH.numpy().reshape(len(call.experts), n_rows, hidden)
        self.ran.filled_rows += (function.rows - n_rows) * len(call.experts)
        x = np.ascontiguousarray(x_EHC.reshape(-1, hidden).T)[None, :, None]
        y = self._predicted(package, function, x=x)["y"]
        y_ECH = y[0, :, 0].T.reshape(len(call.experts), function.rows, hidden)[:, :n_rows]
        return torch.from_numpy(np.ascontiguousarray(y_ECH.reshape(-1, hidden), dtype=np.float32))

    def _every_token(self, normed_TH: Tensor, weights: GatedWeights, layer: int) -> Tensor:
        package = self._of_role.get((layer, "shared" if self.config.is_sparse(layer) else "dense"))
        if package is None:
            return super()._every_token(normed_TH, weights, layer)
        found = []
        for first, n, function in _pieces(len(normed_TH), package.functions):
            x = self._columns(normed_TH[first : first + n], function.rows)
            found.append(self._predicted(package, function, x=x)["y"][0, :, 0, :n].T)
        return _rows(found)

    def _columns(self, rows_TX: Tensor, n: int) -> Any:
        """[T, X] as (1, X, 1, n), zeros behind."""
        made = np.zeros((1, rows_TX.shape[1], 1, n), self._predictor.dtype)
        made[0, :, 0, : len(rows_TX)] = rows_TX.numpy().T
        return made

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention_functions(self, layer: int) -> list[GraphFunction]:
        is_stateful = self._variant == "stateful"
        package = self._of_role[layer, "attention"]
        return sorted((f for f in package.functions if f.stateful == is_stateful), key=lambda f: f.rows)

    def _attend(self, normed_TH: Tensor, layer: int, step: Step) -> Tensor:
        if not self.attends_by_graphs:
            return super()._attend(normed_TH, layer, step)
        functions, found = self._attention_functions(layer), []
        for chunk in step.chunks:
            for first, n, function in _pieces(chunk.n_tokens, functions):
                found.append(self._attend_piece(normed_TH, layer, step, chunk, first, n, function))
        return _rows(found)

    def _attend_piece(
        self, normed_TH: Tensor, layer: int, step: Step, chunk: Chunk, first: int, n: int, function: GraphFunction
    ) -> Any:
        """n tokens of a chunk, from its `first` on."""
        assert isinstance(chunk.cache, GraphCache)
        assert function.past is not None  # attention has positions
        package = self._of_role[layer, "attention"]
        rows = slice(chunk.first_row + first, chunk.first_row + first + n)
        given = {"x": self._columns(normed_TH[rows], function.rows)}
        if self.config.attention.rope_layers[layer]:
            for name, of_all_TP in (("cos", step.cos_TP), ("sin", step.sin_TP)):
                given[name] = self._columns(of_all_TP[rows], function.rows).transpose(0, 2, 1, 3)
        position = chunk.position + first
        seen_TS = self._seen(layer, position, n, function.past)
        if function.stateful:
            given |= self._places(position, n, function, seen_TS)
            states = chunk.cache.states
            if layer not in states:
                states[layer] = self._predictor.new_state(package, function.name, self._units)
            y = self._predicted(package, function, states[layer], **given)["y"]
        else:
            own_TT = self._own(layer, position, n, function.rows)
            past_TS = np.full((function.rows, function.past), MASKED, self._predictor.dtype)
            past_TS[:n, :position] = np.where(seen_TS[:, :position], 0, MASKED)
            given["mask"] = np.concatenate([past_TS, own_TT], axis=1)[None, None]
            keys, values = chunk.cache.keys[layer], chunk.cache.values[layer]
            given["past_key"], given["past_value"] = (kept.numpy()[None, :, None] for kept in (keys, values))
            made = self._predicted(package, function, **given)
            for kept, name in ((keys, "key"), (values, "value")):
                kept[:, position : position + n] = torch.from_numpy(np.ascontiguousarray(made[name][0, :, 0, :n]))
            y = made["y"]
        return y[0, :, 0, :n].T

    def _seen(self, layer: int, position: int, n: int, past: int) -> Any:
        """seen_TS: whether a token of the piece, or of none, sees a position."""
        span = self.config.attention.spans[layer]
        query_T1, key_S = np.arange(position, position + n)[:, None], np.arange(past)
        seen_TS = key_S <= query_T1
        return seen_TS if span is None else seen_TS & span.reaches(query_T1, key_S)

    def _own(self, layer: int, position: int, n: int, rows: int) -> Any:
        """The mask of a piece on itself. Rows behind it see themselves, that their softmax has something."""
        seen_TS = self._seen(layer, position, n, position + n)[:, position:]
        mask_TT = np.full((rows, rows), MASKED, self._predictor.dtype)
        mask_TT[:n, :n] = np.where(seen_TS, 0, MASKED)
        mask_TT[range(n, rows), range(n, rows)] = 0
        return mask_TT

    def _places(self, position: int, n: int, function: GraphFunction, seen_TS: Any) -> dict[str, Any]:
        """mask, place and keep of a stateful graph. What a state held beyond the piece is not kept."""
        assert function.past is not None
        dtype, shape = self._predictor.dtype, (1, 1, function.rows, function.past)
        place, mask = np.zeros(shape, dtype), np.zeros(shape, dtype)
        mask[0, 0, :n] = np.where(seen_TS, 0, MASKED)
        place[0, 0, range(n), range(position, position + n)] = 1
        keep = np.zeros((1, 1, 1, function.past), dtype)
        keep[..., :position] = 1
        return {"mask": mask, "place": place, "keep": keep}


def _pieces(n_tokens: int, functions: Sequence[GraphFunction]) -> Iterable[tuple[int, int, GraphFunction]]:
    """(first token, tokens, the smallest graph that holds them), of at most the largest graph's tokens each."""
    by_rows = sorted(functions, key=lambda function: function.rows)
    first = 0
    while first < n_tokens:
        n = min(n_tokens - first, by_rows[-1].rows)
        yield first, n, next(function for function in by_rows if function.rows >= n)
        first += n


def _rows(pieces: Sequence[Any]) -> Tensor:
    """One under another, fp32, as the host goes on with."""
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return torch.from_numpy(np.ascontiguousarray(whole, dtype=np.float32))


def _of_calls(plan: DispatchPlan, calls: Sequence[ExpertCall]) -> DispatchPlan:
    """The plan with some of its calls, and the rows of these alone: what the torch reader computes of it."""
    places = [np.arange(call.first_row, call.first_row + call.n_rows) for call in calls]
    row_R = torch.from_numpy(np.concatenate(places))
    firsts = np.cumsum([0, *(call.n_rows for call in calls)])
    moved = [replace(call, first_row=int(first)) for call, first in zip(calls, firsts, strict=False)]
    n_valid = sum(call.n_valid for call in calls)
    return DispatchPlan(
        plan.n_tokens, plan.token_R[row_R], plan.weight_R[row_R], Calls.of(moved), n_valid, dropped_pairs=0
    )
