"""Rows of NPUMoE (000) that follow from its own tables: sums, ratios and means of printed figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from harness.reproduce.findings import Ours
from harness.reproduce.ledger import ledger
from harness.reproduce.npumoe import places
from harness.reproduce.npumoe.places import ARMS, BASELINES, MODES, TABLE_3, TABLE_4, TABLE_5, claim
from harness.reproduce.printed import Span
from harness.reproduce.rounding import span_of

OPERATIONS = TABLE_4[:-1]
"""Rows of Table 4 that its last row adds up."""
ENERGY_PARTS = ("CPU J", "ANE J", "comm J")
STATED_TTFT_GAINS = {
    (prompt, chunk): tuple(claim(first + arm) for arm in (0, 1, 2))
    for (prompt, chunk), first in (((1024, 256), 41), ((1024, 512), 44), ((4096, 512), 47), ((4096, 1024), 50))
}
"""By (prompt, chunk), of the three baselines: §5.3."""


def printed(id_: str) -> float:
    return ledger().figure(id_)


def percent_less(ours: float, theirs: float) -> float:
    return 100 * (1 - ours / theirs)


def percent_change(before: float, after: float) -> float:
    return 100 * (after / before - 1)


def span(found: Iterable[float]) -> Span:
    values = list(found)
    return Span(min(values), max(values))


def stated_base_gain() -> float:
    """§5.8: base over all techniques."""
    return printed(claim(214))


def own_figures() -> Mapping[str, Ours]:
    """By claim."""
    return {**_latency(), **_accuracy(), **_layer(), **_groups(), **_qwen(), **_gpu()}


def _latency() -> dict[str, Ours]:
    """§5.3 against the tables, and §5.8 against §5.3 and §5.5."""
    ours = printed(places.table_4("expert FFN", "npumoe"))
    at_1024 = [printed(one) for one in STATED_TTFT_GAINS[4096, 1024]]
    return {
        # Experts alone, which gain most: a whole TTFT cannot gain more.
        claim(41): printed(places.table_4("expert FFN", "coreml-cpu")) / ours,
        claim(43): printed(places.table_4("expert FFN", "anemll")) / ours,
        claim(83): "chunk 512",
        claim(84): "chunk 1024",
        claim(225): span(at_1024),
        claim(226): "chunk 512",
    }


def _accuracy() -> dict[str, Ours]:
    """Table 3."""

    def column(name: str) -> list[str]:
        return [places.table_3(dataset, name) for dataset in range(len(TABLE_3))]

    both = zip(column("accuracy in FP16 %"), column("accuracy of ours %"), strict=True)
    changes = [percent_change(printed(before), printed(after)) for before, after in both]
    accuracies = [printed(one) for one in column("accuracy of ours %")]
    drops, pads = ([printed(one) for one in column(name)] for name in ("dropped %", "padded %"))
    return {
        **dict(zip(column("change %"), changes, strict=True)),
        claim(10): -min(changes),
        claim(108): min(accuracies[2:]),
        claim(109): span(drops),
        claim(110): span(pads),
        claim(111): -min(changes),
        claim(219): mean(pads),
    }


def block_ms(arm: str) -> float:
    """The rows of a column of Table 4 added up. The total that it prints for NPUMoE is another."""
    return sum(printed(places.table_4(name, arm)) for name in OPERATIONS)


def _layer() -> dict[str, Ours]:
    """Table 4, and what else the source says of attention and of the expert FFN's share."""

    def less(operation: str, arm: str) -> float:
        return percent_less(printed(places.table_4(operation, "npumoe")), printed(places.table_4(operation, arm)))

    attention = [printed(places.table_6(mode, "attention s")) for mode in ("coreml", "ours", "anemll")]
    shares = [100 * printed(places.table_4("expert FFN", arm)) / block_ms(arm) for arm in ARMS]
    return {
        **{places.table_4("whole block", arm): block_ms(arm) for arm in ARMS},
        claim(53): span(percent_change(attention[0], one) for one in attention[1:]),
        claim(54): span(shares),
        claim(140): tuple(less("expert FFN", arm) for arm in ("coreml-cpu", "anemll")),
        claim(141): tuple(less("scatter", arm) for arm in BASELINES),
        claim(142): span(percent_less(block_ms("npumoe"), block_ms(arm)) for arm in ("coreml-cpu", "anemll")),
        claim(143): percent_less(block_ms("npumoe"), block_ms("coreml-naive")),
        claim(271): block_ms("npumoe") / 1e3,
    }


def _groups() -> dict[str, Ours]:
    """Table 5, whose text is of its serial columns."""

    def gain(slow: tuple[int, int], fast: tuple[int, int], column: str = "serial ms") -> float:
        return printed(places.table_5(slow, column)) / printed(places.table_5(fast, column))

    def slower(config: tuple[int, int]) -> float:
        return printed(places.table_5(config, "serial ms")) / printed(places.table_5(config, "parallel ms"))

    joules = "serial mJ"
    return {
        claim(204): gain((1, 32), (1, 128)),
        claim(205): span(gain((1, 32), fast, joules) for fast in ((1, 64), (1, 128))),
        claim(206): gain((8, 32), (8, 64)),
        claim(207): gain((8, 32), (8, 96)),
        claim(208): span(gain((8, 32), fast, joules) for fast in ((8, 64), (8, 96))),
        claim(209): span(slower(config) for config in TABLE_5[1:-2]),
        claim(210): gain((1, 32), (4, 32)),
        claim(211): gain((1, 32), (8, 32)),
        claim(212): gain((1, 64), (4, 64)),
        claim(213): gain((1, 64), (8, 64)),
    }


def _qwen() -> dict[str, Ours]:
    """Tables 6 and 7."""
    walls, energies = (
        {mode: printed(table(mode, column)) for mode in MODES}
        for table, column in ((places.table_6, "wall s"), (places.table_7, "energy J"))
    )
    return {
        **{places.table_6(mode, "speedup"): walls[mode] / walls["ours"] for mode in MODES},
        **{places.table_7(mode, "efficiency"): energies[mode] / energies["ours"] for mode in MODES},
        **{
            places.table_7(mode, "energy J"): sum(printed(places.table_7(mode, part)) for part in ENERGY_PARTS)
            for mode in MODES
        },
        claim(60): span(walls[mode] / walls["ours"] for mode in MODES[1:]),
        claim(62): span(energies[mode] / energies["ours"] for mode in MODES[1:]),
    }


def rounding() -> Mapping[str, tuple[Span, ...]]:
    """Of sums and ratios of Tables 6 to 9, by claim: what each may be, as the figures behind it are rounded."""

    def ratio(above: str, below: str) -> Span:
        return span_of(lambda a, b: a / b, number(above), number(below))

    number = ledger().number
    found: dict[str, tuple[Span, ...]] = {}
    for mode in MODES:
        found[places.table_6(mode, "speedup")] = (
            ratio(places.table_6(mode, "wall s"), places.table_6("ours", "wall s")),
        )
        found[places.table_7(mode, "efficiency")] = (
            ratio(places.table_7(mode, "energy J"), places.table_7("ours", "energy J")),
        )
        parts = [number(places.table_7(mode, part)) for part in ENERGY_PARTS]
        found[places.table_7(mode, "energy J")] = (span_of(lambda *joules: sum(joules), *parts),)
    for metric_number, metric in enumerate(places.METRICS):
        ends: list[tuple[float, Span]] = []
        for table in (places.table_8, places.table_9):
            gpu, npu = table(metric, 0), table(metric, 1)
            found[table(metric, 2)] = (ratio(npu, gpu) if metric == "runtime" else ratio(gpu, npu),)
            ends.append((printed(table(metric, 2)), found[table(metric, 2)][0]))
        found[claim(231 + metric_number)] = tuple(end for _, end in sorted(ends))
    for table in (places.table_8, places.table_9):
        for column in (0, 1):
            found[table("power", column)] = (ratio(table("energy", column), table("runtime", column)),)
    return found


def _gpu() -> dict[str, Ours]:
    """Tables 8 and 9: the GPU is faster and takes more, so that each ratio is above 1."""
    found: dict[str, Ours] = {}
    for number, metric in enumerate(places.METRICS):
        ratios = []
        for table in (places.table_8, places.table_9):
            gpu, npu = printed(table(metric, 0)), printed(table(metric, 1))
            ratios.append(npu / gpu if metric == "runtime" else gpu / npu)
            found[table(metric, 2)] = ratios[-1]
        found[claim(231 + number)] = span(ratios)
    for table in (places.table_8, places.table_9):
        for column in (0, 1):  # mJ over ms, J over s: watts alike
            found[table("power", column)] = printed(table("energy", column)) / printed(table("runtime", column))
    return found


def decode_over_cpu(prefill_gain: float, prefill_percent: float, whole_gain: float) -> float:
    """How much longer a decode step of ours takes than one of an arm, by the source's figures: the arm's TTFT is
    `prefill_gain` times ours and `prefill_percent` of its whole time, which is `whole_gain` times ours."""
    prefill, decode = prefill_percent / 100, 1 - prefill_percent / 100
    return (1 / whole_gain - prefill / prefill_gain) / decode


def stated_decode_over_cpu() -> float:
    """From the gains at 1024/256, the prefill's share and the gain end to end: three figures of three places."""
    return decode_over_cpu(printed(claim(41)), printed(claim(11)), printed(claim(57)))


def stated_gain(arm: str, prompt: int, chunk: int) -> float:
    return printed(STATED_TTFT_GAINS[prompt, chunk][BASELINES.index(arm)])


def padded_percent(dataset: int, slots_per_pair: float) -> float:
    """That follows from the dropped tokens of Table 3, where every routed pair has so many slots."""
    kept = 1 - printed(places.table_3(dataset, "dropped %")) / 100
    return 100 * (1 - kept / slots_per_pair)


def slots_per_pair(dataset: int) -> float:
    """Of Table 3's dropped and padded tokens."""
    dropped, padded = (printed(places.table_3(dataset, name)) / 100 for name in ("dropped %", "padded %"))
    return (1 - dropped) / (1 - padded)


def launch_ms(group: int, capacity: int) -> float:
    """Of one launch of Table 5, serial."""
    return printed(places.table_5((group, capacity), "serial ms")) * group * capacity


def mean_slots_per_pair() -> float:
    """Of Table 3's means."""
    dropped, padded = _table_3_means()
    return (1 - dropped) / (1 - padded)


def naive_rows() -> float:
    """Rows of each naive launch of Table 4, whose padding is priced as NPUMoE's: 2048 pairs in 64 launches, of which
    NPUMoE keeps and pads as many as Table 3 says on average. The price of a naive launch is fitted with it."""
    naive, ours = (ledger().calibration(places.table_4("padding", arm)) for arm in ("coreml-naive", "npumoe"))
    dropped, padded = _table_3_means()
    pairs, launches = 1024 * 2, 4 * 16
    padded_rows = pairs * (1 - dropped) * padded / (1 - padded)
    return (pairs + naive / ours * padded_rows) / launches


def _table_3_means() -> tuple[float, float]:
    """Shares of dropped and of padded tokens."""
    dropped, padded = (
        mean(ledger().calibration(places.table_3(dataset, name)) / 100 for dataset in range(len(TABLE_3)))
        for name in ("dropped %", "padded %")
    )
    return dropped, padded
