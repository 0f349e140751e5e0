"""The tables and figures of 001 drawn again. It prints averages and maxima; its bars have no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engines.pricing.costs import SheetCosts
from engines.pricing.shapes import sizes_of
from engines.techniques.place.balance import Times, balanced
from engines.techniques.place.ndp import Schedule
from harness.reproduce.gpu_ndp.computed import (
    FULL_DECODE,
    HELD_CLOCK_HZ,
    LB_DECODE,
    LB_PREFILL,
    LEAST,
    PRE_DECODE,
    QWEN3_DECODE,
    QWEN3_PREFILL,
    TP_DECODE,
    TP_PREFILL,
    UNIFORM,
    Computed,
    computed,
)  # fmt: skip
from harness.reproduce.gpu_ndp.configurations import MODELS, N_UNITS, PRINTED_UNITS, QWEN3, no_room
from harness.reproduce.gpu_ndp.decode import N_DRAWS, UTILISATIONS, Configuration
from harness.reproduce.gpu_ndp.end_to_end import AHEAD
from harness.reproduce.gpu_ndp.end_to_end import UTILISATIONS as END_TO_END
from harness.reproduce.gpu_ndp.prefill import SKEWS, SPLITS, Reading, mean_ratios
from harness.reproduce.gpu_ndp.sizes import COLUMNS, DIMM_BYTES, FIRST_ROW, row_of_table_2
from harness.reproduce.gpu_ndp.stage import ARMS, FIDDLER, FULL, MONDE, ON_DEMAND, TP, TP_LB, TP_PRE
from harness.reproduce.redrawn import Entry, SourceTable
from results.units import GIB

NO_ROOM = "N.S."
MODELLED = "Priced on the sheet rtx5080-ndp; uniform routing."
MEAN = "mean"
SHOWN_CLOCKS_HZ = (0.8e9, 2.3e9, 8e9, 32e9, 128e9)
"""Of those that are tried."""


def tables() -> list[SourceTable]:
    own = computed()
    return [
        *table_2(), which_fit(own), fig_6(own), fig_8(own), *fig_9(own), whole_seconds(own),
        fig_10(own), readings_of_prefill(own), prefill_seconds_of_layers(own),
        fig_11(own), by_utilisation(own), layer_times(own), balances(own),
    ]  # fmt: skip


def table_2() -> Iterator[SourceTable]:
    entries = []
    for model, first in FIRST_ROW.items():
        for number, (column, ours) in enumerate(zip(COLUMNS, row_of_table_2(model), strict=True), first):
            shown = "/".join(f"{one:g}" for one in ours) if isinstance(ours, tuple) else ours
            entries.append(Entry(model, column, shown, claim=f"001-{number:03}"))
    yield SourceTable(
        "Table II", "models and their experts", "", "model", tuple(entries),
        note="From the published configurations. Shared experts of DeepSeek-MoE are counted, as it does.",
    )  # fmt: skip


def which_fit(own: Computed) -> SourceTable:
    entries = []
    for model, asked in MODELS.items():
        for n in N_UNITS:
            lacks = no_room(asked, n, own.sheet)
            needed = asked.shape.routed_bytes / GIB
            ours = NO_ROOM if lacks is not None else f"fits: {needed:.1f} of {n * DIMM_BYTES / GIB:g} GiB"
            entries.append(Entry(model, f"N = {n}", ours, note=str(lacks) if lacks is not None else ""))
    return SourceTable(
        "Fig. 9 to 11, N.S.", "what so many DIMMs of 32 GiB hold", "", "model", tuple(entries),
        note="The captions of its figures explain N.S., and its text does not say which configurations have it; it runs"
        " N = 2, 4 and 6.",
    )  # fmt: skip


def fig_6(own: Computed) -> SourceTable:
    columns = "counted on the same answer", "counted on all others", "by chance"
    entries = []
    for kept, found in own.recorded.items():
        for column, share in zip(columns, (found.own.mean, found.others.mean, found.chance), strict=True):
            entries.append(Entry(str(kept), column, 100 * share))
    return SourceTable(
        "Fig. 6", "share of the fetched experts that a token uses", "%", "experts fetched of each layer",
        tuple(entries),
        note="Recorded routing of gpt-oss-20b, 26,355 tokens of 142 answers; the first half of an answer stands for its"
        " prompt, which was not recorded. The source asks Qwen3-30B-A3B on 20 inputs of GSM8K, against counts of GSM8K"
        " and MMLU, and draws bars without numbers.",
        picture="lines",
    )  # fmt: skip


def fig_8(own: Computed) -> SourceTable:
    entries = []
    for phase, claim in (("prefill", QWEN3_PREFILL), ("decode", QWEN3_DECODE)):
        found = {
            n: own.held[Configuration(QWEN3, n)].tp_lb
            if phase == "prefill"
            else own.decoding[Configuration(QWEN3, n)].tp_lb
            for n in PRINTED_UNITS
        }
        entries += [Entry(phase, f"N = {n}", ratio) for n, ratio in found.items()]
        entries.append(Entry(phase, MEAN, float(np.mean(list(found.values()))), claim=claim))
    return SourceTable(
        "Fig. 8", f"experts of {QWEN3}: times faster than MoNDE", "x", "stage", tuple(entries),
        note=f"{MODELLED} Slices with balance, nothing fetched ahead; multipliers at 0.8 GHz.", picture="bars",
    )  # fmt: skip


def fig_9(own: Computed) -> Iterator[SourceTable]:
    for multiple in (own.multiple, None):
        entries = list(_of_fig_9(own, multiple))
        if multiple is None:
            title, note = "the rest by the GPU's roofline", "Nothing is fitted; launches cost nothing on this sheet."
        else:
            title = "the rest fitted"
            note = (
                f"All that is no expert takes {multiple:.3f} of what the experts take in slices over six DIMMs,"
                " fitted on 001-005."
            )
        yield SourceTable(
            "Fig. 9" if multiple is not None else "Fig. 9, nothing fitted",
            f"512 tokens read and 512 answered: times faster than MoE-OnDemand; {title}", "x", "model and DIMMs",
            tuple(entries),
            note=f"{MODELLED} {note} Of ndp the share of the fetched experts that a token uses is named, as it is not"
            " known; the most of ndp-tp-lb is held against what the source states of its full system.",
        )  # fmt: skip


def _of_fig_9(own: Computed, multiple: float | None) -> Iterator[Entry]:
    asked = own.requests
    for one in placed(PRINTED_UNITS):
        row = row_of(one)
        if one not in asked.configurations:
            yield Entry(row, TP_LB, NO_ROOM)
            continue
        base = asked.seconds(one, ON_DEMAND, multiple)
        for arm in (ON_DEMAND, FIDDLER, MONDE, TP_LB):
            yield Entry(row, arm, base / asked.seconds(one, arm, multiple))
        for q in END_TO_END:
            yield Entry(row, f"{FULL}, {100 * q:.0f} %", base / asked.seconds(one, FULL, multiple, q))
    for baseline, claim in ((ON_DEMAND, "001-005"), (FIDDLER, "001-006"), (MONDE, "001-007")):
        row = f"most over {baseline}"
        yield Entry(row, TP_LB, max(asked.times_faster(baseline, multiple, ours=TP_LB).values()), claim=claim)
        for q in END_TO_END:
            yield Entry(row, f"{FULL}, {100 * q:.0f} %", max(asked.times_faster(baseline, multiple, q).values()))


def whole_seconds(own: Computed) -> SourceTable:
    asked, entries = own.requests, []
    near = min(END_TO_END, key=lambda q: abs(q - own.recorded[4].own.mean))
    for one in placed(N_UNITS):
        for arm in ARMS:
            column = f"{arm}, {100 * near:.0f} %" if arm in AHEAD else arm
            fits = one in asked.configurations
            seconds = asked.seconds(one, arm, own.multiple, near if arm in AHEAD else 0.0) if fits else NO_ROOM
            entries.append(Entry(row_of(one), column, seconds))
    return SourceTable(
        "Fig. 9, seconds", "512 tokens read and 512 answered", "s", "model and DIMMs", tuple(entries),
        note=f"{MODELLED} All that is no expert is fitted on 001-005. N.S. where the DIMMs do not hold the experts;"
        " systems"
        " without them would run.",
    )  # fmt: skip


def row_of(one: Configuration) -> str:
    return f"{one.model}, N = {one.n_units}"


def placed(units: tuple[int, ...]) -> list[Configuration]:
    """All, in the order of the models; those that do not fit too."""
    return [Configuration(model, n) for model in MODELS for n in units]


def fig_10(own: Computed) -> SourceTable:
    entries = []
    for one in placed(PRINTED_UNITS):
        ratios = own.held.get(one)
        for arm in (TP, TP_LB):
            ours = NO_ROOM if ratios is None else ratios.tp if arm == TP else ratios.tp_lb
            entries.append(Entry(row_of(one), arm, ours))
    average = mean_ratios(own.held)
    entries += [Entry(MEAN, TP, average.tp, claim=TP_PREFILL), Entry(MEAN, TP_LB, average.tp_lb, claim=LB_PREFILL)]
    return SourceTable(
        "Fig. 10", "experts in prefill: times faster than MoNDE", "x", "model and DIMMs", tuple(entries),
        note=f"{MODELLED} 512 tokens at once, MoNDE's best split, multipliers at 0.8 GHz. Nothing was bent to come"
        " nearer:"
        " every reading stands below.",
        picture="bars",
    )  # fmt: skip


def prefill_seconds_of_layers(own: Computed) -> SourceTable:
    asked, entries = own.requests, []
    for one in placed(N_UNITS):
        n_layers = MODELS[one.model].shape.n_sparse_layers
        for arm in (ON_DEMAND, FIDDLER, MONDE, TP, TP_LB):
            fits = one in asked.configurations
            ours = 1e3 * asked.prefill_s(one, arm) / n_layers if fits else NO_ROOM
            entries.append(Entry(row_of(one), arm, ours))
    return SourceTable(
        "Fig. 10, seconds", "experts of a layer for a prompt of 512 tokens", "ms", "model and DIMMs", tuple(entries),
        note=f"{MODELLED} MoNDE's best split, multipliers at 0.8 GHz. What is fetched ahead is of no use to a prompt.",
    )  # fmt: skip


def readings_of_prefill(own: Computed) -> SourceTable:
    columns = (
        (f"{TP}, mean of ten", TP_PREFILL),
        (f"{TP_LB}, mean of ten", LB_PREFILL),
        (f"{TP_LB}, {QWEN3}", QWEN3_PREFILL),
    )
    entries = [Entry("stated", column, None, claim=claim) for column, claim in columns]
    for split in SPLITS:
        for skew in SKEWS:
            for clock_hz in SHOWN_CLOCKS_HZ:
                found = own.prefill[Reading(clock_hz, split, skew)]
                row = f"h = {split}, skew {skew:g}, {clock_hz / 1e9:g} GHz"
                if (split, skew, clock_hz) == (LEAST, UNIFORM, HELD_CLOCK_HZ):
                    row += ", the declared one"
                average = mean_ratios(found)
                figures = average.tp, average.tp_lb, mean_ratios(found, QWEN3).tp_lb
                entries += [Entry(row, column, ours) for (column, _), ours in zip(columns, figures, strict=True)]
    near = ", ".join(f"{one.clock_hz / 1e9:g} GHz at skew {one.skew:g}" for one in own.all_three)
    return SourceTable(
        "Fig. 10, every reading", "prefill: times faster than MoNDE", "x", "MoNDE's split, skew of the routing, clock",
        tuple(entries),
        note="h: experts that MoNDE takes to the GPU: as many as make a layer shortest, by its own factor, or none."
        " Skew s:"
        f" experts are chosen with the weight rank^-s. {len(own.all_three)} of {len(own.prefill)} readings have all"
        " three"
        f" figures within 15 %{': h = 0 with ' + near if near else ''}. Five of the eleven clocks are shown. With the"
        " fastest computing hardly binds a DIMM: with 64"
        " multipliers a DIMM and the clocks of today it does.",
    )  # fmt: skip


def fig_11(own: Computed) -> SourceTable:
    entries = []
    trace = own.recorded[4].own.mean
    near = min(UTILISATIONS, key=lambda q: abs(q - trace))
    for one in placed(N_UNITS):
        found = own.decoding.get(one)
        arms = (TP, TP_LB, f"{TP_PRE}, {100 * near:.0f} %", f"{FULL}, {100 * near:.0f} %")
        figures: tuple[float | str, ...] = (NO_ROOM,) * 4
        if found is not None:
            figures = (found.tp, found.tp_lb, found.tp_pre[near], found.full[near])
        entries += [Entry(row_of(one), arm, ours) for arm, ours in zip(arms, figures, strict=True)]
    ten = list(own.printed_decoding.values())
    row = "mean of the ten with N = 2, 4, 6"
    entries += [
        Entry(row, TP, float(np.mean([one.tp for one in ten])), claim=TP_DECODE),
        Entry(row, TP_LB, float(np.mean([one.tp_lb for one in ten])), claim=LB_DECODE),
        Entry(row, f"{TP_PRE}, {100 * near:.0f} %", own.by_utilisation[TP_PRE][near], claim=PRE_DECODE),
        Entry(row, f"{FULL}, {100 * near:.0f} %", own.by_utilisation[FULL][near], claim=FULL_DECODE),
    ]
    error = max(one.monde_s.error / one.monde_s.mean for one in own.decoding.values())
    return SourceTable(
        "Fig. 11", "experts in decoding: times faster than MoNDE", "x", "model and DIMMs", tuple(entries),
        note=f"{MODELLED} MoNDE is the mean of {N_DRAWS} tokens, ± {100 * error:.1f} % at most; of two DIMMs of all"
        " choices."
        f" Of the arms that fetch ahead, {100 * near:.0f} % of the fetched experts are used, nearest to the"
        f" {100 * trace:.0f} % of the recorded routing of gpt-oss-20b; the source's share is not known. DeepSeek-MoE's"
        " shared experts lie in the DIMMs.",
        picture="bars",
    )  # fmt: skip


def by_utilisation(own: Computed) -> SourceTable:
    entries = [
        Entry(f"{100 * q:.0f}", arm, own.by_utilisation[arm][q], claim=claim)
        for arm, claim in ((TP_PRE, PRE_DECODE), (FULL, FULL_DECODE))
        for q in UTILISATIONS
    ]
    wanted = {arm: f"{100 * q:.0f} %" if q is not None else "no share" for arm, q in own.wanted.items()}
    chance = ", ".join(f"{100 * one.chance:.0f} %" for one in MODELS.values())
    return SourceTable(
        "Fig. 11, by share used", "experts in decoding: times faster than MoNDE, mean of the ten", "x",
        "% of the fetched experts that a token uses", tuple(entries),
        note=f"{MODELLED} What the source states comes out where {wanted[TP_PRE]} ({TP_PRE}) and {wanted[FULL]}"
        f" ({FULL})"
        f" are used: about what chance gives its four models ({chance}), and less than recorded routing has (Fig. 6).",
        picture="lines",
    )  # fmt: skip


def layer_times(own: Computed) -> SourceTable:
    entries = []
    for one in placed(N_UNITS):
        for arm in ARMS:
            seconds = own.layer_seconds.get((one, arm))
            entries.append(Entry(row_of(one), arm, NO_ROOM if seconds is None else 1e6 * seconds))
    return SourceTable(
        "Fig. 11, seconds", "experts of a layer for one decoded token", "us", "model and DIMMs", tuple(entries),
        note=f"{MODELLED} {TP_PRE} and {FULL} where no fetched expert is used but shared ones. Duplex is in none of its"
        " figures: its two units share one memory, and this machine has none such.",
    )  # fmt: skip


N_RANDOM = 1000


def several_roots(n: int, seed: int = 0) -> int:
    """Of n random machines, 1 to 6 DIMMs and 1 to 8 experts of a token, how many balance at more than one E_g. T_w, T_g
    and T_n between 0.1 and 10, T_a between 0.001 and 0.1, all sizes alike."""
    random = np.random.default_rng(seed)
    found = 0
    for _ in range(n):
        fetch, gpu, ndp, activation = 10 ** random.uniform((-1, -1, -1, -3), (1, 1, 1, -1))
        times = Times(float(fetch), float(gpu), float(ndp), float(activation))
        found += bool(balanced(times, int(random.integers(1, 7)), int(random.integers(1, 9))).others)
    return found


def balances(own: Computed) -> SourceTable:
    """Eq. 1 and 3 on the sheet."""
    entries = []
    for model, asked in MODELS.items():
        shape = replace(asked.shape, n_layers=1, n_dense_layers=None, dense_width=0)
        sizes = sizes_of(shape)
        assert sizes is not None
        for n in N_UNITS:
            schedule = Schedule(SheetCosts(own.sheet, sizes), sizes, [f"ndp:{i}" for i in range(n)])
            found, row = schedule.balanced(sizes.top_k, sizes.top_k, 1), f"{model}, N = {n}"
            entries += [
                Entry(row, "E_g", found.on_gpu),
                Entry(row, "other roots", ", ".join(f"{one:.3f}" for one in found.others) or "none"),
                Entry(row, "E_max", float(schedule.most_on_gpu(sizes.top_k, sizes.top_k))),
            ]
    several = sum(entry.column == "other roots" and entry.ours != "none" for entry in entries)
    return SourceTable(
        "Eq. 1 and 3", "experts of a token on the GPU", "", "model and DIMMs", tuple(entries),
        note="E_g' of Eq. 1 falls where E_g passes a whole number, so several E_g can balance; the largest is taken."
        " On this"
        f" machine {several or 'none'} of {len(entries) // 3} have more than one; of {N_RANDOM} machines with random"
        f" times {several_roots(N_RANDOM)} have more.",
    )  # fmt: skip
