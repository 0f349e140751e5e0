"""The limits that something sets to the clocks of a device, and whether they changed between its states.

A core that is off line shows no limit, and that is no other limit: cores are compared where they were on line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from results.core_lists import core_words, parse_cores
from results.environments import Conditions

WHOLE = ("cpu_policy", "gpu_limits")
"""What is told of a device as one. `frequency_caps` are told of cores."""
_TOLD = ("frequency_caps", "cores_online", *WHOLE)
NO_LIMIT = "no limit"
_CAP = re.compile(r"cpu (\d[\d,-]*) (.+)")


def limits_changed(seen: Sequence[Conditions]) -> bool:
    """What is not told is no change."""
    if any(len({getattr(state, name) for state in seen} - {None}) > 1 for name in WHOLE):
        return True
    told = [(state, _by_core(state)) for state in seen if state.frequency_caps is not None]
    capped = {core for _, caps in told for core in caps}
    found: defaultdict[int, set[str]] = defaultdict(set)
    for state, caps in told:
        online = capped if not state.cores_online else capped & parse_cores(state.cores_online)
        for core in online:
            found[core].add(caps.get(core, NO_LIMIT))
    return any(len(limits) > 1 for limits in found.values())


def limit_words(state: Conditions) -> str | None:
    """All limits in force; None where the device tells none of them."""
    told = [limits for limits in (state.frequency_caps, state.cpu_policy, state.gpu_limits) if limits is not None]
    return ("; ".join(words for limits in told for words in limits) or NO_LIMIT) if told else None


def rules_seen(states: Iterable[Conditions]) -> dict[str, list[str]]:
    """By what is told of a device as one: each rule that held in these states once, in words, in their order."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for state in states:
        for name in WHOLE:
            if (rules := getattr(state, name)) is not None:
                found[name]["; ".join(rules)] = None
    return {name: list(words) for name, words in found.items()}


def changes_of_limits(seen: Sequence[Conditions]) -> Iterator[tuple[Conditions, Conditions]]:
    """(the state before, the state behind) of each change, in order of time. A core off line keeps its limit."""
    last: Conditions | None = None
    for state in seen:
        now = state if last is None else _following(last, state)
        if last is not None and limits_changed([last, now]):
            yield last, now
        last = now


def _following(last: Conditions, state: Conditions) -> Conditions:
    """The state, with what it does not tell as it was told last: other figures, and limits of cores off line."""
    told = {name: getattr(state, name) for name in _TOLD if getattr(state, name) is not None}
    if state.cores_online and last.cores_online:
        online = parse_cores(state.cores_online)
        off_line = {core: words for core, words in _by_core(last).items() if core not in online}
        if off_line and state.frequency_caps is not None:
            told["frequency_caps"] = _in_words(off_line | _by_core(state))
        told["cores_online"] = core_words(parse_cores(last.cores_online) | online)
    return last.model_copy(update=told | {"at_s": state.at_s})


def _by_core(state: Conditions) -> dict[int, str]:
    """ "cpu 4-7 limited to 1500 of 2800 MHz": of each of the four."""
    matches = [match for words in state.frequency_caps or () if (match := _CAP.fullmatch(words))]
    return {core: match[2] for match in matches for core in parse_cores(match[1])}


def _in_words(caps: Mapping[int, str]) -> tuple[str, ...]:
    cores = {words: [core for core, own in caps.items() if own == words] for words in caps.values()}
    return tuple(f"cpu {core_words(own)} {words}" for words, own in sorted(cores.items(), key=lambda one: min(one[1])))
