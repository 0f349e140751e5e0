"""One layer of NPUMoE's arms over a prompt of 1024 tokens in chunks of 256: Tables 4, 6, 7 and 9.

Table 4's column of NPUMoE is two graphs of eight experts with 32 rows each, in each of four chunks: 530.91 ms are eight
such launches of Table 5. What Tables 6 and 7 measured is read as one layer of Qwen3-30B-A3B in FP16 over that prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.published_shapes import NAMED_SHAPES
from harness.reproduce.npumoe.grid import BLOCK, PROMPTS, ROUTING, Given
from harness.reproduce.npumoe.places import MODES
from results.records import COMM

PROMPT, CHUNK = 1024, 256
FIXED_KEYS = max(PROMPTS)
"""Of an attention graph of one shape that takes the source's longest prompt."""
AS_TABLE_4 = "m2-ultra-table4"
TWO_GROUPS: Given = (("multiples", (1.0,)), ("group_size", 8))
TABLE_4_ARMS = {"coreml-cpu": (), "coreml-naive": (), "anemll": (), "npumoe-tg": TWO_GROUPS}
"""In the order of its columns; the last is its NPUMoE."""
MODE_ARMS = dict(zip(MODES, ("npumoe", "coreml-cpu", "anemll"), strict=True))
"""Of Tables 6 and 7."""


@dataclass(frozen=True)
class Layer:
    """seconds: by operation. joules: by component. The head is in neither."""

    seconds: Mapping[str, float]
    joules: Mapping[str, float]
    n_launches: int = 0
    """Of experts."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def block_s(self) -> float:
        return sum(self.seconds.get(name, 0.0) for name in BLOCK)

    @property
    def total_j(self) -> float:
        return sum(self.joules.values())


@cache
def layer(arm: str, model: str, sheet_name: str = "m2-ultra", given: Given = (), cached_tokens: int = 0) -> Layer:
    """One after another: no operation of these arms runs beside another. cached_tokens: that stand before the
    prompt."""
    sheet, shape = load_sheet(sheet_name), replace(NAMED_SHAPES[model], n_layers=1)
    cell = Cell(sheet, shape, parameters(arm, **dict(given)), ROUTING, PROMPT, chunk=CHUNK, cached_tokens=cached_tokens)
    phase = price_cell(cell).prefill
    assert phase is not None
    seconds: dict[str, float] = {}
    for (name, _), spent_s in phase.spent.items():
        seconds[name] = seconds.get(name, 0.0) + spent_s
    head_s = seconds.pop("LM head")
    joules = {component: spent_j or 0.0 for component, spent_j in phase.joules.items()}
    busy_w, memory = sheet.units["cpu"].busy_w, sheet.memory
    assert busy_w is not None
    assert memory is not None
    joules["cpu"] -= busy_w.value * head_s
    joules[COMM] -= memory.comm_w.value * head_s
    return Layer(seconds, joules, phase.counters.expert_calls)


def table_4(arm: str) -> Mapping[str, float]:
    """ms by operation and of the whole block, with the write-back as Table 4 prints it."""
    found = layer(arm, "phi-3.5-moe", AS_TABLE_4, TABLE_4_ARMS[arm])
    return {**{name: 1e3 * found.seconds.get(name, 0.0) for name in BLOCK}, "whole block": 1e3 * found.block_s}


def qwen(mode: str, cached_tokens: int = 0) -> Layer:
    """Of a row of Tables 6 and 7."""
    return layer(MODE_ARMS[mode], "qwen3-30b-a3b", cached_tokens=cached_tokens)


def qwen_of_fixed_keys(mode: str) -> Layer:
    """The same where each chunk's attention is over FIXED_KEYS: the chunks have that many on average."""
    mean_keys = (PROMPT + CHUNK) // 2
    return qwen(mode, FIXED_KEYS - mean_keys)
