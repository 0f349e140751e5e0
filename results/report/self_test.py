"""A self-test in words: the same lines on a terminal and in a report."""

from __future__ import annotations

from results.printable import with_colon
from results.self_tests import Agreement, Check, MeterTest, SelfTest
from results.units import format_error, format_quantity

VERDICT_WORDS = {
    "ready": "it measures, and nothing is wrong",
    "untested": "it measures, but nothing that its meters see could be put under load",
    "modelled only": "it has no meter: its joules are modelled",
    "to be fixed": "it measures, but something is to be fixed",
    "not ready": "it cannot measure",
}
CHECK_WORDS = {True: "ok", False: "FIX", None: "note"}


def verdict_line(found: SelfTest) -> str:
    return f"{with_colon(found.device)} {found.verdict} ({VERDICT_WORDS[found.verdict]}); {found.made_at}"


def check_line(check: Check) -> str:
    remedy = f"; {check.remedy}" if check.remedy else ""
    return f"{check.name}: {check.found}{remedy}"


def meter_line(meter: MeterTest) -> str:
    """What a meter is good for, in one line."""
    parts = [f"{meter.meter} ({', '.join(meter.components)}; {meter.method})"]
    if meter.idle_w is not None and meter.load_w is not None:
        noise = f" ± {format_quantity(meter.noise_w, 'W')}" if meter.noise_w is not None else ""
        parts.append(f"idle {format_quantity(meter.idle_w, 'W')}{noise}, load {format_quantity(meter.load_w, 'W')}")
    parts.append(_update_words(meter))
    if meter.sees_load is not None:
        parts.append("sees the load" if meter.sees_load else "does NOT see the load")
    for share, seconds in (("1 %", meter.shortest_1_percent_s), ("5 %", meter.shortest_5_percent_s)):
        if seconds is not None:
            parts.append(f"{share} from {format_quantity(seconds, 's')}")
    if meter.relative_accuracy:
        parts.append(f"gain {format_error(meter.relative_accuracy)}")
    if meter.reason:
        parts.append(meter.reason)
    return "; ".join(parts)


def agreement_line(agreement: Agreement) -> str:
    first, second = agreement.meters
    energies = " and ".join(format_quantity(e, "J") for e in agreement.energy_j)
    how = "agree" if agreement.agrees else "DISAGREE"
    return (
        f"{first} and {second} {how} about the {agreement.unit}: {energies}, {100 * agreement.difference:+.2g} %,"
        f" {100 * agreement.allowed:.2g} % allowed"
    )


def self_test_lines(found: SelfTest) -> list[str]:
    """The verdict, what each meter is good for, and what is to be fixed: for a report."""
    lines = [verdict_line(found), *map(meter_line, found.meters), *map(agreement_line, found.agreements)]
    return lines + [check_line(c) for c in found.checks if c.ok is not True]


def _update_words(meter: MeterTest) -> str:
    if meter.seen_update_s is None:
        return f"no change of its value was seen (stated: every {format_quantity(meter.stated_update_s, 's')})"
    every = format_quantity(meter.seen_update_s, "s")
    # A meter cannot be seen to renew its value more often than it is read.
    if meter.seen_update_s < 1.5 * meter.sample_interval_s:
        return f"a new value at every reading ({every})"
    return f"a new value every {every}"
