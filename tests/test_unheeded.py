"""Keys that are valid and change nothing are told before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.device_specs import AndroidSpec, HostSpec
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.schema import PROTOCOL
from harness.unheeded import unheeded_of_protocol
from tests.fakes.families import CASES, write_family
from tests.plans import DROPLESS, HERE, HOST, M2_ULTRA, raw_plan


def warnings_of(**changes: Any) -> list[str]:
    draft = draft_plan(raw_plan(**changes))
    return list(preflight(draft, RunParts(draft.plan.protocol)).warnings)


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        ({"repeats": 7, "stop": {"metric": "ttft_s"}}, "protocol.repeats = 7 changes nothing: stop decides"),
        ({"repeats": 7, "stop": {"minutes": 3}}, "protocol.repeats = 7 changes nothing: stop decides"),
        ({"seed": 7}, 'protocol.seed = 7 changes nothing: it is of order = "shuffled"'),
        ({"max_temperature_c": 35.0}, "protocol.max_temperature_c = 35.0 changes nothing: it is of a phone's battery"),
        ({"min_charge_percent": 80.0}, "protocol.min_charge_percent = 80.0 changes nothing: it is of a phone's"),
        ({"gate_wait_s": 5.0}, "protocol.gate_wait_s = 5.0 changes nothing: it is of a phone's battery"),
    ],
)
def test_a_key_that_changes_nothing_is_told(protocol: dict[str, Any], told: str) -> None:
    """A plan for a laptop with max_temperature_c ran however hot it was, without a word."""
    (found,) = warnings_of(protocol=protocol)
    assert found.startswith(told)


@pytest.mark.parametrize(
    "protocol",
    [
        {},
        {"repeats": 7, "seed": 7, "order": "shuffled"},
        {"repeats": 3, "max_temperature_c": 40.0, "stop": {"metric": "e2e_s"}},
        {"min_charge_percent": 80.0, "stop": {"minutes": 3, "until_charge_percent": 60}},
    ],
)
def test_what_is_read_or_is_the_default_is_not_told(protocol: dict[str, Any]) -> None:
    assert warnings_of(protocol=protocol) == []


@pytest.mark.parametrize("protocol", [{"repeats": 9}, {"stop": {"metric": "ttft_s"}}])
def test_repeats_of_modelled_devices_alone_are_told(protocol: dict[str, Any]) -> None:
    (found,) = warnings_of(protocol=protocol, device=[M2_ULTRA])
    assert found.startswith(f"protocol.{next(iter(protocol))}")
    assert "is priced once" in found
    assert warnings_of(protocol=protocol, engine=[DROPLESS | HERE], device=[M2_ULTRA, HOST]) == []


def test_the_one_repeat_that_a_modelled_device_gets_is_not_told() -> None:
    assert warnings_of(protocol={"repeats": 1}, device=[M2_ULTRA]) == []


def test_a_phone_reads_what_is_of_its_battery() -> None:
    protocol = PROTOCOL.read({"max_temperature_c": 35.0, "min_charge_percent": 80.0, "gate_wait_s": 5.0})
    assert list(unheeded_of_protocol(protocol, [HostSpec(name="host"), AndroidSpec(name="adb:1")])) == []


def test_a_moment_for_longrope_is_told_where_the_model_has_none(tmp_path: Path) -> None:
    arms = [DROPLESS | {"long_rope": "when_reached"}]
    (found,) = warnings_of(engine=arms)
    assert "long_rope changes nothing: bundled:tiny-qwen3-moe has no LongRoPE" in found
    write_family(tmp_path, CASES["phi3-long-rope"])
    assert warnings_of(model={"source": str(tmp_path)}, engine=arms) == []
