"""Findings of 001 that need no schedule: sizes of models (Table II), figures of its machine (Table I), what fits."""

from __future__ import annotations

from collections.abc import Iterator

from devices.models.sheet import Sheet
from engines.pricing.shapes import NAMED_SHAPES, ModelShape
from harness.reproduce.findings import Finding
from harness.reproduce.gpu_ndp.configurations import DEEPSEEK, MIXTRAL, MODELS, PHI, QWEN3
from results.units import GIB, MIB

PUBLISHED: dict[str, ModelShape] = {
    DEEPSEEK: NAMED_SHAPES["deepseek-moe-16b"],
    QWEN3: NAMED_SHAPES["qwen3-30b-a3b"],
    PHI: NAMED_SHAPES["phi-3.5-moe"],
    MIXTRAL: NAMED_SHAPES["mixtral-8x7b"],
}
FIRST_ROW = {DEEPSEEK: 38, QWEN3: 44, PHI: 50, MIXTRAL: 56}
COLUMNS = ("expert parameters, 1e9", "experts", "TopK", "hidden", "intermediate", "MoE layers")
SETTING = "a part of its machine, which nothing here computes"
DDR4_RANK_BYTES, DDR4_RATE, RANKS = 8, 3200e6, 4
"""Of Table I: a rank of 64 bits, transfers a second, ranks of a DIMM."""
DIMM_BYTES, N_DIMMS = 32 * GIB, 6


def expert_billions(model: str) -> float:
    """Of all experts, shared ones too, as Table II counts them."""
    shape = MODELS[model].shape
    return shape.n_sparse_layers * shape.n_experts * shape.expert_weights / 1e9


def row_of_table_2(model: str) -> tuple[float | tuple[float, ...], ...]:
    shape = PUBLISHED[model]
    n_shared = shape.shared_width // shape.expert_width
    top_k = (float(shape.top_k), float(n_shared)) if n_shared else float(shape.top_k)
    n_sparse = float(shape.n_sparse_layers)
    layers = (n_sparse, float(shape.n_layers)) if shape.n_sparse_layers < shape.n_layers else n_sparse
    return (
        expert_billions(model), float(shape.n_experts), top_k, float(shape.hidden), float(shape.expert_width), layers,
    )  # fmt: skip


NOTES = {
    38: "with the two shared experts of each layer: 27 x 66 of them",
    53: "Table II has the two widths swapped",
    54: "Table II has the two widths swapped",
    56: "42.0 are 45.1e9 / 2**30: Gi in a column of G",
}


def table_2() -> Iterator[Finding]:
    for model, first in FIRST_ROW.items():
        for number, ours in enumerate(row_of_table_2(model), first):
            yield Finding(f"001-{number:03}", ours, "shape", NOTES.get(number, ""))


def examples() -> Iterator[Finding]:
    qwen3, mixtral = PUBLISHED[QWEN3], PUBLISHED[MIXTRAL]
    yield Finding("001-020", qwen3.parameters.total * qwen3.bytes_per_value / 1e9, "shape")
    activated = mixtral.top_k * mixtral.expert_weights * mixtral.bytes_per_value / MIB
    yield Finding("001-021", activated, "shape", "in MiB, printed as MB")
    yield Finding("001-022", mixtral.hidden * mixtral.bytes_per_value / MIB, "shape", "in MiB, printed as MB")


def table_1(sheet: Sheet) -> Iterator[Finding]:
    """Its machine: what our sheet has of it, and what of it decides no figure here."""
    gpu, dimm = sheet.capacity_bytes("gpu"), sheet.capacity_bytes("ndp:0")
    host = sheet.units["cpu"].roofline
    assert gpu is not None
    assert dimm is not None
    assert host is not None
    peak = "the GPU's peak in our sheet rests on it: 336 tensor cores x 2.30 GHz x 128 FLOP"
    for number, told in (
        (23, peak),
        (25, "no figure of ours rests on it"),
        (26, peak),
        (27, "63 GB/s each way in our sheet: 32 GT/s x 16 lanes x 128/130"),
        (28, "the DIMM's bandwidth rests on it (001-034)"),
        (30, "the DIMM's bandwidth rests on it (001-034)"),
        (33, "their clock is not stated; our sheet assumes 0.8 GHz, two FLOP each"),
        (32, "no figure of ours rests on it: the DIMM's bandwidth is that of its ranks"),
    ):
        yield Finding(f"001-{number:03}", None, note=told, missing=SETTING)
    yield Finding("001-024", gpu / GIB, "sheet", "GiB")
    yield Finding("001-029", dimm / GIB, "sheet", "GiB")
    yield Finding(
        "001-031", 4.0, "formula", "DDR4 has 4 bank groups, 8 are of DDR5 (JESD79-4); no figure of ours rests on it"
    )
    yield Finding(
        "001-034",
        RANKS * DDR4_RANK_BYTES * DDR4_RATE / 1e9,
        "formula",
        "4 ranks x 8 bytes x 3200 MT/s, as in our sheet",
    )
    n_ndps = sum(name.startswith("ndp:") for name in sheet.units)
    yield Finding("001-035", float(n_ndps), "sheet")
    yield Finding("001-036", N_DIMMS * DIMM_BYTES / GIB, "formula", "GiB, of six DIMMs of 32 GiB")
    yield Finding(
        "001-037", host.bytes_per_s.value / 1e9, "sheet", "of DDR5-5600; its DIMMs are DDR4-3200, 25.6 GB/s a channel"
    )
