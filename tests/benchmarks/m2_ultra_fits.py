"""Fits of the sheets m2-ultra and m2-ultra-table4 on the tables of 000-npumoe.

The fits here are the only origin of the sheets' `fitted` figures; a test compares the two. All fits are non-negative
least squares of relative residuals, since the tables print two or three digits of values that span two decades.
No end-to-end ratio of the source enters any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from devices.models.fit import Fit, relative_fit
from engines.pricing.published_shapes import PHI_3_5_MOE as PHI
from engines.pricing.published_shapes import QWEN3_30B_A3B
from engines.pricing.shapes import ModelShape

# --- the source's figures --------------------------------------------------------------------------------------------

# Table 5, serial: G, C, launches, ms per token, mJ per token.
TABLE_5 = (
    (1, 32, 16, 0.31, 1.43),
    (1, 64, 16, 0.23, 1.17),
    (1, 128, 16, 0.16, 0.89),
    (4, 32, 4, 0.27, 1.22),
    (4, 64, 4, 0.19, 0.98),
    (8, 32, 2, 0.26, 1.16),
    (8, 64, 2, 0.18, 0.93),
    (8, 96, 2, 0.15, 0.88),
    (8, 128, 2, 0.14, 0.96),
)
MOST_ROWS = 128
"""Of an expert in the rows above."""
TABLE_5_UNUSED = ((8, 192, 2, 0.15, 0.92), (8, 256, 2, 0.16, 0.99))
"""More rows than 8 x 128 take more than linear time: the model does not know why, and its line stays below them."""
# Table 4, ms of one layer over a prompt of 1024 tokens: Core ML CPU, Core ML naive, ANEMLL, NPUMoE.
TABLE_4 = {
    "router": (1.0, 1.0, 1.0, 1.0),
    "gather": (3.62, 1.95, 3.73, 1.24),
    "padding": (0.0, 1.62, 0.0, 0.37),
    "expert FFN": (969.53, 3369.86, 983.05, 530.91),
    "scatter": (901.06, 896.76, 902.87, 775.52),
    "residual": (440.62, 435.23, 440.22, 398.34),
}
TABLE_3_DROPPED = (0.1466, 0.1063, 0.2177, 0.2100)
TABLE_3_PADDED = (0.3173, 0.3477, 0.3749, 0.3700)
# Tables 6 and 7 (Qwen3-MoE): wall, experts, attention in s; CPU, ANE, communication in J.
TABLE_6_7 = {
    "ours": (0.572, 0.464, 0.086, 1.23, 1.20, 1.37),
    "coreml": (1.139, 0.978, 0.095, 9.66, 0.00, 3.01),
    "anemll": (1.144, 0.988, 0.090, 8.87, 0.26, 2.99),
}
# Table 8: a dense attention kernel, s, J, W.
TABLE_8_NPU = (38.27e-3, 275.70e-3, 7.10)
TABLE_8_GPU = (7.09e-3, 515.60e-3, 66.80)
# Table 9, attention and MoE block: s, J, W.
TABLE_9_OURS, TABLE_9_GPU = (1.26, 12.21, 9.61), (0.99, 54.72, 54.29)
GEMM_TERMS = ("s_per_launch", "s_per_weight_byte", "s_per_flop")

SECOND_READING = {
    "units.cpu.kernels.expert_ffn.s_per_launch": 1.209e-3,
    "units.cpu.kernels.expert_ffn.s_per_weight_byte": 6.128e-11,
    "units.cpu.kernels.expert_ffn.s_per_flop": 8.754e-13,
    "units.cpu.kernels.gather_dynamic.s_per_moved_byte": 2.19e-10,
    "units.npu.kernels.expert_ffn.s_per_launch": 2.49e-3,
    "units.npu.kernels.expert_ffn.s_per_weight_byte": 2.948e-11,
    "units.npu.kernels.expert_ffn.s_per_flop": 6.573e-13,
    "units.npu.s_per_naive_launch": 36.1e-3,
    "units.gpu.kernels.attention.s_per_flop": 1.5e-13,
}
"""Constants that somebody else got from the same tables: a cross-check, in no fit."""

PROMPT = 1024
PAIRS = PROMPT * PHI.top_k
CHUNKS = 4
"""Of 256 tokens, in Tables 4 and 6; with routing of 1024 tokens every expert is called in every chunk."""
KERNEL_ROWS = 512
"""Of Table 8's kernel: the static shape of Fig. 20, and the only one that is near on the NPU's line."""
FLOPS_PER_ROW = 2.0 * PHI.expert_weights
EXPERT_BYTES = float(PHI.expert_weights * PHI.bytes_per_value)
ROW_BYTES = float(PHI.hidden * PHI.bytes_per_value)
KEPT_ROWS = PAIRS * (1 - float(np.mean(TABLE_3_DROPPED)))
PADDED_ROWS = KEPT_ROWS / (1 - float(np.mean(TABLE_3_PADDED))) - KEPT_ROWS

Array = NDArray[np.float64]


# --- the fits --------------------------------------------------------------------------------------------------------


def launch_s(row: tuple[int, int, int, float, float]) -> float:
    """Table 5 prints time per token of 16 full slices: 16 C tokens in n launches."""
    _, capacity, launches, ms, _ = row
    return ms * 1e-3 * 16 * capacity / launches


def launch_j(row: tuple[int, int, int, float, float]) -> float:
    _, capacity, launches, _, mj = row
    return mj * 1e-3 * 16 * capacity / launches


def fit_npu_time() -> Fit:
    """t = a + G (w bytes + C b FLOP): launch, weight bytes, FLOP."""
    amounts = [(1.0, g * EXPERT_BYTES, g * c * FLOPS_PER_ROW) for g, c, *_ in TABLE_5]
    return relative_fit(amounts, [launch_s(row) for row in TABLE_5])


def fit_comm_power() -> Fit:
    """Table 7: communication joules are a constant power over Table 6's wall time."""
    return relative_fit([(run[0],) for run in TABLE_6_7.values()], [run[5] for run in TABLE_6_7.values()])


def fit_npu_energy(comm_w: float) -> Fit:
    """E = (comm + p) t + e FLOP with t from Table 5 itself: p, e. Residuals are of the whole launch."""
    amounts = np.asarray([(launch_s(row), row[0] * row[1] * FLOPS_PER_ROW) for row in TABLE_5])
    printed_j = np.asarray([launch_j(row) for row in TABLE_5])
    without_comm = 1 - comm_w * amounts[:, 0] / printed_j
    relative = amounts / printed_j[:, None]
    scale = relative.max(axis=0)
    constants = nnls(relative / scale, without_comm)[0] / scale
    return Fit(tuple(float(c) for c in constants), tuple(float(r) for r in relative @ constants - without_comm))


def fit_total_energy() -> Fit:
    """The same without Table 7: all static watts of a launch together, and J per FLOP."""
    amounts = [(launch_s(row), row[0] * row[1] * FLOPS_PER_ROW) for row in TABLE_5]
    return relative_fit(amounts, [launch_j(row) for row in TABLE_5])


def fit_cpu_power() -> Fit:
    """Table 7: CPU joules of the two runs with experts on the CPU, over the wall time outside NPU attention."""
    coreml, anemll = TABLE_6_7["coreml"], TABLE_6_7["anemll"]
    return relative_fit([(coreml[0],), (anemll[0] - anemll[2],)], [coreml[3], anemll[3]])


@dataclass(frozen=True)
class CpuGemm:
    """A row of the CPU's line: what the source printed, and the calls, weight bytes and FLOP behind it."""

    name: str
    printed_s: float
    calls: int
    weight_bytes: float
    flops: float


def experts_on_cpu(name: str, printed_s: float, shape: ModelShape) -> CpuGemm:
    """One layer over the whole prompt, every expert called in every chunk, no row padded."""
    calls = CHUNKS * shape.n_experts
    return CpuGemm(
        name,
        printed_s,
        calls,
        weight_bytes=float(calls * shape.expert_weights * shape.bytes_per_value),
        flops=2.0 * PROMPT * shape.top_k * shape.expert_weights,
    )


def cpu_gemms() -> list[CpuGemm]:
    """Experts of Tables 4 and 6, and the attention kernel of Table 8 as the CPU would take it by Table 6's ratio.

    What Table 6 measured is read as one layer of Qwen3 in FP16: 512 calls of 16 rows.
    """
    cpu, _, anemll, _ = TABLE_4["expert FFN"]
    return [
        experts_on_cpu("Table 4, experts, Core ML CPU", cpu * 1e-3, PHI),
        experts_on_cpu("Table 4, experts, ANEMLL", anemll * 1e-3, PHI),
        experts_on_cpu("Table 6, experts, coreml", TABLE_6_7["coreml"][1], QWEN3_30B_A3B),
        experts_on_cpu("Table 6, experts, anemll", TABLE_6_7["anemll"][1], QWEN3_30B_A3B),
        CpuGemm(
            "Table 8's kernel x Table 6's CPU/NPU",
            cpu_over_npu_attention() * TABLE_8_NPU[0],
            calls=1,
            weight_bytes=float(PHI.attention_weights * PHI.bytes_per_value),
            flops=attention_flops(KERNEL_ROWS),
        ),
    ]


def table_6_attention() -> CpuGemm:
    """Not fitted: Table 6's CPU attention, read as one layer over a prompt of 1024, four chunks of 256."""
    shape, rows = QWEN3_30B_A3B, PROMPT // CHUNKS
    projections = 2.0 * PROMPT * shape.attention_weights
    scores = sum(4.0 * rows * rows * chunk * shape.n_heads * shape.head_dim for chunk in range(1, CHUNKS + 1))
    return CpuGemm(
        "Table 6, attention, coreml",
        TABLE_6_7["coreml"][2],
        CHUNKS,
        weight_bytes=float(CHUNKS * shape.attention_weights * shape.bytes_per_value),
        flops=projections + scores,
    )


def fit_cpu_gemm() -> Fit:
    """Experts and attention are the same dense product, so one line: s per call, per weight byte, per FLOP."""
    rows = cpu_gemms()
    return relative_fit([(row.calls, row.weight_bytes, row.flops) for row in rows], [row.printed_s for row in rows])


def naive_capacity() -> float:
    """Rows of a naive launch: Table 4's padding price from NPUMoE's column, on the naive column's 1.62 ms."""
    _, naive, _, ours = TABLE_4["padding"]
    return (PAIRS + naive / ours * PADDED_ROWS) / (CHUNKS * PHI.n_experts)


def naive_launch_s() -> float:
    """What Table 4's naive launch takes beyond the line: Core ML's own dispatch. Residual 0: one row, one figure."""
    launch, byte, flop = fit_npu_time().constants
    printed_s = TABLE_4["expert FFN"][1] * 1e-3 / (CHUNKS * PHI.n_experts)
    return printed_s - (launch + byte * EXPERT_BYTES + flop * naive_capacity() * FLOPS_PER_ROW)


def table_4_fits() -> dict[str, Fit]:
    """Seconds per FLOP or byte of the CPU's other operations. Naive padding is not used: see `naive_capacity`."""
    ms = 1e-3

    def fit(operation: str, amounts: dict[int, float]) -> Fit:
        return relative_fit([(v,) for v in amounts.values()], [TABLE_4[operation][i] * ms for i in amounts])

    cpu, naive, anemll, ours = range(4)
    every, kept = PAIRS * ROW_BYTES, KEPT_ROWS * ROW_BYTES
    router = 2.0 * PROMPT * PHI.hidden * PHI.n_experts
    return {
        "router": fit("router", dict.fromkeys(range(4), router)),
        "gather_dynamic": fit("gather", {cpu: every, anemll: every}),
        "gather_static": fit("gather", {naive: every, ours: kept}),
        "padding": fit("padding", {ours: PADDED_ROWS * ROW_BYTES}),
        "scatter": fit("scatter", {cpu: every, naive: every, anemll: every, ours: kept}),
        "residual": fit("residual", dict.fromkeys(range(4), PROMPT * ROW_BYTES)),
    }


def attention_flops(n_rows: int) -> float:
    return 2.0 * n_rows * PHI.attention_weights + 4.0 * n_rows * n_rows * PHI.n_heads * PHI.head_dim


def cpu_over_npu_attention() -> float:
    """Table 6's attention times: one on the CPU, two on the NPU."""
    npu_s = relative_fit([(1.0,), (1.0,)], [TABLE_6_7["ours"][2], TABLE_6_7["anemll"][2]]).constants[0]
    return TABLE_6_7["coreml"][2] / npu_s


def gpu_s_per_flop() -> float:
    return TABLE_8_GPU[0] / attention_flops(KERNEL_ROWS)


def gpu_accuracy() -> float:
    """How far Table 8's kernel, which prices the GPU, lies below Table 9's block: both in joules over the NPU's."""
    return 1 - (TABLE_8_GPU[1] / TABLE_8_NPU[1]) / (TABLE_9_GPU[1] / TABLE_9_OURS[1])


def npu_accuracy() -> float:
    """RMS over Table 5 of the launch energy predicted with the predicted time."""
    launch, byte, flop = fit_npu_time().constants
    comm_w = fit_comm_power().constants[0]
    static_w, j_per_flop = fit_npu_energy(comm_w).constants
    residuals = []
    for row in TABLE_5:
        flops = row[0] * row[1] * FLOPS_PER_ROW
        t = launch + row[0] * EXPERT_BYTES * byte + flops * flop
        residuals.append(((comm_w + static_w) * t + j_per_flop * flops) / launch_j(row) - 1)
    return math.sqrt(float(np.mean(np.square(residuals))))


def cpu_accuracy(sheet: str) -> float:
    """RMS of the fits of its times, with the power fit's in quadrature."""
    fits = [fit_cpu_gemm(), *(fit for kernel, fit in table_4_fits().items() if _is_fitted(sheet, kernel))]
    times = [r for fit in fits for r in fit.residuals]
    return math.hypot(math.sqrt(float(np.mean(np.square(times)))), fit_cpu_power().rms)


def _is_fitted(sheet: str, kernel: str) -> bool:
    """The write-back of Table 4 is in its own sheet only."""
    return sheet == "m2-ultra-table4" or kernel not in ("scatter", "residual")


def fitted_figures(sheet: str) -> dict[str, float]:
    """Every `fitted` figure of the sheet by its path in the TOML."""
    launch, byte, flop = fit_npu_time().constants
    comm = fit_comm_power()
    static_w, j_per_flop = fit_npu_energy(comm.constants[0]).constants
    figures = {
        "memory.comm_w": comm.constants[0],
        "memory.relative_accuracy": comm.rms,
        "units.npu.busy_w": static_w,
        "units.npu.j_per_flop": j_per_flop,
        "units.npu.relative_accuracy": npu_accuracy(),
        "units.npu.kernels.expert_ffn.s_per_launch": launch,
        "units.npu.kernels.expert_ffn.s_per_weight_byte": byte,
        "units.npu.kernels.expert_ffn.s_per_flop": flop,
        "units.cpu.busy_w": fit_cpu_power().constants[0],
        "units.cpu.relative_accuracy": cpu_accuracy(sheet),
        "units.npu.s_per_naive_launch": naive_launch_s(),
        "units.gpu.relative_accuracy": gpu_accuracy(),
        "units.gpu.kernels.attention.s_per_flop": gpu_s_per_flop(),
    }
    for kernel in ("expert_ffn", "attention"):
        for amount, value in zip(GEMM_TERMS, fit_cpu_gemm().constants, strict=True):
            figures[f"units.cpu.kernels.{kernel}.{amount}"] = value
    for kernel, fit in table_4_fits().items():
        if _is_fitted(sheet, kernel):
            amount = "s_per_flop" if kernel == "router" else "s_per_moved_byte"
            figures[f"units.cpu.kernels.{kernel}.{amount}"] = fit.constants[0]
    return figures
