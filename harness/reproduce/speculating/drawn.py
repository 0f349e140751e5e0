"""The tables and figures of 003 drawn again. Its curves and bars have no numbers but those that its text states."""

from __future__ import annotations

from collections.abc import Iterator

from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.ledger import Ledger, ledger
from harness.reproduce.printed import Span
from harness.reproduce.redrawn import Entry, SourceTable
from harness.reproduce.speculating import trends
from harness.reproduce.speculating.accuracy import Accuracy, accuracies, arm_of_average, averages
from harness.reproduce.speculating.estimators import fitting, millions
from harness.reproduce.speculating.found import (
    COMPUTE_SHARE,
    COPY_SHARE,
    ESTIMATORS,
    GAIN,
    TABLE_2,
    TABLE_3,
    TABLE_3_COLUMNS,
    machine_of,
    published,
)
from harness.reproduce.speculating.tpot import (
    EVALUATED,
    LENGTHS,
    MODELS,
    QWEN3,
    Compared,
    Run,
    beyond_context,
    compared,
    evaluated,
    expert_bytes_a_token,
)  # fmt: skip
from harness.reproduce.speculating.trends import ESTIMATOR, Q, S
from results.units import GIB

MODELLED = (
    "Priced on the sheets of Table 3's machines, whose rates are peaks: nothing was compared with them, launches cost"
    f" nothing, and so nothing idles. {beyond_context()}."
)
BUNDLED = (
    "The bundled model (four layers, 16 experts, top 2) on prompts that were held out: a trend, and no reproduction."
)


def tables() -> list[SourceTable]:
    book = ledger()
    return [
        *table_1(book), table_2(), table_3(), bytes_a_token(), *fig_3_and_4(), fig_5(), fig_7(), *fig_8(),
        all_machines(), *fig_9_and_10(), estimator_sizes(book),
    ]  # fmt: skip


# --- Table 1 ---------------------------------------------------------------------------------------------------------


def table_1(book: Ledger) -> Iterator[SourceTable]:
    rows = accuracies(book)
    means = averages(book)
    stated = [Entry(row.arm, row.task, None, claim=row.claim) for row in rows]
    for claim, mean in means.items():
        arm = arm_of_average(book.claims[claim])
        assert arm is not None  # averages has no other
        stated.append(Entry(arm, "average", mean, claim=claim))
    yield SourceTable(
        "Table 1", "accuracy of answers on predicted experts", "", "arm", tuple(stated),
        note="Accuracies need the checkpoints, so ours are the averages of its six alone. What predicted experts do"
        " to the bundled model's answers stands in prediction-accuracy, a page of joulebench's source: they fall with"
        " recall as here.",
    )  # fmt: skip
    n_match = sum(row.is_as_read for row in rows)
    n_unbiased = sum(row.is_unbiased for row in rows)
    yield SourceTable(
        "Table 1, ±", "standard errors: as read off the scan, and sqrt(p (1 - p) / n)", "", "arm",
        tuple(_error(row) for row in rows),
        note=f"{n_match} of {len(rows)} come out in their last digit, and {n_unbiased} with n - 1 in the place of n."
        " The"
        " others are where the scan is not legible. p is the share of right answers that rounds to what is printed.",
    )  # fmt: skip
    yield SourceTable(
        "Table 1, answers", "right answers that give what is printed", "", "arm",
        tuple(Entry(row.arm, row.task, "none" if row.n_right is None else f"{row.n_right} of {row.n}") for row in rows),
        note="An accuracy is a whole number of n answers: every one printed is.",
    )  # fmt: skip


def _error(row: Accuracy) -> Entry:
    note = "" if row.is_as_read else f"read as {row.read} where the scan is not legible; the formula gives {row.error}"
    return Entry(row.arm, row.task, row.standard_error, float(row.read), note=note)


# --- sizes -----------------------------------------------------------------------------------------------------------


def table_2() -> SourceTable:
    columns = ("L", "E", "H", "H_MoE", "experts, GiB", "others, GiB")
    entries = []
    for model, first in TABLE_2.items():
        shape, as_run = published(model), MODELS[model]
        ours = (
            float(shape.n_layers), float(shape.n_experts), float(shape.hidden), float(shape.expert_width),
            as_run.routed_bytes / GIB, as_run.others_bytes / GIB,
        )  # fmt: skip
        for number, (column, value) in enumerate(zip(columns, ours, strict=True), first):
            entries.append(Entry(model, column, value, claim=f"003-{number:03}"))
    return SourceTable(
        "Table 2", "models and their memory in bf16", "", "model", tuple(entries),
        note="From the published configurations; printed as GB, and in GiB throughout. GPT-OSS-120B stands there with"
        " the"
        " shape of the 20B (which has 35.6 GiB of experts), Qwen3-235B-A22B with about its size in 8 bits.",
    )  # fmt: skip


def table_3() -> SourceTable:
    """Theirs as printed, in one text a machine; ours the sheets that its times are priced on."""
    book, entries = ledger(), []
    for machine, number in TABLE_3.items():
        claim = f"003-{number:03}"
        printed = str(book.claims[claim].printed).split("/")
        gpu_gib, host_gib, link_gb_per_s = machine_of(machine)
        ours = (f"{gpu_gib} GiB", f"{host_gib} GiB", f"{link_gb_per_s:g} GB/s each way, the peak")
        for column, own, theirs in zip(TABLE_3_COLUMNS, ours, printed, strict=True):
            entries.append(Entry(machine.upper(), column, own, theirs))
    return SourceTable(
        "Table 3", "machines", "", "machine", tuple(entries),
        note="Ours are the sheets on which its times are priced: settings that are taken over, and nothing that is"
        " found. The source prints no rate of a link.",
    )  # fmt: skip


def bytes_a_token() -> SourceTable:
    return SourceTable(
        "§5.1, bytes", "experts that are copied for a token", "GB", "model",
        tuple(Entry(model, "bf16", expert_bytes_a_token(shape) / 1e9) for model, shape in MODELS.items()),
        note="Layers x K x 3 x H x H_MoE x 2 bytes.", picture="bars",
    )  # fmt: skip


def estimator_sizes(book: Ledger) -> SourceTable:
    entries = []
    for name, number in ESTIMATORS.items():
        claim, shape = f"003-{number:03}", NAMED_SHAPES[name]
        pairs = fitting(shape, book.calibration(claim))
        entries.append(Entry(name, "parameters, 1e6", millions(shape, pairs[0]), claim=claim))
        told = ", ".join(f"({pair.width}, {pair.expansion})" for pair in pairs)
        entries.append(Entry(name, "widths and expansions of that size", told))
    return SourceTable(
        "Fig. 11", "estimators", "", "model", tuple(entries),
        note="Its widths are not stated: each size fits several, so that it comes out is no prediction.",
    )  # fmt: skip


# --- predictors ------------------------------------------------------------------------------------------------------


def fig_3_and_4() -> Iterator[SourceTable]:
    cosines, recalls = [], []
    for told, predictor in (("q", Q), ("s", S)):
        for one in trends.held_out(predictor):
            cosines.append(Entry(str(one.layer), told, one.cosine))
            recalls.append(Entry(str(one.layer), told, 100 * one.recall))
    yield SourceTable(
        "Fig. 3", "cosine of q and of s with the next router's input", "", "layer", tuple(cosines),
        note=BUNDLED, picture="lines",
    )  # fmt: skip
    yield SourceTable(
        "Fig. 4", "recall@k, from q and from s", "%", "layer", tuple(recalls), note=BUNDLED, picture="lines"
    )


def fig_5() -> SourceTable:
    entries = [
        Entry(f"rank {rank}", f"layer {one.layer}", 100 * share)
        for one in trends.held_out(Q)
        for rank, share in enumerate(one.rank_alignment, 1)
    ]
    return SourceTable(
        "Fig. 5", "tokens whose predicted expert of a rank is the router's", "%", "rank by weight", tuple(entries),
        note=BUNDLED,
    )  # fmt: skip


def fig_9_and_10() -> Iterator[SourceTable]:
    origin = trends.predictions().estimator
    learnt = (
        "" if origin is None else f" It learnt from {origin.n_tokens:,} tokens, {origin.n_parameters:,} parameters."
    )
    entries = []
    for told, predictor in (("estimator", ESTIMATOR), ("router, q", Q)):
        for one in trends.held_out(predictor):
            entries.append(Entry(str(one.layer), told, 100 * one.recall))
    yield SourceTable(
        "Fig. 9", "hit rate of the estimator, mean of all layers", "%", "model",
        (
            Entry("bundled model", "after its training", 100 * trends.mean_recall(ESTIMATOR)),
            Entry("Qwen3-30B-A3B", "after its training", None, claim="003-123"),
            Entry("GPT-OSS-120B", "after its training", None, claim="003-124"),
            Entry("GPT-OSS-20B", "after its training", None, claim="003-125"),
        ),
        note=f"{BUNDLED}{learnt} Theirs learnt from 4 and 5 million tokens; prediction-accuracy, a page of"
        " joulebench's source, has ours after 30, 300 and 2000 steps.",
    )  # fmt: skip
    yield SourceTable(
        "Fig. 10", "hit rate of the estimator by layer", "%", "layer", tuple(entries),
        note=BUNDLED + learnt, picture="lines",
    )  # fmt: skip


# --- time per token --------------------------------------------------------------------------------------------------


def _row(run: Run) -> str:
    return f"{run.model}, {run.machine.upper()}, {run.length}"


def fig_7() -> SourceTable:
    entries = []
    for run, one in evaluated().items():
        for column, share in (("compute", one.compute_share), ("copy", one.copy_share), ("idle", one.idle_share)):
            entries.append(Entry(_row(run), column, 100 * share))
    own = [one for run, one in evaluated().items() if run.model == QWEN3]
    for column, claim, found in (
        ("compute", COMPUTE_SHARE, [100 * one.compute_share for one in own]),
        ("copy", COPY_SHARE, [100 * one.copy_share for one in own]),
    ):
        entries.append(Entry(f"{QWEN3}, all lengths", column, Span(min(found), max(found)), claim=claim))
    return SourceTable(
        "Fig. 7", "shares of the time per token on demand", "%", "model, machine and prompt", tuple(entries),
        note=f"{MODELLED} Of GLM-4.7-Flash nobody says which heads it was run with: 20 of 128, keys and values of"
        " their own,"
        " are assumed, and long prompts take much of its time for that.",
        picture="bars",
    )  # fmt: skip


def fig_8() -> Iterator[SourceTable]:
    found = evaluated()
    times = []
    for run, one in found.items():
        times += [
            Entry(_row(run), "on demand", 1e3 * one.on_demand.whole_s),
            Entry(_row(run), "fetched ahead", 1e3 * one.ahead.whole_s),
        ]
    yield SourceTable(
        "Fig. 8", "time per output token", "ms", "model, machine and prompt", tuple(times), MODELLED, "bars"
    )
    gains = [Entry(_row(run), "gain", 100 * one.gain) for run, one in found.items()]
    groups: tuple[tuple[str, str, list[Compared]], ...] = (
        (f"{QWEN3}, all lengths", GAIN, [one for run, one in found.items() if run.model == QWEN3]),
        ("A6000, all", "003-005", [one for run, one in found.items() if run.machine == "a6000"]),
        ("A100 and GH200, all", "003-006", [one for run, one in found.items() if run.machine != "a6000"]),
    )
    for row, claim, own in groups:
        least, most = (100 * end(one.gain for one in own) for end in (min, max))
        gains.append(Entry(row, "gain", Span(least, most), claim=claim))
    yield SourceTable(
        "Fig. 8, gains", "time per token that is saved", "%", "model, machine and prompt", tuple(gains),
        note=f"{MODELLED} Compute that hides behind copies: {QWEN3}'s grows with the prompt as the source's does.",
        picture="bars",
    )  # fmt: skip


def all_machines() -> SourceTable:
    entries = []
    for run, one in compared().items():
        row = f"{run.model}, {run.length}"
        if isinstance(one, str):
            entries.append(Entry(row, run.machine.upper(), one))
        else:
            ms, gain = 1e3 * one.on_demand.whole_s, 100 * one.gain
            entries.append(Entry(row, run.machine.upper(), f"{ms:.1f} ms, {gain:.1f} %"))
    pairs = ", ".join(f"{model} on {machine.upper()}" for model, machine in EVALUATED.items())
    return SourceTable(
        "Fig. 8, all machines", "time per token on demand, and the share that fetching ahead saves", "", "model and"
        " prompt",
        tuple(entries), note=f"{MODELLED} The source ran {pairs}, with prompts of {', '.join(map(str, LENGTHS))}.",
    )  # fmt: skip
