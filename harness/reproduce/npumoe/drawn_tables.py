"""NPUMoE's Tables 1 and 3 to 9, theirs and ours."""

from __future__ import annotations

from collections.abc import Iterator

from harness.reproduce.npumoe import arithmetic, explained, grid, inputs, layer, machine, places
from harness.reproduce.npumoe.arithmetic import own_figures
from harness.reproduce.npumoe.grid import WORDS
from harness.reproduce.npumoe.layer import TABLE_4_ARMS
from harness.reproduce.npumoe.places import ARMS, METRICS, MODES, TABLE_3, TABLE_4, TABLE_5, claim
from harness.reproduce.npumoe.sizes import MODELS, n_graphs, table_1
from harness.reproduce.redrawn import Entry, SourceTable

PARALLEL = "no rule says how launches that run at the same time share the NPU"
ENUMERATED = "what a graph of enumerated shapes costs is not stated"
NO_ACCURACY = "needs the checkpoint of Phi-3.5-MoE, which does not run here"
FITTED_ON = "The sheet is fitted on rows of this table."
MODE_WORDS = dict(zip(MODES, ("NPUMoE", "Core ML CPU", "ANEMLL"), strict=True))


def tables() -> Iterator[SourceTable]:
    yield _models()
    yield _accuracy()
    yield _layer()
    yield from _launches()
    yield from _qwen()
    yield from _gpu()


def _models() -> SourceTable:
    found = []
    for first, name in zip((22, 27, 32), MODELS, strict=True):
        _, total, active, *_ = table_1(name)
        found += [
            Entry(name, "all", total, claim=claim(first + 1)),
            Entry(name, "a token meets", active, claim=claim(first + 2)),
        ]
    note = "From published configurations. What a token meets is counted with the embedding, of which it reads one row."
    return SourceTable("Table 1", "parameters of the models", "1e9", "model", tuple(found), note)


def _accuracy() -> SourceTable:
    phase = grid.prefill("npumoe-tg", 1024, 256)
    dropped, padded = grid.dropped_percent(phase), grid.padded_percent(phase)
    slots = phase.counters.computed_rows / phase.counters.routed_pairs
    own = own_figures()
    found = []
    for number, dataset in enumerate(TABLE_3):
        change = own[places.table_3(number, "change %")]
        assert isinstance(change, float)
        found += [
            Entry(dataset, "dropped", dropped, claim=places.table_3(number, "dropped %")),
            Entry(dataset, "padded", padded, claim=places.table_3(number, "padded %")),
            Entry(
                dataset, f"padded, given their drops and {slots:.2f} slots a pair",
                arithmetic.padded_percent(number, slots), claim=places.table_3(number, "padded %"),
            ),
            Entry(
                dataset, "accuracy, FP16", None, claim=places.table_3(number, "accuracy in FP16 %"), note=NO_ACCURACY
            ),
            Entry(dataset, "accuracy, NPUMoE", None, claim=places.table_3(number, "accuracy of ours %")),
            Entry(dataset, "change", change, claim=places.table_3(number, "change %")),
        ]  # fmt: skip
    note = (
        f"Drops and padding of TG at 1024/256 over one routing, {grid.ROUTING.name}, which is of no data set. Padding"
        " that follows from their drops, with the slots of that plan, is theirs in three of four: HellaSwag needs"
        f" {arithmetic.slots_per_pair(1):.2f} slots a pair. The change is computed from their accuracies."
    )
    return SourceTable("Table 3", "dropped and padded tokens, and accuracy", "%", "data set", tuple(found), note)


def _layer() -> SourceTable:
    found = [
        Entry(operation, WORDS[column], layer.table_4(arm)[operation], claim=places.table_4(operation, column))
        for operation in TABLE_4
        for arm, column in zip(TABLE_4_ARMS, ARMS, strict=True)
    ]
    note = (
        f"One layer over 1024 tokens in chunks of 256, on sheet {layer.AS_TABLE_4}. {FITTED_ON} NPUMoE has two graphs"
        " of 8x32, whose experts' time no fit used. The rows of its printed column add up to"
        f" {arithmetic.block_ms('npumoe'):.2f} ms."
    )
    return SourceTable(
        "Table 4", "time of the operations of an MoE layer", "ms", "operation", tuple(found), note, "bars"
    )


def _launches() -> Iterator[SourceTable]:
    title = "launches of G experts with C rows each"
    units = (("ms", "serial ms", "parallel ms"), ("mJ", "serial mJ", "parallel mJ"))
    names = {config: f"{config[0]}x{config[1]}" if config[1] else "1 x 1 to 512" for config in TABLE_5}
    for unit, serial, parallel in units:
        found = []
        for config in TABLE_5:
            ours = None if not config[1] else machine.launch_per_row(*config)
            value = None if ours is None else 1e3 * (ours.seconds if unit == "ms" else ours.joules)
            found += [
                Entry(
                    names[config], "serial", value, claim=places.table_5(config, serial),
                    note=ENUMERATED if ours is None else "",
                ),
                Entry(names[config], "parallel", None, claim=places.table_5(config, parallel), note=PARALLEL),
            ]  # fmt: skip
        note = f"Of a row, all of which hold tokens. {FITTED_ON} It used 32 to 128 rows of the serial columns."
        yield SourceTable("Table 5", f"{title}, {unit} a token", unit, "G x C", tuple(found), note, "bars")
    graphs = tuple(
        Entry(names[config], "graphs", float(n_graphs(config[0])), claim=places.table_5(config, "graphs"))
        for config in TABLE_5
    )
    note = "Graphs of a layer whose experts share one tier, as planned."
    yield SourceTable("Table 5", f"{title}, how many for 16 experts", "graphs", "G x C", graphs, note)


def _qwen() -> Iterator[SourceTable]:
    read = (
        "Read as one layer of Qwen3-30B-A3B in FP16 over 1024 tokens in chunks of 256: the source does not say what it"
        f" measured. {FITTED_ON} That is the experts' time of Core ML CPU and ANEMLL, and the watts. Experts of NPUMoE"
        " lie in groups of 4."
    )
    layers = {mode: layer.qwen(mode) for mode in MODES}
    seconds, gains, joules, ratios = [], [], [], []
    for mode, found in layers.items():
        name = MODE_WORDS[mode]
        spent = (found.wall_s, found.seconds["expert FFN"], found.seconds["attention"])
        for words, column, value in zip(
            ("whole", "experts", "attention"), places.TABLE_6_COLUMNS[:3], spent, strict=True
        ):
            seconds.append(Entry(name, words, value, claim=places.table_6(mode, column)))
        gain = found.wall_s / layers["ours"].wall_s
        gains.append(Entry(name, "time over NPUMoE's", gain, claim=places.table_6(mode, "speedup")))
        parts = (found.total_j, *(found.joules[one] for one in ("cpu", "npu", "comm")))
        for words, column, value in zip(
            ("whole", "CPU", "NPU", "communication"), places.TABLE_7_COLUMNS[:4], parts, strict=True
        ):
            joules.append(Entry(name, words, value, claim=places.table_7(mode, column)))
        ratio = found.total_j / layers["ours"].total_j
        ratios.append(Entry(name, "energy over NPUMoE's", ratio, claim=places.table_7(mode, "efficiency")))
    yield SourceTable(
        "Table 6",
        "time of Qwen3-30B-A3B",
        "s",
        "arm",
        tuple(seconds),
        f"{read} {inputs.ATTENTION_READ}",
        "bars",
    )
    yield SourceTable("Table 6", "gain of NPUMoE in time", "x", "arm", tuple(gains), read)
    yield SourceTable(
        "Table 7",
        "energy of Qwen3-30B-A3B",
        "J",
        "arm",
        tuple(joules),
        f"{read} Of NPUMoE's CPU: {inputs.cpu_joules()}",
        "bars",
    )
    yield SourceTable(
        "Table 7",
        "gain of NPUMoE in energy",
        "x",
        "arm",
        tuple(ratios),
        f"{read} Of NPUMoE's CPU: {inputs.cpu_joules()}",
    )


def _gpu() -> Iterator[SourceTable]:
    gpu, npu = (machine.attention(unit) for unit in ("gpu", "npu"))
    shape = f"{machine.KERNEL_ROWS} rows of a layer of Phi-3.5-MoE; no shape is stated."
    kernel = (
        (gpu.seconds * 1e3, npu.seconds * 1e3),
        (gpu.joules * 1e3, npu.joules * 1e3),
        (gpu.joules / gpu.seconds, npu.joules / npu.seconds),
    )
    found = []
    for metric, unit, values in zip(METRICS, ("ms", "mJ", "W"), kernel, strict=True):
        larger = max(values) / min(values)
        for column, (name, value) in enumerate(
            zip(("GPU", "NPU", "larger over smaller"), (*values, larger), strict=True)
        ):
            found.append(Entry(f"{metric}, {unit}", name, value, claim=places.table_8(metric, column)))
    note = (
        f"{shape} The GPU's time is fitted on this row, and its watts are printed: not those of its energy over time."
    )
    yield SourceTable("Table 8", "a kernel of dense attention", "as the row says", "metric", tuple(found), note)
    block = layer.layer("npumoe", grid.PHI)
    no_gpu = "the sheet has one kernel of the GPU, and no price of a launch or of weights: no block"
    found = []
    of_block = (("s", block.wall_s), ("J", block.total_j), ("W", block.total_j / block.wall_s))
    for metric, (unit, value) in zip(METRICS, of_block, strict=True):
        found += [
            Entry(f"{metric}, {unit}", "GPU", None, claim=places.table_9(metric, 0), note=no_gpu),
            Entry(f"{metric}, {unit}", "NPU", value, claim=places.table_9(metric, 1)),
        ]
    note = (
        "One layer of Phi-3.5-MoE over 1024 tokens in chunks of 256 on sheet m2-ultra; no shape is stated."
        f" {explained.write_back()}"
    )
    yield SourceTable("Table 9", "attention and MoE block", "as the row says", "metric", tuple(found), note)
