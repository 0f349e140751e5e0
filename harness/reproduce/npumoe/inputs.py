"""Measured figures of NPUMoE's (000) Tables 6 to 9 that models start from, where ours are others: what is known of why.

A reason that leaves the difference open is a note, and the row is told as not explained.
"""

from __future__ import annotations

from typing import NamedTuple

from engines.pricing.published_shapes import NAMED_SHAPES
from harness.reproduce.npumoe import arithmetic, machine, places
from harness.reproduce.npumoe.layer import Layer, qwen
from harness.reproduce.npumoe.places import claim

QWEN = "qwen3-30b-a3b"
READ = "one layer of Qwen3-30B-A3B in FP16 over 1024 tokens in chunks of 256; the source does not say what it measured"
KERNEL = f"{machine.KERNEL_ROWS} rows of one layer of Phi-3.5-MoE; the source states no shape"
HALF_THE_ATTENTION = (
    "attention takes about half of theirs on either unit; what theirs holds beside projections, scores and values is"
    " not said"
)
OWN_POWER = dict.fromkeys(
    (claim(268), claim(276), claim(277)),
    "Ours is their own energy over their own time; they print another power beside both.",
)
MIB = 2**20


class Told(NamedTuple):
    """note: what is known. explanation: empty where that does not explain the difference."""

    note: str
    explanation: str = ""


def of_table_6(mode: str, column: str) -> Told:
    if column == "attention s":
        return Told(f"{HALF_THE_ATTENTION}; {READ}")
    if column == "wall s":
        return Told(f"{_parts(mode)}; {READ}")
    return Told(READ, _small_experts() if mode == "ours" else "One line goes through Tables 4, 6 and 8: its residual.")


def of_table_7(mode: str, column: str) -> Told:
    if column == "comm J":
        return Told(READ, _communication(mode))
    if column == "ANE J":
        return Told(f"{_npu_joules() if mode == 'ours' else _attention_joules()}; {READ}")
    return Told(f"{cpu_joules() if mode == 'ours' else _cpu_time(mode)}; {READ}")


def of_table_8(metric: str, unit: str) -> Told:
    if unit == "gpu":
        own_w = arithmetic.printed(places.table_8("energy", 0)) / arithmetic.printed(places.table_8("runtime", 0))
        stated_w = arithmetic.printed(places.table_8("power", 0))
        why = (
            f"Ours is the {stated_w:g} W that they print, times the time; their energy over their time is"
            f" {own_w:.1f} W."
        )
        return Told(KERNEL, why if metric == "energy" else "")
    found = machine.attention("npu")
    stated_s, stated_j = (1e-3 * arithmetic.printed(places.table_8(one, 1)) for one in ("runtime", "energy"))
    if metric == "runtime":
        why = (
            "The NPU's line is fitted on Table 5's launches of experts. This is another table's attention, at a size"
            " that is not stated."
        )
        return Told(KERNEL, why)
    why = (
        f"As its time, {100 * (found.seconds / stated_s - 1):+.1f} %, and its watts: {found.joules / found.seconds:.1f}"
        f" by Table 5's launches, {stated_j / stated_s:.1f} here."
    )
    return Told(KERNEL, why)


def _parts(mode: str) -> str:
    """How a wall time differs, part by part."""
    ours = qwen(mode)
    theirs_s, theirs_experts_s, theirs_attention_s = _theirs_s(mode)
    experts_s, attention_s = ours.seconds["expert FFN"], ours.seconds["attention"]
    rest_s, theirs_rest_s = ours.wall_s - experts_s - attention_s, theirs_s - theirs_experts_s - theirs_attention_s
    return (
        f"experts make {experts_s - theirs_experts_s:+.3f} s of the difference, attention"
        f" {attention_s - theirs_attention_s:+.3f} s and all else {rest_s - theirs_rest_s:+.3f} s"
    )


def _theirs_s(mode: str) -> list[float]:
    return [arithmetic.printed(places.table_6(mode, column)) for column in places.TABLE_6_COLUMNS[:3]]


def _small_experts() -> str:
    shape, price = NAMED_SHAPES[QWEN], machine.m2_ultra().units["npu"].kernels["expert_ffn"]
    assert price.s_per_launch is not None
    ours, n_launches = qwen("ours"), qwen("ours").n_launches
    needed_s = price.s_per_launch.value - (ours.seconds["expert FFN"] - _theirs_s("ours")[1]) / n_launches
    return (
        f"The NPU's line is fitted on experts of 150 MiB, and these have"
        f" {shape.expert_weights * shape.bytes_per_value / MIB:.0f} MiB, outside its fit: {n_launches} launches at"
        f" {price.s_per_launch.value * 1e3:.2f} ms, where theirs would need {needed_s * 1e3:.2f} ms."
    )


def _communication(mode: str) -> str:
    memory = machine.m2_ultra().memory
    assert memory is not None
    theirs_s, theirs_j = _theirs_s(mode)[0], arithmetic.printed(places.table_7(mode, "comm J"))
    longer = 100 * (qwen(mode).wall_s / theirs_s - 1)
    return (
        f"One power, {memory.comm_w.value:.2f} W, is fitted on all runs of the table: it is {theirs_j / theirs_s:.2f} W"
        f" in this one, and our time is {abs(longer):.1f} % {'longer' if longer > 0 else 'shorter'}."
    )


def _busy_w() -> float:
    busy_w = machine.m2_ultra().units["cpu"].busy_w
    assert busy_w is not None
    return busy_w.value


def cpu_joules() -> str:
    """Of NPUMoE."""
    theirs_s = arithmetic.printed(places.table_7("ours", "CPU J")) / _busy_w()
    return (
        f"their CPU joules are {theirs_s:.2f} s of work at {_busy_w():.1f} W, and ours"
        f" {qwen('ours').joules['cpu'] / _busy_w():.2f} s of router, gather, scatter and norms; what else their CPU"
        " does, such as dispatch, is not said"
    )


def _cpu_time(mode: str) -> str:
    theirs_s = arithmetic.printed(places.table_7(mode, "CPU J")) / _busy_w()
    return (
        f"{_busy_w():.1f} W over {theirs_s:.2f} s are theirs, and over {qwen(mode).joules['cpu'] / _busy_w():.2f} s"
        f" ours: it differs as the time of {places.table_6(mode, 'wall s')}"
    )


def _npu_watts(ours: Layer) -> float:
    return ours.joules["npu"] / (ours.seconds["expert FFN"] + ours.seconds["attention"])


def _npu_joules() -> str:
    _, experts_s, attention_s = _theirs_s("ours")
    theirs_w = arithmetic.printed(places.table_7("ours", "ANE J")) / (experts_s + attention_s)
    return (
        f"over experts and attention theirs is {theirs_w:.1f} W and ours {_npu_watts(qwen('ours')):.1f} W: ours goes"
        " with the multiplications, as in Table 5, and what theirs goes with is not said"
    )


def _attention_joules() -> str:
    return f"of attention alone, whose time is about half of theirs ({places.table_6('anemll', 'attention s')})"
