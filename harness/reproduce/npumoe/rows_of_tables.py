"""What we find for the rows of NPUMoE's (000) tables, sizes and worked examples."""

from __future__ import annotations

from collections.abc import Iterator

from harness.reproduce.findings import Finding, Ours
from harness.reproduce.npumoe import explained, grid, layer, machine, places
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
SAMPLE_ROUTING = "of the generated routing, which is of no data set"


def findings() -> Iterator[Finding]:
    rounded = rounding()
    for id_, ours in own_figures().items():
        yield Finding(id_, ours, "its own figures", OWN_NOTES.get(id_, ""), rounding=rounded.get(id_, ()))
    active = {claim(29): MODELS[1], claim(34): MODELS[2]}
    for id_, figures in sizes().items():
        why = other_counts(active[id_]) if id_ in active else ""
        yield Finding(id_, _one(figures), "shape", explanation=why)
    for id_, figures in examples().items():
        yield Finding(id_, _one(figures), "plan")
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
    read = (
        "one layer of Qwen3-30B-A3B in FP16 over 1024 tokens in chunks of 256; the source does not say what it measured"
    )
    for mode in MODES:
        found = layer.qwen(mode)
        spent = (found.wall_s, found.seconds["expert FFN"], found.seconds["attention"])
        for column, ours in zip(places.TABLE_6_COLUMNS[:3], spent, strict=True):
            why = explained.HALF_THE_ATTENTION if column == "attention s" else ""
            yield Finding(places.table_6(mode, column), ours, "priced", read, why)
        for column, component in (("CPU J", "cpu"), ("ANE J", "npu"), ("comm J", "comm")):
            why = explained.cpu_joules() if (mode, component) == ("ours", "cpu") else ""
            yield Finding(places.table_7(mode, column), found.joules[component], "priced", read, why)
    shape = f"{machine.KERNEL_ROWS} rows of one layer of Phi-3.5-MoE; the source states no shape"
    for number, unit in enumerate(("gpu", "npu")):
        kernel = machine.attention(unit)
        yield Finding(places.table_8("runtime", number), kernel.seconds * 1e3, "sheet", shape)
        yield Finding(places.table_8("energy", number), kernel.joules * 1e3, "sheet", shape)
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
