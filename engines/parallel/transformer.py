"""The transformer as one rank computes it.

Attention's weights, norms, routers, shared experts and the head are whole on every rank: at N up to 4 the experts are
what fills memory. Of the routed experts a rank has what the technique's place gives it. In prefill tokens are dealt
(`OverRanks.deals`): a rank computes queries, router and norms of its own, and keys and values are gathered so that
every rank has the whole cache. In decoding all ranks compute the same token, and the experts' partial results travel.
Where attention's weights are large, each rank computes its heads of the token for all (`split_attention.h`).

Legend: T rows of the step, K experts per token, E experts, L layers with experts, N ranks, H hidden, Q = query heads *
features, M = key/value heads * features, P pairs of turned features, R rows of calls, S segments, X values.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engines.calls import CallKind, Calls, Integers
from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.kernels import native, tables
from engines.kernels.laid_out import layout_table
from engines.model.accelerator import Backend
from engines.model.attention import AttentionWeights, LatentWeights
from engines.model.checkpoints import Checkpoint
from engines.model.experts import ExpertWeights, GatedWeights, execute, gated_ffn
from engines.model.key_value_cache import Chunk, KeyValueCache, Step
from engines.model.router import choose, route, router_logits
from engines.model.said_layouts import SaidLayouts
from engines.model.step_plans import Computed, StepPlans
from engines.model.transformer import Asked, RoutingListener, Transformer
from engines.model.weights import SparseWeights
from engines.observers import LayerObserver, SparseLayerStep
from engines.parallel.links import Links, check_ids
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import ChunkPhase, LayerInput
from engines.techniques.over_ranks import (
    OverRanks,
    own_segments,
    passed_values,
    rows_of,
    splits_attention,
    tokens_N,
    wanted_NT,
)


@dataclass(frozen=True)
class DealtRows:
    """Who has the rows of a step: rank r has rows_N[r] of them, in order. An `key_value_cache.SharedRows`."""

    chunks: Sequence[Chunk]
    links: Links
    rows_N: Sequence[int]

    @property
    def own(self) -> slice:
        first = sum(self.rows_N[: self.links.rank])
        return slice(first, first + self.rows_N[self.links.rank])

    def gathered(self, own_TX: Tensor) -> Tensor:
        return self.links.gathered(own_TX, self.rows_N, "backbone")


class RankTransformer(Transformer):
    """Computes only what a technique over ranks asks, and only together with the other ranks."""

    def __init__(self, checkpoint: Checkpoint, links: Links, backend: Backend | None = None) -> None:
        """checkpoint: with the experts of this rank alone, in the order of `OverRanks.held`."""
        super().__init__(checkpoint, backend)
        self.links = links
        self.routed_crc = 0
        """Of all choices of experts so far: ranks that disagree have lost step."""
        assert checkpoint.config.moe is not None  # a dense model has no technique over ranks
        self._n_experts = checkpoint.config.moe.n_experts
        self._local: dict[int, Integers] = {}
        self._technique: OverRanks | None = None
        self._whole_steps: SaidLayouts | None = None
        self._splits_attention = False
        self._dealt: DealtRows | None = None

    def forward_batch(
        self,
        chunks: Sequence[Tensor],
        caches: Sequence[KeyValueCache],
        technique: Technique,
        phase: ChunkPhase,
        observer: LayerObserver | None = None,
        on_routing: RoutingListener | None = None,
        shown: Shown | None = None,
        ends: Sequence[int] | None = None,
    ) -> tuple[Tensor, StepPlans]:
        """As of one process. Other ranks than the first get the hidden states of their own rows back. ends: refused."""
        if ends is not None:
            raise EngineError("ranks compute all rows of the last layer; leave last_layer out")
        if not isinstance(technique, OverRanks):
            raise EngineError(f"technique {technique.name} runs in one process, and this is one of several")
        rows = sum(map(len, chunks))
        is_dealt = technique.deals(rows, phase)
        if is_dealt and observer is not None:
            raise EngineError("a rank sees the layers of its own tokens; observe with sequence_parallel = false")
        if technique is not self._technique:
            self._technique, self._local = technique, {}
            self._whole_steps = self._of_whole_steps(technique)
        self._tell(chunks, caches, phase)
        rows_N = tokens_N(rows, self.links.n_ranks).tolist() if is_dealt else []
        self._dealt = DealtRows((), self.links, rows_N) if is_dealt else None
        hidden_TH, plans = super().forward_batch(chunks, caches, technique, phase, observer, on_routing, shown)
        if plans.is_fused:
            self._note_whole_step(plans)
        if is_dealt:
            hidden_TH = self.links.gathered(hidden_TH, rows_N, "backbone", only=0)
        return hidden_TH, plans

    def decode(self, token: int, cache: KeyValueCache, technique: Technique, shown: Shown) -> None:
        """The other ranks are told of a step in `forward_batch`."""

    def _said(self, technique: Technique, shown: Shown) -> SaidLayouts | None:
        return self._whole_steps

    def _stopping(self, asked: Asked) -> None:
        """Ranks add up between layers."""

    def _of_whole_steps(self, technique: OverRanks) -> SaidLayouts | None:
        """What a decoded token computes, where ranks can add up inside of one call of the kernels; None where a layer
        must be left for it. All layers are plain: each rank computes its part of the chosen experts, a row each; of
        those that others have too, what is dealt to it."""
        sums, hidden = self.links.sums, self.config.hidden
        is_sparse = [isinstance(layer.mlp, SparseWeights) for layer in self.weights.layers]
        are_plain = technique.decodes_plainly if sums is None else technique.decodes_exactly
        can = self.decodes_in_one_call and are_plain
        if not can or (self.links.n_ranks > 1 and (sums is None or hidden > sums.most_values)):
            return None
        if sums is not None:
            sparse = [layer for layer, has in enumerate(is_sparse) if has]
            local_LE = [self._local_E(layer, technique).tolist() for layer in sparse]
            holders_LE = [holders_E for layer in sparse if (holders_E := technique.holders_E(layer)) is not None]
            self._splits_attention = self._has_much_attention()
            self._exchange = sums.of_step(local_LE, self._splits_attention, holders_LE or None)
        layout = DecodeLayout(widths=technique.widths)
        plain = layout_table([PLAIN if has else None for has in is_sparse], self._n_experts, [()] * len(is_sparse))
        return SaidLayouts(technique, [layout if has else None for has in is_sparse], plain)

    def _has_much_attention(self) -> bool:
        """As of `splits_attention`, by the layer that has least."""
        sizes = self.config
        least_bytes = min(_attention_bytes(layer.attention) for layer in self._weights.layers)
        n_passed = passed_values(sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, sizes.hidden)
        return splits_attention(self.links.n_ranks, sizes.n_kv_heads, least_bytes, n_passed)

    def _note_whole_step(self, plans: StepPlans) -> None:
        routed = [computed.routing for computed in plans.computed if isinstance(computed, Computed)]
        self.links.note_sums(len(routed), self.config.hidden)
        if self._splits_attention:
            self.links.note_split(len(self.weights.layers), self._own_values())
        for routing in routed:
            self.routed_crc = zlib.crc32(routing.expert_ids_TK.numpy().tobytes(), self.routed_crc)

    def _own_values(self) -> int:
        """Of `passed_values` those of this rank."""
        sizes, n_ranks, rank = self.config, self.links.n_ranks, self.links.rank
        n_heads, n_rows = (tokens_N(n, n_ranks)[rank] for n in (sizes.n_kv_heads, sizes.hidden))
        of_head = (sizes.n_heads // sizes.n_kv_heads + 2) * sizes.head_dim
        return int(n_heads * of_head + n_rows)

    def _tell(self, chunks: Sequence[Tensor], caches: Sequence[KeyValueCache], phase: ChunkPhase) -> None:
        """The first rank's: the others what comes next."""

    def _own_rows(self, tokens_T: Tensor) -> Tensor:
        return tokens_T if self._dealt is None else tokens_T[self._dealt.own]

    def _step(self, n_tokens: Sequence[int], caches: Sequence[KeyValueCache]) -> Step:
        whole = super()._step(n_tokens, caches)
        if self._dealt is None:
            return whole
        own = self._dealt.own
        self._dealt = replace(self._dealt, chunks=whole.chunks)
        chunks = [part for chunk in whole.chunks if (part := self._part_of(chunk, own)) is not None]
        return Step(chunks, whole.cos_TP[own], whole.sin_TP[own], self._dealt)

    def _part_of(self, chunk: Chunk, own: slice) -> Chunk | None:
        """Of a chunk's tokens those that stand in these rows; None where none does."""
        first, end = max(chunk.first_row, own.start), min(chunk.first_row + chunk.n_tokens, own.stop)
        if first >= end:
            return None
        return chunk.part(first - chunk.first_row, end - first, first - own.start, self._device)

    # --- experts -----------------------------------------------------------------------------------------------------

    def _mlp(
        self,
        normed_TH: Tensor,
        residual_TH: Tensor,
        mlp: GatedWeights | SparseWeights,
        layer: int,
        saliency_T: Tensor | None,
        asked: Asked,
    ) -> tuple[Tensor, Computed | DispatchPlan | None]:
        if isinstance(mlp, GatedWeights):
            return gated_ffn(normed_TH, mlp, self.config.unit), None
        technique, phase, observer = asked.technique, asked.phase, asked.observer
        assert isinstance(technique, OverRanks)  # `forward_batch` refuses others
        routing = self._routing(normed_TH, mlp, technique)
        if asked.on_routing is not None:
            asked.on_routing(layer, routing, phase)
        computed: Computed | DispatchPlan
        one = self._one_token(normed_TH, routing, mlp.experts, layer, technique, phase)
        if one is not None and observer is None:
            mixed_TH = self.links.summed(one) if self.links.n_ranks > 1 else one
            computed = Computed(routing, None, DecodeLayout(widths=technique.widths))
        else:
            computed = technique.plan(LayerInput(layer, phase, routing, saliency_T))
            mixed_TH = self._mixed(computed, normed_TH, mlp.experts, layer, technique)
        shared_TH = self._shared(normed_TH, mlp, layer)
        if observer is not None:
            assert saliency_T is not None  # computed for whoever observes
            observer.layer(
                SparseLayerStep(layer, phase, saliency_T, normed_TH, routing, mixed_TH, residual_TH, shared_TH)
            )
        return mixed_TH if shared_TH is None else mixed_TH + shared_TH, computed

    def _routing(self, normed_TH: Tensor, mlp: SparseWeights, technique: OverRanks) -> Routing:
        """Of all rows. Dealt ones are routed by who has them."""
        moe = self.config.moe
        assert moe is not None  # sparse weights are read only where the config has experts
        if self._dealt is None:
            routing = route(normed_TH, mlp.router, moe.router)
            self.routed_crc = zlib.crc32(routing.ids_on_host_TK.tobytes(), self.routed_crc)
            return routing
        rows_N = self._dealt.rows_N
        if technique.router_gather == "logits":
            logits_TE = self.links.gathered(router_logits(normed_TH, mlp.router), rows_N, "experts")
            return choose(logits_TE, mlp.router.correction_E, moe.router)
        own = route(normed_TH, mlp.router, moe.router)
        top_k = own.expert_ids_TK.shape[1]
        # Bits travel as they are: an expert's number in the place of a float.
        ids_TK = own.expert_ids_TK.to(torch.int32).view(torch.float32)
        both_TX = self.links.gathered(torch.cat([ids_TK, own.weights_TK.float()], dim=1), rows_N, "experts")
        all_ids_TK = both_TX[:, :top_k].contiguous().view(torch.int32).long()
        check_ids(all_ids_TK, self._n_experts)
        return Routing(all_ids_TK, both_TX[:, top_k:].contiguous(), self._n_experts)

    def _one_token(
        self, normed_TH: Tensor, routing: Routing, experts: ExpertWeights, layer: int, technique: OverRanks,
        phase: ChunkPhase,
    ) -> Tensor | None:  # fmt: skip
        """This rank's partial result of one decoded token, without a plan; None where that must be asked."""
        if len(normed_TH) != 1 or phase != "decode" or not technique.decodes_plainly or experts.table is None:
            return None
        if not tables.serves(normed_TH, routing.weights_TK):
            return None
        local_E = self._local_E(layer, technique)
        local_K = local_E[routing.expert_ids_TK.numpy()[0]]
        own_K = local_K >= 0
        n = int(own_K.sum())
        if not n:
            return torch.zeros_like(normed_TH)
        weights_K = torch.from_numpy(routing.weights_TK.numpy()[0][own_K])
        zeros_R = torch.zeros(n, dtype=torch.int64)
        return native.mix(normed_TH, experts.table, local_K[own_K].tolist(), [1] * n, zeros_R, weights_K)

    def _mixed(
        self, plan: DispatchPlan, normed_TH: Tensor, experts: ExpertWeights, layer: int, technique: OverRanks
    ) -> Tensor:
        """The weighted sum of experts, of the rows that this rank has."""
        local_E = self._local_E(layer, technique)
        own = _own_plan(plan, self.links.rank, local_E)
        if self.links.n_ranks == 1:
            return execute(own, normed_TH, experts)
        if self._dealt is None:
            return self.links.summed(execute(own, normed_TH, experts))
        rows_N = self._dealt.rows_N
        if technique.row_exchange == "all_gather":
            all_TH = self.links.gathered(normed_TH, rows_N, "experts")
            return self.links.scattered_sum(execute(own, all_TH, experts), rows_N)
        return self._sent_and_back(own, wanted_NT(plan, self.links.n_ranks), normed_TH, experts, self._dealt)

    def _sent_and_back(
        self, own: DispatchPlan, wanted: np.ndarray, normed_TH: Tensor, experts: ExpertWeights, dealt: DealtRows
    ) -> Tensor:
        """Rows go to the ranks that want them, and their results come back."""
        links, hidden, rows = self.links, normed_TH.shape[1], dealt.own
        device = normed_TH.device
        mine_NT = [torch.from_numpy(np.flatnonzero(wanted[rank, rows])).to(device) for rank in range(links.n_ranks)]
        ends = np.cumsum(dealt.rows_N)
        n_theirs = [int(wanted[links.rank, end - n : end].sum()) for n, end in zip(dealt.rows_N, ends, strict=True)]
        sent = [normed_TH.index_select(0, mine) for mine in mine_NT]
        came = links.exchanged(sent, [n * hidden for n in n_theirs], "experts")
        came[links.rank] = sent[links.rank].reshape(-1)
        visiting_TH = torch.cat(came).view(-1, hidden)
        place_T = np.full(own.n_tokens, -1)
        place_T[wanted[links.rank]] = np.arange(len(visiting_TH))
        token_R = own.token_R.cpu().numpy()
        visitor_R = torch.from_numpy(np.where(token_R >= 0, place_T[token_R], -1)).to(device)
        result_TH = execute(replace(own, n_tokens=len(visiting_TH), token_R=visitor_R), visiting_TH, experts)
        results = torch.split(result_TH, n_theirs)
        back = links.exchanged(results, [len(mine) * hidden for mine in mine_NT], "experts")
        back[links.rank] = results[links.rank].reshape(-1)
        mixed_TH = torch.zeros_like(normed_TH)
        for mine, result in zip(mine_NT, back, strict=True):
            mixed_TH.index_add_(0, mine, result.view(-1, hidden))
        return mixed_TH

    def _local_E(self, layer: int, technique: OverRanks) -> Integers:
        """Where each expert stands among those of this rank; -1: elsewhere."""
        if layer not in self._local:
            local_E = np.full(self._n_experts, -1)
            held = technique.held(layer, self.links.rank).experts
            local_E[list(held)] = np.arange(len(held))
            self._local[layer] = local_E
        return self._local[layer]


def _attention_bytes(weights: AttentionWeights | LatentWeights) -> int:
    """As they are stored. Latent attention is not split."""
    if isinstance(weights, LatentWeights):
        return 0
    matrices = (weights.q_QH, weights.k_MH, weights.v_MH, weights.out_HQ)
    return sum(matrix.nbytes for matrix in matrices)


def _own_plan(plan: DispatchPlan, rank: int, local_E: Integers) -> DispatchPlan:
    """What a rank computes, of its own experts, each as it holds it."""
    segments = own_segments(plan, rank)
    rows_R = torch.from_numpy(rows_of(plan, segments)).to(plan.token_R.device)
    rows_S, valid_S = plan.calls.rows_S[segments], plan.calls.valid_S[segments]
    calls = Calls(
        local_E[plan.calls.expert_S[segments]],
        rows_S,
        valid_S,
        np.cumsum(rows_S) - rows_S,
        np.arange(len(segments)),
        (CallKind(),),
    )
    n_valid = int(valid_S.sum())
    return DispatchPlan(plan.n_tokens, plan.token_R[rows_R], plan.weight_R[rows_R], calls, n_valid, 0)
