"""What a person sees of a session: a line a probe, then candidates with intervals, and why one was chosen."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from harness.progress import PlainProgress, outcome
from harness.tuning.checking import REPLAYED_WORDS
from harness.tuning.probing import Arm, Probe
from harness.tuning.profile import TunedProfile, is_refuted
from harness.tuning.race import Ask, Estimate, Failed, RaceResult, Standing
from harness.tuning.session import PhaseFound, SessionFound, TuneOptions
from results.records import Phase
from results.trials import Trial
from results.units import format_share

DOES = {"prefill": "prefill", "decode": "decoding", "all": "requests"}
STATE_WORDS = {
    "chosen": "chosen",
    "as good": "as good as the chosen",
    "on the front": "on the front",
    "costlier": "costs more",
    "slower": "slower",
    "too slow": "below the floor",
    "beaten": "beaten in both",
    "undecided": "not told apart",
    "not raced": "probed, not raced",
    "failed": "failed",
}


class ProbeLines(PlainProgress):
    """Waits, repetitions and the pairs of a check as of any run; each probe has its own line from `told`."""

    def trial_finished(self, cell: str, trial: Trial) -> None:
        if self._n_trials:
            super().trial_finished(cell, trial)
        elif trial.failure is not None or trial.marks:  # nobody knows how many probes there will be
            self._say(f"{cell} · trial {trial.repeat + 1} · {outcome(trial)}")

    def expired(self, changed: Sequence[str]) -> None:
        """Of a profile that is checked."""
        self._say(f"changed since the profile was made or checked: {'; '.join(changed)}")

    def told(self, name: Callable[[Arm], str], phase: Phase, ask: Ask[Arm], nth: int, found: Probe | Failed) -> None:
        head = f"{DOES[phase]:8} round {ask.round:<3} {ask.n_in} in · {name(ask.arm)} · probe {nth}"
        if isinstance(found, Failed):
            self._say(f"{head} · leaves the search: {found.reason}")
            return
        joules = "no joules" if found.joules is None else f"{si(found.joules / found.tokens)}J/token {found.method}"
        self._say(f"{head} · {_speed(found.tokens / found.seconds)} token/s · {joules}")


def si(value: float) -> str:
    """12.3 m, 1.2, ...: for joules of a token."""
    if value >= 1 or value == 0:
        return f"{value:.3g} "
    return f"{value * 1e3:.3g} m" if value >= 1e-3 else f"{value * 1e6:.3g} µ"


def with_interval(estimate: Estimate | None, shown: Callable[[float], str]) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return shown(estimate.value)
    return f"{shown(estimate.value)} [{shown(estimate.low)}, {shown(estimate.high)}]"


def speed_words(estimate: Estimate | None) -> str:
    return with_interval(estimate, _speed)


def _speed(tokens_per_s: float) -> str:
    return _digits(tokens_per_s, 4)


def _digits(value: float, n: int) -> str:
    """All of them in front of the point, without an exponent."""
    return f"{value:.{n}g}" if round(value) < 10**n else f"{value:.0f}"


def energy_words(estimate: Estimate | None) -> str:
    """In mJ of a token, or thousandths of the gauge's unit."""
    return with_interval(estimate, lambda value: _digits(1e3 * value, 3))


def ratio_words(estimate: Estimate | None) -> str:
    return with_interval(estimate, lambda value: f"{value:.2f}×")


def order_words(options: TuneOptions) -> str:
    """How the rows of `candidate_rows` follow each other."""
    return "the fastest first" if options.objective == "latency" else "the cheapest first"


def candidate_rows(session: SessionFound[Arm], found: PhaseFound[Arm]) -> list[dict[str, Any]]:
    """For the terminal, and in full for the CSV by `candidate_records`. Without columns of energy where it is not
    asked."""
    rows = []
    for one in found.result.standings:
        row = {
            "candidate": session.space.names[one.arm],
            "probes": one.n_probes,
            f"token/s, {session.time_method}": speed_words(one.speed_tokens_per_s),
        }
        if session.options.objective != "latency":
            unit = f"m{session.cost_unit(found) or 'J/token'}, {session.cost_method(found) or 'no meter'}"
            row |= {unit: energy_words(one.cost), "energy over chosen": ratio_words(one.cost_over_chosen)}
        row |= {
            "speed over fastest": ratio_words(one.speed_over_fastest),
            "outcome": one.reason or state_words(found.result, one),
        }
        rows.append(row)
    return rows


def state_words(result: RaceResult[Arm], one: Standing[Arm]) -> str:
    words = STATE_WORDS[one.state]
    if one.arm == result.chosen and one.state != "chosen":
        words = "chosen"
    is_on_edge = one.arm in result.on_edge and one.arm != result.fastest
    return f"{words}, on the edge of the floor" if is_on_edge else words


def candidate_records(session: SessionFound[Arm], found: PhaseFound[Arm]) -> list[dict[str, Any]]:
    """One row a candidate. Energy in the unit that stands in its column of that name."""

    def triple(key: str, estimate: Estimate | None) -> dict[str, float | None]:
        value, low, high = estimate or (None, None, None)
        return {key: value, f"{key}_low": low, f"{key}_high": high}

    return [
        {
            "phase": found.phase,
            "candidate": session.space.names[one.arm],
            "state": one.state,
            "n_probes": one.n_probes,
            "time_method": session.time_method,
            **triple("speed_tokens_per_s", one.speed_tokens_per_s),
            "energy_method": session.cost_method(found) or "missing",
            "energy_unit": session.cost_unit(found),
            **triple("energy_per_token", one.cost),
            **triple("energy_over_chosen", one.cost_over_chosen),
            **triple("speed_over_fastest", one.speed_over_fastest),
            "reason": one.reason,
        }
        for one in found.result.standings
    ]


def probe_records(session: SessionFound[Arm], found: PhaseFound[Arm]) -> list[dict[str, Any]]:
    """One row a probe, in the order in which its search asked."""
    rows = []
    for i, one in enumerate(found.probes):
        probe = one.found if isinstance(one.found, Probe) else None
        rows.append(
            {
                "phase": found.phase,
                "asked": i + 1,
                "round": one.ask.round,
                "stage": one.ask.stage,
                "candidate": session.space.names[one.ask.arm],
                "probe": one.nth,
                "tokens": probe and probe.tokens,
                "seconds": probe and probe.seconds,
                "energy": probe and probe.joules,
                "energy_unit": None if found.energy_unit is None else found.energy_unit.removesuffix("/token"),
                "energy_method": (probe and probe.method) or "missing",
                "reason": probe.why_no_joules if probe else one.found.reason if isinstance(one.found, Failed) else None,
            }
        )
    return rows


def sentence(session: SessionFound[Arm], found: PhaseFound[Arm]) -> str:
    """What was chosen and why."""
    result, names, options = found.result, session.space.names, session.options
    chosen = next(one for one in result.standings if one.arm == result.chosen)
    speed = f"{speed_words(chosen.speed_tokens_per_s)} token/s"
    energy = "" if chosen.cost is None else f"{energy_words(chosen.cost)} m{session.cost_unit(found)}"
    n = sum(one.state not in ("not raced", "failed") for one in result.standings)
    n_failed = sum(one.state == "failed" for one in result.standings)
    counted = f"{n} candidate{'s' if n != 1 else ''}"
    method = session.cost_method(found)
    slower = f"{format_share(options.slowdown, '.6g')} slower than the fastest"
    if n == 1:
        why = f"is the only candidate that was raced: {f'{energy} ({method}) at ' if energy else ''}{speed}"
    elif options.objective == "latency":
        why = f"is the fastest of {n} at {speed}"
    elif options.objective == "pareto":
        why = (
            f"costs least of those on the front ({len(result.front)} of {counted}) that are at most {slower}:"
            f" {energy} ({method}) at {speed}"
        )
    else:
        # Later probes may read otherwise than the one that set the floor.
        fastest = "from one probe of" if options.is_once else "the fastest is"
        floor = _speed(result.floor_tokens_per_s) if result.floor_tokens_per_s is not None else "none"
        why = (
            f"costs least of those of {counted} that are at most {slower}: {energy} ({method}) at {speed};"
            f" the floor is {floor}, {fastest} {names[result.fastest]}"
        )
    speed_now = chosen.speed_tokens_per_s
    if (
        options.is_once
        and speed_now is not None
        and result.floor_tokens_per_s is not None
        and speed_now.value < result.floor_tokens_per_s
    ):
        why = f"is stage 1's fastest: no candidate was fast enough when it was probed; {energy} ({method}) at {speed}"
    n_rest = len(session.space.cells) - n - n_failed
    if options.is_once:
        sure = " Each was probed once or twice, as source 002 does: how far noise decided is not known."
    elif n == 1 or result.is_separated:
        sure = "" if n == 1 else " No other of them may be better by more than the indifference, with 95 % confidence."
        if n_rest:
            sure += f" Nothing is claimed of the other {n_rest} that there are: they were not raced."
    else:
        open_ones = [names[one.arm] for one in result.standings if one.state in ("undecided", "as good")]
        told = f" ({', '.join(open_ones[:4])})" if open_ones else ""
        sure = f" Not certain: {result.n_probes} probes were spent before all others were told apart{told}."
    if session.is_by_replayed_joules(found):
        sure = f" Not certain.{REPLAYED_WORDS}"
    if n_failed:
        sure += f" {n_failed} left the search; their reasons stand with the candidates."
    if found.method == "modelled" and options.needs_joules and session.time_method == "measured":
        sure += " The joules are modelled from CPU time, and a meter may say otherwise."
    return f"{DOES[found.phase].capitalize()}: {names[result.chosen]} {why}.{sure}"


def taken_words(profile: TunedProfile) -> str:
    """How a plan takes what was chosen, or why none does."""
    if is_refuted(profile):
        again = f"`joulebench tune --check {shlex.quote(profile.name)}` measures it again"
        return f'no plan takes the profile "{profile.name}", for its check does not hold; {again}'
    return f'a plan takes it by engine = "tuned:{profile.name}"'
