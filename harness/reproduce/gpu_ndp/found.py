"""What we find for each row of 001. Sizes and its machine: `sizes`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.reproduce.findings import Finding
from harness.reproduce.gpu_ndp.computed import (
    FULL_DECODE,
    HELD_CLOCK_HZ,
    LB_DECODE,
    LB_PREFILL,
    LEAST,
    ON_DEMAND_MOST,
    PRE_DECODE,
    QWEN3_DECODE,
    QWEN3_PREFILL,
    TP_DECODE,
    TP_PREFILL,
    UNIFORM,
    Computed,
    computed,
)  # fmt: skip
from harness.reproduce.gpu_ndp.configurations import DEEPSEEK, MODELS, PRINTED_UNITS, QWEN3, no_room
from harness.reproduce.gpu_ndp.decode import Configuration
from harness.reproduce.gpu_ndp.end_to_end import UTILISATIONS, mean
from harness.reproduce.gpu_ndp.prefill import PROMPT_TOKENS, Reading, mean_ratios
from harness.reproduce.gpu_ndp.sizes import examples, table_1, table_2
from harness.reproduce.gpu_ndp.stage import FIDDLER, FULL, MONDE, ON_DEMAND, TP_LB, TP_PRE
from harness.reproduce.printed import Span

TOP_K_OF_TRACE = 4


def findings() -> list[Finding]:
    own = computed()
    return [
        *end_to_end(own), *prefill(own), *decoding(own), *what_fits(own), utilisation(own), *examples(),
        *table_1(own.sheet), *table_2(),
    ]  # fmt: skip


def decoding(own: Computed) -> Iterator[Finding]:
    ten, without = list(own.printed_decoding.values()), list(own.without_shared.values())
    monde = f"MoNDE with its best split, {len(ten)} configurations, uniform routing"
    for id_, arm in ((TP_DECODE, "tp"), (LB_DECODE, "tp_lb")):
        others = np.mean([getattr(one, arm) for one in without])
        note = f"{monde}; {others:.2f} with DeepSeek-MoE's shared experts on the GPU"
        yield Finding(id_, float(np.mean([getattr(one, arm) for one in ten])), "priced", note)
    of_qwen3 = [own.decoding[Configuration(QWEN3, n)].tp_lb for n in PRINTED_UNITS]
    yield Finding(QWEN3_DECODE, float(np.mean(of_qwen3)), "priced", "slices with balance; nothing fetched ahead")
    for id_, arm in ((PRE_DECODE, TP_PRE), (FULL_DECODE, FULL)):
        by, chances = own.by_utilisation[arm], [asked.chance for asked in MODELS.values()]
        where, without_shared = (_share(found[arm]) for found in (own.wanted, own.wanted_without_shared))
        note = (
            f"from none to all of the fetched experts used. What it states comes out where {where} are used"
            f" ({without_shared} with DeepSeek-MoE's shared experts on the GPU in every arm); chance gives its models"
            f" {100 * min(chances):.0f} to {100 * max(chances):.0f} %, and in the recorded routing of gpt-oss-20b"
            f" {100 * own.recorded[TOP_K_OF_TRACE].own.mean:.0f} % were used"
        )
        yield Finding(id_, Span(min(by.values()), max(by.values())), "priced", note)
    two = tuple(own.decoding[Configuration(model, 2)].tp for model in (DEEPSEEK, QWEN3))
    yield Finding(
        "001-016",
        two,
        "priced",
        "DeepSeek-MoE and Qwen3-30B-A3B on two DIMMs, over every way in which chosen experts can lie on them",
        explanation="" if max(two) < 1 else (
            f"DeepSeek-MoE is slower; Qwen3-30B-A3B is a tie, {100 * (two[1] - 1):+.2f} %: MoNDE takes the experts of"
            " the"
            " lower numbers to the GPU, and not those of the busier DIMM"
        ),
    )  # fmt: skip
    gains = tuple(own.gain_of_balance(n) for n in PRINTED_UNITS)
    yield Finding(
        "001-017", gains, "priced", "slices with balance over slices, N = 2, 4, 6, the two models that two DIMMs hold"
    )


def _share(utilisation: float | None) -> str:
    return "no share" if utilisation is None else f"{100 * utilisation:.0f} %"


def prefill(own: Computed) -> Iterator[Finding]:
    held = mean_ratios(own.held)
    declared = f"uniform routing, MoNDE's best split, multipliers at {HELD_CLOCK_HZ / 1e9:g} GHz, which nobody states"
    yield Finding(TP_PREFILL, held.tp, "priced", declared, explanation=lambda: f"{_of_rows()}; {_all_three(own)}")
    yield Finding(
        LB_PREFILL, held.tp_lb, "priced", declared,
        explanation=lambda: "MoNDE's best split sends as many experts to the GPU as Eq. 2 does, so little is left;"
        f" {_all_three(own)}",
    )  # fmt: skip
    yield Finding(
        QWEN3_PREFILL, mean_ratios(own.held, QWEN3).tp_lb, "priced", declared, explanation=lambda: _of_clock(own)
    )


def _all_three(own: Computed) -> str:
    readings = sorted({f"h = {one.split}" for one in own.all_three})
    slowest = min((one.clock_hz for one in own.all_three), default=0.0)
    which = f", all with {', '.join(readings)} and {slowest / 1e9:g} GHz or more" if own.all_three else ""
    return (
        f"of {len(own.prefill)} readings (clock, MoNDE's split, skew of the routing) {len(own.all_three)} have"
        f" {own.stated_of_prefill} within 15 % at once{which}"
    )


def _of_rows() -> str:
    rows = [PROMPT_TOKENS * asked.shape.top_k / asked.shape.n_experts for asked in MODELS.values()]
    return (
        f"at that clock a DIMM computes a row of an expert in the time in which it reads it, and a prompt has"
        f" {min(rows):.0f} to {max(rows):.0f} rows for each; MoNDE's best split fetches nearly all experts instead"
    )


def _of_clock(own: Computed) -> str:
    best = mean_ratios(own.prefill[Reading(own.best_clock_hz, LEAST, UNIFORM)], QWEN3)
    return (
        f"no clock gives it with MoNDE's best split, so that none is fitted and the sheet's is held; the nearest of all"
        f" that were tried, {own.best_clock_hz / 1e9:g} GHz, gives {best.tp_lb:.2f}; {_all_three(own)}"
    )


def end_to_end(own: Computed) -> Iterator[Finding]:
    asked, multiple = own.requests, own.multiple
    fitted = f"all that is no expert takes {multiple:.2f} of what the experts take in slices over six DIMMs"
    wanted = own.wanted[FULL]
    near = min(UTILISATIONS, key=lambda q: abs(q - (wanted or 0.0)))
    average = mean(asked.times_faster(MONDE, multiple, near))
    for id_ in ("001-001", "001-003"):
        yield Finding(
            id_, average, "priced",
            f"end to end, where its decode stage alone comes to {own.stated_of_full:g} ({100 * near:.0f} %"
            " of the fetched experts"
            f" used); {fitted}",
        )  # fmt: skip
    by = {q: max(asked.times_faster(MONDE, multiple, q).values()) for q in UTILISATIONS}
    balanced = max(asked.times_faster(MONDE, multiple, ours=TP_LB).values())
    for id_ in ("001-002", "001-004", "001-007"):
        note = f"from none to all of the fetched experts used, {balanced:.2f} with balance alone; {fitted}"
        yield Finding(id_, Span(min(by.values()), max(by.values())), "priced", note)
    for id_, baseline in ((ON_DEMAND_MOST, ON_DEMAND), ("001-006", FIDDLER)):
        ours = max(asked.times_faster(baseline, multiple, ours=TP_LB).values())
        yield Finding(id_, ours, "priced", f"slices with balance; {fitted}, fitted on {ON_DEMAND_MOST}")
        bare = max(asked.times_faster(baseline, None, ours=TP_LB).values())
        yield Finding(
            id_, bare, "priced", "with nothing fitted: the rest by the GPU's roofline",
            explanation="a roofline without launches is the least that the rest can take",
        )  # fmt: skip


def what_fits(own: Computed) -> Iterator[Finding]:
    lacking = {one: no_room(MODELS[one.model], one.n_units, own.sheet) for one in own.not_supported()}
    told = ", ".join(f"{one.model} on {one.n_units}" for one in lacking)
    results = ", ".join(sorted({lacks.result for lacks in lacking.values() if lacks is not None}))
    yield Finding("001-018", results, "sheet", f"{told} DIMMs, of four models on 2, 4 and 6")


def utilisation(own: Computed) -> Finding:
    found = own.recorded[TOP_K_OF_TRACE]
    return Finding(
        "001-019",
        (100 * found.own.mean, 100 * found.others.mean),
        "trace",
        f"% of the {TOP_K_OF_TRACE} experts fetched of each layer that a token uses, gpt-oss-20b: counted on the"
        " first half"
        f" of its own answer (± {100 * found.own.error:.1f}), and on all other answers (±"
        f" {100 * found.others.error:.1f})",
    )
