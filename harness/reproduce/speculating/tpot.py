"""Time per output token on demand and with experts fetched a layer ahead (003, §5.1), by priced cells.

As the source ran it: one request, bf16, experts in the host's memory and all else on the GPU, two buffers, one copy
stream. GLM-4.7-Flash without its shared expert and with plain attention ("a simplified RoPE-based attention"), of which
nobody says more: 20 heads of 128, keys and values of their own, which makes the ~3 GB of Table 2 and leaves room for
65,536 tokens. All 47 of its layers have experts, as Table 2 counts them. GPT-OSS-120B with its true 36 layers and 128
experts: Table 2 prints those of the 20B beside 213 GB.

The sheets state no launches, so nothing idles on demand: the source has up to 8 % of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from devices.models.sheet import Sheet, load_sheet
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES, ModelShape

ON_DEMAND, AHEAD = "on-demand", "router-pf"
LENGTHS = (1024, 4096, 16384, 65536)
"""Tokens of the prompt (§5.1.1)."""
N_ANSWERED = 32
N_PRICED = 2
"""Decoded tokens that are priced: on these machines one is like the other but for the length of the cache."""
QWEN3, GLM, GPT_OSS, QWEN3_235B = "Qwen3-30B-A3B", "GLM-4.7-Flash", "GPT-OSS-120B", "Qwen3-235B-A22B"
MODELS: Mapping[str, ModelShape] = {
    QWEN3: NAMED_SHAPES["qwen3-30b-a3b"],
    GLM: replace(
        NAMED_SHAPES["glm-4.7-flash"], name="glm-4.7-flash as run", head_dim=128, dense_width=0, shared_width=0,
        n_dense_layers=None, latent=None,
    ),
    GPT_OSS: NAMED_SHAPES["gpt-oss-120b"],
    QWEN3_235B: NAMED_SHAPES["qwen3-235b-a22b"],
}  # fmt: skip
MACHINES = ("a6000", "a100", "gh200")
EVALUATED: Mapping[str, str] = {QWEN3: "a6000", GLM: "a6000", GPT_OSS: "a100", QWEN3_235B: "gh200"}
"""Table 3: the machine of each model."""


def beyond_context() -> str:
    """Which models are priced with longer prompts than their config holds; the engine would refuse them."""
    beyond = [name for name, shape in MODELS.items() if shape.beyond_context(max(LENGTHS) + N_ANSWERED) is not None]
    held = "; ".join(f"{name}: {MODELS[name].max_length:,}" for name in beyond)
    return f"{max(LENGTHS):,} tokens are more than a config.json holds ({held}); priced as the source ran it"


class Run(NamedTuple):
    model: str
    machine: str
    length: int


class Tpot(NamedTuple):
    """Seconds of a decoded token, and of them those in which the GPU computes and the link copies."""

    whole_s: float
    compute_s: float
    copy_s: float

    @property
    def idle_s(self) -> float:
        """On demand: neither. What is left by rounding of sums is none."""
        left_s = self.whole_s - self.compute_s - self.copy_s
        return left_s if left_s > 1e-9 * self.whole_s else 0.0


class Compared(NamedTuple):
    on_demand: Tpot
    ahead: Tpot

    @property
    def gain(self) -> float:
        """Share of the time on demand that is saved."""
        return 1 - self.ahead.whole_s / self.on_demand.whole_s

    @property
    def compute_share(self) -> float:
        """Of the time on demand, as the next two."""
        return self.on_demand.compute_s / self.on_demand.whole_s

    @property
    def copy_share(self) -> float:
        return self.on_demand.copy_s / self.on_demand.whole_s

    @property
    def idle_share(self) -> float:
        return self.on_demand.idle_s / self.on_demand.whole_s


def expert_bytes_a_token(shape: ModelShape) -> float:
    """That are copied for it: the experts that it chooses in every layer."""
    return shape.n_sparse_layers * shape.top_k * shape.expert_bytes


def lacks_gpu(shape: ModelShape, sheet: Sheet, length: int) -> str | None:
    """Why the GPU does not hold what stays there (other weights, keys and values, two buffers), or None. The experts'
    own room is a cell's matter."""
    capacity = sheet.capacity_bytes("gpu")
    cache_bytes = (length + N_ANSWERED) * shape.n_layers * shape.cached_values * shape.bytes_per_value
    needed = shape.others_bytes + cache_bytes + 2 * shape.top_k * shape.expert_bytes
    if capacity is None or needed <= capacity:
        return None
    return f"{needed / 1e9:.0f} GB beside the experts, and the GPU of {sheet.name} holds {capacity / 1e9:.0f} GB"


def tpot(shape: ModelShape, sheet: Sheet, technique: str, length: int) -> Tpot | str:
    """At the middle of the answer. "oom" where the experts, or what stays on the GPU, do not fit."""
    if lacks_gpu(shape, sheet, length) is not None:
        return "oom"
    cell = Cell(
        sheet,
        shape,
        parameters(technique),
        UniformRouting(),
        prompt_tokens=1,
        decode_steps=N_PRICED,
        recall=1.0 if technique == AHEAD else None,
        cached_tokens=length + N_ANSWERED // 2 - 2,
    )
    priced = price_cell(cell)
    if priced.decode is None:
        return priced.result
    by_unit = dict.fromkeys(("gpu", "link"), 0.0)
    for (_, resource), seconds in priced.decode.spent.items():
        by_unit["link" if sheet.link_of(resource) is not None else "gpu"] += seconds / N_PRICED
    return Tpot(priced.decode.seconds / N_PRICED, by_unit["gpu"], by_unit["link"])


@cache
def compared() -> Mapping[Run, Compared | str]:
    """Every model on every machine at every length; "oom" where it does not fit."""
    found: dict[Run, Compared | str] = {}
    for machine in MACHINES:
        sheet = load_sheet(machine)
        for model, shape in MODELS.items():
            for length in LENGTHS:
                on_demand, ahead = (tpot(shape, sheet, name, length) for name in (ON_DEMAND, AHEAD))
                if isinstance(on_demand, str) or isinstance(ahead, str):
                    found[Run(model, machine, length)] = on_demand if isinstance(on_demand, str) else str(ahead)
                else:
                    found[Run(model, machine, length)] = Compared(on_demand, ahead)
    return found


def evaluated(machines: tuple[str, ...] = MACHINES) -> dict[Run, Compared]:
    """Those of Table 3."""
    return {
        run: one
        for run, one in compared().items()
        if EVALUATED[run.model] == run.machine and run.machine in machines and not isinstance(one, str)
    }


def gain_of_shares(compute: float, n_layers: int) -> float:
    """Eq. 1, of layers alike and copies that take longer: all compute but that of one layer hides behind copies, for
    the first layer's experts are copied when nothing computes."""
    return compute * (n_layers - 1) / n_layers


def speed_up(compute_s: float, copy_s: float) -> float:
    """Eq. 1: on demand over ahead, of layers alike: (compute + copy) / max of both."""
    return (compute_s + copy_s) / max(compute_s, copy_s)
