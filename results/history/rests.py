"""What a run rests on besides the settings of its arms: weights, sheets, recordings, data, variables, its protocol, and
the rules by which its host sets its clocks and its GPUs' power, and the parts that its meters saw.

A file is told by its digest, wherever it lies. An arm of one name and one model stays one line of a history when a file
below it is replaced, so whoever compares two runs says where that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from results.cells import by_device, usable
from results.clock_limits import rules_seen
from results.history.settings import ABSENT
from results.records import MODEL_PREFIX
from results.run_notes import parts_seen
from results.runs import HARDWARE_SHEET, OF_MODEL, OF_PROFILE, OWN_CODE, SHA256, RunData, shown_value

PROTOCOL: Final = "protocol."
RULES: Final = {"cpu_policy": "clocks of ", "gpu_limits": "power limits of GPUs of "}
"""And a device: governor, limits, turbo; what their owner lets GPUs draw. Of a run that did not see them nothing is
known."""
SEEN_BY: Final = "parts seen by "
ON: Final = " on "
"""SEEN_BY a meter ON a device: what its joules are of."""
NOT_OF_A_FIGURE: Final = ("repeats", "stop")
"""Of the protocol: how often was measured, which stands with each figure."""
THEN: Final = " then "
DEFAULT: Final = f"{ABSENT} (the default)"


def rests_of(run: RunData) -> dict[str, str]:
    """Empty in runs from before it was kept. joulebench's own code is told by its version, and a profile or a file of
    another engine by the settings of its arms."""
    info = run.info
    if not info.inputs:
        return {}
    set_by_arms = {key for cell in run.cells for key in cell.engine_parameters}
    found = {
        one.name: one.value
        for one in info.inputs
        if one.name != OWN_CODE and OF_PROFILE not in one.name and one.name not in set_by_arms
    }
    protocol = info.plan.get("protocol")
    if isinstance(protocol, Mapping):
        found |= {f"{PROTOCOL}{key}": str(value) for key, value in protocol.items() if key not in NOT_OF_A_FIGURE}
    return found | dict(_seen(run))


def _seen(run: RunData) -> Iterator[tuple[str, str]]:
    """Of each device whose trials saw by what rules its clocks and its GPUs' power are set, or of which parts a meter's
    joules are: all, in their order."""
    for device, trials in by_device(run).items():
        for name, rules in rules_seen(state for trial in usable(trials) for state in trial.conditions).items():
            yield f"{RULES[name]}{device}", THEN.join(rules)
        for meter, parts in parts_seen(usable(trials)).items():
            yield f"{SEEN_BY}{meter}{ON}{device}", THEN.join(parts)


def known_rests(before: Mapping[str, str], own: Mapping[str, str]) -> Mapping[str, str]:
    """The last that is known: a run from before they were kept, or whose clocks nobody saw, hides no change."""
    if not own:
        return before
    return {name: value for name, value in before.items() if _device_seen(name) is not None} | dict(own)


def changed_rests(first: Mapping[str, str], second: Mapping[str, str], model: str, device: str) -> list[str]:
    """ "model.safetensors of model m sha256 1f0e → sha256 77ab", each, of what an arm of this model and device rests
    on. A file that only lies elsewhere is the same."""
    if not first or not second or first == second:
        return []
    one, other = (dict(_of_arm(rests, model, device)) for rests in (first, second))
    moved = {value for value in one.values() if value.startswith(SHA256)} & set(other.values())
    return [
        f"{name} {_told(name, before)} → {_told(name, after)}"
        for name in sorted(one.keys() | other.keys())
        if (before := one.get(name)) != (after := other.get(name))
        and not (before in moved and after is None)
        and not (after in moved and before is None)
        and not (_device_seen(name) is not None and None in (before, after))
    ]


def _of_arm(rests: Mapping[str, str], model: str, device: str) -> Iterator[tuple[str, str]]:
    """Without what other models and machines of the run rest on."""
    sources = {name.partition(OF_MODEL)[2] for name in rests if OF_MODEL in name}
    # A swept model is called "m[source=m]", a noted one "m (random weights)".
    own = {source for source in sources if model == source or model.startswith((f"{source} ", f"{source}["))}
    for name, value in rests.items():
        if OF_MODEL in name and own and name.partition(OF_MODEL)[2] not in own:
            continue
        if name.startswith(HARDWARE_SHEET) and not _is_sheet_of(name.removeprefix(HARDWARE_SHEET), device):
            continue
        if _device_seen(name) not in (None, device):
            continue
        yield name, value


def _device_seen(name: str) -> str | None:
    """Of what trials saw of it; None of what the run knew before."""
    if name.startswith(SEEN_BY):
        return name.partition(ON)[2]
    return next((name.removeprefix(rule) for rule in RULES.values() if name.startswith(rule)), None)


def _is_sheet_of(sheet: str, device: str) -> bool:
    own = device.removeprefix(MODEL_PREFIX)
    return own == sheet or own.startswith(f"{sheet}[")


def _told(name: str, value: str | None) -> str:
    if value is None:
        return DEFAULT if name.startswith(PROTOCOL) else ABSENT
    return shown_value(value)
