"""Measured figures of NPUMoE's (000) Tables 6 to 9 that models start from, where ours are others: what is known of why.

Where the source lacks what a figure would take, the reason says what is missing, and how much of it would do.
"""

from __future__ import annotations

from typing import NamedTuple

from engines.pricing.published_shapes import NAMED_SHAPES
from harness.reproduce.npumoe import arithmetic, machine, places
from harness.reproduce.npumoe.layer import CHUNK, FIXED_KEYS, PROMPT, qwen, qwen_of_fixed_keys
from harness.reproduce.npumoe.places import claim
from results.units import MIB

QWEN = "qwen3-30b-a3b"
READ = "one layer of Qwen3-30B-A3B in FP16 over 1024 tokens in chunks of 256; the source does not say what it measured"
KERNEL = f"{machine.KERNEL_ROWS} rows of one layer of Phi-3.5-MoE; the source states no shape"
ATTENTION_READ = (
    f"Attention of ours is over the {CHUNK} to {PROMPT} keys that are there; over {FIXED_KEYS}, in a graph of one"
    " shape, it takes what theirs does."
)
OWN_POWER = dict.fromkeys(
    (claim(268), claim(276), claim(277)),
    "Ours is their own energy over their own time; they print another power beside both.",
)


class Told(NamedTuple):
    """note: how the row is read. explanation: why ours is another figure; empty where it is theirs."""

    note: str
    explanation: str = ""


def of_table_6(mode: str, column: str) -> Told:
    if column == "attention s":
        return Told(READ, _fixed_attention(mode))
    if column == "wall s":
        own = places.table_6(mode, "experts s"), places.table_6(mode, "attention s")
        told = f"{_parts(mode)} {own[0]} and {own[1]} say why of the first two."
        return Told(READ, told if mode == "ours" else f"{told} {_unnamed(mode)}")
    return Told(READ, _small_experts() if mode == "ours" else "One line goes through Tables 4, 6 and 8: its residual.")


def of_table_7(mode: str, column: str) -> Told:
    if column == "comm J":
        return Told(READ, _communication(mode))
    if column == "ANE J":
        return Told(READ, _npu_joules() if mode == "ours" else _attention_joules())
    return Told(READ, cpu_joules() if mode == "ours" else _cpu_time(mode))


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


def _fixed_attention(mode: str) -> str:
    """Of attention's time."""
    fixed_s, theirs_s = qwen_of_fixed_keys(mode).seconds["attention"], _theirs_s(mode)[2]
    return (
        f"Ours is over the {CHUNK} to {PROMPT} keys that are there. The source states no shape of attention. A graph of"
        f" one shape for {FIXED_KEYS} keys, its longest prompt, takes {fixed_s:.3f} s by the same price,"
        f" {100 * (fixed_s / theirs_s - 1):+.0f} %, and so it is on both units."
    )


def _unnamed_s(mode: str) -> float:
    """What their wall time has beside experts and attention, and ours has not."""
    theirs_s, theirs_experts_s, theirs_attention_s = _theirs_s(mode)
    ours = qwen(mode)
    rest_s = ours.wall_s - ours.seconds["expert FFN"] - ours.seconds["attention"]
    return theirs_s - theirs_experts_s - theirs_attention_s - rest_s


def _unnamed(mode: str) -> str:
    calls = {one: _unnamed_s(one) / qwen(one).n_launches for one in (mode, "ours")}
    return (
        f"In all else ours lacks {1e3 * calls[mode]:.3f} ms for each of {qwen(mode).n_launches} calls of experts; in"
        f" NPUMoE's run {1e3 * calls['ours']:.3f} ms for each of {qwen('ours').n_launches}. Table 4 tells what router,"
        " gather, scatter and norms take by the byte, and the source states no price of a call of them: so ours has"
        " none."
    )


def _parts(mode: str) -> str:
    """How a wall time differs, part by part."""
    ours_s, (_, experts_s, attention_s) = qwen(mode).seconds, _theirs_s(mode)
    return (
        f"Experts make {ours_s['expert FFN'] - experts_s:+.3f} s of the difference, attention"
        f" {ours_s['attention'] - attention_s:+.3f} s and all else {-_unnamed_s(mode):+.3f} s."
    )


def _theirs_s(mode: str) -> list[float]:
    return [arithmetic.printed(places.table_6(mode, column)) for column in places.TABLE_6_COLUMNS[:3]]


def _expert_mib() -> float:
    shape = NAMED_SHAPES[QWEN]
    return shape.expert_weights * shape.bytes_per_value / MIB


def _small_experts() -> str:
    price = machine.m2_ultra().units["npu"].kernels["expert_ffn"]
    assert price.s_per_launch is not None
    ours, n_launches = qwen("ours"), qwen("ours").n_launches
    needed_s = price.s_per_launch.value - (ours.seconds["expert FFN"] - _theirs_s("ours")[1]) / n_launches
    return (
        f"The NPU's line is fitted on experts of 150 MiB, and these have {_expert_mib():.0f} MiB, outside its fit:"
        f" {n_launches} launches at"
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
    theirs_j = arithmetic.printed(places.table_7("ours", "CPU J"))
    wall_s, experts_s, attention_s = _theirs_s("ours")
    outside_s, on_npu_s, n_launches = wall_s - experts_s - attention_s, experts_s + attention_s, qwen("ours").n_launches
    left_j = theirs_j - _busy_w() * outside_s
    return (
        f"Ours are joules of router, gather, scatter and norms alone. Outside experts and attention their wall has"
        f" {outside_s:.3f} s, {_busy_w() * outside_s:.2f} J at the CPU's {_busy_w():.1f} W. The other {left_j:.2f} J"
        f" are drawn while the NPU works: {left_j / on_npu_s:.1f} W of a CPU that waits, or"
        f" {1e3 * left_j / _busy_w() / n_launches:.1f} ms of its work for each of {n_launches} launches. The source"
        " states neither, so that nothing predicts this row."
    )


def _cpu_time(mode: str) -> str:
    fixed_j, lacking_j = qwen_of_fixed_keys(mode).joules["cpu"], _busy_w() * _unnamed_s(mode)
    lacking = [places.table_6(mode, "wall s")]
    if fixed_j != qwen(mode).joules["cpu"]:  # the CPU computes attention
        lacking.insert(0, places.table_6(mode, "attention s"))
    tell = "tells" if len(lacking) == 1 else "tell"
    return (
        f"It is {_busy_w():.1f} W times the CPU's time, which lacks what {' and '.join(lacking)} {tell}: with that it"
        f" is {fixed_j + lacking_j:.2f} J."
    )


def _npu_joules() -> str:
    ours, fixed_j, npu = qwen("ours"), qwen_of_fixed_keys("ours").joules["npu"], machine.m2_ultra().units["npu"]
    assert npu.busy_w is not None
    _, experts_s, attention_s = _theirs_s("ours")
    left_w = (arithmetic.printed(places.table_7("ours", "ANE J")) - fixed_j) / (experts_s + attention_s)
    return (
        f"Ours is {ours.joules['npu']:.2f} J, and {fixed_j:.2f} J with attention over {FIXED_KEYS} keys"
        f" ({places.table_6('ours', 'attention s')}). The rest of theirs is {left_w:.1f} W while experts and attention"
        f" run. Table 5, on experts of 150 MiB, leaves the NPU {npu.busy_w.value:.1f} W beside what goes with"
        f" multiplications. The source states no power at {_expert_mib():.0f} MiB, where launches and weights count"
        " for more, so that nothing predicts this row."
    )


def _attention_joules() -> str:
    """Of ANEMLL, whose NPU computes attention alone."""
    return (
        f"Theirs lies between two readings of attention, which is all that the NPU does here:"
        f" {qwen('anemll').joules['npu']:.2f} J over the keys that are there, and"
        f" {qwen_of_fixed_keys('anemll').joules['npu']:.2f} J over {FIXED_KEYS}, by which its time comes out"
        f" ({places.table_6('anemll', 'attention s')}). The source states neither the shape of attention nor the NPU's"
        " watts in it, so that nothing predicts this row."
    )
