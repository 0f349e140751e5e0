"""NPUMoE's Fig. 7 and Fig. 13 to 19, and the whole grid of its settings, theirs and ours.

The source draws bars and curves; the numbers that its text gives of them stand beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.reproduce.npumoe import explained, grid, machine, overlap, second_reading
from harness.reproduce.npumoe.arithmetic import STATED_TTFT_GAINS
from harness.reproduce.npumoe.grid import ABLATIONS, BASELINES, CHUNKS, OURS, PROMPTS, STATED, WORDS
from harness.reproduce.npumoe.places import claim
from harness.reproduce.npumoe.sizes import MODELS
from harness.reproduce.redrawn import Entry, SourceTable

PRICED = f"Phi-3.5-MoE on sheet m2-ultra; routing {grid.ROUTING.name}."
WHOLE = (*BASELINES, *ABLATIONS)
CAPACITIES, GROUPS = (32, 64, 128), (4, 8)


def figures() -> Iterator[SourceTable]:
    yield _products()
    yield from _trade_off()
    yield from _latency()
    yield _operations()
    yield _routing()
    yield from _energy()
    yield from _cycles()
    yield from _ablation()
    yield _overlap()
    yield from _tiny()
    yield from _gpu()
    yield from _end_to_end()
    yield second_reading.table()
    yield from _grid()
    yield from _capacities()


def at_words(at: tuple[int, int]) -> str:
    return f"{at[0]}/{at[1]}"


def _products() -> SourceTable:
    found = tuple(
        Entry(str(rows), "time on the CPU over the NPU", machine.cpu_over_npu(rows), "1.4 to 2.3")
        for rows in machine.FIG_7_ROWS
    )
    trend = machine.FIG_7_TREND[0].upper() + machine.FIG_7_TREND[1:]
    note = f"M rows times 4096 x 6400 on sheet m2-ultra. The source gives the range, and not the shapes. {trend}."
    return SourceTable("Fig. 7", "gain of the NPU for one product", "x", "M", found, note)


def _trade_off() -> Iterator[SourceTable]:
    """A point an arm, as there: to the left and below is better. A picture for each setting."""
    note = f"{PRICED} The source prints no number of its points; NPUMoE has the least of both here, as there."
    for at in STATED:
        found = tuple(
            Entry(WORDS[arm], column, of(arm, *at))
            for arm in (*BASELINES, OURS)
            for column, of in (("TTFT, s", grid.ttft_s), ("energy a token, mJ", grid.mj_per_token))
        )
        title = f"latency against energy at {at_words(at)}"
        yield SourceTable("Fig. 13", title, "s; mJ a token", "arm", found, note, "dots")


def _latency() -> Iterator[SourceTable]:
    found = []
    for at in STATED:
        for arm in (*BASELINES, OURS):
            phase = grid.prefill(arm, *at)
            parts = {name: grid.seconds_of(phase, operation) for name, operation in PARTS.items()}
            parts["everything else"] = phase.seconds - sum(parts.values())
            found += [Entry(f"{at_words(at)} {WORDS[arm]}", name, value) for name, value in parts.items()]
    note = f"{PRICED} The source draws these as bars, without numbers."
    yield SourceTable("Fig. 14", "TTFT by part", "s", "prompt/chunk and arm", tuple(found), note, "bars")
    gains = tuple(
        Entry(at_words(at), WORDS[arm], grid.ttft_gain(arm, *at), claim=id_)
        for at, ids in STATED_TTFT_GAINS.items()
        for arm, id_ in zip(BASELINES, ids, strict=True)
    )
    yield SourceTable(
        "Fig. 14", "TTFT of the baselines over NPUMoE's", "x", "prompt/chunk", gains,
        f"{PRICED} {explained.BEYOND.replace('here', 'at chunk 1024')}", "bars",
    )  # fmt: skip
    shares = tuple(
        Entry(at_words(at), WORDS[arm], grid.expert_share(arm, *at), claim=claim(54))
        for at in STATED
        for arm in (*BASELINES, OURS)
    )
    yield SourceTable("Fig. 14", "share of the experts in TTFT", "%", "prompt/chunk", shares, PRICED)


PARTS = {"attention": "attention", "experts": "expert FFN"}


def _operations() -> SourceTable:
    at = (1024, 256)
    found = []
    for arm in WHOLE:
        phase = grid.prefill(arm, *at)
        names = dict.fromkeys(name for name, _ in grid.prefill(OURS, *at).spent)
        found += [Entry(name, WORDS[arm], grid.seconds_of(phase, name)) for name in names]
    note = f"The whole prefill at 1024/256. {PRICED} Table 4 has the source's figures of one layer's MoE block."
    return SourceTable("Fig. 14", "TTFT by operation", "s", "operation", tuple(found), note)


def _routing() -> SourceTable:
    """What hangs on the routing that the source does not publish."""
    found = []
    for imbalance in grid.IMBALANCES:
        ours, naive = (grid.of_imbalance(arm, 1024, 256, imbalance) for arm in (OURS, "coreml-naive"))
        row = f"{imbalance:g}"
        found += [
            Entry(row, "dropped, %", grid.dropped_percent(ours), claim=claim(109)),
            Entry(row, "padded, %", grid.padded_percent(ours), claim=claim(110)),
            Entry(row, "TTFT, Core ML naive over NPUMoE", naive.seconds / ours.seconds, claim=claim(42)),
            Entry(row, "TTFT of NPUMoE, s", ours.seconds),
        ]
    note = (
        "Phi-3.5-MoE at 1024/256 on sheet m2-ultra. A quarter of the experts is so many times as busy as the mean. All"
        " other tables have 2, the example of §4.1; above 2.5 the others fall into the smallest tier. Core ML CPU"
        " and ANEMLL do not change: every expert has tokens in every chunk."
    )
    return SourceTable("Routing", "what hangs on the imbalance", "as the column says", "imbalance", tuple(found), note)


def _energy() -> Iterator[SourceTable]:
    entries = tuple(
        Entry(at_words(at), WORDS[arm], grid.mj_per_token(arm, *at), claim=claim(72) if arm == OURS else "")
        for at in STATED
        for arm in (*BASELINES, OURS)
    )
    yield SourceTable(
        "Fig. 15", "energy of the prefill a token", "mJ", "prompt/chunk", entries,
        f"{PRICED} The source gives one range for NPUMoE in all settings.", "bars",
    )  # fmt: skip
    stated = {
        (1024, 256): (222, 222, 222),
        (1024, 512): (67, 66, 68),
        (4096, 512): (70, 69, 71),
        (4096, 1024): (70, 69, 71),
    }
    gains = tuple(
        Entry(at_words(at), WORDS[arm], grid.energy_gain(arm, *at), claim=claim(number))
        for at, numbers in stated.items()
        for arm, number in zip(BASELINES, numbers, strict=True)
    )
    note = (
        f"{PRICED} A naive launch draws what a waiting NPU and communication draw, under 3 W; nobody says who works"
        " then. At 1024/256 the source has one range for all three, at 4096 one for both chunks."
    )
    yield SourceTable("Fig. 15", "energy of the baselines over NPUMoE's", "x", "prompt/chunk", gains, note, "bars")
    found = tuple(
        Entry(
            at_words(at), WORDS["coreml-naive"], grid.comm_j("coreml-naive", *at) / grid.comm_j(OURS, *at),
            claim=claim(73),
        )
        for at in STATED
    )  # fmt: skip
    yield SourceTable("Fig. 15", "energy of communication over NPUMoE's", "x", "prompt/chunk", found, PRICED)


def _cycles() -> Iterator[SourceTable]:
    ids = {(1024, 256): (77, 78, 79), (1024, 512): (80, 81, 82)}
    note = "The source states no clock, and no cycles of an operation, a launch or a wait."
    found = tuple(
        Entry(at_words(at), WORDS[arm], None, claim=claim(number), note="not predictable")
        for at, numbers in ids.items()
        for arm, number in zip(BASELINES, numbers, strict=True)
    )
    yield SourceTable("Fig. 16", "CPU cycles of the baselines over NPUMoE's", "x", "prompt/chunk", found, note)
    busy = tuple(
        Entry(at_words(at), WORDS[arm], grid.cpu_busy_s(arm, *at)) for at in STATED for arm in (*BASELINES, OURS)
    )
    note = f"{PRICED} Seconds in which the CPU works, without what it spends waiting: these are no cycles."
    yield SourceTable("Fig. 16", "busy time of the CPU", "s", "prompt/chunk", busy, note)


def _ablation() -> Iterator[SourceTable]:
    at, wide = (1024, 256), "base, 256 rows"
    whole, tg = grid.prefill(OURS, *at), grid.prefill("npumoe-tg", *at)
    found = {WORDS[arm]: grid.prefill(arm, *at) for arm in ABLATIONS}
    found[wide] = grid.prefill("npumoe-base", *at, given=explained.WIDE)
    latency = {WORDS["npumoe-base"]: 214, wide: 214, WORDS["npumoe-tg"]: 215}
    energy = {WORDS["npumoe-base"]: 217, wide: 217, WORDS["npumoe-t"]: 218}
    note = (
        f"At 1024/256. {PRICED} The source does not say which fixed shape base has: 64 rows an expert here, twice the"
        " mean load, or 256, which none overflows. Residency moves no graph to the CPU."
    )
    for title, reference, of, ids in (
        ("time over NPUMoE's", whole, grid.seconds_whole, latency),
        ("energy over TG's", tg, grid.joules_of, energy),
    ):
        entries = tuple(
            Entry(name, title, of(phase) / of(reference), claim=claim(ids[name]) if name in ids else "")
            for name, phase in found.items()
        )
        yield SourceTable("Fig. 17", f"the techniques one by one: {title}", "x", "arm", entries, note, "bars")
    absolute = tuple(
        Entry(name, words, value)
        for name, phase in found.items()
        for words, value in (("TTFT, s", phase.seconds), ("energy, J", grid.joules_of(phase)))
    )
    yield SourceTable("Fig. 17", "the techniques one by one", "s, J", "arm", absolute, note)


def _overlap() -> SourceTable:
    trace, counts = overlap.data_file(overlap.TRACE), overlap.data_file(overlap.COUNTS)
    unseen = None if trace is None else overlap.recorded(trace)
    across = {} if counts is None else overlap.across_texts(counts)
    absent = "" if trace and counts else "no recorded routing is there; set JOULEBENCH_DATA to a data folder"
    found = [
        Entry(f"unseen prompts, K = {k}", overlap.MODEL, unseen and unseen.overlap[k], claim=claim(id_), note=absent)
        for k, id_ in ((4, 227), (8, 228))
    ]
    found += [
        Entry(f"other texts, prefill, K = {k}", overlap.COUNTED, across.get(k), claim=claim(229), note=absent)
        for k in overlap.KS
    ]
    not_apart = "its counts do not tell prefill and decoding apart"
    found.append(Entry("other texts, decode", overlap.COUNTED, None, claim=claim(230), note=not_apart))
    told = ""
    if unseen is not None:
        least, most = unseen.imbalance
        told = f" Its busiest experts have {least:.1f} to {most:.1f} times the mean load."
    note = (
        f"Ours are of other models: nothing of Phi-3.5-MoE follows from them. {overlap.MODEL}: decoding, 32 experts,"
        f" top-4; every other sequence is calibration; mean over layers.{told} {overlap.COUNTED}: 64 experts, top-8,"
        " six kinds of text; mean over pairs and three layers. The source does not give the K of other texts."
    )
    return SourceTable("Fig. 18", "experts that calibration knew", "%", "of what", tuple(found), note)


def _tiny() -> Iterator[SourceTable]:
    note = (
        "Phi-tiny-MoE on sheet m2-max, where every price is assumed: half an M2 Ultra. The source gives one range for"
        " all baselines, and no prompt and chunk. Nobody says whether Core ML naive sends experts so small to the NPU."
    )
    for title, of, id_ in (("TTFT", grid.seconds_whole, 59), ("energy", grid.joules_of, 61)):
        entries = tuple(
            Entry(
                at_words(at), WORDS[arm],
                of(grid.prefill(arm, *at, grid.TINY, grid.MAX)) / of(grid.prefill(OURS, *at, grid.TINY, grid.MAX)),
                claim=claim(id_),
            )
            for at in STATED
            for arm in BASELINES
        )  # fmt: skip
        yield SourceTable(
            "Fig. 19", f"{title} of the baselines over NPUMoE's", "x", "prompt/chunk", entries, note, "bars"
        )


def _gpu() -> Iterator[SourceTable]:
    gpu, npu = (machine.attention(unit) for unit in ("gpu", "npu"))
    at = (1024, 256)
    theirs, ours = grid.prefill("gpu", *at), grid.prefill(OURS, *at)
    rows = (
        ("kernel of Table 8", npu.seconds / gpu.seconds, gpu.joules / npu.joules),
        ("prefill at 1024/256", ours.seconds / theirs.seconds, grid.joules_of(theirs) / grid.joules_of(ours)),
    )
    found = tuple(
        entry
        for name, time, energy in rows
        for entry in (
            Entry(name, "time, NPU over GPU", time, claim=claim(231)),
            Entry(name, "energy, GPU over NPU", energy, claim=claim(232)),
        )
    )
    note = (
        "Ratios only: the GPU's sheet has the FLOP price of one kernel, and no price of a launch or of weights, so that"
        " a prefill on it is too fast. The source's ranges are from Table 8's kernel to Table 9's block."
    )
    yield SourceTable("§5.8", "GPU against NPU", "x", "what", found, note)


def _end_to_end() -> Iterator[SourceTable]:
    tokens = f"a prompt and {grid.DECODED} tokens"
    entries = tuple(
        Entry(at_words(at), WORDS[arm], grid.end_to_end_gain(arm, *at), claim=claim(number))
        for at in STATED
        for arm, number in (("coreml-cpu", 57), ("coreml-naive", 56), ("anemll", 58))
    )
    note = f"{PRICED} The source gives the largest gain over its data sets, whose prompts have other lengths."
    yield SourceTable("§5.3", f"{tokens}: time over NPUMoE's", "x", "prompt/chunk", entries, note)
    joules = tuple(
        Entry(at_words(at), WORDS[arm], grid.end_to_end_energy_gain(arm, *at), claim=claim(number))
        for at in STATED
        for arm, number in (("coreml-cpu", 75), ("coreml-naive", 74), ("anemll", 76))
    )
    yield SourceTable("§5.4", f"{tokens}: energy over NPUMoE's", "x", "prompt/chunk", joules, note)
    same = "NPUMoE, prefill's graphs"
    steps = [Entry(at_words(at), WORDS[arm], grid.priced(arm, *at).tpot_s) for at in STATED for arm in WHOLE]
    steps += [Entry(at_words(at), same, grid.priced(OURS, *at, given=explained.SAME_GRAPHS).tpot_s) for at in STATED]
    note = (
        f"{PRICED} The source prints no time of decoding. Ours decode through graphs of 32 rows, or those of prefill."
    )
    yield SourceTable("Decode", "time of a token (TPOT)", "s", "prompt/chunk", tuple(steps), note)
    shares = tuple(
        Entry(at_words(at), WORDS[arm], grid.prefill_share(arm, *at), claim=claim(11))
        for at in STATED
        for arm in (*BASELINES, OURS)
    )
    note = f"{PRICED} The source does not say of which arm and prompt its share is."
    yield SourceTable("Fig. 2", f"share of the prefill in {tokens}", "%", "prompt/chunk", shares, note)


def _grid() -> Iterator[SourceTable]:
    """Every setting of §5.1, of the three models."""
    settings = [(model, (prompt, chunk)) for model in MODELS for prompt in PROMPTS for chunk in CHUNKS]
    cells = {
        (f"{model} {at_words(at)}", arm): grid.prefill_only(arm, *at, model) for model, at in settings for arm in WHOLE
    }
    prompts = {f"{model} {at_words(at)}": at[0] for model, at in settings}
    note = (
        f"Four ablations and three baselines on sheet m2-ultra; routing {grid.ROUTING.name}. The sheet's prices are of"
        " Phi-3.5-MoE: smaller experts and chunk 1024 lie outside their fit."
    )
    ttft = tuple(Entry(row, WORDS[arm], phase.seconds) for (row, arm), phase in cells.items())
    yield SourceTable("Grid of §5.1", "TTFT", "s", "model, prompt/chunk", ttft, note)
    energy = tuple(
        Entry(row, WORDS[arm], grid.joules_of(phase) / prompts[row] * 1e3) for (row, arm), phase in cells.items()
    )
    yield SourceTable("Grid of §5.1", "energy a token", "mJ", "model, prompt/chunk", energy, note)
    ratios = []
    for model, at in settings:
        row, gpu = f"{model} {at_words(at)}", grid.prefill_only("gpu", *at, model)
        ours = cells[row, OURS]
        ratios.append(Entry(row, "TTFT", gpu.seconds / ours.seconds))
        ratios.append(Entry(row, "energy", grid.joules_of(gpu) / grid.joules_of(ours)))
    note = (
        "The fourth baseline in ratios only, as in §5.8: its prefill is too fast, as no price of a launch or of weights"
        " is known."
    )
    yield SourceTable("Grid of §5.1", "the GPU's over NPUMoE's", "x", "model, prompt/chunk", tuple(ratios), note)


def _capacities() -> Iterator[SourceTable]:
    """Rows an expert and group sizes of §5.1."""
    cells = {
        (f"{model} {at_words((prompt, chunk))}", f"{group}x{capacity}"): grid.in_groups(
            prompt, chunk, model, group, capacity
        )
        for model in MODELS
        for prompt in PROMPTS
        for chunk in CHUNKS
        for group in GROUPS
        for capacity in CAPACITIES
    }
    note = (
        "TG with G experts a graph, whose tiers are 2C, C and C/2 rows, at most the chunk; others as in the grid"
        " before. The source tries these C and G and prints no number of them. An expert whose load no"
        " tier holds has the largest."
    )
    for title, unit, of in (
        ("TTFT by group size and capacity", "s", grid.seconds_whole),
        ("dropped tokens", "%", grid.dropped_percent),
        ("padded tokens", "%", grid.padded_percent),
    ):
        entries = tuple(Entry(row, column, of(phase)) for (row, column), phase in cells.items())
        yield SourceTable("Grid of §5.1", title, unit, "model, prompt/chunk", entries, note)
