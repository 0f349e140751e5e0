"""Source 003: time per token by hand, error bars, sizes, and what is said of rows that nothing here can compute."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.findings import judged
from harness.reproduce.ledger import ledger
from harness.reproduce.printed import Number
from harness.reproduce.speculating import trends
from harness.reproduce.speculating.accuracy import Accuracy, accuracies, averages, recovered
from harness.reproduce.speculating.drawn import table_1, table_3
from harness.reproduce.speculating.estimators import Widths, fitting, millions
from harness.reproduce.speculating.found import findings
from harness.reproduce.speculating.tpot import (
    AHEAD,
    GLM,
    GPT_OSS,
    MODELS,
    ON_DEMAND,
    QWEN3,
    QWEN3_235B,
    Tpot,
    expert_bytes_a_token,
    gain_of_shares,
    lacks_gpu,
    speed_up,
    tpot,
)  # fmt: skip

GIB = 2**30
GPU, LINK = 768e9, 31.5e9
"""Bytes a second of the A6000 and of PCIe 4.0 x16."""


# --- time per token --------------------------------------------------------------------------------------------------


def test_a_token_copies_the_bytes_of_its_experts() -> None:
    """48 layers x 8 experts x 3 x 2048 x 768 x 2 bytes: the 3.62 GB of Qwen3-30B-A3B."""
    assert expert_bytes_a_token(MODELS[QWEN3]) == 48 * 8 * 3 * 2048 * 768 * 2
    assert round(expert_bytes_a_token(MODELS[QWEN3]) / 1e9, 2) == 3.62


@pytest.fixture(scope="module")
def of_qwen3() -> tuple[Tpot, Tpot]:
    """On demand and ahead, 16,384 tokens on the A6000."""
    sheet = load_sheet("a6000")
    found = [tpot(MODELS[QWEN3], sheet, name, 16384) for name in (ON_DEMAND, AHEAD)]
    assert isinstance(found[0], Tpot)
    assert isinstance(found[1], Tpot)
    return found[0], found[1]


def test_on_demand_takes_compute_and_copy_in_turn(of_qwen3: tuple[Tpot, Tpot]) -> None:
    """Copies: 3.62 GB at 31.5 GB/s. Compute: attention, keys and values, experts and head are read once at 768 GB/s;
    norms, gather and residuals are within 2 % of that."""
    on_demand, _ = of_qwen3
    copy_s = 48 * 8 * 3 * 2048 * 768 * 2 / LINK
    attention = 2 * 2048 * 128 * 2 * (32 + 4)
    cache = 2 * 2 * 4 * 128 * (16384 + 16)
    experts = 8 * 3 * 2048 * 768 * 2
    compute_s = (48 * (attention + cache + experts) + 2 * 2048 * 151936) / GPU
    assert on_demand.copy_s == pytest.approx(copy_s, rel=1e-9)
    assert on_demand.compute_s == pytest.approx(compute_s, rel=0.02)
    assert on_demand.whole_s == pytest.approx(on_demand.compute_s + on_demand.copy_s, rel=1e-9)
    assert on_demand.idle_s == pytest.approx(0.0, abs=1e-9)


def test_ahead_hides_the_compute_of_all_layers_but_one(of_qwen3: tuple[Tpot, Tpot]) -> None:
    """Copies take longer in every layer. What hides is the layers' compute, between the first copy and the last."""
    on_demand, ahead = of_qwen3
    assert (ahead.compute_s, ahead.copy_s) == pytest.approx((on_demand.compute_s, on_demand.copy_s), rel=1e-9)
    head_s = 2 * 2048 * 151936 / GPU
    hidden_s = gain_of_shares(on_demand.compute_s - head_s, 48)
    assert on_demand.whole_s - ahead.whole_s == pytest.approx(hidden_s, rel=0.01)


def test_shares_of_the_source_bound_its_gain() -> None:
    """8 to 13 % of compute in 47 of 48 layers: 7.8 to 12.7, against the 9 to 14 stated."""
    assert 100 * gain_of_shares(0.08, 48) == pytest.approx(7.83, abs=0.01)
    assert 100 * gain_of_shares(0.13, 48) == pytest.approx(12.73, abs=0.01)


def test_nothing_gains_more_than_equal_times() -> None:
    assert speed_up(1.0, 1.0) == 2.0
    for copy_s in (0.01, 0.5, 0.99, 1.01, 3.0, 100.0):
        assert 1 < speed_up(1.0, copy_s) < 2


def test_what_fits_where() -> None:
    """A6000: 128 GiB hold neither 229 nor 454 GB of experts. The A100's host holds the first."""
    a6000, a100 = load_sheet("a6000"), load_sheet("a100")
    assert tpot(MODELS[GPT_OSS], a6000, ON_DEMAND, 1024) == "oom"
    assert tpot(MODELS[QWEN3_235B], a100, ON_DEMAND, 1024) == "oom"
    assert isinstance(tpot(MODELS[GPT_OSS], a100, ON_DEMAND, 1024), Tpot)
    # Of the assumed 20 heads of 128 keys and values of 65,536 tokens take 31.6 GB; of 256 63.1, and weights 5.2.
    assert lacks_gpu(MODELS[GLM], a6000, 65536) is None
    wide = lacks_gpu(replace(MODELS[GLM], head_dim=256), a6000, 65536)
    assert wide is not None
    assert "68 GB" in wide


def test_tokens_in_the_cache_cost_what_a_prompt_of_them_does() -> None:
    """Of the next tokens; reading the prompt is not priced."""
    sheet, shape = load_sheet("a6000"), replace(MODELS[QWEN3], n_layers=2)

    def decode_s(n_prompt: int, n_cached: int) -> float:
        cell = Cell(
            sheet, shape, parameters(ON_DEMAND), UniformRouting(), n_prompt, decode_steps=3, cached_tokens=n_cached
        )
        decode = price_cell(cell).decode
        assert decode is not None
        return decode.seconds

    assert decode_s(1, 299) == pytest.approx(decode_s(300, 0), rel=1e-12)
    assert decode_s(1, 299) > decode_s(1, 0)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "experts_gib", "other_gib"), [(QWEN3, 54, 3), (GLM, 53, 3), (GPT_OSS, 213.57, 4), (QWEN3_235B, 423, 14.9)]
)
def test_sizes_of_table_2(model: str, experts_gib: float, other_gib: float) -> None:
    """Printed 54, 53, 213 and 230; 3, 3, 4 and 14."""
    digits = 2 if experts_gib % 1 else 0
    assert round(MODELS[model].routed_bytes / GIB, digits) == experts_gib
    assert round(MODELS[model].others_bytes / GIB, 1 if other_gib % 1 else 0) == other_gib


def test_estimator_sizes_by_hand() -> None:
    """A, positions, B and C, norm, head: GPT-OSS-20B at width 720, expansion 2."""
    by_hand = 720 * 2880 + 23 * 720 + 2 * 2 * 720 * 720 + 2 * 720 + 32 * 720
    assert millions(NAMED_SHAPES["gpt-oss-20b"], Widths(720, 2)) == pytest.approx(by_hand / 1e6)
    assert Widths(720, 2) in fitting(NAMED_SHAPES["gpt-oss-20b"], 4)
    assert Widths(1024, 7) in fitting(NAMED_SHAPES["qwen3-30b-a3b"], 17)
    assert fitting(NAMED_SHAPES["qwen3-30b-a3b"], 18) != fitting(NAMED_SHAPES["qwen3-30b-a3b"], 17)


def test_table_3_is_drawn_from_the_sheets_that_times_are_priced_on() -> None:
    """Printed 48/128/PCIe 4.0, 80/256/PCIe 4.0 and 96/480/NVLink-C2C; PCIe 4.0 x16 has 31.5 GB/s a way."""
    table = table_3()
    found = {row: [table.at(row, column) for column in table.columns] for row in table.rows}
    assert [entry and entry.theirs for entry in found["A6000"]] == ["48", "128", "PCIe 4.0"]
    assert [entry and entry.ours for entry in found["A6000"]] == ["48 GiB", "128 GiB", "31.5 GB/s each way, the peak"]
    assert [entry and entry.theirs for entry in found["GH200"]] == ["96", "480", "NVLink-C2C"]
    assert [entry and entry.ours for entry in found["GH200"]][:2] == ["96 GiB", "480 GiB"]


# --- Table 1 ---------------------------------------------------------------------------------------------------------


def test_68_of_72_error_bars_are_the_formulas() -> None:
    """claims/corrections.md, and the four that are not are where the scan is not legible."""
    rows = accuracies(ledger())
    assert len(rows) == 72
    misread = {row.claim: (row.read, row.error.text) for row in rows if not row.is_as_read}
    assert misread == {
        "003-032": ("0.020", "0.022"), "003-033": ("0.005", "0.006"), "003-034": ("0.085", "0.084"),
        "003-066": ("0.015", "0.013"),
    }  # fmt: skip
    assert sum(row.is_unbiased for row in rows) < 60


def test_every_error_bar_is_told_in_one_way() -> None:
    """The claim as printed, its note, the list of corrected rows and the table of error bars: the last three say of the
    same four rows that they are not legible, and 003-031 has the digits everywhere that were read."""
    book = ledger()
    (bars,) = (table for table in table_1(book) if table.name == "Table 1, ±")
    entries = dict(zip((row.claim for row in accuracies(book)), bars.entries, strict=True))
    notes = {finding.claim: finding.note for finding in findings()}
    for row in accuracies(book):
        is_legible = entries[row.claim].note == ""
        assert (f"read as {row.read}" not in notes[row.claim]) == is_legible
        assert ("not legible" not in book.claims[row.claim].corrected) == is_legible
        assert f"{row.standard_error:.4f}" in notes[row.claim]
        if is_legible:  # what is printed is what was read, and the formula's
            assert entries[row.claim].theirs == row.error.value == pytest.approx(entries[row.claim].ours, abs=6e-4)
            assert abs(row.standard_error - row.error.value) <= row.error.half_digit
    assert sum(entry.note != "" for entry in entries.values()) == 4


def test_an_error_bar_by_hand() -> None:
    """GSM8k 0.576: 760 of 1319 right, sqrt(0.5762 x 0.4238 / 1319) = 0.0136."""
    row = Accuracy("a", "b", "GSM8k", 1319, Number("0.576"), Number("0.014"), "0.014")
    assert row.n_right == 760
    assert row.standard_error == pytest.approx(math.sqrt(760 * 559 / 1319**3))
    assert row.is_as_read
    assert Accuracy("a", "b", "c", 30, Number("0.71"), Number("0.08"), "0.08").n_right is None


def test_every_accuracy_is_of_whole_answers() -> None:
    assert all(row.n_right is not None for row in accuracies(ledger()))


def test_averages_are_those_printed() -> None:
    book, found = ledger(), averages(ledger())
    assert len(found) == 12
    for claim, mean in found.items():
        printed = book.claims[claim].printed
        assert isinstance(printed, Number)
        assert mean == pytest.approx(printed.value, abs=printed.half_digit)


def test_37_are_points_and_not_percent() -> None:
    """0.576 to 0.946 of a gap up to 0.950."""
    assert recovered(ledger()) == pytest.approx((37.0, 100 * 370 / 374))


# --- trends, findings ------------------------------------------------------------------------------------------------


def test_the_bundled_models_predictors_have_the_sources_order() -> None:
    """Cosines of q above those of s in each layer (Fig. 3); heavier experts told better (Fig. 5)."""
    pairs = list(zip(trends.held_out(trends.Q), trends.held_out(trends.S), strict=True))
    assert len(pairs) == 3
    assert all((q.cosine or 0) > (s.cosine or 1) for q, s in pairs)
    assert trends.mean_by_rank(trends.Q)[0] > trends.mean_by_rank(trends.Q)[1]
    assert trends.most_gained() > 0


@pytest.mark.slow
def test_every_row_has_a_finding_and_none_is_open() -> None:
    book = ledger()
    claims = [claim.id for claim in book.of_source("003")]
    found = findings()
    assert len(claims) == 132
    assert {finding.claim for finding in found} == set(claims)
    for row in judged(book, found, claims):
        assert row.verdict.outcome != "not computed", row.claim.id
        assert row.verdict.has_held is not False or row.is_explained, row.claim.id
