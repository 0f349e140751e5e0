"""The pieces of a layer as the engine computes them, on a made model, each as work with its amounts.

Amounts are those of the operations that a schedule makes of the same work (`engines.pricing`), so that what is fitted
and what is priced cannot drift apart. Each piece goes through all layers of its model: weights come from memory, as
they do in a step. `calls` are the calls from Python, whose time is the engine's and no kernel's.

Legend: T tokens, H hidden, K experts per token, P pairs of turned features.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from devices.models.fit import Amounts
from devices.models.operation import Operation
from engines.curves.rounds import Called, Piece, Work
from engines.dispatch import DispatchPlan, Routing
from engines.model.accelerator import Backend, StackedExperts, execute_stacked, synchronised
from engines.model.attention import attend, kernel_table
from engines.model.experts import execute
from engines.model.key_value_cache import Chunk, Step, view_of
from engines.model.norms import summed
from engines.model.router import route
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.pricing.attention import attention
from engines.pricing.block import Block, residual
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import lm_head, norm
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps
from engines.pricing.tiles import RowTile
from engines.techniques.base import TechniqueParameters
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.presets import DroplessParameters, preset_parameters

FEW_ROWS = 8
"""Of an expert, of a layer's experts in the mean, or of a product: up to so many the kernels compute with code of their
own (`kMaxTokens`, `kMeanNarrowRows`)."""
AMOUNTS = ("launches", "weight_bytes", "moved_bytes", "flops")
ROWS = {"gather_dynamic", "gather_static", "padding", "scatter"}
"""Kernels that a call of the experts does on the way: rows fetched, and results put back."""
CALLS = "calls"
CACHE_BYTES = 1 << 27
"""More than the last level of most machines holds. Some servers have more, and the system says so."""
MOST_CACHE_BYTES = 1 << 31
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
TILES = (8, 16, 32, 64, 128)
"""Rows of a tile that are tried: an expert with fewer than the least has few, which have no tiles."""
FEW_LAYERS = 2
DROPLESS = DroplessParameters.model_validate({})
QUERY_TILES = (1, *TILES)
"""Queries of a tile that are tried."""


MOST_FEW: Mapping[str, int] = {"expert_ffn": FEW_ROWS, "attention": 1, "lm_head": FEW_ROWS}
"""Rows up to which a kernel has another line."""
HALF_A_ROW = 0.5
"""Between the last of the few and the first of more."""


def most_few_flops(kernel: str, bytes_per_value: float) -> float:
    """FLOP for a weight byte up to which a kernel has few rows. bytes_per_value: of the weights."""
    return 2 * (MOST_FEW[kernel] + HALF_A_ROW) / bytes_per_value


def tiled(rows: int, name: str = "expert_ffn.flops") -> str:
    """An amount of a kernel, as a unit with such tiles computes it."""
    return f"{name} by {rows}"


def amounts_of(
    operations: Iterable[Operation], has_few: Callable[[Operation], bool] = lambda one: False, times: int = 1
) -> dict[str, float]:
    """Of work: "kernel.amount", with those that only move rows together as `rows`. has_few: of products, those with few
    rows, which are another kernel, "kernel.few"."""
    found: dict[str, float] = defaultdict(float)
    for operation in operations:
        kernel: str = "rows" if operation.kernel in ROWS else operation.kernel
        if operation.weight_bytes and has_few(operation):
            kernel = f"{kernel}.few"
        for amount in AMOUNTS:
            value = getattr(operation, amount)
            if value and not (kernel == "rows" and amount == "launches"):
                found[f"{kernel}.{amount}"] += value * times
    return dict(found)


@dataclass(frozen=True)
class Bench:
    """A model to measure pieces of. name: for the reader. backend: None on the CPU in fp32."""

    name: str
    model: Transformer
    shape: ModelShape
    backend: Backend | None = None

    def pieces(
        self, tokens: Iterable[int], past: Iterable[int], few: Iterable[int], many: Iterable[int]
    ) -> Iterator[Work]:
        """tokens: of steps that read prompts. past: positions before them. few: rows of experts and of
        the head, where those are few. many: rows of every expert."""
        for n_tokens in tokens:
            yield self._simple(n_tokens)
            yield self._residual(n_tokens)
            yield self._router(n_tokens)
            yield self._experts(n_tokens)
        for n_past in past:
            for n_tokens in (1, *tokens):
                yield self._attention(n_tokens, n_past)
        for n_rows in few:
            yield self._few_experts(n_rows)
            yield self._head(n_rows)
        yield self._head(max(tokens))
        for n_rows in many:
            yield from self._many_rows(n_rows)

    def calls(self, tokens: Sequence[int]) -> Iterator[Work]:
        """Of a model so small that its experts and its attention take what calling them takes. tokens: some that give
        experts few rows and some that give them more, for each has a line of its own."""
        for n_tokens in tokens:
            yield self._experts(n_tokens)
        for n_tokens in (1, *tokens):
            yield self._attention(n_tokens, 0)

    # --- one by one --------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.backend is None else self.backend.device

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.backend is None else self.backend.dtype

    @property
    def _n_layers(self) -> int:
        return self.shape.n_layers

    def _rows(self, n_tokens: int, seed: int = 0) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        return torch.randn(n_tokens, self.shape.hidden, generator=random).to(self._device, self._dtype)

    def _work(self, curve: str, shape: str, amounts: Amounts, call: Callable[[], object], n_calls: int = 0) -> Work:
        now_s = time.perf_counter if self.backend is None else synchronised(time.perf_counter, self._device)
        calls = {CALLS: float(n_calls or self._n_layers)}
        piece = Piece(curve, f"{self.name}; {shape}", {**amounts, **calls})
        return Called(piece, _inferring(call), now_s, Emptied.of(self._device))

    def _simple(self, n_tokens: int) -> Work:
        x_TH = self._rows(n_tokens)
        layers = self.model.weights.layers

        def call() -> None:
            for layer in layers:
                layer.attention_norm(x_TH)

        work = amounts_of([norm(PricedStep(n_tokens, n_tokens), self.shape, "cpu")], times=self._n_layers)
        return self._work("norm", f"{n_tokens} rows", work, call)

    def _residual(self, n_tokens: int) -> Work:
        x_TH, y_TH = self._rows(n_tokens), self._rows(n_tokens, 1)

        def call() -> None:
            for _ in range(self._n_layers):
                summed(x_TH, y_TH)

        work = amounts_of([residual("residual", n_tokens, self.shape, "cpu")], times=self._n_layers)
        return self._work("residual", f"{n_tokens} rows", work, call)

    def _sparse(self) -> list[SparseWeights]:
        return [layer.mlp for layer in self.model.weights.layers if isinstance(layer.mlp, SparseWeights)]

    def _router(self, n_tokens: int) -> Work:
        x_TH, sparse, moe = self._rows(n_tokens), self._sparse(), self.model.config.moe
        assert moe is not None  # made models have experts

        def call() -> None:
            for mlp in sparse:
                route(x_TH, mlp.router, moe.router)

        flops = 2.0 * n_tokens * self.shape.hidden * self.shape.n_experts
        work = amounts_of([Operation("router", "cpu", "router", flops=flops)], times=self._n_layers)
        return self._work("router", f"{n_tokens} rows", work, call)

    def _experts(self, n_tokens: int) -> Work:
        """Chosen at random: some experts have many rows, and some few, which the kernels compute by other code. Where
        they have few in the mean, all of them are, and the piece is of the curve of few rows."""
        n_experts, top_k = self.shape.n_experts, self.shape.top_k
        random = torch.Generator().manual_seed(n_tokens)
        ids_TK = torch.rand(n_tokens, n_experts, generator=random).argsort(-1)[:, :top_k].contiguous()
        few = ids_TK.numel() <= FEW_ROWS * len(set(ids_TK.flatten().tolist()))
        return self._planned(f"{n_tokens} rows of {top_k}", ids_TK, n_tokens, few, every_expert=True)

    def _few_experts(self, n_rows: int) -> Work:
        """Each called expert with so many rows, and others in each layer."""
        ids_TK = torch.arange(self.shape.top_k).expand(n_rows, -1).contiguous()
        return self._planned(f"{self.shape.top_k} calls of {n_rows} rows", ids_TK, n_rows, True, every_expert=False)

    def _many_rows(self, n_rows: int) -> Iterator[Work]:
        """So many rows of every expert: of tokens, and of padding. What lies between two products leaves the caches
        then. A few layers tell it, for weights are the least of what is read."""
        n_experts = self.shape.n_experts
        all_TK = torch.arange(n_experts).expand(n_rows, -1).contiguous()
        yield self._planned(f"{n_rows} rows of {n_experts}", all_TK, n_rows, False, True, n_layers=FEW_LAYERS)
        blocks = preset_parameters("blockwise").model_validate({"block_size": n_rows})
        what = f"blocks of {n_rows} rows"
        one_TK = torch.arange(n_experts)[:, None]
        yield self._planned(what, one_TK, n_experts, False, True, blocks, n_layers=FEW_LAYERS)

    def _planned(
        self,
        what: str,
        ids_TK: Tensor,
        n_tokens: int,
        few_rows: bool,
        every_expert: bool,
        parameters: TechniqueParameters = DROPLESS,
        n_layers: int | None = None,
    ) -> Work:
        """every_expert: of a layer, or nearly; else each layer calls others than the one before. n_layers: the first
        ones; None: all."""
        x_TH, sparse, n_experts = self._rows(n_tokens), self._sparse()[:n_layers], self.shape.n_experts
        technique = parameters.build(BuildContext(max(n_tokens, 1)))
        plans: list[DispatchPlan] = []
        for shift in range(0, n_experts, n_experts if every_expert else self.shape.top_k):
            weights_TK = torch.full(ids_TK.shape, 1 / ids_TK.shape[1])
            routing = Routing(((ids_TK + shift) % n_experts).to(self._device), weights_TK.to(self._device), n_experts)
            plans.append(technique.plan(LayerInput(0, "prefill", routing)))
        state = {"next": 0}

        def call() -> None:
            for mlp in sparse:
                plan = plans[state["next"]]
                if isinstance(mlp.experts, StackedExperts):
                    execute_stacked(plan, x_TH, mlp.experts)
                else:
                    execute(plan, x_TH, mlp.experts)
            state["next"] = (state["next"] + 1) % len(plans)

        most = most_few_flops("expert_ffn", self.shape.bytes_of("experts"))

        def has_few(one: Operation) -> bool:
            return few_rows or one.flops <= most * one.weight_bytes

        work = amounts_of(self._operations(plans[0], 1), has_few, len(sparse))
        for rows in () if few_rows else TILES:
            found = amounts_of(self._operations(plans[0], rows), has_few, len(sparse))
            work |= {tiled(rows, name): found[name] for name in ("expert_ffn.flops", "expert_ffn.moved_bytes")}
        return self._work("few rows" if few_rows else "experts", what, work, call, len(sparse))

    def _operations(self, plan: DispatchPlan, tile: int) -> list[Operation]:
        steps = Steps()
        Block(self.shape, "cpu", None, None, {"cpu": RowTile(tile, FEW_ROWS)}, {"cpu"}).add_to(steps, plan, 0, {})
        return [one for one in steps.operations if one.kernel != "router"]

    def _attention(self, n_tokens: int, n_past: int) -> Work:
        x_TH, config = self._rows(n_tokens), self.model.config
        cache = self.model.new_cache()
        cache.start(n_past + n_tokens)
        for buffer in (*cache.keys, *cache.values):
            buffer.normal_()
        views = {span: view_of(span, n_past, n_tokens, self._device) for span in set(config.attention.spans)}
        turns = cache.turns.at(n_past, n_tokens)
        cos_TP, sin_TP = (one.to(self._device) for one in turns)
        step = Step([Chunk(cache, n_past, n_tokens, 0, views)], cos_TP, sin_TP)
        layers = [layer.attention for layer in self.model.weights.layers]
        tables = [kernel_table(one, config, i) if self.backend is None else None for i, one in enumerate(layers)]

        def call() -> None:
            for number, weights in enumerate(layers):
                attend(x_TH, weights, config, number, step, tables[number])

        def operations(tile: int) -> list[Operation]:
            priced = PricedStep(n_tokens, n_past + n_tokens)
            return attention(priced, self.shape, "cpu", apart=True, query_tile=tile)

        work = amounts_of(operations(1), lambda one: n_tokens == 1, self._n_layers)
        for rows in QUERY_TILES:
            work[tiled(rows, "scores.flops")] = operations(rows)[1].flops * self._n_layers
        return self._work("attention", f"{n_tokens} rows behind {n_past}", work, call)

    def _head(self, n_rows: int) -> Work:
        x_TH = self._rows(n_rows)
        work = amounts_of([lm_head(n_rows, self.shape)], lambda one: n_rows <= FEW_ROWS)
        return self._work("head", f"{n_rows} rows", work, lambda: self.model.logits(x_TH), n_calls=1)


def emptying_bytes(caches: Path = CACHES) -> int:
    """What must be read so that nothing of before is left in the largest cache: a third more than it holds."""
    sizes = [CACHE_BYTES]
    for path in caches.glob("index*/size"):
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1) * 4 // 3)
    return min(max(sizes), MOST_CACHE_BYTES)


class Emptied:
    """Reads so much that nothing else is left in the caches."""

    _held: ClassVar[dict[torch.device, Emptied]] = {}

    def __init__(self, device: torch.device) -> None:
        n_bytes = emptying_bytes() if device.type == "cpu" else CACHE_BYTES
        self._read = torch.zeros(n_bytes // 4, device=device)

    @classmethod
    def of(cls, device: torch.device) -> Emptied:
        if device not in cls._held:
            cls._held[device] = cls(device)
        return cls._held[device]

    def __call__(self) -> None:
        self._read.sum()


def _inferring(call: Callable[[], object]) -> Callable[[], object]:
    def inferring() -> object:
        with torch.inference_mode():
            return call()

    return inferring


def sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Amounts of several pieces together."""
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            found[name] += value
    return dict(found)
