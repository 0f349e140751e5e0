"""The same model on another device or in another arithmetic: CUDA and MPS in bf16 by default, fp32 on request.

Weights are moved once, quantised ones widened; the experts of a layer become one stack, so that one grouped product
computes all of them. Everything else is the transformer's own code on other tensors. So it runs on a CPU as well, which
is how it is tested where there is no accelerator.

A step is not captured in a CUDA graph: a dispatch plan's calls are known on the host only, which waits for the router
once a layer. That wait is part of what a dispatch plan costs here.

Legend: T tokens, H hidden, I expert width, J = 2I, E experts, R rows of all expert calls, S segments (the rows of one
expert in one call).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.calls import Calls
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.attention import AttentionWeights
from engines.model.experts import ExpertWeights, GatedWeights, execute, gather_rows, join
from engines.model.quantised import QuantisedMatrix
from engines.model.router import RouterWeights
from engines.model.weights import ModelWeights

logger = logging.getLogger(__name__)

DeviceType = Literal["cpu", "cuda", "mps"]
GROUPED_BYTES = 16
"""Rows of the operands of a grouped product must be a multiple of this long."""


@dataclass(frozen=True)
class Backend:
    """Where tensors are, and what activations and weights are computed in. Routers and softmax are fp32 everywhere."""

    device: torch.device
    dtype: torch.dtype


def find_backend(device: str, dtype: torch.dtype | None) -> Backend | None:
    """None for fp32 on the CPU, which has kernels of its own. dtype None: the device's own.

    Raises `EngineError` where this machine or this build of torch does not have the device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device not in there:
        raise EngineError(f"device {device!r} is not supported; use one of {', '.join(there)}")
    if not there[device]:
        usable = ", ".join(name for name, is_there in there.items() if is_there)
        raise EngineError(
            f"torch {torch.__version__} sees no {device} device; use {usable}, or install a build of torch for {device}"
        )
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise EngineError(f"arithmetic in {dtype} is not supported; use torch.float32 or torch.bfloat16")
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if device == "cpu" and dtype is torch.float32:
        return None
    return Backend(torch.device(device), dtype)


def synchronised(now_s: Callable[[], float], device: torch.device) -> Callable[[], float]:
    """The clock, read once the device has done all that it was given."""
    if device.type == "cpu":
        return now_s
    wait = torch.cuda.synchronize if device.type == "cuda" else torch.mps.synchronize

    def now_and_done_s() -> float:
        wait()
        return now_s()

    return now_and_done_s


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StackedExperts(ExpertWeights):
    """Experts whose matrices are parts of stacks: gate above up, then down."""

    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_bias_EJ: Tensor | None
    down_bias_EH: Tensor | None


def moved(weights: ModelWeights, backend: Backend, experts_stay: bool = False) -> ModelWeights:
    """The weights on the backend, layer by layer; a matrix that serves twice (a tied head) is moved once.

    experts_stay: routed experts are left where they are, to be copied when they are called."""
    mover = _Mover(backend, experts_stay)
    on_backend = cast(ModelWeights, mover.moved(weights))
    if mover.n_widened:
        logger.info(
            "%d quantised matrices widened to %s on %s, which has no kernels for them",
            mover.n_widened,
            backend.dtype,
            backend.device,
        )
    return on_backend


class _Mover:
    def __init__(self, backend: Backend, experts_stay: bool) -> None:
        self._backend, self._experts_stay = backend, experts_stay
        self._done: dict[int, Tensor] = {}
        self.n_widened = 0

    def moved(self, part: Any) -> Any:
        """Any part of `ModelWeights`: tensors converted, what holds them rebuilt, the rest as it is."""
        if isinstance(part, Tensor | QuantisedMatrix):
            if id(part) not in self._done:
                self._done[id(part)] = self._tensor(part)
            return self._done[id(part)]
        if isinstance(part, RouterWeights):
            device = self._backend.device
            return RouterWeights(part.weight_EH.to(device), _on(part.bias_E, device), _on(part.correction_E, device))
        if isinstance(part, ExpertWeights):
            return part if self._experts_stay else self._experts(part)
        if isinstance(part, tuple):
            return tuple(self.moved(one) for one in part)
        if isinstance(part, AttentionWeights) and part.arithmetic != "fp32":
            own = isinstance(part.out_HQ, QuantisedMatrix) and part.out_HQ.arithmetic == "bf16"
            self._refuse(f"attention in {part.arithmetic}", "arithmetic" if own else "attention_arithmetic")
        if isinstance(part, AttentionWeights) and part.kept is not torch.float32:
            self._refuse(f"a cache in {part.kept}", "cache")
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{f.name: self.moved(getattr(part, f.name)) for f in fields(part)})
        return part

    def _refuse(self, asked: str, key: str) -> NoReturn:
        on = f"{self._backend.device} computes in {self._backend.dtype}"
        raise EngineError(f"{asked} is of the CPU, and {on}; leave {key} out")

    def _tensor(self, matrix: Tensor | QuantisedMatrix) -> Tensor:
        if isinstance(matrix, QuantisedMatrix):
            if matrix.arithmetic != "fp32":
                self._refuse(f"{matrix.arithmetic} arithmetic", "arithmetic")
            self.n_widened += 1
            return matrix.to(self._backend.dtype).to(self._backend.device)
        return matrix.to(self._backend.device, self._backend.dtype)

    def _experts(self, weights: ExpertWeights) -> StackedExperts:
        experts = weights.experts
        width, hidden = experts[0].gate_IH.shape
        gate_up_EJH, down_EHI = self._empty(len(experts), 2 * width, hidden), self._empty(len(experts), hidden, width)
        has_bias = experts[0].gate_bias_I is not None
        gate_up_bias_EJ = self._empty(len(experts), 2 * width) if has_bias else None
        down_bias_EH = self._empty(len(experts), hidden) if has_bias else None
        views = []
        for expert, one in enumerate(experts):
            gate_up_JH, down_HI = gate_up_EJH[expert], down_EHI[expert]
            view = GatedWeights(gate_up_JH[:width], gate_up_JH[width:], down_HI)
            if gate_up_bias_EJ is not None and down_bias_EH is not None:
                gate_up_bias_J = gate_up_bias_EJ[expert]
                biases = (gate_up_bias_J[:width], gate_up_bias_J[width:], down_bias_EH[expert])
                view = GatedWeights(view.gate_IH, view.up_IH, view.down_HI, *biases)
            for field in fields(GatedWeights):
                source, target = getattr(one, field.name), getattr(view, field.name)
                if source is not None:
                    target.copy_(self._tensor(source))
            views.append(view)
        return StackedExperts(
            tuple(views),
            weights.unit,
            weights.weights_input,
            gate_up_EJH=gate_up_EJH,
            down_EHI=down_EHI,
            gate_up_bias_EJ=gate_up_bias_EJ,
            down_bias_EH=down_bias_EH,
        )

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._backend.dtype, device=self._backend.device)


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


# --- the reader of a dispatch plan -----------------------------------------------------------------------------------


def execute_stacked(plan: DispatchPlan, hidden_TH: Tensor, experts: StackedExperts) -> Tensor:
    """What `experts.execute` computes, with two grouped products over all calls where the device has them."""
    calls = plan.calls
    if not len(calls) or not multiplies_groups(calls, experts):
        return execute(plan, hidden_TH, experts)
    if not bool((calls.expert_S[1:] > calls.expert_S[:-1]).all()):
        plan = _by_expert(plan)
    rows_E = np.bincount(calls.expert_S, weights=calls.rows_S, minlength=len(experts.experts)).astype(np.int64)
    counts_E = torch.from_numpy(rows_E).to(hidden_TH.device)
    ends_E = counts_E.cumsum(0).to(torch.int32)
    weight_R1 = plan.weight_R[:, None].to(hidden_TH.dtype)
    rows_RH = gather_rows(plan, hidden_TH)
    if experts.weights_input:
        rows_RH = rows_RH * weight_R1
    gate_up_RJ = F.grouped_mm(rows_RH, experts.gate_up_EJH.mT, offs=ends_E)
    if experts.gate_up_bias_EJ is not None:
        gate_up_RJ = gate_up_RJ + experts.gate_up_bias_EJ.repeat_interleave(counts_E, dim=0)
    gate_RI, up_RI = gate_up_RJ.chunk(2, dim=-1)
    result_RH = F.grouped_mm(join(gate_RI, up_RI, experts.unit), experts.down_EHI.mT, offs=ends_E)
    if experts.down_bias_EH is not None:
        result_RH = result_RH + experts.down_bias_EH.repeat_interleave(counts_E, dim=0)
    if not experts.weights_input:
        result_RH = result_RH * weight_R1
    # Padding rows, whose token is -1, are added to a row that is cut off.
    out_TH = hidden_TH.new_zeros(len(hidden_TH) + 1, hidden_TH.shape[1])
    token_R = torch.where(plan.token_R < 0, len(hidden_TH), plan.token_R)
    return out_TH.index_add_(0, token_R, result_RH)[:-1]


def _by_expert(plan: DispatchPlan) -> DispatchPlan:
    """The same rows, those of an expert together, experts ascending: graphs and blocks stand in other orders."""
    calls = plan.calls
    expert_R = np.repeat(calls.expert_S, calls.rows_S)
    order_R = torch.from_numpy(np.argsort(expert_R, kind="stable")).to(plan.token_R.device)
    return replace(plan, token_R=plan.token_R[order_R], weight_R=plan.weight_R[order_R])


def multiplies_groups(calls: Calls, experts: StackedExperts) -> bool:
    """Whole experts on CPUs and, from compute capability 8.0 on, CUDA, where rows are long enough; elsewhere experts go
    one by one."""
    if not calls.is_one_after_another:
        return False
    device = experts.down_EHI.device
    if device.type == "mps" or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)):
        return False
    return all(n * experts.down_EHI.itemsize % GROUPED_BYTES == 0 for n in experts.down_EHI.shape[1:])
