"""What a phone says of itself, and the gates it passes."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.android.gates import why_not_ready
from devices.android.shell import Phone
from devices.android.state import (
    BatteryState,
    PhoneState,
    parse_battery,
    parse_facts,
    parse_memory_bytes,
    parse_properties,
    parse_state,
    parse_suspended_s,
    parse_thermal,
    read_facts,
    read_state,
    split_sections,
)
from devices.gates import Gates
from tests.data_folder import data_folder
from tests.fakes.phone import DISCHARGING, THERMAL, FakePhone

READY = BatteryState(status=3, powered_by=(), is_faked=False, percent=82.0, temperature_c=31.2)


def test_battery_dump() -> None:
    assert parse_battery(DISCHARGING) == BatteryState(
        status=3,
        powered_by=(),
        is_faked=False,
        percent=82.0,
        temperature_c=31.2,
        voltage_v=4.012,
        charge_counter_c=12441.6,  # 3456 mAh
    )


def test_a_charger_and_its_status_are_seen() -> None:
    battery = parse_battery(
        DISCHARGING.replace("USB powered: false", "USB powered: true").replace("status: 3", "status: 2")
    )
    assert battery is not None
    assert (battery.powered_by, battery.status, battery.is_charging) == (("USB",), 2, True)


@pytest.mark.parametrize("charger", ["AC", "USB", "Wireless", "Dock"])
def test_a_charger_on_line_counts_though_the_battery_discharges(charger: str) -> None:
    """A weak port carries a part of the load, and the gauge does not see it."""
    battery = parse_battery(DISCHARGING.replace(f"{charger} powered: false", f"{charger} powered: true"))
    assert battery is not None
    assert (battery.status, battery.is_charging) == (3, True)
    assert parse_battery(DISCHARGING) == replace(battery, powered_by=())


def test_a_frozen_battery_state_is_seen() -> None:
    text = DISCHARGING.replace("state:\n", "state:\n  (UPDATES STOPPED -- use 'reset' to restart)\n")
    battery = parse_battery(text)
    assert battery is not None
    assert battery.is_faked


def test_a_maker_s_second_line_of_a_name_does_not_count() -> None:
    battery = parse_battery(DISCHARGING + "  mSavedBatteryAsoc: -1\n  temperature: 999\n")
    assert battery is not None
    assert battery.temperature_c == 31.2


@pytest.mark.parametrize("text", ["", "Can't find service: battery\n", "Permission Denial: can't dump\n"])
def test_no_battery_dump_is_none(text: str) -> None:
    assert parse_battery(text) is None


def test_a_thermal_status_that_somebody_set_is_unknown() -> None:
    """`cmd thermalservice override-status 0` hides the throttling of a hot phone; its sensors are still its own."""
    assert parse_thermal(THERMAL) == (0, 45.5)
    assert parse_thermal(THERMAL.replace("IsStatusOverride: false", "IsStatusOverride: true")) == (None, 45.5)


def test_thermal_reads_what_is_now_and_not_the_cache() -> None:
    assert parse_thermal(THERMAL) == (0, 45.5)
    assert parse_thermal(THERMAL.replace("Thermal Status: 0", "Thermal Status: 3"))[0] == 3
    assert parse_thermal("Can't find service: thermalservice") == (None, None)


@pytest.mark.parametrize(
    ("dump", "model", "soc", "android"),
    [
        ("galaxy-s9-us", "samsung SM-G960U", "SDM845", "8.0.0 (SDK 26)"),
        ("galaxy-s9-global", "samsung SM-G960F", "exynos9810", "8.0.0 (SDK 26)"),
        ("galaxy-s8-us", "samsung SM-G950U", "MSM8998", "7.0 (SDK 24)"),
        ("galaxy-a8-2018", "samsung SM-A530F", "exynos7885", "7.1.1 (SDK 25)"),
        ("huawei-mate-20", "HUAWEI HMA-L29", "kirin980", "9 (SDK 28)"),
        ("huawei-mate-10", "HUAWEI ALP-L29", "kirin970", "8.0.0 (SDK 26)"),
        ("huawei-p20-pro", "HUAWEI CLT-L29", "kirin970", "8.1.0 (SDK 27)"),
        ("pixel", "Google Pixel", "msm8996", "7.1.2 (SDK 25)"),
        ("pixel-2-xl", "Google Pixel 2 XL", "msm8998", "8.1.0 (SDK 27)"),
        ("oneplus-5t", "OnePlus ONEPLUS A5010", "msm8998", "8.0.0 (SDK 26)"),
        ("nexus5x", "LGE Nexus 5X", "msm8992", "8.0.0 (SDK 26)"),
    ],
)
def test_facts_of_real_phones_read_off_by_hand(dump: str, model: str, soc: str, android: str) -> None:
    with gzip.open(data_folder() / "traces" / "phones" / "sysfs" / f"{dump}.json.gz", "rt") as file:
        properties: dict[str, str] = json.load(file)["properties"]
    listed = "".join(f"[{key}]: [{value}]\n" for key, value in properties.items())
    facts = parse_facts(parse_properties(listed), "", None)
    assert (facts.model, facts.soc, facts.android, facts.abi) == (model, soc, android, "arm64-v8a")


def test_memory() -> None:
    assert parse_memory_bytes("MemTotal:       11515564 kB\nMemFree: 1 kB\n") == 11515564 * 1024
    assert parse_memory_bytes("") is None


def test_the_whole_state_comes_in_one_round_trip(fake: FakePhone, phone: Phone) -> None:
    fake.answer("settings get system screen_brightness", "102\n")
    fake.answer("settings get global airplane_mode_on", "1\n")
    fake.file("/proc/loadavg", "1.25 0.80 0.60 2/3000 12345\n")
    fake.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "600000\n")
    fake.file("/sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "1800000\n")
    fake.file("/sys/devices/system/cpu/online", "0-1\n")
    for core, limit_khz in ((0, 2_000_000), (1, 1_500_000)):
        clocks = f"/sys/devices/system/cpu/cpu{core}/cpufreq"
        fake.file(f"{clocks}/cpuinfo_max_freq", "2000000\n")
        fake.file(f"{clocks}/scaling_max_freq", f"{limit_khz}\n")
        fake.file(f"{clocks}/related_cpus", f"{core}\n")
    state = read_state(phone)
    assert state.battery is not None
    assert state.battery.percent == 82.0
    assert replace(state, battery=None) == PhoneState(
        battery=None,
        thermal_status=0,
        cpu_temperature_c=45.5,
        brightness=102,
        airplane_mode=True,
        load_average_1m=1.25,
        cpu_frequency_mhz=1200.0,
        frequency_caps=("cpu 1 limited to 1500 of 2000 MHz",),
        screen_on=True,
        boot_id="2b1ab1f3-5c6e-4b0d-9a52-1d9f6c0c7a11",
        online=(0, 1),
    )


def test_what_a_phone_hides_is_none_and_not_zero(fake: FakePhone, phone: Phone) -> None:
    for call in ("dumpsys battery", "dumpsys thermalservice", "dumpsys power"):
        fake.answer(call, None)
    fake.local("/proc/sys/kernel/random/boot_id").unlink()
    fake.answer("settings get system screen_brightness", "null\n")
    assert read_state(phone) == PhoneState(battery=None)


def test_the_time_asleep_is_the_distance_of_two_clocks() -> None:
    """Lines of a real dump; on that phone's clocks 1000.02 s had gone by, and 940 s of them awake."""
    dump = "  mWakefulness=Asleep\n  mLastWakeTime=900000 (40000 ms ago)\n  mLastGlobalWakeTimeRealtime=1 (2 ms ago)\n"
    assert parse_suspended_s(f"{dump}uptimes 1000.00 1000.04\n") == pytest.approx(60.02)
    # What lies between two readings of the uptime is not told apart from sleep.
    assert parse_suspended_s(f"{dump}uptimes 1000.00 1000.12\n") is None
    assert parse_suspended_s("  mLastWakeTime=52611994516 ago\nuptimes 1000.00 1000.04\n") is None
    assert parse_suspended_s(dump) is None


def test_facts_of_the_phone(fake: FakePhone, phone: Phone) -> None:
    fake.file("/proc/meminfo", "MemTotal:       2048 kB\n")
    facts = read_facts(phone)
    assert (facts.model, facts.soc, facts.android, facts.memory_bytes) == (
        "Example Phone One",
        "SM8650",
        "15 (SDK 35)",
        2048 * 1024,
    )


@given(st.dictionaries(st.sampled_from(["battery", "thermal", "load", "frequencies", "brightness", "caps"]), st.text()))
def test_no_text_breaks_the_parsers(sections: dict[str, str]) -> None:
    parse_state(sections)


def test_sections_split_at_their_names() -> None:
    assert split_sections("noise\n@@ a\n1\n2\n@@ b\n@@ c\n3\n") == {"a": "1\n2\n", "b": "", "c": "3\n"}


@pytest.mark.parametrize(
    ("battery", "reason"),
    [
        (replace(READY, status=2, powered_by=("USB",)), r"charging \(USB\).*unplug it and use Wi-Fi"),
        (replace(READY, status=5), "full"),
        (replace(READY, status=4, powered_by=("AC",)), r"not charging \(AC\)"),
        (replace(READY, status=None), "state None"),
        (replace(READY, is_faked=True), "dumpsys battery reset"),
        (replace(READY, temperature_c=40.0), "40.0 degC, 40 is the limit; let it cool"),
        (replace(READY, percent=50.0), "50 %, 50 % is the limit; charge it"),
    ],
)
def test_a_phone_that_is_not_ready_says_why(battery: BatteryState, reason: str) -> None:
    assert re.search(reason, why_not_ready(battery, Gates()) or "")


def test_a_ready_phone_has_nothing_against_it() -> None:
    assert why_not_ready(READY, Gates()) is None
    assert why_not_ready(None, Gates()) is not None
