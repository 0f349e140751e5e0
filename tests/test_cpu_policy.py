"""The rules of the clocks, from trees like those of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices import conditions
from devices.cpu_policy import cpu_policy
from devices.state_watch import changes, state_marks


def add_policy(cpus: Path, number: int, **files: str) -> None:
    folder = cpus / "cpufreq" / f"policy{number}"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


EFFICIENT = {"scaling_governor": "powersave", "scaling_min_freq": "400000", "scaling_max_freq": "2600000"}
FAST = EFFICIENT | {"scaling_max_freq": "4700000", "energy_performance_preference": "balance_power"}


@pytest.fixture
def absent(tmp_path: Path) -> Path:
    return tmp_path / "absent"


def test_each_rule_is_told_once_in_order_of_the_cores(tmp_path: Path, absent: Path) -> None:
    for number, files in ((10, EFFICIENT), (2, FAST), (0, FAST), (8, EFFICIENT)):
        add_policy(tmp_path, number, **files)
    (tmp_path / "intel_pstate").mkdir()
    (tmp_path / "intel_pstate" / "no_turbo").write_text("1\n")
    profile = tmp_path / "platform_profile"
    profile.write_text("low-power\n")
    assert cpu_policy(tmp_path, profile) == (
        "governor powersave (balance_power), 400 to 4700 MHz",
        "governor powersave, 400 to 2600 MHz",
        "turbo off",
        "platform profile low-power",
    )
    assert cpu_policy(tmp_path, absent) == cpu_policy(tmp_path, profile)[:3]


@pytest.mark.parametrize(("text", "word"), [("0", "turbo off"), ("1", "turbo on")])
def test_boost_is_the_other_way_round(tmp_path: Path, absent: Path, text: str, word: str) -> None:
    (tmp_path / "cpufreq").mkdir()
    (tmp_path / "cpufreq" / "boost").write_text(text)
    assert cpu_policy(tmp_path, absent) == (word,)


def test_a_kernel_that_shows_no_rule_has_none(tmp_path: Path, absent: Path) -> None:
    assert cpu_policy(tmp_path, absent) is None
    add_policy(tmp_path, 0, scaling_max_freq="<unsupported>")
    assert cpu_policy(tmp_path, absent) is None


def test_a_governor_that_changes_between_idle_time_and_load_marks_the_trial(
    tmp_path: Path, absent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_policy(tmp_path, 0, **EFFICIENT)
    monkeypatch.setattr(conditions, "cpu_policy", lambda: cpu_policy(tmp_path, absent))
    seen = [conditions.host_conditions(0.0), conditions.host_conditions(1.0)]
    assert "clock limits changed" not in state_marks(seen, reads_battery=False)
    (tmp_path / "cpufreq" / "policy0" / "scaling_governor").write_text("performance\n")
    seen += [conditions.host_conditions(2.0), conditions.host_conditions(3.0)]
    assert "clock limits changed" in state_marks(seen, reads_battery=False)
    assert [c.cpu_policy for c in changes(seen)] == [
        ("governor powersave, 400 to 2600 MHz",),
        ("governor performance, 400 to 2600 MHz",),
        ("governor performance, 400 to 2600 MHz",),
    ]
