"""Display of numbers: prefixes, and digits that the uncertainty supports."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.units import (
    figure_scale,
    format_amount,
    format_bytes,
    format_error,
    format_figure,
    format_interval,
    format_known,
    format_long_duration,
    format_mean,
    format_number,
    format_p,
    format_quantity,
    number_of,
    si_scale,
    signed,
    told_apart,
    uncertainty_digit,
    with_prefix,
)

PREFIX_POWERS = {"p": -12, "n": -9, "µ": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12}


@pytest.mark.parametrize(
    ("value", "unit", "uncertainty", "text"),
    [
        (0.0123456, "s", 0.00041, "12.3 ± 0.4 ms"),
        (0.0123456, "s", 0.00014, "12.35 ± 0.14 ms"),
        (1234.5, "token/s", 23.0, "1230 ± 20 token/s"),
        (0.25, "1", 0.014, "0.250 ± 0.014"),
        (0.5, "s", 0.0, "500 ± 0 ms"),
        (0.305, "J/token", None, "305 mJ/token"),
        (12.34, "%", None, "12.3 %"),
        (1234567.0, "token/s", None, "1234567 token/s"),
        (0.99996, "s", None, "1.00 s"),
        (1990.0, "s", None, "1990 s"),  # minutes would be read, kiloseconds are not
        (0.0, "J", None, "0 J"),
        (3.0, "J", 40.0, "0 ± 40 J"),
        (-0.0004, "W", 0.3, "0 ± 300 mW"),
    ],
)
def test_quantities_show_what_the_uncertainty_supports(
    value: float, unit: str, uncertainty: float | None, text: str
) -> None:
    assert format_quantity(value, unit, uncertainty) == text


@given(st.floats(min_value=1e-11, max_value=1e14))
def test_prefixed_magnitude_reads_between_1_and_1000(magnitude: float) -> None:
    scale, unit = si_scale(magnitude, "J")
    assert unit.endswith("J")
    assert math.isclose(scale, 10.0 ** PREFIX_POWERS[unit.removesuffix("J")], rel_tol=1e-12)
    assert 0.999 <= magnitude / scale < 999.5


@given(st.floats(min_value=-1e6, max_value=1e6), st.floats(min_value=1e-6, max_value=1e4))
def test_rounding_moves_a_value_by_less_than_its_uncertainty(value: float, uncertainty: float) -> None:
    shown, shown_uncertainty = (Decimal(part) for part in format_number(value, uncertainty).split(" ± "))
    assert abs(shown - Decimal(value)) <= Decimal(uncertainty) / 2
    # One digit of an uncertainty errs by at most 25 % (0.0025 of 0.02), two digits that start with 1 by at most 5 %.
    assert abs(shown_uncertainty - Decimal(uncertainty)) <= Decimal(uncertainty) / 4
    assert shown.as_tuple().exponent == shown_uncertainty.as_tuple().exponent


@pytest.mark.parametrize(
    ("uncertainty", "digit"), [(0.41, -1), (0.14, -2), (23.0, 1), (0.0996, -2), (0.0951, -2), (1.96, 0), (0.0, None)]
)
def test_two_digits_are_kept_only_of_an_uncertainty_that_starts_with_one(uncertainty: float, digit: int | None) -> None:
    assert uncertainty_digit(uncertainty) == digit


@pytest.mark.parametrize(
    ("value", "half", "text", "of_mean"),
    [
        (4321.0, 20000.0, "4000 ± 20000", "4000"),  # of two trials: "0 ± 20000" stood there
        (7321.0, 20000.0, "7000 ± 20000", "7000"),
        (0.432, 2.3, "0.4 ± 2", "0.4"),
        (4321.0, 23.0, "4320 ± 20", "4320"),
        (0.0, 3.0, "0 ± 3", "0.0"),
    ],
)
def test_an_amount_is_not_0_however_wide_its_interval(value: float, half: float, text: str, of_mean: str) -> None:
    assert format_amount(value, half) == text
    assert format_mean(value, max(0.0, value - half), value + half) == of_mean


def test_a_difference_that_its_interval_hides_is_0() -> None:
    assert format_mean(0.0012, -0.6, 0.6) == "0.0"
    assert format_number(0.0012, 0.6) == "0.0 ± 0.6"


def test_intervals_are_rounded_at_the_digit_of_half_their_width() -> None:
    assert format_interval(11.91, 12.74) == "[11.9, 12.7]"
    assert format_mean(12.3456, 11.91, 12.74) == "12.3"
    assert format_interval(0.9, 1.1) == "[0.90, 1.10]"


def test_an_interval_of_no_width_keeps_three_digits() -> None:
    assert format_interval(1.0, 1.0) == "[1.00, 1.00]"


def test_bytes_are_counted_in_powers_of_1024() -> None:
    assert [format_figure(v, u) for v, u in ((430475245.0, "B"), (0.5, "1"), (0.998, "s"))] == [
        "411 MiB", "50.0 %", "998 ms",
    ]  # fmt: skip
    assert figure_scale(430475245.0, "B") == (1048576, "MiB")
    assert [format_bytes(n) for n in (0, 1023, 1024, 137438953472)] == ["0 B", "1023 B", "1.00 KiB", "128 GiB"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="missing one is None with a reason"):
        format_quantity(value, "s")


def test_a_negative_uncertainty_is_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        format_number(1.0, -0.1)


@pytest.mark.parametrize(("number", "shown"), [("0.150", "+0.150"), ("-0.1", "-0.1"), ("0.00", "0.00"), ("0", "0")])
def test_a_change_has_its_sign_unless_it_shows_as_nothing(number: str, shown: str) -> None:
    assert signed(number) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.005774, "± 0.58 %"), (0.5, "± 50 %"), (1.0, "± 100 %"), (2.0, "± 200 %"), (247.3, "± 25000 %")],
)
def test_a_stated_error_is_written_out_however_large_it_is(share: float, shown: str) -> None:
    assert format_error(share) == shown


def test_a_small_p_is_not_made_up_to_digits() -> None:
    assert (format_p(0.0004), format_p(0.0312), format_p(1.0)) == ("p < 0.001", "p = 0.031", "p = 1")


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (107511.0, 0.038, "108000"),
        (107511.0, 0.5, "110000"),
        (107.511, 0.038, "108"),
        (10.0251, 0.001, "10.0"),
        (0.22431, 0.5, "0.22"),
        (107511.0, None, "107511"),
    ],
)
def test_a_stated_error_leaves_its_digits_two_at_least(value: float, error: float | None, expected: str) -> None:
    assert format_known(value, error) == expected


def test_a_figure_that_is_copied_keeps_its_digits() -> None:
    assert with_prefix(6.3e10, "B/s") == "63 GB/s"
    assert with_prefix(206158430208, "B") == "206.158 GB"
    assert with_prefix(1.5007e-13, "s/FLOP") == "0.15007 ps/FLOP", "below the least prefix"
    assert with_prefix(999999.9, "W") == "1 MW", "as it is shown"
    assert with_prefix(0.0, "s") == "0 s"


def test_two_sizes_of_which_one_is_larger_are_told_so_that_it_shows() -> None:
    assert told_apart(4849664, 4546560) == ("4.85 MB", "4.55 MB")
    assert told_apart(67104768, 67108864) == ("67.1 MB", "67.11 MB"), "67.1 MB both, with three digits"
    assert told_apart(5e9, 5e9) == ("5 GB", "5 GB")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.01, "1 s"), (12.4, "12 s"), (90, "1.5 minutes"), (9000, "2.5 hours"), (129_600, "1.5 days")],
)
def test_a_guessed_duration_is_never_none(seconds: float, told: str) -> None:
    """A dry run of a modelled plan was told to take about 0.0 minutes."""
    assert format_long_duration(seconds) == told


def test_one_of_a_thing_has_no_s() -> None:
    assert [number_of(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
