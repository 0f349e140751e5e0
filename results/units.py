"""How numbers look: SI prefixes, and digits decided by the uncertainty. Only here are units scaled for people.

A value with an uncertainty is rounded where the uncertainty's digits end: two digits of it when they start with 1
(rounding 0.14 to 0.1 would lose a third of it), else one. 12.3456 +- 0.41 becomes "12.3 ± 0.4".
A value without one gets `PLAIN_DIGITS` significant digits. Halves round to even.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_EVEN, Decimal

PLAIN_DIGITS = 3

MIB, GIB = 2**20, 2**30

_PREFIXES = ((-12, "p"), (-9, "n"), (-6, "µ"), (-3, "m"), (0, ""), (3, "k"), (6, "M"), (9, "G"), (12, "T"))
_PREFIXED_UNITS = frozenset({"s", "J", "W", "J/token", "J/response"})
"""Units that take a prefix; %, token/s and the dimensionless 1 stay as they are."""


def number_of(n: int, what: str) -> str:
    """ "1 run", "3 runs"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def format_quantity(value: float, unit: str, uncertainty: float | None = None) -> str:
    """Value with unit, and uncertainty where there is one: "12.3 ± 0.4 ms"."""
    scale, scaled_unit = si_scale(max(abs(value), uncertainty or 0.0), unit)
    number = format_number(value / scale, None if uncertainty is None else uncertainty / scale)
    return f"{number} {scaled_unit}".rstrip()


def si_scale(magnitude: float, unit: str) -> tuple[float, str]:
    """(what to divide by, the unit then): 0.0123 s -> (0.001, "ms"). 999.9 ms and more, as displayed, is 1 s."""
    name = "" if unit == "1" else unit
    if unit not in _PREFIXED_UNITS or magnitude == 0:
        return 1.0, name
    shown = _rounded(_finite(abs(magnitude)), _last_digit(abs(magnitude), PLAIN_DIGITS))
    largest = 0 if unit == "s" else _PREFIXES[-1][0]  # nobody reads kiloseconds
    exponent = min(max(3 * (shown.adjusted() // 3), _PREFIXES[0][0]), largest)
    return float(Decimal(10) ** exponent), dict(_PREFIXES)[exponent] + name


def with_prefix(value: float, unit: str, digits: int = 6) -> str:
    """For figures that are copied, of any unit that takes a prefix: 6.3e10 "B/s" is "63 GB/s"."""
    exponent = 0 if value == 0 else 3 * (Decimal(f"{abs(value):.{digits - 1}e}").adjusted() // 3)
    exponent = min(max(exponent, _PREFIXES[0][0]), _PREFIXES[-1][0])
    return f"{value / 10.0**exponent:.{digits}g} {dict(_PREFIXES)[exponent]}{unit}"


def told_apart(first: float, second: float, unit: str = "B") -> tuple[str, str]:
    """Both with a prefix, and with as many digits as show which is the larger: "67.1 MB" and "67.11 MB"."""
    told = [(with_prefix(first, unit, digits), with_prefix(second, unit, digits)) for digits in range(3, 16)]
    return next(((a, b) for a, b in told if a != b), told[0])


def format_number(value: float, uncertainty: float | None = None) -> str:
    """A number in the unit of its column, with its standard uncertainty or half interval where known."""
    if uncertainty is None:
        return _plain(value)
    if uncertainty < 0:
        raise ValueError(f"an uncertainty is not negative, this one is {uncertainty}")
    last = uncertainty_digit(uncertainty)
    if last is None:
        return f"{_plain(value)} ± 0"
    return f"{_fixed(value, last)} ± {_fixed(uncertainty, last)}"


def format_amount(value: float, uncertainty: float) -> str:
    """The same of what is never below 0: a digit of the value stays, however wide its interval: "4000 ± 20000"."""
    last = uncertainty_digit(uncertainty)
    if last is None or value == 0:
        return format_number(value, uncertainty)
    return f"{_fixed(value, min(last, _last_digit(value, 1)))} ± {_fixed(uncertainty, last)}"


def format_interval(low: float, high: float) -> str:
    """ "[11.9, 12.7]", both ends rounded where the digits of half the width end."""
    last = uncertainty_digit((high - low) / 2)
    return f"[{_fixed(low, last)}, {_fixed(high, last)}]" if last is not None else f"[{_plain(low)}, {_plain(high)}]"


def format_mean(mean: float, low: float, high: float) -> str:
    """The mean with the digits that its interval supports. Of what is not below 0 one at least: `format_amount`."""
    last = uncertainty_digit((high - low) / 2)
    if last is None:
        return _plain(mean)
    return _fixed(mean, min(last, _last_digit(mean, 1)) if mean and low >= 0 else last)


def format_known(value: float, relative_error: float | None) -> str:
    """With the digits that a stated error leaves, two at least, three at most: 107511 is "108000" where it is good to
    4 %, "110000" to 50 %. relative_error: None where none is stated."""
    last = uncertainty_digit(abs(value) * relative_error) if relative_error else None
    if last is None:
        return _plain(value)
    return _fixed(value, min(max(last, min(_last_digit(value, PLAIN_DIGITS), 0)), _last_digit(value, 2)))


def format_share(share: float, form: str = ".0f") -> str:
    """0.12 is "12 %"."""
    return f"{share * 100:{form}} %"


def format_error(share: float) -> str:
    """A stated error of a figure, as a share of it, with two digits: 0.125 is "± 12 %", 250 "± 25000 %"."""
    return f"± {float(f'{100 * share:.2g}'):.15g} %"


def signed(number: str) -> str:
    """A change: with its sign, unless it is shown as 0."""
    return number if number.startswith("-") or not number.strip("0.") else f"+{number}"


def format_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def uncertainty_digit(uncertainty: float) -> int | None:
    """Power of ten of the last digit that an uncertainty leaves: 0.41 -> -1, 0.14 -> -2, 23 -> 1; None for 0."""
    if uncertainty == 0:
        return None
    two = _rounded(_finite(uncertainty), _last_digit(uncertainty, 2))
    return two.adjusted() - (1 if two.as_tuple().digits[0] == 1 else 0)


def format_duration(duration_s: float) -> str:
    """Of a sentence: "412 ms", "1.63 s"."""
    return f"{duration_s:.3g} s" if duration_s >= 1 else f"{duration_s * 1e3:.3g} ms"


def format_long_duration(duration_s: float) -> str:
    """Of a guess: "2.3 minutes", "12 s"."""
    for size, word in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if duration_s >= size:
            return f"{duration_s / size:.1f} {word}"
    return f"{duration_s:.0f} s" if duration_s >= 1 else "1 s"


def format_bytes(n_bytes: int) -> str:
    """Memory in binary units: 137438953472 -> "128 GiB"."""
    exponent = min(max(int(math.log2(n_bytes)) // 10, 0), 4) if n_bytes > 0 else 0
    return f"{_plain(n_bytes / 1024**exponent)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


def format_figure(value: float, unit: str) -> str:
    """A figure of any metric: shares ("1") in %; bytes in binary units. Other scores have no unit ("")."""
    if unit == "B":
        return format_bytes(round(value))
    return format_quantity(100 * value, "%") if unit == "1" else format_quantity(value, unit)


def figure_scale(magnitude: float, unit: str) -> tuple[float, str]:
    """As `si_scale`, for a column of figures of any metric."""
    if unit == "B":
        return 1024.0**2, "MiB"
    return (0.01, "%") if unit == "1" else si_scale(magnitude, unit)


def format_count(n: float) -> str:
    """A large count in words of thousands: 5734400 -> "5.73 million"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= size:
            return f"{_plain(n / size)} {word}"
    return f"{n:.0f}"


def _plain(value: float) -> str:
    """`PLAIN_DIGITS` significant digits, but no digit before the point is ever made up into a zero."""
    if value == 0:
        return "0"
    last = _last_digit(value, PLAIN_DIGITS)
    # Beyond the digits of a double all of them are made up, and `Decimal` holds 28.
    return _fixed(value, last if last > 15 else min(last, 0))


def _fixed(value: float, last: int) -> str:
    """Decimal notation rounded at 10**last; very small and very large numbers as 1.23e-07."""
    rounded = _rounded(_finite(value), last)
    if rounded == 0:
        rounded = abs(rounded)
    if last < -9 or rounded.adjusted() > 12:
        return f"{rounded:.{max(rounded.adjusted() - last, 0)}e}"
    return f"{rounded:f}"


def _rounded(value: Decimal, last: int) -> Decimal:
    return (
        value.quantize(Decimal(1).scaleb(last), rounding=ROUND_HALF_EVEN)
        if last <= 0
        else (value.scaleb(-last).quantize(Decimal(1), rounding=ROUND_HALF_EVEN).scaleb(last))
    )


def _last_digit(value: float, digits: int) -> int:
    """Power of ten of the last of so many significant digits, after rounding (9.996 has its third at 0.1: 10.0)."""
    exact = _finite(abs(value))
    last = exact.adjusted() - digits + 1
    return _rounded(exact, last).adjusted() - digits + 1


def _finite(value: float) -> Decimal:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a figure; a missing one is None with a reason")
    # repr, not the exact binary value: 0.25 and 2.675 round as they are read.
    return Decimal(repr(float(value)))
