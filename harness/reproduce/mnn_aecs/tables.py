"""Tables 4 to 11 and Figures 8 to 13 of source 002 drawn again; those of the search are in `search_tables`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from devices.models.core_clusters import Selection
from harness.reproduce.mnn_aecs import arithmetic, fixed_lengths, phone_fit, search_tables
from harness.reproduce.mnn_aecs.other_models import is_anchor, parameters, predicted
from harness.reproduce.mnn_aecs.places import (
    ANDROID,
    ENGINES,
    IPHONES,
    MODELS,
    OTHERS,
    PHONES,
    Cell,
    Quantity,
    cells,
    cores_row,
)
from harness.reproduce.mnn_aecs.searches import phone_model
from harness.reproduce.printed import Span
from harness.reproduce.redrawn import Entry, SourceTable
from harness.tuning.selections import whole_cluster

UNITS: Mapping[Quantity, str] = {"speed": "token/s", "battery": "uAh a token", "energy": "mJ a token"}
TITLES: Mapping[Quantity, str] = {
    "speed": "decode speed of each model, engine and phone",
    "battery": "battery charge of a token",
    "energy": "energy of a token",
}
STARTS = "where ours starts"
TABLE_6: Mapping[str, str] = {
    "executorch": "no no yes yes no",
    "llama.cpp": "yes yes yes yes yes",
    "MediaPipe": "no no no no yes",
    "mllm": "yes oom yes oom no",
    "MNN": "yes yes yes yes yes",
}
"""By engine, in the order of MODELS."""
CELL_TEXTS = {"yes": "supported", "no": "not supported", "oom": "out of memory"}
FIG_11: Mapping[str, str] = {"iPhone 12": "002-143", "Meizu 21": "002-145"}


def redrawn() -> Iterable[SourceTable]:
    yield from _table_4()
    yield from _table_5()
    yield _table_6()
    yield from search_tables.table_7()
    yield _table_8()
    for quantity in UNITS:
        yield _cells("Table 9", ANDROID, quantity)
        if quantity != "battery":
            yield _cells("Table 10", IPHONES, quantity)
    yield from search_tables.table_11()
    yield from search_tables.figures_5_and_6()
    yield from _figure_8()
    yield from _figures_9_and_10()
    yield from _figure_11()
    yield from _figure_12()
    yield from _figure_13()
    yield from search_tables.under_noise()


# --- Tables 4, 5, 6 and 8 ---------------------------------------------------------------------------------------------


def _table_4() -> Iterable[SourceTable]:
    """Energy from power and speed; speed and power of the fitted model, which knows Table 9 and not Table 4."""
    rows = {"llama.cpp": ("040", "041", "042"), "MNN": ("046", "047", "048"), "MNN-AECS": ("052", "053", "054")}
    energies = [
        Entry(name, "energy", 1e3 * arithmetic.figure(power) / arithmetic.figure(speed), claim=f"002-{energy}")
        for name, (speed, power, energy) in rows.items()
    ]
    yield SourceTable(
        "Table 4",
        "energy of a token on the Mate 40 Pro",
        "mJ a token",
        "engine",
        tuple(energies),
        note="ours: the table's own power over its own speed",
        picture="bars",
    )
    model = phone_model("Mate 40 Pro")
    seen: dict[str, Selection] = {
        "llama.cpp": whole_cluster(model.clusters),
        "MNN": phone_fit.mnn_selection(model),
        "MNN-AECS": phone_fit.tuned_selection("Mate 40 Pro", model),
    }
    entries = [
        Entry(name, "power", model.power(selection), claim=f"002-{rows[name][1]}") for name, selection in seen.items()
    ]
    yield SourceTable(
        "Table 4, power",
        "power while decoding on the Mate 40 Pro",
        "W",
        "engine",
        tuple(entries),
        note="ours: the sheet's model, fitted on MNN and MNN-AECS of Table 9 (8.1 and 6.1 W there), not on llama.cpp",
        picture="bars",
    )


def _table_5() -> Iterable[SourceTable]:
    model = phone_model("iPhone 12")
    rows = {"llama.cpp": ("061", "062", 2), "MNN": ("065", "066", 4), "MNN-AECS": ("069", "070", 1)}
    speeds, powers, relative = [], [], []
    base, base_row = model.power((4,)), "066"
    for name, (speed, power, threads) in rows.items():
        own = name != "llama.cpp"
        note = "" if own else "another engine: the model of speed is MNN's"
        speeds.append(
            Entry(name, "speed", model.tokens_per_s((threads,)) if own else None, claim=f"002-{speed}", note=note)
        )
        powers.append(Entry(name, "power", None, claim=f"002-{power}", note="no unit, so that only ratios compare"))
        theirs = arithmetic.figure(power) / arithmetic.figure(base_row)
        note = {"MNN": "1 by definition", "llama.cpp": "MNN's model at two threads; llama.cpp draws more"}.get(name, "")
        relative.append(Entry(name, "power, MNN = 1", model.power((threads,)) / base, theirs, note=note))
    told = "ours: the sheet's model at 2, 4 and 1 threads, fitted on MNN and MNN-AECS of Table 10"
    yield SourceTable(
        "Table 5", "decode speed on the iPhone 12", "token/s", "engine", tuple(speeds), note=told, picture="bars"
    )
    yield SourceTable(
        "Table 5, power",
        "power while decoding on the iPhone 12, as printed",
        "of a gauge without unit",
        "engine",
        tuple(powers),
        note="theirs as printed. The gauge has no unit, so that ours stands in the ratios below alone",
    )
    yield SourceTable(
        "Table 5, power over MNN's",
        "power while decoding on the iPhone 12 over MNN's",
        "of MNN's",
        "engine",
        tuple(relative),
        note=f"{told}; theirs: each printed power over MNN's",
        picture="bars",
    )


def _table_6() -> SourceTable:
    """Theirs as printed; ours counts the phones for which Table 9 has the model on that engine."""
    entries = []
    for engine, texts in TABLE_6.items():
        for model, text in zip(MODELS, texts.split(), strict=True):
            n = sum(Cell(phone, engine, model, "energy") in cells() for phone in ANDROID)
            ours = f"figures on {n} of {len(ANDROID)} phones" if n else "no figures"
            note = ""
            if text == "yes" and not n:
                note = "said to be supported, and Table 9 has it nowhere"
            elif text == "oom":
                gb = 0.5e-9 * parameters(model)
                note = f"4-bit weights are {gb:.1f} GB of at least 8; what else the engine keeps is not stated"
            entries.append(Entry(engine, model, ours, CELL_TEXTS[text], note=note))
    return SourceTable(
        "Table 6",
        "which engine runs which model on Android",
        "result",
        "engine",
        tuple(entries),
        note="theirs: the table. Ours: on how many phones Table 9 has figures. Neither is a measurement of ours",
    )


def _table_8() -> SourceTable:
    entries = []
    for engine in ENGINES:
        for phone in PHONES:
            ours: float | None = None
            if engine == "MNN-AECS":
                ours = float(sum(search_tables.chosen_selection(phone)))
            note = "" if ours is not None else "a setting of that engine"
            entries.append(Entry(engine, phone, ours, claim=cores_row(engine, phone), note=note))
    return SourceTable(
        "Table 8",
        "cores or threads while decoding",
        "cores",
        "engine",
        tuple(entries),
        note="ours: how many cores the search takes on the modelled phone, as in our Table 7. Rows 002-117 to 002-123"
        " stand under another condition: they count the cores that the source's own Table 7 names",
    )


# --- Tables 9 and 10 --------------------------------------------------------------------------------------------------


def _cells(name: str, phones: Iterable[str], quantity: Quantity) -> SourceTable:
    entries = []
    for phone in phones:
        for engine in ENGINES:
            if not any(Cell(phone, engine, model, "energy") in cells() for model in MODELS):
                continue
            for model in MODELS if phone in ANDROID else MODELS[::2][:2]:
                entries.append(_cell(Cell(phone, engine, model, quantity)))
    unit = UNITS[quantity] if name == "Table 9" or quantity == "speed" else "of a gauge without unit"
    ours = {
        "battery": "ours: the table's energy over 3.6 J a mAh and volt, at the voltage of Table 1",
        "speed": "ours: one model of each engine and phone, over the ratio of parameters (llama.cpp: of times)",
        "energy": "ours: one model of each engine and phone, times the ratio of parameters (llama.cpp: of times)",
    }[quantity]
    return SourceTable(
        f"{name}, {quantity}",
        TITLES[quantity],
        unit,
        "phone and engine",
        tuple(entries),
        note=f"{ours}; N.S. and oom: the engine does not run that model, or ran out of memory (Table 6)",
    )


def _cell(place: Cell) -> Entry:
    row, claim = f"{place.phone}, {place.engine}", cells().get(place)
    if claim is None:
        return _without_figure(row, place)
    if place.quantity == "battery":
        energy = arithmetic.cell(place.phone, place.engine, place.model, "energy")
        assert energy is not None
        return Entry(row, place.model, energy / (arithmetic.J_PER_MAH_V * arithmetic.volts(place.phone)), claim=claim)
    if is_anchor(place):
        return Entry(row, place.model, None, claim=claim, note=STARTS)
    return Entry(row, place.model, predicted(*place), claim=claim)


def _without_figure(row: str, place: Cell) -> Entry:
    """What Table 6 says of a cell that Tables 9 and 10 leave empty."""
    said = TABLE_6.get(place.engine, "").split()[MODELS.index(place.model)]
    if said == "yes":
        return Entry(row, place.model, None, "-", note="no figure, though Table 6 has it as supported")
    return Entry(row, place.model, None, {"no": "N.S.", "oom": "oom"}[said], note=CELL_TEXTS[said])


# --- Figures 8 to 13 --------------------------------------------------------------------------------------------------


def _figure_8() -> Iterable[SourceTable]:
    lengths = [f"prompt {p}" for p in fixed_lengths.PROMPTS] + [f"decode {d}" for d in fixed_lengths.DECODES]
    by_claim = {finding.claim: finding.ours for finding in fixed_lengths.findings()}
    for first, name, what in ((125, "Fig. 8a", "energy reduction"), (131, "Fig. 8b", "decode speedup")):
        entries = []
        for n, length in enumerate(lengths):
            ours = by_claim[f"002-{first + n}"]
            assert isinstance(ours, Span)
            entries.append(Entry(length, what, ours, claim=f"002-{first + n}"))
        yield SourceTable(
            name,
            f"{what} by MNN-AECS over executorch, llama.cpp and mllm at fixed lengths",
            "%",
            "tokens",
            tuple(entries),
            note="ours: least and most of the three engines, from one row of each engine and phone and prefill at three"
            " times the speed; the order is tested, not the size",
            picture="bars",
        )


def _figures_9_and_10() -> Iterable[SourceTable]:
    reductions = [
        Entry(
            str(prompt), phone, 100.0 * fixed_lengths.energy_reduction("MNN", [prompt], fixed_lengths.DECODES, [phone])
        )
        for prompt in fixed_lengths.PROMPTS
        for phone in PHONES
    ]
    note = "the text alone states figures: 18 to 42 % on six phones, 10 % on the Meizu 21, less with longer prompts"
    yield SourceTable(
        "Fig. 9",
        "energy saved by MNN-AECS over MNN by prompt length",
        "%",
        "prompt tokens",
        tuple(reductions),
        note=note,
        picture="lines",
    )
    speedups = [Entry(phone, "speedup", 100.0 * fixed_lengths.speedup("MNN", [phone])) for phone in PHONES]
    yield SourceTable(
        "Fig. 10",
        "decode speed of MNN-AECS over MNN",
        "%",
        "phone",
        tuple(speedups),
        note="at any length; the text states -6 % for the V30 Pro and 0 to 20 % for the others",
        picture="bars",
    )


def _figure_11() -> Iterable[SourceTable]:
    energies = [Entry(p, "energy saved", arithmetic.reduction("MNN", [p]), claim=FIG_11.get(p, "")) for p in PHONES]
    speeds = [Entry(p, "speedup", arithmetic.speedup("MNN", [p])) for p in PHONES]
    note = "ours: geometric means of Tables 9 and 10"
    yield SourceTable(
        "Fig. 11a",
        "energy saved by MNN-AECS over MNN on the data sets",
        "%",
        "phone",
        tuple(energies),
        note=f"{note}; the text has about 20 % for the five others",
        picture="bars",
    )
    yield SourceTable(
        "Fig. 11b",
        "decode speed of MNN-AECS over MNN on the data sets",
        "%",
        "phone",
        tuple(speeds),
        note=f"{note}; the text has -1 and -7 % for the first two, 1 to 20 % for the others",
        picture="bars",
    )


def _figure_12() -> Iterable[SourceTable]:
    for name, what, of in (
        ("Fig. 12a", "energy saved", arithmetic.reduction),
        ("Fig. 12b", "decode speedup", arithmetic.speedup),
    ):
        entries = [
            Entry(phone, engine, of(engine, [phone]))
            for phone in PHONES
            for engine in OTHERS
            if arithmetic.ratios(engine, "energy", [phone])
        ]
        stated = "26 to 92 %" if what == "energy saved" else "12 to 363 %"
        yield SourceTable(
            name,
            f"{what} by MNN-AECS over other engines",
            "%",
            "phone",
            tuple(entries),
            note=f"ours: geometric means of Tables 9 and 10; the text states {stated}, which they contradict",
            picture="bars",
        )


def _figure_13() -> Iterable[SourceTable]:
    drawn: dict[Quantity, tuple[str, str]] = {
        "energy": ("Fig. 13a", "energy by model"),
        "speed": ("Fig. 13b", "decode speed by model"),
    }
    for quantity, (name, title) in drawn.items():
        entries = []
        for model in MODELS:
            pairs = [
                (ours, other)
                for phone in PHONES
                if (ours := arithmetic.cell(phone, "MNN-AECS", model, quantity)) is not None
                and (other := arithmetic.cell(phone, "MNN", model, quantity)) is not None
            ]
            mean = statistics.geometric_mean(ours / other for ours, other in pairs)
            entries.append(Entry(model, "MNN-AECS over MNN", mean))
        note = "ours: geometric means over the phones of Tables 9 and 10; the figure prints no numbers"
        yield SourceTable(name, title, "of MNN's", "model", tuple(entries), note=note, picture="bars")
