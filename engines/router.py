"""The router of Qwen3-MoE (and Mixtral): softmax over all experts, the top k, renormalised if the model says so.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.dispatch import Routing


def route(hidden_TH: Tensor, router_EH: Tensor, top_k: int, normalise: bool) -> Routing:
    """Chooses experts for each token. Scores in fp32; of equal scores the lower expert index wins.

    `torch.topk` leaves the order of ties open, so that two machines could choose different experts; a stable sort
    does not.
    """
    scores_TE = F.softmax(F.linear(hidden_TH.float(), router_EH.float()), dim=-1)
    sorted_TE, order_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    weights_TK = sorted_TE[:, :top_k]
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(order_TE[:, :top_k], weights_TK, router_EH.shape[0])
