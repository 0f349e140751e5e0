"""What we find of source 002, against its print, the corrections handed to us, closed forms and brute force."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.reproduce.findings import Finding, judged
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs import (
    arithmetic,
    findings,
    fixed_lengths,
    lengths,
    phone_fit,
    search_rows,
    searches,
)
from harness.reproduce.mnn_aecs.other_models import parameters, predicted
from harness.reproduce.mnn_aecs.places import ANDROID, MODELS, PHONES, Cell, anchor_model, cells
from harness.reproduce.mnn_aecs.search_tables import REPEATS
from harness.reproduce.mnn_aecs.searches import noiseless, noisy, outcomes, truth
from harness.reproduce.mnn_aecs.tables import redrawn
from harness.reproduce.printed import Span
from harness.tuning.race import Reading
from tests.data_folder import data_folder

FOUND = {finding.claim: finding for finding in reversed(list(findings()))}
"""The first finding of each claim, which counts."""


def ours(row: str) -> object:
    return FOUND[f"002-{row}"].ours


# --- its own figures -------------------------------------------------------------------------------------------------


def test_every_cell_of_tables_9_and_10_has_a_place() -> None:
    """Table 9 has 89 cells of speed, battery and energy; Table 10 has 12 of speed and energy."""
    book = ledger()
    rows = [claim for claim in book.of_source("002") if claim.location in ("Table9", "Table10")]
    assert sorted(cells().values()) == sorted(claim.id for claim in rows)
    assert sum(cell.quantity == "battery" for cell in cells()) == 89
    assert sum(cell.phone.startswith("iPhone") for cell in cells()) == 24
    assert anchor_model("Mate 40 Pro", "MediaPipe") == "Gemma2-2B"
    assert anchor_model("Meizu 21", "MediaPipe") is None


def test_joules_are_mah_times_volts() -> None:
    """4.34, 4.04 and 4.07 V by Table 1; other phones have the mean."""
    assert arithmetic.volts("Xiaomi 15 Pro") == pytest.approx(4.34, abs=0.005)
    assert arithmetic.volts("Mate 40 Pro") == pytest.approx(4.04, abs=0.005)
    assert arithmetic.volts("iPhone 12") == pytest.approx(4.07, abs=0.005)
    assert arithmetic.volts("Meizu 21") == pytest.approx((4.340 + 4.044 + 4.072) / 3, abs=0.001)
    # 389.4 mJ of MNN on the Mate 40 Pro: 389.4 / (3.6 * 4.044) = 26.75 uAh, printed 26.8.
    assert ours("173") == pytest.approx(26.75, abs=0.01)


def test_the_mean_saving_is_22_point_8_percent() -> None:
    assert ours("001") == pytest.approx(22.8, abs=0.05)
    by_hand = 1 - math.sqrt(19.6 / 34.0 * 15.5 / 27.1)
    assert ours("143") == pytest.approx(100 * by_hand)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("002", Span(44, 76)),
        ("007", Span(20, 294)),
        ("142", Span(34, 90)),
        ("028", Span(2.5, 6.4)),
        ("032", 10.5),
        ("055", 25.6),
        ("058", (47, 8)),
        ("071", 49.1),
        ("073", 74.3),
        ("074", 105.9),
        ("141", 9.1),
    ],
)
def test_contradictions_have_the_other_value(row: str, expected: object) -> None:
    """As corrections.md, which recomputed them, has it: to the digits that it gives."""
    found = ours(row)
    digits = 0.5 if not isinstance(expected, float) and row != "028" else 0.05
    assert found == pytest.approx(expected, abs=digits)
    (verdict,) = judged(ledger(), [FOUND[f"002-{row}"]], [f"002-{row}"])
    assert verdict.verdict.outcome == "contradicted"


def test_mnn_is_0_90_to_3_97_times_as_fast_as_others() -> None:
    assert ours("451") == pytest.approx(Span(0.90, 3.97), abs=0.005)


def test_reductions_that_are_of_power_say_so() -> None:
    assert "41.9 %" in FOUND["002-071"].note
    assert "47.0 %" in FOUND["002-073"].note


def test_the_space_is_of_five_phones() -> None:
    assert ours("439") == Span(20, 71)
    assert search_rows.spaces() == [39, 44, 39, 71, 20]


# --- other models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-3B", 3.09),
        ("Llama3.2-1B", 1.24),
        ("Llama3.2-3B", 3.21),
        ("Gemma2-2B", 2.61),
    ],
)
def test_parameters_are_those_that_their_makers_state(model: str, billions: float) -> None:
    assert parameters(model) / 1e9 == pytest.approx(billions, abs=0.006)


def test_energy_goes_with_parameters_and_speed_against_them() -> None:
    """From 389.4 mJ and 20.7 token/s of Qwen2.5-1.5B; printed 737.7 and 10.5 for twice the parameters."""
    ratio = 3.0857 / 1.5436
    assert predicted("Mate 40 Pro", "MNN", "Qwen2.5-3B", "energy") == pytest.approx(389.4 * ratio, rel=1e-4)
    assert predicted("Mate 40 Pro", "MNN", "Qwen2.5-3B", "speed") == pytest.approx(20.7 / ratio, rel=1e-4)
    assert predicted("Meizu 21", "MediaPipe", "Gemma2-2B", "energy") is None


def errors(quantity: str) -> dict[Cell, float]:
    book = ledger()
    found = {}
    for cell, claim in cells().items():
        finding = FOUND.get(claim)
        if cell.quantity == quantity and finding is not None and isinstance(finding.ours, float):
            found[cell] = finding.ours / book.figure(claim) - 1
    return found


def test_energy_is_within_15_percent_in_44_of_61_cells_at_least() -> None:
    """The reading that was handed to us, by parameters alone, has 44; the sizes of the models decide the last."""
    off = errors("energy")
    anchored = {cell: error for cell, error in off.items() if anchor_model(cell.phone, cell.engine) == MODELS[0]}
    assert len(off) == 66
    assert len(anchored) == 61
    first = first_figures("energy")
    by_parameters = {cell: first.get(cell, error) for cell, error in anchored.items()}
    missed = {cell for cell, error in by_parameters.items() if abs(error) > 0.15}
    assert len(anchored) - len(missed) >= 44
    # Twelve of them are on four phones, where llama.cpp's Qwen2.5-1.5B is dear.
    assert sum(cell.engine == "llama.cpp" for cell in missed) == 13
    assert sum(cell.engine == "llama.cpp" and abs(error) > 0.15 for cell, error in anchored.items()) == 2


def first_figures(quantity: str) -> dict[Cell, float]:
    """Errors of llama.cpp's cells by the ratio of parameters, which counts no longer."""
    book, places = ledger(), {claim: cell for cell, claim in cells().items()}
    return {
        places[one.claim]: one.ours / book.figure(one.claim) - 1
        for one in findings()
        if one.replaced and isinstance(one.ours, float) and places[one.claim].quantity == quantity
    }


def test_speed_follows_parameters_on_mnn_and_not_on_llama_cpp() -> None:
    """Within 16 % on MNN and MNN-AECS; of llama.cpp's 17, four are, and 15 with its way to divide work."""
    off, first = errors("speed"), first_figures("speed")
    mnn = [abs(error) for cell, error in off.items() if cell.engine.startswith("MNN")]
    llama = [abs(error) for cell, error in off.items() if cell.engine == "llama.cpp"]
    assert max(mnn) < 0.165
    assert (len(first), sum(abs(error) <= 0.16 for error in first.values())) == (17, 4)
    assert (len(llama), sum(error <= 0.16 for error in llama)) == (17, 15)


def test_each_miss_says_why_and_nothing_else_does() -> None:
    book = ledger()
    for row in judged(book, FOUND.values(), FOUND):
        assert row.finding is not None
        assert bool(row.finding.why) == (row.verdict.has_held is False), row.claim.id


def test_the_one_model_that_is_faster_than_its_like_says_so() -> None:
    """9.1 over 7.2 token/s on the Galaxy A56; 5.8 / 6.3, 6.0 / 6.3, 7.3 / 7.8 and 15.1 / 14.1 elsewhere."""
    told = FOUND["002-273"].why
    assert "over Qwen2.5-3B, with +4 % parameters, its speed is +26 % here, and -8 to +7 % on the other phones" in told


# --- fixed lengths ---------------------------------------------------------------------------------------------------


def test_a_run_spends_on_prefill_and_decoding() -> None:
    """Mate 40 Pro, Qwen2.5-1.5B: 389.4 mJ decoded, a third of it a prompt token; MNN-AECS prefills as MNN."""
    spent = fixed_lengths.energy_per_decoded_token("Mate 40 Pro", "MNN", MODELS[0], 256, 128)
    assert spent == pytest.approx(389.4 + 2 * 389.4 / 3)
    tuned = fixed_lengths.energy_per_decoded_token("Mate 40 Pro", "MNN-AECS", MODELS[0], 256, 128)
    assert tuned == pytest.approx(298.2 + 2 * 389.4 / 3)
    assert fixed_lengths.energy_per_decoded_token("Meizu 21", "MediaPipe", MODELS[4], 64, 128) is None


def test_longer_prompts_save_less_as_the_source_says() -> None:
    saved = [fixed_lengths.energy_reduction("MNN", [p], fixed_lengths.DECODES) for p in fixed_lengths.PROMPTS]
    assert saved == sorted(saved, reverse=True)
    assert 0 < saved[-1] < saved[0] < 0.228, "below what decoding alone saves"


# --- data sets -------------------------------------------------------------------------------------------------------


def rows_of(path: str) -> Iterator[dict[str, object]]:
    file = data_folder() / path
    if not file.is_file():
        pytest.skip(f"no {file.name}")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def test_words_of_the_data_sets_are_counted() -> None:
    n = prompts = answers = 0
    for row in rows_of("sharegpt/test.jsonl.gz"):
        n += 1
        for message in row["conversations"]:  # type: ignore[attr-defined]
            words = len(message["value"].split())
            prompts += words if message["from"] == "human" else 0
            answers += words if message["from"] == "gpt" else 0
    assert lengths.COUNTED[0][1:] == (n, prompts, answers)
    rows = list(rows_of("rolebench/role_generalization_eng/role_specific_test.jsonl.gz"))
    asked = sum(len(str(row["question"]).split()) for row in rows)
    told = sum(len(row["generated"][0].split()) for row in rows)  # type: ignore[index]
    assert lengths.COUNTED[1][1:] == (len(rows), asked, told)


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_model_finds_five_of_table_7s_seven() -> None:
    """Fitted so that it does; the two others say why."""
    printed = {phone: ledger().claims[f"002-{75 + n:03d}"].value for n, phone in enumerate(PHONES)}
    same = [phone for phone in PHONES if search_rows.chosen(phone) == printed[phone]]
    assert len(same) == 5
    assert set(PHONES) - set(same) == set(search_rows.WHY_OTHERWISE)


def test_no_other_share_of_the_grid_finds_more() -> None:
    book, best = ledger(), phone_fit.fit_alone()
    counts = {
        alone: sum(
            phone_fit.found_by_search(phone, alone) == book.claims[f"002-{75 + n:03d}"].value
            for n, phone in enumerate(PHONES)
        )
        for alone in phone_fit.ALONE
    }
    assert counts[best] == max(counts.values())


def test_stage_1_ends_as_in_figure_5() -> None:
    """One big and two middle cores of the Mate 40 Pro, after a probe of the third middle one."""
    result = noiseless("Mate 40 Pro")
    assert result.fastest == (1, 2, 0)
    assert [one for one, _ in result.first_probes] == [(1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 3, 0)]


@pytest.mark.parametrize("phone", PHONES)
def test_the_true_optimum_is_brute_force(phone: str) -> None:
    known = truth(phone)
    top = max(known.model.tokens_per_s(s) for s in known.readings)
    allowed = [s for s in known.readings if known.model.tokens_per_s(s) >= 0.92 * top]
    assert known.optimum == min(allowed, key=lambda s: known.model.power(s) / known.model.tokens_per_s(s))


def test_a_seed_gives_every_search_the_same_noise() -> None:
    readings = truth("Mate 40 Pro").readings
    one, two, other = (noisy(readings, "normal", seed) for seed in (3, 3, 4))
    drawn = [probe((1, 0, 0)) for probe in (one, two, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_noise_is_as_wide_as_stated() -> None:
    """Of 4000 probes: 5 % of standard deviation, a third of it for the mean of nine; within 5 %, if even."""
    flat = {(1,): Reading(1.0, 1.0)}

    def spread(kind: searches.Noise, repeats: int) -> list[float]:
        probe = noisy(flat, kind, 0, repeats)
        return [value for _ in range(4000) for value in probe((1,)) if value is not None]

    def deviation(values: list[float]) -> float:
        return math.sqrt(sum((value - 1) ** 2 for value in values) / len(values))

    assert deviation(spread("normal", 1)) == pytest.approx(0.05, rel=0.05)
    assert deviation(spread("normal", 9)) == pytest.approx(0.05 / 3, rel=0.05)
    even = spread("even", 1)
    assert deviation(even) == pytest.approx(0.05 / math.sqrt(3), rel=0.05)
    assert max(abs(value - 1) for value in even) <= 0.05


@pytest.mark.parametrize("phone", ["Mate 40 Pro", "iPhone 15"])
def test_shares_and_probes_of_a_search_are_of_its_seeds(phone: str) -> None:
    found = outcomes(phone, "normal", 1, 20)
    whole = found["exhaustive"]
    assert whole.same_share == 1.0
    assert whole.mean_probes == whole.n_selections == len(truth(phone).readings)
    for one in found.values():
        assert sum(n for _, n in one.choices) == one.n_seeds == 20
        assert one.optimum_share == dict(one.choices).get(truth(phone).optimum, 0) / 20
        assert one.mean_distinct <= one.mean_probes


def test_repeated_probes_end_nearer_to_the_optimum() -> None:
    """Nine probes of each candidate in place of one, on the phones whose optimum lies in the tree."""
    for phone in ("Mate 40 Pro", "Galaxy A56"):
        once, often = (outcomes(phone, "normal", repeats)["aecs"].near_share for repeats in (REPEATS[0], REPEATS[-1]))
        assert often > once


def test_without_noise_a_search_that_can_reach_the_optimum_does() -> None:
    for phone in ("Mate 40 Pro", "Galaxy A56", "iPhone 12", "iPhone 15"):
        assert noiseless(phone).chosen == truth(phone).optimum


def test_a_tree_takes_fewer_probes_than_all() -> None:
    assert ours("450") == pytest.approx(100 * (1 - 11 / 71)), "Meizu 21: 3 of stage 1 and 8 nodes"
    for phone in ANDROID:
        result = noiseless(phone)
        assert result.n_probes == len(result.first_probes) + len(result.probed)
        assert result.n_probes < len(truth(phone).readings) / 3 or phone == "Xiaomi 15 Pro"


# --- redrawn ---------------------------------------------------------------------------------------------------------


def test_tables_4_to_11_and_figures_8_to_13_are_drawn_and_name_known_rows() -> None:
    tables = list(redrawn())
    names = " | ".join(table.name for table in tables)
    for name in [f"Table {n}" for n in range(4, 12)] + [f"Fig. {n}" for n in range(8, 14)]:
        assert name in names
    drawn = {entry.claim for table in tables for entry in table.entries if entry.claim}
    assert drawn <= set(ledger().claims)
    assert set(cells().values()) <= drawn


def test_cells_without_figures_have_their_words() -> None:
    (speed,) = (table for table in redrawn() if table.name == "Table 9, speed")
    texts = {
        ("executorch", "Qwen2.5-3B"): "N.S.",
        ("mllm", "Llama3.2-3B"): "oom",
        ("mllm", "Qwen2.5-1.5B"): "-",
        ("MediaPipe", "Llama3.2-1B"): "N.S.",
        ("llama.cpp", "Gemma2-2B"): "-",
    }
    for (engine, model), text in texts.items():
        entry = speed.at(f"Mate 40 Pro, {engine}", model)
        assert entry is not None
        assert (entry.theirs, entry.ours) == (text, None)


def test_an_explanation_is_only_for_a_miss() -> None:
    """A cell that holds gets none, and one that is moved off gets one."""
    held = Finding("002-175", 10.5, "shape")
    assert arithmetic.explained(held) == held
    assert arithmetic.explained(replace(held, ours=20.0)).why
