"""Why ours differ from what NPUMoE (000) prints, in figures that are computed here; and what is missing for rows that
nobody can predict."""

from __future__ import annotations

from harness.reproduce.npumoe import arithmetic, grid, machine, places
from harness.reproduce.npumoe.grid import BASELINES, OURS, STATED, WORDS
from harness.reproduce.npumoe.layer import TABLE_4_ARMS, table_4

WIDE = (("rows", 256),)
"""Base with one fixed shape that no expert overflows: all 256 tokens of a chunk."""
SAME_GRAPHS = (("decode_graphs", "same"),)
"""Decoding through the prefill's graphs: the other reading of §5.8."""
FITTED_ROWS = 128
"""Most rows of an expert in the fit of the NPU's line (Table 5)."""
BEYOND = f"Experts have up to 256 rows here; the NPU's line is fitted on 32 to {FITTED_ROWS}."
SLOWER_BEYOND = "Table 5's launches of 256 rows take longer than the line, so that the gain would be smaller still."


def chunk_1024(arm: str) -> str:
    """Of the gains over Core ML CPU and ANEMLL at 4096/1024."""
    needed_s = arithmetic.stated_gain(arm, 4096, 1024) * grid.prefill(OURS, 4096, 1024).seconds
    theirs, other = grid.prefill(arm, 4096, 1024), grid.prefill(arm, 1024, 512)
    row_s = (needed_s - theirs.seconds) / theirs.counters.computed_rows
    would = (other.seconds + row_s * other.counters.computed_rows) / grid.prefill(OURS, 1024, 512).seconds
    return (
        "The source's gain rises with the chunk and with the prompt. Ours falls with the chunk, because more rows share"
        " what the CPU pays for a call and its weights. The stated gain needs"
        f" {row_s * 1e3:.2f} ms more for each row on the CPU; 1024/512 would then gain {would:.2f}, and the source has"
        f" {arithmetic.stated_gain(arm, 1024, 512):g} there. {BEYOND} {SLOWER_BEYOND}"
    )


def naive_at_1024() -> str:
    naive = grid.prefill("coreml-naive", 4096, 1024)
    needed_s = arithmetic.stated_gain("coreml-naive", 4096, 1024) * grid.prefill(OURS, 4096, 1024).seconds
    more_s = (needed_s - naive.seconds) / naive.counters.expert_calls
    gain = grid.ttft_gain("coreml-naive", 4096, 1024, given=grid.naive_rows(1024))
    own = machine.m2_ultra().units["npu"].s_per_naive_launch
    assert own is not None
    return (
        f"The stated gain needs {(own.value + more_s) * 1e3:.0f} ms of Core ML's own dispatch a launch. The one row"
        f" that tells it, Table 4 at chunk 256, leaves {own.value * 1e3:.0f} ms. With graphs as large as Table 4's"
        f" padding says, in proportion to the chunk, the gain is {gain:.2f}. {BEYOND}"
    )


def end_to_end() -> str:
    cpu_s = _step_s("coreml-cpu")
    gains = {arm: max(grid.end_to_end_gain(arm, *at, given=SAME_GRAPHS) for at in STATED) for arm in BASELINES}
    told = ", ".join(f"{gain:.2f} over {WORDS[arm]}" for arm, gain in gains.items())
    return (
        "§5.8 says that decoding follows the prefill's pipeline, and not through which graphs. Ours runs one of 32 rows"
        f" for each chosen expert: {_step_s(OURS) / cpu_s:.2f} times the CPU's step. The source's gains of prefill and"
        f" of the whole, with its 80 % of prefill, leave {arithmetic.stated_decode_over_cpu():.1f} times. Through the"
        f' prefill\'s graphs (`decode_graphs = "same"`) it is {_step_s(OURS, SAME_GRAPHS) / cpu_s:.1f} times, and the'
        f" largest gains are {told}."
    )


def _step_s(arm: str, given: grid.Given = ()) -> float:
    step_s = grid.priced(arm, 1024, 256, given=given).tpot_s
    assert step_s is not None
    return step_s


def wide_launches(group: int, capacity: int) -> str:
    rows = capacity / FITTED_ROWS
    at, fitted = ((group, capacity), (group, FITTED_ROWS))
    longer = arithmetic.launch_ms(*at) / arithmetic.launch_ms(*fitted)
    return (
        f"A launch with {rows:g} times the rows takes {longer:.2f} times as long in Table 5 itself. Nothing says why,"
        f" and the line, which is fitted on 32 to {FITTED_ROWS} rows, cannot follow."
    )


def base() -> str:
    ours, own = grid.prefill(OURS, 1024, 256), grid.prefill("npumoe-base", 1024, 256)
    gain = grid.prefill("npumoe-base", 1024, 256, given=WIDE).seconds / ours.seconds
    launch = machine.m2_ultra().units["npu"].kernels["expert_ffn"].s_per_launch
    assert launch is not None
    needed_s = launch.value + (arithmetic.stated_base_gain() * ours.seconds - own.seconds) / own.counters.expert_calls
    return (
        "The fixed shape of base is not stated. At chunk 256 ours has 64 rows, twice the mean load; with 256 rows,"
        f" which no expert overflows, the gain is {gain:.2f}. The source blames the 16 calls of a layer: with 64 rows"
        f" its gain needs {needed_s * 1e3:.1f} ms a call beside weights and rows, and Table 5 leaves"
        f" {launch.value * 1e3:.1f} ms."
    )


def padding(arm: str) -> str:
    """Of the rows of Table 4 that pad."""
    printed = arithmetic.printed(places.table_4("padding", places.ARMS[list(TABLE_4_ARMS).index(arm)]))
    needs = (
        f"a busiest expert of {arithmetic.naive_rows():.0f} rows"
        if arm == "coreml-naive"
        else f"{arithmetic.mean_slots_per_pair():.2f} slots a routed pair, and two graphs of 8x32 have 1"
    )
    return (
        f"Padding follows the routing, which the source does not publish: its figure needs {needs}. Ours is"
        f" {table_4(arm)['padding'] / printed:.2f} of it, and all padding is below 0.1 % of the block."
    )


def write_back() -> str:
    """Of Table 9."""
    return (
        f"Their MoE block alone takes {arithmetic.block_ms('npumoe') / 1e3:.2f} s in Table 4, most of it write-back,"
        " which m2-ultra prices as a gather."
    )


def cycles(arm: str = "coreml-cpu") -> str:
    """Missing for each row of CPU cycles."""
    busy = grid.cpu_busy_s(arm, 1024, 256) / grid.cpu_busy_s(OURS, 1024, 256)
    return (
        "the source states no clock, and no cycles of an operation, a launch or a wait. In our price at 1024/256"
        f" {WORDS[arm]} keeps the CPU busy {busy:.0f} times as long as NPUMoE; the source counts more than that,"
        " perhaps a CPU that spins while the NPU works"
    )
