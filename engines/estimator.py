"""A small network that guesses the next layer's router logits from the quasi-hidden state: one for all layers.

    z = A q + pos[l]        z <- z + C SiLU(B z)        logits = D LayerNorm(z)

(003 Appendix A.) Trained by distillation: the Kullback-Leibler divergence of the router's scores from the estimator's.

Legend: N tokens, P layers whose next one is guessed, H hidden, W width, V = m W inner width, E experts, S tokens of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from engines.errors import EngineError
from engines.model.architecture import RouterConfig
from results.records import Record

NORM_EPS = 1e-5


@dataclass(frozen=True, eq=False)
class Estimator:
    """fp32. layers: of row p of `position_PW`, the layer whose state is looked at. `at_16_bits` is what guesses."""

    layers: tuple[int, ...]
    reduce_WH: Tensor
    position_PW: Tensor
    widen_VW: Tensor
    narrow_WV: Tensor
    norm_W: Tensor
    norm_bias_W: Tensor
    head_EW: Tensor

    @property
    def n_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "layers"}

    def to(self, device: torch.device) -> Estimator:
        return Estimator(self.layers, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.reduce_WH, self.widen_VW, self.narrow_WV, self.head_EW

    @cached_property
    def at_16_bits(self) -> Estimator:
        """With matrices rounded to fp16, of which kernels read half the bytes. Itself where one is beyond fp16."""
        rounded = [matrix.half().float() for matrix in self.matrices]
        if not all(bool(matrix.isfinite().all()) for matrix in rounded):
            return self
        reduce_WH, widen_VW, narrow_WV, head_EW = rounded
        return replace(self, reduce_WH=reduce_WH, widen_VW=widen_VW, narrow_WV=narrow_WV, head_EW=head_EW)

    def logits(self, state_NH: Tensor, layer: int) -> Tensor:
        """logits_NE of the next sparse layer, from the quasi-hidden state of `layer`."""
        return self._logits(state_NH.float(), self.position_PW[self.layers.index(layer)])

    def logits_of_all(self, state_PNH: Tensor) -> Tensor:
        """logits_PNE, from the states of all layers."""
        return self._logits(state_PNH, self.position_PW[:, None])

    def _logits(self, state_H: Tensor, position_W: Tensor) -> Tensor:
        z_W = F.linear(state_H, self.reduce_WH) + position_W
        z_W = z_W + F.linear(F.silu(F.linear(z_W, self.widen_VW)), self.narrow_WV)
        return F.linear(F.layer_norm(z_W, self.norm_W.shape, self.norm_W, self.norm_bias_W, NORM_EPS), self.head_EW)


def estimator_shapes(
    n_layers: int, hidden: int, n_experts: int, width: int, expansion: int
) -> dict[str, tuple[int, ...]]:
    """Of each tensor. n_layers: those whose next one is guessed."""
    inner = expansion * width
    return {
        "reduce_WH": (width, hidden),
        "position_PW": (n_layers, width),
        "widen_VW": (inner, width),
        "narrow_WV": (width, inner),
        "norm_W": (width,),
        "norm_bias_W": (width,),
        "head_EW": (n_experts, width),
    }


class EstimatorRecipe(Record):
    """Widths and training. The source says neither: (720, 2) and (1024, 7) give the sizes that it reports."""

    width: int | None = Field(None, ge=1, le=1 << 16)
    """W; None: half of the model's."""
    expansion: int = Field(2, ge=1, le=64)
    """m: inner over outer width of the feed-forward block."""
    n_steps: int = Field(3000, ge=1, le=10_000_000)
    n_tokens: int = Field(256, ge=1, le=1 << 20)
    """Tokens of a step, each with all its layers."""
    peak_rate: float = Field(3e-3, gt=0)
    """Of Adam; it rises over the first twentieth of the steps and falls to zero as a cosine."""
    seed: int = Field(0, ge=0, lt=1 << 63)

    def width_of(self, hidden: int) -> int:
        return max(1, hidden // 2) if self.width is None else self.width

    def rate(self, step: int) -> float:
        rise = min(1.0, (step + 1) / max(1, self.n_steps // 20))
        return self.peak_rate * min(rise, 0.5 * (1 + math.cos(math.pi * step / self.n_steps)))


@torch.enable_grad()
def train_estimator(
    layers: tuple[int, ...],
    state_PNH: Tensor,
    logits_PNE: Tensor,
    config: RouterConfig,
    recipe: EstimatorRecipe,
    on_step: Callable[[], object] = lambda: None,
) -> Estimator:
    """Learns logits_PNE, the routers' own, from the quasi-hidden states of the layers before. Raises `EngineError`.

    The same on every call: tokens and first weights are drawn from the recipe's seed. on_step: told after each.
    """
    n_layers, n_tokens, hidden = state_PNH.shape
    if not n_layers or not n_tokens:
        raise EngineError("an estimator needs two layers of experts and tokens to learn from")
    generator = torch.Generator().manual_seed(recipe.seed)
    shapes = estimator_shapes(n_layers, hidden, logits_PNE.shape[-1], recipe.width_of(hidden), recipe.expansion)
    weights = {name: _first_weights(name, shape, generator).requires_grad_() for name, shape in shapes.items()}
    estimator = Estimator(layers, **weights)
    optimizer = torch.optim.AdamW(weights.values(), lr=recipe.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(recipe.n_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        drawn_S = torch.randint(n_tokens, (min(recipe.n_tokens, n_tokens),), generator=generator)
        loss = divergence(logits_PNE[:, drawn_S], estimator.logits_of_all(state_PNH[:, drawn_S]), config)
        if not torch.isfinite(loss):
            raise EngineError(
                f"estimator, step {step}: the loss is {loss.item()}; lower peak_rate {recipe.peak_rate:g}"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        on_step()
    return Estimator(layers, **{name: tensor.detach() for name, tensor in weights.items()})


def divergence(router_E: Tensor, guess_E: Tensor, config: RouterConfig) -> Tensor:
    """KL(router || estimator) in nats, the mean over rows, of what the router makes of its logits.

    Softmax: over the experts. Sigmoids: a sum of one divergence per expert, for each is a probability of its own.
    Sparsemixer's weights also hang on the logits' common level, which a softmax does not see: its square is added.
    """
    if config.scoring in ("sigmoid", "sigmoid of chosen"):
        p_E = router_E.sigmoid()
        yes_E = p_E * (F.logsigmoid(router_E) - F.logsigmoid(guess_E))
        no_E = (1 - p_E) * (F.logsigmoid(-router_E) - F.logsigmoid(-guess_E))
        return (yes_E + no_E).sum(-1).mean()
    own_E, guessed_E = router_E.log_softmax(-1), guess_E.log_softmax(-1)
    found = (own_E.exp() * (own_E - guessed_E)).sum(-1).mean()
    if config.scoring == "sparsemixer":
        found = found + (router_E.logsumexp(-1) - guess_E.logsumexp(-1)).square().mean()
    return found


def _first_weights(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name in ("norm_bias_W", "position_PW"):
        return torch.zeros(shape)
    if name == "norm_W":
        return torch.ones(shape)
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
