"""Routers: from hidden states to the experts of each token and their weights.

| scoring | choice | weights |
|---|---|---|
| softmax | best scores (by group where the model has groups) | scores, made to add up to 1 if the model does so |
| sigmoid | best scores + correction, by group | scores without the correction, likewise |
| softmax of chosen | best logits | softmax over the chosen |
| sigmoid of chosen | best logits | their sigmoid |
| sparsemixer | best logit, then the best of the rest | each against the logits close to it (Phi-3.5-MoE) |

Legend: T tokens, H hidden, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import Routing
from engines.kernels import native, tables
from engines.model.architecture import RouterConfig


@dataclass(frozen=True)
class RouterWeights:
    """Always fp32. correction_E steers the choice and not the weights."""

    weight_EH: Tensor
    bias_E: Tensor | None = None
    correction_E: Tensor | None = None


def route(hidden_TH: Tensor, weights: RouterWeights, config: RouterConfig) -> Routing:
    """Chooses experts for each token. Scores in fp32; of equal scores the lower expert index wins.

    `torch.topk` leaves the order of ties open, so that two machines could choose different experts; a stable sort
    does not.
    """
    if tables.serves(hidden_TH):
        table = kernel_router(weights, config)
        if table is not None:
            return Routing(*native.route(hidden_TH, table), len(weights.weight_EH))
    return choose(router_logits(hidden_TH, weights), weights.correction_E, config)


def router_logits(hidden_TH: Tensor, weights: RouterWeights) -> Tensor:
    """logits_TE, fp32."""
    return F.linear(hidden_TH.float(), weights.weight_EH, weights.bias_E)


def choose(logits_TE: Tensor, correction_E: Tensor | None, config: RouterConfig) -> Routing:
    """What a router makes of its logits, or of another's guess at them."""
    if config.scoring == "sparsemixer":
        ids_TK, weights_TK = _sparsemixer(logits_TE, config.jitter)
        return Routing(ids_TK, weights_TK, logits_TE.shape[-1])
    if config.scoring == "softmax":
        scores_TE = F.softmax(logits_TE, dim=-1)
    elif config.scoring == "sigmoid":
        scores_TE = logits_TE.sigmoid()
    else:
        scores_TE = logits_TE
    favour_TE = scores_TE if correction_E is None else scores_TE + correction_E
    ids_TK = _best(_within_groups(favour_TE, config), config.top_k)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if config.scoring == "softmax of chosen":
        weights_TK = F.softmax(weights_TK, dim=-1)
    elif config.scoring == "sigmoid of chosen":
        weights_TK = weights_TK.sigmoid()
    if config.normalise:
        # Sigmoids may all underflow; softmax scores never do.
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
    return Routing(ids_TK, weights_TK * config.scale, logits_TE.shape[-1])


def kernel_router(weights: RouterWeights, config: RouterConfig) -> tables.RouterTable | None:
    """The router as the kernels compute it; None for what only some families have."""
    is_plain = config.scoring in ("softmax", "softmax of chosen") and config.top_groups == config.n_groups
    if not is_plain or weights.correction_E is not None:
        return None
    of_chosen = config.scoring == "softmax of chosen"
    return tables.router_table(
        weights.weight_EH, weights.bias_E, config.top_k, of_chosen, config.normalise, config.scale
    )


def _best(scores_TE: Tensor, n: int) -> Tensor:
    return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[..., :n]


def _within_groups(favour_TE: Tensor, config: RouterConfig) -> Tensor:
    """Puts the experts outside each token's best groups out of reach (DeepSeek-V2 §2.2.2, V3 §2.1.2)."""
    if config.top_groups == config.n_groups:
        return favour_TE
    grouped_TGE = favour_TE.view(len(favour_TE), config.n_groups, -1)
    n_counted = 1 if config.group_score == "best" else 2
    group_score_TG = grouped_TGE.topk(n_counted, dim=-1).values.sum(dim=-1)
    chosen_TG = torch.zeros_like(group_score_TG, dtype=torch.bool)
    chosen_TG.scatter_(-1, _best(group_score_TG, config.top_groups), True)
    return grouped_TGE.masked_fill(~chosen_TG[..., None], float("-inf")).view_as(favour_TE)


def _sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Phi-3.5-MoE's two choices (SparseMixer-v2, Liu et al. 2024). A choice's weight is its softmax over the logits
    within 2 * jitter of it, relative to the larger of both; the second choice leaves out the first."""
    ids, weights = [], []
    left_TE = logits_TE
    for _ in range(2):
        id_T1 = _best(left_TE, 1)
        top_T1 = left_TE.gather(-1, id_T1)
        distance_TE = (top_T1 - logits_TE) / torch.maximum(logits_TE.abs(), top_T1)
        close_TE = left_TE.masked_fill(distance_TE > 2 * jitter, float("-inf"))
        ids.append(id_T1)
        weights.append(F.softmax(close_TE, dim=-1).gather(-1, id_T1))
        left_TE = left_TE.scatter(-1, id_T1, float("-inf"))
    return torch.cat(ids, dim=-1), torch.cat(weights, dim=-1)
