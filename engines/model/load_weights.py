"""A model's weights put together from a checkpoint's tensors by name.

One description serves two readers: `load_weights` takes the tensors from files, `engines.model.wanted_tensors` takes
them from nowhere and notes what was asked for. So the names and shapes that are checked are those that are read.

Legend: H hidden, Q = heads * features of a query, M = kv heads * head_dim, N heads, D head_dim, V features of a value,
W dense width, I expert width, J = 2I, E experts, L vocabulary rows, R rank of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engines.calls import CallKind, Width
from engines.errors import EngineError
from engines.kernels import tables
from engines.model.architecture import LatentConfig, ModelConfig, MoeConfig, TensorNames
from engines.model.attention import AttentionWeights, LatentWeights
from engines.model.experts import ExpertWeights, GatedWeights, sliced
from engines.model.made_experts import MadeExperts
from engines.model.mxfp4 import BLOCK, PackedBlocks
from engines.model.norms import NormWeights
from engines.model.quantised import (
    AS_THE_MODEL,
    PLAIN_DTYPES,
    ROUNDED_FORMS,
    Form,
    Matrix,
    Quantisation,
    QuantisedMatrix,
    Room,
    anywhere,
)
from engines.model.router import RouterWeights
from engines.model.single_tensors import ReadsTensors, SingleTensors
from engines.model.tensor_files import give_back
from engines.model.weights import LayerWeights, ModelWeights, SparseWeights

LATENT_NORM_EPS = 1e-6
"""The norms inside latent attention have this epsilon in all published models, whatever config.json says."""
ALL = slice(None)


class TakesExperts(Protocol):
    """Rows (out) and columns (in) of an expert in a stack; of MXFP4 blocks all columns."""

    def __call__(self, expert: int, rows: slice, columns: slice = ALL) -> Tensor | PackedBlocks: ...


HoldsExperts = Callable[[int], tuple[Sequence[int], Width | None]]
"""Of a layer, which experts are wanted, and which columns of their intermediate dimension; None: all columns."""


def load_weights(
    config: ModelConfig,
    read: ReadsTensors,
    dtype: torch.dtype,
    quantise: Quantisation = AS_THE_MODEL,
    held: HoldsExperts | None = None,
    experts_as_filed: bool = False,
) -> ModelWeights:
    """A view of a file stays one where nothing has to change. dtype: of matrices that `quantise` leaves alone; vectors
    and routers are always fp32. held: experts of a layer in the order in which they are wanted; None: all.
    experts_as_filed: routed experts stay in a file: the checkpoint's, in its form; or, if they are narrowed, stacked,
    packed or in FP8 blocks, one of this process in the form asked for (`engines.model.made_experts`).

    Matrices are converted one by one, so that no more than one is held in two forms. Raises `EngineError`.
    """
    return _Builder(config, read, dtype, quantise, held, experts_as_filed).model()


def _lie_alone(config: ModelConfig) -> bool:
    """Whether the files hold each matrix of an expert as a tensor of its values, of which a view computes."""
    moe = config.moe
    return config.names.stacked_experts is None and config.fp8_block is None and (moe is None or not moe.mxfp4)


def _values(matrix: Matrix) -> Tensor:
    return matrix.values if isinstance(matrix, QuantisedMatrix) else matrix


def _check_rounding(quantise: Quantisation) -> None:
    """Raises `EngineError` where arithmetic is asked for that nothing on this machine does."""
    for keys, why_not in (
        (quantise.multiplying_bf16, tables.why_not_bf16),
        (quantise.attending_by_bytes, tables.why_no_byte_attention),
    ):
        if keys and (reason := why_not()) is not None:
            asked = " and ".join(f'{key} "{quantise.rounding[key]}"' for key in keys)
            raise EngineError(f"{asked}: {reason}; leave {' and '.join(keys)} out")


class _Builder:
    def __init__(
        self,
        config: ModelConfig,
        read: ReadsTensors,
        dtype: torch.dtype,
        quantise: Quantisation,
        held: HoldsExperts | None,
        experts_as_filed: bool,
    ) -> None:
        self._config = config
        self._names: TensorNames = config.names
        self._held_experts = held
        _check_rounding(quantise)
        self._tensors = SingleTensors(config, read, dtype, quantise.arithmetic)
        plain = self._tensors.plain
        self._experts_form: Form | None = quantise.experts or plain
        rounds = self._experts_form in ROUNDED_FORMS.get(quantise.arithmetic, ())
        is_narrow = self._experts_form not in PLAIN_DTYPES or rounds
        is_made = experts_as_filed and (is_narrow or not _lie_alone(config))
        n_experts = 0 if config.moe is None else len(config.moe.sparse_layers) * config.moe.n_experts
        self._made = MadeExperts(n_experts) if is_made else None
        if experts_as_filed and not is_made:
            self._experts_form = None
        self._dense_form: Form = quantise.dense or plain
        self._attention_form: Form = quantise.attention or plain
        self._attention_arithmetic, self._kept = quantise.attention_of(self._attention_form), quantise.kept
        self._head_form: Form = quantise.head or plain

    def model(self) -> ModelWeights:
        config, root = self._config, self._names.root
        rows = config.vocabulary_size
        embedding_name, head_name = root + "model.embed_tokens.weight", root + "lm_head.weight"
        embedding = self._tensors.read(embedding_name, (rows, config.hidden))
        embedding_LH = self._tensors.held_plain(embedding_name, embedding)
        norm = self._tensors.norm(root + "model.norm")
        if not config.tie_embeddings:
            head_LH = self._tensors.matrix(head_name, self._head_form, rows, config.hidden)
        else:
            is_plain = self._head_form == self._tensors.plain
            head_LH = self._tensors.held(embedding_name, embedding_LH if is_plain else embedding, self._head_form)
        weights = ModelWeights(
            embedding_LH=embedding_LH,
            norm=norm,
            head_LH=head_LH,
            head_bias_L=self._tensors.vector(root + "lm_head.bias", rows) if config.head_bias else None,
            head_is_copy=config.tie_embeddings and _values(head_LH).data_ptr() != embedding_LH.data_ptr(),
            layers=tuple(self._layer(f"{root}model.layers.{n}.", n) for n in range(config.n_layers)),
        )
        self._tensors.room.close()
        return weights

    # --- a layer -----------------------------------------------------------------------------------------------------

    def _layer(self, prefix: str, layer: int) -> LayerWeights:
        names, latent = self._names, self._config.attention.latent
        after_attention, after_mlp = names.after_attention_norm, names.after_mlp_norm
        mlp = f"{prefix}{names.mlp}."
        return LayerWeights(
            attention_norm=self._tensors.norm(prefix + "input_layernorm"),
            mlp_norm=self._tensors.norm(prefix + names.mlp_norm),
            after_attention_norm=self._tensors.norm(prefix + after_attention) if after_attention is not None else None,
            after_mlp_norm=self._tensors.norm(prefix + after_mlp) if after_mlp is not None else None,
            attention=self._attention(prefix + "self_attn.")
            if latent is None
            else self._latent_attention(prefix + "self_attn.", latent),
            mlp=self._sparse(mlp, self._config.moe, layer)
            if self._config.moe is not None and self._config.is_sparse(layer)
            else self._dense(mlp, self._config.dense_width, names.fused_dense),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config, attention = self._config, self._config.attention
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        form = self._attention_form
        if self._names.fused_qkv:
            name = prefix + "qkv_proj.weight"
            fused = self._tensors.projected(name, q_width + 2 * kv_width, config.hidden)
            parts = torch.split(fused, [q_width, kv_width, kv_width])
            q_QH, k_MH, v_MH = (self._tensors.held(name, part, form) for part in parts)
        else:
            q_QH = self._tensors.projection(prefix + "q_proj.weight", form, q_width, config.hidden)
            k_MH = self._tensors.projection(prefix + "k_proj.weight", form, kv_width, config.hidden)
            v_MH = self._tensors.projection(prefix + "v_proj.weight", form, kv_width, config.hidden)

        def bias(name: str, width: int, present: bool) -> Tensor | None:
            return self._tensors.vector(f"{prefix}{name}.bias", width) if present else None

        def norm(name: str, width: int) -> NormWeights | None:
            if attention.qk_norm not in ("head", "all heads"):
                return None
            return self._tensors.rms(
                prefix + name, config.head_dim if attention.qk_norm == "head" else width, config.norm.eps
            )

        return AttentionWeights(
            q_QH=q_QH,
            k_MH=k_MH,
            v_MH=v_MH,
            out_HQ=self._tensors.projection(prefix + "o_proj.weight", form, config.hidden, q_width),
            q_bias_Q=bias("q_proj", q_width, attention.qkv_bias),
            k_bias_M=bias("k_proj", kv_width, attention.qkv_bias),
            v_bias_M=bias("v_proj", kv_width, attention.qkv_bias),
            out_bias_H=bias("o_proj", config.hidden, attention.out_bias),
            q_norm=norm("q_norm", q_width),
            k_norm=norm("k_norm", kv_width),
            sinks_N=self._tensors.vector(prefix + "sinks", config.n_heads) if attention.sinks else None,
            arithmetic=self._attention_arithmetic,
            kept=self._kept,
        )

    def _latent_attention(self, prefix: str, latent: LatentConfig) -> LatentWeights:
        hidden, n_heads, rank = self._config.hidden, self._config.n_heads, latent.kv_rank
        q_width = n_heads * (latent.nope_dim + latent.rope_dim)
        form = self._attention_form
        q_down_RH, q_norm = None, None
        if latent.q_rank is None:
            q_QR = self._tensors.projection(prefix + "q_proj.weight", form, q_width, hidden)
        else:
            q_down_RH = self._tensors.projection(prefix + "q_a_proj.weight", form, latent.q_rank, hidden)
            q_norm = self._tensors.rms(prefix + "q_a_layernorm", latent.q_rank, LATENT_NORM_EPS)
            q_QR = self._tensors.projection(prefix + "q_b_proj.weight", form, q_width, latent.q_rank)
        up_name = prefix + "kv_b_proj.weight"
        # It is multiplied from either side, in the order that takes fewer products: groups along one side would not do.
        kv_up = self._tensors.held_plain(
            up_name, self._tensors.projected(up_name, n_heads * (latent.nope_dim + latent.value_dim), rank)
        )
        by_head = kv_up.view(n_heads, -1, rank)
        key_up_NDR, value_up_NVR = torch.split(by_head, [latent.nope_dim, latent.value_dim], dim=1)
        return LatentWeights(
            q_down_RH=q_down_RH,
            q_norm=q_norm,
            q_QR=q_QR,
            kv_down_RH=self._tensors.projection(
                prefix + "kv_a_proj_with_mqa.weight", form, rank + latent.rope_dim, hidden
            ),
            kv_norm=self._tensors.rms(prefix + "kv_a_layernorm", rank, LATENT_NORM_EPS),
            key_up_NDR=key_up_NDR,
            value_up_NVR=value_up_NVR,
            out_HQ=self._tensors.projection(prefix + "o_proj.weight", form, hidden, n_heads * latent.value_dim),
        )

    def _dense(self, prefix: str, width: int, fused: bool) -> GatedWeights:
        hidden, form = self._config.hidden, self._dense_form
        if fused:
            name = prefix + "gate_up_proj.weight"
            halves = self._tensors.projected(name, 2 * width, hidden).chunk(2)
            gate_IH, up_IH = (self._tensors.held(name, half, form) for half in halves)
        else:
            gate_IH = self._tensors.projection(prefix + "gate_proj.weight", form, width, hidden)
            up_IH = self._tensors.projection(prefix + "up_proj.weight", form, width, hidden)
        return GatedWeights(gate_IH, up_IH, self._tensors.projection(prefix + "down_proj.weight", form, hidden, width))

    # --- experts -----------------------------------------------------------------------------------------------------

    def _sparse(self, prefix: str, moe: MoeConfig, layer: int) -> SparseWeights:
        names, hidden = self._names, self._config.hidden
        router, correction = prefix + names.router, prefix + names.router + ".e_score_correction_bias"
        shared = moe.shared
        return SparseWeights(
            router=RouterWeights(
                self._tensors.vector(router + ".weight", moe.n_experts, hidden),
                self._tensors.vector(router + ".bias", moe.n_experts) if moe.router.has_bias else None,
                self._tensors.vector(correction, moe.n_experts) if moe.router.has_correction else None,
            ),
            experts=self._experts(prefix + "experts.", moe, layer),
            shared=self._dense(f"{prefix}{names.shared}.", shared.width, False) if shared is not None else None,
            shared_gate_1H=self._shared_gate(f"{prefix}{names.shared}_gate.weight")
            if shared is not None and shared.gated
            else None,
        )

    def _shared_gate(self, name: str) -> Tensor:
        return self._tensors.held_plain(name, self._tensors.read(name, (1, self._config.hidden)))

    def _experts(self, prefix: str, moe: MoeConfig, layer: int) -> ExpertWeights:
        read = self._single_experts if self._names.stacked_experts is None else self._stacked_experts
        if self._held_experts is None:
            every = read(
                prefix, moe, range(moe.n_experts), None, self._tensors.room if self._made is None else anywhere
            )
            held = tuple(every) if self._made is None else self._made.kept(every)
            return ExpertWeights(held, moe.unit, moe.weights_input)
        experts, width = self._held_experts(layer)
        is_cut_late = width is not None and (moe.mxfp4 or self._experts_form not in PLAIN_DTYPES)
        # Memory that experts share would not end with what is cut off.
        own = read(
            prefix, moe, experts, None if is_cut_late else width, anywhere if is_cut_late else self._tensors.room
        )
        if is_cut_late:
            # Groups of narrowed values lie across columns: what stands between two cuts is that of the whole expert.
            own = (sliced(one, CallKind(width=width)) for one in own)
        return ExpertWeights(tuple(own), moe.unit, moe.weights_input)

    def _single_experts(
        self, prefix: str, moe: MoeConfig, experts: Sequence[int], width: Width | None, room: Room
    ) -> Iterator[GatedWeights]:
        hidden, inner, form = self._config.hidden, moe.expert_width, self._experts_form
        gate, up, down = self._names.experts
        columns = slice(None) if width is None else slice(*width)
        rows, across = ((), ()) if width is None else ((columns,), (slice(None), columns))
        for expert in experts:
            yield GatedWeights(
                self._tensors.projection(f"{prefix}{expert}.{gate}.weight", form, inner, hidden, part=rows, room=room),
                self._tensors.projection(f"{prefix}{expert}.{up}.weight", form, inner, hidden, part=rows, room=room),
                self._tensors.projection(
                    f"{prefix}{expert}.{down}.weight", form, hidden, inner, part=across, room=room
                ),
            )

    def _stacked_experts(
        self, prefix: str, moe: MoeConfig, experts: Sequence[int], width: Width | None, room: Room
    ) -> Iterator[GatedWeights]:
        hidden, inner, n_experts = self._config.hidden, moe.expert_width, moe.n_experts
        gate_up_name, down_name, form = prefix + "gate_up_proj", prefix + "down_proj", self._experts_form
        gate_up_bias_EJ = down_bias_EH = None
        if moe.expert_bias:
            gate_up_bias_EJ = self._tensors.vector(prefix + "gate_up_proj_bias", n_experts, 2 * inner)
            down_bias_EH = self._tensors.vector(prefix + "down_proj_bias", n_experts, hidden)
        gate_rows, up_rows = self._gate_and_up_rows(inner, width)
        columns = slice(None) if width is None else slice(*width)
        is_first = width is None or width.first == 0
        gate_up, *of_gate_up = self._stack(gate_up_name, moe, hidden, 2 * inner)
        down, *of_down = self._stack(down_name, moe, inner, hidden)
        for expert in experts:
            gate_bias_I = up_bias_I = None
            if gate_up_bias_EJ is not None:
                bias_J = gate_up_bias_EJ[expert]
                gate_bias_I, up_bias_I = bias_J[gate_rows].contiguous(), bias_J[up_rows].contiguous()
            yield GatedWeights(
                self._tensors.held(gate_up_name, gate_up(expert, gate_rows), form, room=room),
                self._tensors.held(gate_up_name, gate_up(expert, up_rows), form, room=room),
                self._tensors.held(down_name, down(expert, slice(None), columns), form, room=room),
                gate_bias_I,
                up_bias_I,
                None if down_bias_EH is None or not is_first else down_bias_EH[expert],
            )
            for stack_E in (*of_gate_up, *of_down):
                give_back(stack_E[expert])  # nothing that is held is a view of a stack

    def _stack(self, name: str, moe: MoeConfig, n_in: int, n_out: int) -> tuple[TakesExperts, *tuple[Tensor, ...]]:
        """All experts of a layer in one tensor: plain files hold [E, in, out], MXFP4 ones blocks along `in`. And what
        of the file it takes them of, by expert; nothing where each is read by itself."""
        shape = (moe.n_experts, n_in, n_out)
        packed_shape = (moe.n_experts, n_out, n_in // BLOCK)
        if self._held_experts is None:
            if moe.mxfp4:
                blocks = self._tensors.read(name + "_blocks", (*packed_shape, BLOCK // 2))
                packed = PackedBlocks(blocks, self._tensors.read(name + "_scales", packed_shape))
                return lambda expert, rows, columns=ALL: packed[expert][rows], packed.blocks, packed.scales
            whole = self._tensors.read(name, shape)
            return lambda expert, rows, columns=ALL: whole[expert].mT[rows, columns], whole

        def part(expert: int, rows: slice, columns: slice = ALL) -> Tensor | PackedBlocks:
            own = slice(expert, expert + 1)
            if not moe.mxfp4:
                return self._tensors.read(name, shape, (own, columns, rows))[0].mT
            blocks = self._tensors.read(name + "_blocks", (*packed_shape, BLOCK // 2), (own, rows))
            return PackedBlocks(blocks[0], self._tensors.read(name + "_scales", packed_shape, (own, rows))[0])

        return (part,)

    def _gate_and_up_rows(self, inner: int, width: Width | None) -> tuple[slice, slice]:
        """Which of an expert's joined rows are its gate's and which its up's: they lie in turns or in halves."""
        first, end = (0, inner) if width is None else width
        if self._names.stacked_experts == "interleaved":
            return slice(2 * first, 2 * end, 2), slice(2 * first + 1, 2 * end, 2)
        return slice(first, end), slice(inner + first, inner + end)
