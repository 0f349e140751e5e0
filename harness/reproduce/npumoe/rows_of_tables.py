"""What we find for the rows of NPUMoE's (000) tables, sizes and worked examples."""

from __future__ import annotations

from collections.abc import Iterator

from harness.reproduce.findings import Finding, Ours
from harness.reproduce.npumoe import explained, grid, inputs, layer, machine, places
from harness.reproduce.npumoe.arithmetic import own_figures, rounding
from harness.reproduce.npumoe.layer import TABLE_4_ARMS
from harness.reproduce.npumoe.places import MODES, TABLE_3, TABLE_4, TABLE_5, claim
from harness.reproduce.npumoe.sizes import MODELS, examples, other_counts, packing, sizes

OWN_NOTES = {
    claim(41): "the experts' time of Table 4 alone, which gains most; a whole TTFT gains less",
    claim(43): "the experts' time of Table 4 alone, which gains most; a whole TTFT gains less",
    claim(53): "Table 6: attention of ours and of ANEMLL on the NPU, over the CPU's",
    claim(54): "share of the experts in the MoE blocks of Table 4, least and most of its columns",
    claim(60): "Table 6",
    claim(62): "Table 7",
    claim(83): "§5.8 gives chunk 1024 what §5.5 gives chunk 512, so that this one would be of 512",
    claim(84): "§5.8 gives the same range to chunk 1024",
    claim(226): "§5.5 gives the same range to chunk 512",
    claim(225): "§5.3 at 4096/1024",
    claim(271): "s of Table 4's MoE block alone, its rows added up",
}
UNITS = {
    claim(20): "GiB: eight experts of 150 MiB, which are 1.26 GB",
    claim(21): "MiB",
    claim(37): "GB, in FP16",
    claim(38): "GB, in FP16",
    claim(39): "GB in FP16; GiB in 8 bits",
}
"""Of the figures that are printed in MB and GB."""
SAMPLE_ROUTING = "of the generated routing, which is of no data set"


def findings() -> Iterator[Finding]:
    rounded = rounding()
    for id_, ours in own_figures().items():
        note, why = OWN_NOTES.get(id_, ""), inputs.OWN_POWER.get(id_, "")
        yield Finding(id_, ours, "its own figures", note, why, rounding=rounded.get(id_, ()))
    active = {claim(29): MODELS[1], claim(34): MODELS[2]}
    for id_, figures in sizes().items():
        why = other_counts(active[id_]) if id_ in active else ""
        yield Finding(id_, _one(figures), "shape", UNITS.get(id_, ""), why)
    for id_, figures in examples().items():
        yield Finding(id_, _one(figures), "plan", UNITS.get(id_, ""))
    packed = packing()
    yield Finding(
        claim(286), f"({','.join(map(str, packed.tokens))}) in C={packed.capacity}", "plan",
        f"{packed.padded:.0f} % of its slots are padded",
    )  # fmt: skip
    yield from _table_3()
    yield from _table_4()
    yield from _table_5()
    yield from _tables_6_to_9()
    yield from _missing()


def _one(figures: tuple[float, ...]) -> Ours:
    return figures[0] if len(figures) == 1 else figures


def _table_3() -> Iterator[Finding]:
    phase = grid.prefill("npumoe-tg", 1024, 256)
    dropped, padded = grid.dropped_percent(phase), grid.padded_percent(phase)
    for dataset in range(len(TABLE_3)):
        yield Finding(places.table_3(dataset, "dropped %"), dropped, "plan", SAMPLE_ROUTING)
        yield Finding(places.table_3(dataset, "padded %"), padded, "plan", SAMPLE_ROUTING)


def _table_4() -> Iterator[Finding]:
    for arm, column in zip(TABLE_4_ARMS, places.ARMS, strict=True):
        for operation in TABLE_4[:-1]:
            why = explained.padding(arm) if operation == "padding" and arm in ("coreml-naive", "npumoe-tg") else ""
            yield Finding(
                places.table_4(operation, column), layer.table_4(arm)[operation], "priced",
                f"sheet {layer.AS_TABLE_4}, one layer", why,
            )  # fmt: skip
        yield Finding(
            places.table_4("whole block", column), layer.table_4(arm)["whole block"], "priced",
            f"sheet {layer.AS_TABLE_4}, which is fitted on the rows of this table",
        )  # fmt: skip


def _table_5() -> Iterator[Finding]:
    for group, capacity in TABLE_5[1:]:
        found = machine.launch_per_row(group, capacity)
        why = explained.wide_launches(group, capacity) if capacity == 256 else ""
        for column, ours in (("serial ms", found.seconds * 1e3), ("serial mJ", found.joules * 1e3)):
            yield Finding(places.table_5((group, capacity), column), ours, "sheet", "sheet m2-ultra", why)


def _tables_6_to_9() -> Iterator[Finding]:
    for mode in MODES:
        found = layer.qwen(mode)
        spent = (found.wall_s, found.seconds["expert FFN"], found.seconds["attention"])
        for column, ours in zip(places.TABLE_6_COLUMNS[:3], spent, strict=True):
            yield Finding(places.table_6(mode, column), ours, "priced", *inputs.of_table_6(mode, column))
        for column, component in (("CPU J", "cpu"), ("ANE J", "npu"), ("comm J", "comm")):
            joules, told = found.joules[component], inputs.of_table_7(mode, column)
            yield Finding(places.table_7(mode, column), joules, "priced", *told)
    for number, unit in enumerate(("gpu", "npu")):
        kernel = machine.attention(unit)
        for metric, ours in (("runtime", kernel.seconds * 1e3), ("energy", kernel.joules * 1e3)):
            yield Finding(places.table_8(metric, number), ours, "sheet", *inputs.of_table_8(metric, unit))
    block = layer.layer("npumoe", grid.PHI)
    whole = "one layer of Phi-3.5-MoE over 1024 tokens in chunks of 256; the source states no shape"
    yield Finding(places.table_9("runtime", 1), block.wall_s, "priced", whole)
    yield Finding(places.table_9("energy", 1), block.total_j, "priced", whole, explained.write_back())


def _missing() -> Iterator[Finding]:
    checkpoint = "accuracy needs the checkpoint of Phi-3.5-MoE, which does not run here"
    for dataset in range(len(TABLE_3)):
        for column in ("accuracy in FP16 %", "accuracy of ours %"):
            yield Finding(places.table_3(dataset, column), None, missing=checkpoint)
    shapes = "what one graph of 512 enumerated shapes costs, beyond a graph of one shape"
    for column in ("serial ms", "serial mJ"):
        yield Finding(places.table_5(TABLE_5[0], column), None, missing=shapes)
    parallel = (
        "how launches that run at the same time share the NPU; the column contradicts grouping, for its fastest row has"
        " no groups"
    )
    for config in TABLE_5[1:]:
        for column in ("parallel ms", "parallel mJ"):
            yield Finding(places.table_5(config, column), None, missing=parallel)
    overlap = "routing of Phi-3.5-MoE on the source's data sets; Fig. 18 shows the same of another model's trace"
    for number in (227, 228, 229, 230):
        yield Finding(claim(number), None, missing=overlap)
