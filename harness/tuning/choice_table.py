"""What was chosen and what it saves: the layout of source 002's Tables 7 and 8, and its savings, for one session."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from harness.tuning.display import energy_words, speed_words
from harness.tuning.probing import Arm
from harness.tuning.profile import CheckedRatio, TunedProfile
from harness.tuning.race import Estimate
from harness.tuning.session import PhaseFound, SessionFound
from results.core_lists import parse_cores
from results.records import Phase

PLANNED, FASTEST = "as planned", "the fastest"


class Saving(NamedTuple):
    """Of the chosen arm against another: 0.2 is a fifth less. Ends None: no interval. value None: not known, why."""

    against: str
    quantity: Literal["energy", "time"]
    value: float | None
    low: float | None
    high: float | None
    reason: str | None = None
    method: str | None = None
    """Of joules that the search was not judged by: those of the check."""


def savings(found: PhaseFound[Arm], profile: TunedProfile) -> list[Saving]:
    """Against the planned arm by the pairs of the check; against the fastest by the rounds of the search."""
    ratios = () if profile.check is None else profile.check.ratios
    rows = [_against_planned(one) for one in ratios if one.phase == found.phase]
    if not rows:
        rows = [Saving(PLANNED, "energy", None, None, None, "not measured beside it (--pairs 0)")]
    standing = {one.arm: one for one in found.result.standings}
    fastest, chosen = standing[found.result.fastest], standing[found.result.chosen]
    if fastest.arm == chosen.arm:
        return [*rows, Saving(FASTEST, "energy", None, None, None, "the chosen is the fastest")]
    over = fastest.cost_over_chosen
    rows.append(_inverse(over) if over is not None else Saving(FASTEST, "energy", None, None, None, "no energy"))
    slower = chosen.speed_over_fastest
    if slower is not None:
        rows.append(_inverse(slower)._replace(quantity="time"))
    return rows


def _against_planned(one: CheckedRatio) -> Saving:
    if one.ratio is None:
        return Saving(PLANNED, one.quantity, None, None, None, one.reason)
    low, high = (None if end is None else 1.0 - end for end in (one.high, one.low))
    return Saving(PLANNED, one.quantity, 1.0 - one.ratio, low, high, method=one.method)


def checked_method(profile: TunedProfile) -> str | None:
    """Of the check's joules. None: there are none."""
    ratios = () if profile.check is None else profile.check.ratios
    return next((one.method for one in ratios if one.method is not None), None)


def _inverse(over: Estimate) -> Saving:
    """over: the fastest's energy over the chosen's, or the chosen's speed over the fastest's."""
    low, high = (None if end is None else 1.0 - 1.0 / end for end in (over.low, over.high))
    return Saving(FASTEST, "energy", 1.0 - 1.0 / over.value, low, high)


def saving_words(one: Saving | None) -> str:
    if one is None or one.value is None:
        return f"– ({one.reason})" if one is not None else "–"
    interval = "" if one.low is None or one.high is None else f" [{100 * one.low:.1f}, {100 * one.high:.1f}]"
    return f"{100 * one.value:.1f} %{interval}"


def n_cores(keys: dict[str, Any], phase: Phase) -> int | None:
    """Cores or threads that an arm computes with; None where its keys do not say."""
    for key, count in (("cores", lambda text: len(parse_cores(str(text)))), ("threads", int)):
        value = keys.get(key)
        value = value.get(phase) if isinstance(value, dict) else value
        if value is not None:
            return int(count(value))
    return None


def choice_records(session: SessionFound[Arm], profile: TunedProfile) -> list[dict[str, Any]]:
    """A row a phase and comparison, for the CSV."""
    planned = {key: profile.plan["engine"][0].get(key) for key in ("cores", "threads")}
    rows = []
    for found in session.phases:
        chosen = next(one for one in found.result.standings if one.arm == found.result.chosen)
        for one in savings(found, profile):
            rows.append(
                {
                    "device": profile.fingerprint.device,
                    "engine": profile.fingerprint.engine,
                    "model": profile.fingerprint.model,
                    "phase": found.phase,
                    "chosen": session.space.names[found.result.chosen],
                    "n_cores": n_cores(session.space.keys[found.result.chosen], found.phase),
                    "n_cores_planned": n_cores(planned, found.phase),
                    "speed_tokens_per_s": chosen.speed_tokens_per_s and chosen.speed_tokens_per_s.value,
                    "energy_per_token": chosen.cost and chosen.cost.value,
                    "energy_unit": session.cost_unit(found),
                    "energy_method": session.cost_method(found) or "missing",
                    "against": one.against,
                    "quantity": one.quantity,
                    "saving": one.value,
                    "saving_low": one.low,
                    "saving_high": one.high,
                    "saving_method": _method(session, found, one),
                    "reason": one.reason,
                }
            )
    return rows


def _method(session: SessionFound[Arm], found: PhaseFound[Arm], one: Saving) -> str | None:
    """How a saving was told; None where there is none."""
    if one.value is None:
        return None
    return session.time_method if one.quantity == "time" else one.method or session.cost_method(found)


def choice_cells(session: SessionFound[Arm], found: PhaseFound[Arm], profile: TunedProfile) -> list[str]:
    """Of the page's table: chosen, cores, planned cores, speed, energy."""
    chosen = next(one for one in found.result.standings if one.arm == found.result.chosen)
    planned = {key: profile.plan["engine"][0].get(key) for key in ("cores", "threads")}
    counts = [n_cores(session.space.keys[found.result.chosen], found.phase), n_cores(planned, found.phase)]
    return [
        session.space.names[found.result.chosen],
        "–" if counts[0] is None else str(counts[0]),
        "the engine's own" if counts[1] is None else str(counts[1]),
        speed_words(chosen.speed_tokens_per_s),
        energy_words(chosen.cost) or "–",
    ]


def saved_cells(found: PhaseFound[Arm], profile: TunedProfile) -> list[str]:
    """Of the page's table: savings of energy and of time against the planned arm, then against the fastest."""
    told = {(one.against, one.quantity): one for one in savings(found, profile)}
    return [saving_words(told.get((other, what))) for other in (PLANNED, FASTEST) for what in ("energy", "time")]
