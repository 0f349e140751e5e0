"""Verdicts follow from class, tolerance and the two values; counts and aims follow from verdicts."""

from __future__ import annotations

import dataclasses

import pytest

from harness.reproduce.findings import AS_ROUNDED, Finding, Judged, Ours, compared, judged, percent, ratios, verdict_of
from harness.reproduce.ledger import Claim, Class, Declared, Ledger, ledger
from harness.reproduce.outcome import (
    ClassChange,
    PredictionChange,
    Reproduced,
    aims,
    as_declared,
    class_changes,
    counts,
    prediction_changes,
    reproduce,
    ways,
)
from harness.reproduce.printed import Number, Span, parse_printed
from harness.reproduce.rounding import meets, span_of
from harness.reproduce.sources import SOURCES, Source
from harness.reproduce.told import verdict_text
from tests.cases import marked
from tests.test_reproduce_ledger import handed_rows


def claim(klass: Class, value: str, order: str = "", tolerance: float | None = 0.15, id_: str = "009-001") -> Claim:
    return Claim(
        id_, "009", "Table 1", f"time of {id_}", "", value, "s", "", "", parse_printed(value), klass,
        0.0 if klass in ("exact", "contradicted", "input") else tolerance, order, "because",
    )  # fmt: skip


def words(klass: Class, value: str, ours: Ours | None, order: str = "") -> str:
    finding = None if ours is None else Finding("009-001", ours, "plan")
    return verdict_of(claim(klass, value, order), finding, lambda id_: (2.0, 3.0)).words


@pytest.mark.parametrize(
    ("klass", "value", "ours", "expected"),
    [
        ("exact", "1.94", 1.9375, "as printed"),
        ("exact", "1.94", 1.93, "missed by 0.5 %"),
        ("exact", "5-10", (6.49, 7.1), "as printed"),
        ("exact", "5-10", (6.49, 11.0), "missed by 10 %"),
        ("exact", "1.4-2.9", Span(1.3971, 2.88), "as printed"),
        ("exact", "1.4-2.9", Span(1.5, 2.88), "missed by 7.1 %"),
        ("exact", "16/2", (16, 2), "as printed"),
        ("exact", "16/2", (16, 4), "missed by 100 %"),
        ("exact", "[0,2],[1,-1]", "[0, 2], [1, -1]", "as printed"),
        ("exact", "[0,2],[1,-1]", "[0, 2], [-1, 1]", "is not what is printed"),
        ("predicted", "1.95", 1.95, "as printed"),
        ("predicted", "1.95", 2.0, "within 2.6 %"),
        ("predicted", "2.0", 2.3, "within 15 %"),
        ("predicted", "2.0", 2.31, "missed by 15.5 %"),
        ("predicted", "2.0", 1.5, "missed by 25 %"),
        ("predicted", "52-137", 110.0, "as printed"),
        ("predicted", "1.32-5.55", Span(1.28, 5.02), "within 9.6 %"),
        ("predicted", "up to 90", 95.0, "within 5.6 %"),
        ("predicted", ">60", 60.0, "within 0 %"),
        ("consistent", "2.0", 2.1, "within 5 %"),
        ("predicted", "0", 0.2, "as printed"),
        ("predicted", "0", 0.7, "is not what is printed"),
        ("contradicted", "42.0", 45.1, "contradicted by its source"),
        ("contradicted", "42.0", 42.04, "as printed, and not contradicted"),
        ("input", "42.0", None, "input"),
        ("input", "42.0", 42.0, "input, as printed"),
        ("input", "42.0", 45.1, "input, and ours differs"),
        ("not predictable", "42.0", None, "not predictable: because"),
        ("not predictable", "42.0", 45.1, "not predictable: because"),
        ("exact", "42.0", None, "not computed"),
    ],
)
def test_verdicts(klass: Class, value: str, ours: Ours | None, expected: str) -> None:
    assert words(klass, value, ours) == expected


@pytest.mark.parametrize(
    ("order", "ours", "holds"),
    [
        (">1", 1.2, True),
        (">1", (1.2, 0.9), False),
        (">1", Span(1.01, 3.0), True),
        ("<1", 0.98, True),
        (">=0", 0.0, True),
        (">60", 60.0, False),
        ("falling", (3.0, 2.0, 1.0), True),
        ("falling", (3.0, 3.0, 1.0), False),
        ("falling", 3.0, False),
        ("not rising", (3.0, 3.0, 1.0), True),
        ("not falling", (1.0, 1.0, 1.5), True),
        ("rising", (1.0, 2.0), True),
        ("first is most", (3.0, 1.0, 3.0), True),
        ("first is most", (3.0, 4.0), False),
        ("against 009-002", 4.0, True),
        ("against 009-002", 2.9, False),
    ],
)
def test_orders(order: str, ours: Ours, holds: bool) -> None:
    """Against a row: theirs 5 is above their 2, so ours must be above our 3."""
    told = words("ordering", "5", ours, order).partition(", size off")[0]
    assert told == ("same order" if holds else "other order")


@pytest.mark.parametrize(
    ("value", "ours", "order", "expected"),
    [
        ("7.37", 2.73, ">1", "same order, size off by 63 %"),
        ("2.0", 2.2, ">1", "same order"),
        ("2.0-4.0", Span(2.1, 6.0), ">1", "same order, size off by 50 %"),
        ("2.0", 0.5, ">1", "other order, size off by 75 %"),
        ("5", (9.0, 8.0), "falling", "same order"),
    ],
)
def test_an_order_says_how_far_its_size_is_off(value: str, ours: Ours, order: str, expected: str) -> None:
    """7.37 against 2.73: 63 % less. The size of a series is not one figure."""
    assert words("ordering", value, ours, order) == expected


def test_an_ordering_is_tested_by_its_sign_alone() -> None:
    verdict = verdict_of(claim("ordering", "7.37", ">1"), Finding("009-001", 1.1, "priced"), lambda id_: (0.0, 0.0))
    assert verdict.has_held
    assert verdict.outcome == "same order"
    # How far its size is off is told, and decides nothing.
    assert verdict.error == pytest.approx(1.1 / 7.37 - 1)
    assert verdict.words == "same order, size off by 85 %"


def test_a_finding_says_a_figure_or_what_is_missing() -> None:
    with pytest.raises(ValueError, match="give a figure, or say what is missing"):
        Finding("009-001", None)
    with pytest.raises(ValueError, match="a figure has a method"):
        Finding("009-001", 1.0)
    assert Finding("009-001", None, missing="the checkpoint").missing


def test_what_a_text_amounts_to_stands_in_for_no_figure() -> None:
    formula = claim("exact", "block_size*num_blocks/num_experts")
    finding = Finding("009-001", 480.0, "plan", theirs=Number("480"))
    assert verdict_of(formula, finding, lambda id_: (0.0, 0.0)).words == "as printed"
    with pytest.raises(ValueError, match="no other can stand for it"):
        verdict_of(claim("exact", "470"), finding, lambda id_: (0.0, 0.0))


def test_a_list_of_another_length_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        compared(parse_printed("16/2"), (16.0, 2.0, 1.0))


def test_percent_below_twenty_has_a_decimal() -> None:
    assert [percent(share, round) for share in (0.0123, 0.1519, 0.234)] == ["1.2 %", "15.2 %", "23 %"]


# --- rows together ---------------------------------------------------------------------------------------------------


def book_of(*rows: Claim) -> Ledger:
    return Ledger({row.id: row for row in rows})


def test_the_first_finding_of_a_claim_counts_and_the_others_stand_beside_it() -> None:
    book = book_of(claim("exact", "2.0"))
    findings = [Finding("009-001", 2.0, "its own figures"), Finding("009-001", 2.4, "sheet")]
    (row,) = judged(book, findings, ["009-001"])
    assert row.verdict.words == "as printed"
    ((other, verdict),) = row.also
    assert (other.method, verdict.words) == ("sheet", "missed by 20 %")


def test_a_finding_of_no_claim_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="findings of no claim: 009-002"):
        judged(book_of(claim("exact", "2.0")), [Finding("009-002", 2.0, "plan")], ["009-001"])


def test_our_anchor_is_what_we_found_for_it_or_theirs() -> None:
    anchor = claim("input", "10.0", id_="009-002")
    below = claim("ordering", "6.0", "against 009-002")
    book = book_of(below, anchor)
    assert judged(book, [Finding("009-001", 9.0, "sheet")], ["009-001"])[0].verdict.has_held
    findings = [Finding("009-001", 9.0, "sheet"), Finding("009-002", 8.0, "sheet")]
    assert judged(book, findings, ["009-001"])[0].verdict.has_held is False


def test_ratios_are_ours_over_theirs_figure_by_figure() -> None:
    def of(value: str, ours: Ours) -> tuple[float, ...]:
        found = Finding("009-001", ours, "plan")
        row = claim("predicted", value)
        return ratios(Judged(row, found, verdict_of(row, found, lambda id_: (0.0, 0.0))))

    assert of("2.0", 3.0) == (1.5,)
    assert of("1-4", Span(2.0, 2.0)) == (2.0, 0.5)
    assert of("1-4", 2.0) == ()
    assert of("16/2", (8.0, 2.0)) == (0.5, 1.0)
    assert of("0", 2.0) == ()


def test_counts_and_aims_are_those_of_the_verdicts() -> None:
    """Four predicted of five within 15 %; a consistent row that misses by far moves no aim but the open differences."""
    rows = [claim("predicted", "100", id_=f"009-{n:03}") for n in range(1, 6)]
    rows += [
        claim("consistent", "100", id_="009-006"),
        claim("exact", "7", id_="009-007"),
        claim("ordering", "2", ">1", id_="009-008"),
        claim("input", "5", id_="009-009"),
    ]
    findings = [Finding(f"009-{n:03}", 100.0 + n, "priced") for n in range(1, 5)]
    findings += [
        Finding("009-005", 150.0, "priced", explanation="the source's clock is not stated"),
        Finding("009-006", 300.0, "priced", explanation="of one constant"),
        Finding("009-007", 7.0, "plan"),
        Finding("009-008", 0.5, "priced", explanation="shared experts"),
    ]
    book = book_of(*rows)
    done = [Reproduced(SOURCES[0], tuple(judged(book, findings, list(book.claims))), ())]
    told = {count.klass: count for count in counts(done)}
    assert (told["predicted"].held, told["predicted"].explained, told["predicted"].open_) == (4, 1, 0)
    assert (told["consistent"].held, told["consistent"].explained) == (0, 1)
    assert told["input"].untested == 1
    assert [tuple(way) for way in ways(done)] == [("000", "because", 5, 5, 4)]
    assert all(aim.is_met for aim in aims(done)), aims(done)
    without = [finding if finding.claim != "009-008" else dataclasses.replace(finding, explanation="")
               for finding in findings if finding.claim not in ("009-004", "009-007")]  # fmt: skip
    done = [Reproduced(SOURCES[0], tuple(judged(book, without, list(book.claims))), ())]
    assert [aim.is_met for aim in aims(done)] == [False, False, False, False, False]
    assert [aim.told for aim in aims(done)] == [
        "7 of 9", "0 of 1", "0 the same and 0 explained of 1", "3 of 5, 60 %; 4 would be enough",
        "1 without an explanation",
    ]  # fmt: skip


def test_a_figure_in_several_places_is_told_to_count_once() -> None:
    """Three rows are the same sentence, in abstract, introduction and evaluation: 4 rows of 5, and 2 figures of 3."""
    same = [dataclasses.replace(claim("predicted", "100", id_=f"009-{n:03}"), quantity="gain") for n in range(1, 4)]
    others = [claim("predicted", "100", id_=f"009-{n:03}") for n in (4, 5)]
    book = book_of(*same, *others)
    ours = {"009-005": 200.0}
    findings = [Finding(one, ours.get(one, 100.0), "priced", explanation="x" * (one in ours)) for one in book.claims]
    done = [Reproduced(SOURCES[0], tuple(judged(book, findings, list(book.claims))), ())]
    (way,) = ways(done)
    assert (way.rows, way.figures, way.held) == (5, 3, 4)
    (told,) = [aim.told for aim in aims(done) if "predicted" in aim.words]
    assert told == ("4 of 5, 80 %; 2 of 3, 66.6 %, where a figure that the source states in several places counts once")


def test_exact_rows_that_differ_are_named() -> None:
    rows = [claim("exact", "7", id_=f"009-{n:03}") for n in range(1, 8)]
    book = book_of(*rows)
    findings = [Finding("009-001", 7.0, "plan"), Finding("009-002", 9.0, "plan", explanation="a mean")]
    findings += [Finding(f"009-{n:03}", 9.0, "plan") for n in (3, 4, 5)]
    found = [Reproduced(SOURCES[0], tuple(judged(book, findings, list(book.claims))), ())]
    (aim,) = [aim for aim in aims(found) if "exact" in aim.words]
    assert not aim.is_met
    named = "009-002 differs, explained, 009-003 differs, open, 009-004 differs, open, and 1 more"
    assert aim.told == f"1 of 7; {named}", "two were not computed, which the first aim counts"


def test_an_input_that_differs_says_whether_it_is_explained() -> None:
    rows = [claim("input", "5", id_="009-001"), claim("input", "5", id_="009-002")]
    findings = [Finding("009-001", 6.0, "plan", explanation="of GiB"), Finding("009-002", 6.0, "plan", note="of GiB")]
    book = book_of(*rows)
    done = Reproduced(SOURCES[0], tuple(judged(book, findings, list(book.claims))), ())
    assert [verdict_text(row) for row in done.rows] == [
        "input, and ours differs, explained", "input, and ours differs, not explained",
    ]  # fmt: skip
    last = aims([done])[-1]
    assert (last.is_met, last.told) == (False, "1 without an explanation, 1 of them inputs, which test nothing")


# --- the sources' own findings ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.id)
def test_every_row_that_needs_no_machine_is_computed(source: Source) -> None:
    """Those that are marked so in the file handed to us."""
    analytic = {
        row["id"]
        for row in handed_rows("claims.csv")
        if row["seed"] == source.id and row["how_to_reproduce"].startswith("ANALYTIC")
    }
    found = {finding.claim for finding in source.load().findings() if finding.ours is not None}
    assert analytic
    assert sorted(analytic - found) == []


# The first has all of it in its own tests too.
@pytest.mark.parametrize("source", marked(SOURCES, pytest.mark.slow, but=SOURCES[1:]), ids=lambda s: s.id)
def test_every_row_is_computed_and_what_differs_is_explained(source: Source) -> None:
    book = ledger()
    claims = [claim.id for claim in book.of_source(source.id)]
    (done,) = reproduce(book, claims, with_tables=False, note=lambda line: None)
    assert [row.claim.id for row in done.rows] == claims
    assert [row.claim.id for row in done.rows if row.verdict.outcome == "not computed"] == []
    open_rows = [row.claim.id for row in done.rows if row.verdict.has_held is False and not row.is_explained]
    assert open_rows == []
    told = [row.claim.id for row in done.rows if row.verdict.has_held and row.finding and row.finding.why]
    assert told == [], "a row that holds needs no explanation"


def test_an_aim_that_is_not_met_says_what_would_be_enough() -> None:
    rows = [claim("predicted", "100", id_=f"009-{n:03}") for n in range(1, 10)]
    found = [Finding(one.id, 100.0 if n < 7 else 200.0, "priced", explanation="far") for n, one in enumerate(rows)]
    book = book_of(*rows)
    done = [Reproduced(SOURCES[0], tuple(judged(book, found, list(book.claims))), ())]
    (aim,) = [one for one in aims(done) if "predicted" in one.words]
    assert (aim.is_met, aim.told) == (False, "7 of 9, 77.7 %; 8 would be enough")


def test_a_class_that_was_changed_is_listed_and_the_aims_are_told_as_declared_too() -> None:
    """Five of six as declared, of which two are no predictions any more: three of four."""
    declared = Declared("predicted", 0.15)
    rows = [claim("predicted", "100", id_=f"009-{n:03}") for n in range(1, 5)]
    rows += [
        dataclasses.replace(claim("consistent", "100", id_=f"009-{n:03}"), declared=declared, changed="it is fitted on")
        for n in (5, 6)
    ]
    found = [Finding(one.id, 300.0 if one.id == "009-004" else 100.0, "priced", explanation="far") for one in rows]
    book = book_of(*rows)
    done = [Reproduced(SOURCES[0], tuple(judged(book, found, list(book.claims))), ())]

    def of_predicted(told: list[Reproduced]) -> str:
        return next(aim.told for aim in aims(told) if "predicted" in aim.words)

    assert of_predicted(done) == "3 of 4, 75 %; 4 would be enough"
    assert of_predicted(as_declared(done)) == "5 of 6, 83.3 %"
    changes = class_changes(done)
    assert changes == [ClassChange(("009-005", "009-006"), "predicted 0.15", "consistent", "it is fitted on")]


def test_a_prediction_that_was_changed_is_counted_both_ways() -> None:
    """Two of three are within now, one was first; what came first has the reason of the change as its explanation."""
    rows = [claim("predicted", "100", id_=f"009-{n:03}") for n in range(1, 4)]
    found = [Finding(one.id, 100.0 if one.id != "009-003" else 300.0, "priced", explanation="far") for one in rows]
    found += [
        Finding("009-001", 200.0, "shape", replaced="it waits"),
        Finding("009-002", 101.0, "shape", replaced="it waits"),
    ]
    found += [Finding("009-003", 100.0, "plan", note="only another way")]
    book = book_of(*rows)
    done = [Reproduced(SOURCES[0], tuple(judged(book, found, list(book.claims))), ())]
    assert prediction_changes(done) == [PredictionChange(("009-001", "009-002"), "it waits", 1, 2)]
    first = as_declared(done)[0].rows
    assert [row.verdict.has_held for row in first] == [False, True, False]
    assert [row.is_explained for row in first] == [True, False, True]
    told = {aim.words: aim.told for aim in aims(as_declared(done))}
    assert told["80 % of the predicted rows are within their tolerance"] == "1 of 3, 33.3 %; 3 would be enough"


# --- rounding of what a figure follows from --------------------------------------------------------------------------


def test_a_ratio_of_rounded_figures_lies_between_the_ratios_of_their_ends() -> None:
    """1.255 to 1.265 over 0.985 to 0.995: 1.2613 to 1.2843."""
    low, high = span_of(lambda a, b: a / b, Number("1.26"), Number("0.99"))
    assert low == pytest.approx(1.255 / 0.995, rel=1e-4)
    assert high == pytest.approx(1.265 / 0.985, rel=1e-4)


def test_a_sum_and_a_difference_of_rounded_figures() -> None:
    assert span_of(lambda a, b: a + b, Number("8.87"), Number("2")) == pytest.approx((10.365, 11.375), abs=1e-3)
    assert span_of(lambda a, b: a - b, Number("8"), Number("2")) == pytest.approx((5.0, 7.0), abs=1e-3)


@pytest.mark.parametrize(
    ("own", "expected"),
    [((1.261, 1.284), True), ((1.2651, 1.3), False), ((1.0, 1.2549), False), ((1.0, 2.0), True), ((1.258, 1.26), True)],
)
def test_a_span_meets_what_rounds_to_the_print(own: tuple[float, float], expected: bool) -> None:
    """1.26 is printed of 1.255 to 1.265."""
    assert meets(Number("1.26"), Span(*own)) is expected


@pytest.mark.parametrize(
    ("klass", "value", "ours", "rounding", "expected"),
    [
        ("exact", "1.26", 1.273, (Span(1.261, 1.284),), AS_ROUNDED),
        ("exact", "1.28", 1.277, (Span(1.261, 1.284),), "as printed"),
        ("exact", "1.20", 1.273, (Span(1.261, 1.284),), "missed by 6.1 %"),
        ("exact", "1.26-5.4", Span(1.273, 5.398), (Span(1.261, 1.284), Span(5.39, 5.41)), AS_ROUNDED),
        ("exact", "1.26-5.4", Span(1.273, 5.6), (Span(1.261, 1.284), Span(5.5, 5.7)), "missed by 3.7 %"),
        ("predicted", "1.26", 1.273, (Span(1.261, 1.284),), "within 1.1 %"),
        ("contradicted", "1.26", 1.273, (Span(1.261, 1.284),), f"{AS_ROUNDED}, and not contradicted"),
        ("contradicted", "1.20", 1.273, (Span(1.261, 1.284),), "contradicted by its source"),
    ],
)  # fmt: skip
def test_an_exact_row_holds_within_the_rounding_of_its_inputs(
    klass: Class, value: str, ours: Ours, rounding: tuple[Span, ...], expected: str
) -> None:
    finding = Finding("009-001", ours, "its own figures", rounding=rounding)
    assert verdict_of(claim(klass, value), finding, lambda id_: (0.0, 0.0)).words == expected


def test_rounding_has_a_span_for_each_figure() -> None:
    with pytest.raises(ValueError, match="009-001: rounding has one span for each figure"):
        Finding("009-001", 2.0, "its own figures", rounding=(Span(1, 2), Span(1, 2)))
