"""`--device`: a plan on some of its devices alone, or one of a single device on another in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.plan_values import shown
from harness.sweep import flattened

Raw = dict[str, Any]


def put_on_devices(raw: Raw, names: Sequence[str]) -> list[str]:
    """Changes a plan's content in place: (the problems). Arms that are for other devices alone go with them, and what
    names these arms too."""
    devices = raw.get("device")
    if not names or not isinstance(devices, list) or not all(isinstance(one, dict) for one in devices):
        return []
    known = [one.get("name") for one in devices]
    if len(devices) == len(names) == 1 and names[0] not in known:
        _rename(raw, devices[0], names[0])
        return []
    problems = [
        f"--device {shown(name)}: the plan has no such device; it has {', '.join(map(str, known))}"
        for name in dict.fromkeys(names)
        if name not in known
    ]
    if not problems:
        raw["device"] = [one for one in devices if one.get("name") in names]
        engines = raw.get("engine")
        _cut_arms(raw, names)
        _cut_sweep(raw, {"device": devices, "engine": engines})
    return problems


def _rename(raw: Raw, device: Raw, name: str) -> None:
    before, device["name"] = device.get("name"), name
    for engine in _arms(raw):
        engine["devices"] = [name if one == before else one for one in engine["devices"]]


def _cut_arms(raw: Raw, names: Sequence[str]) -> None:
    gone = set()
    for engine in _arms(raw):
        if engine["devices"] and not set(engine["devices"]) & set(names):
            gone.add(str(engine.get("name")))
        engine["devices"] = [one for one in engine["devices"] if one in names]
    if isinstance(raw.get("engine"), list):
        raw["engine"] = [one for one in raw["engine"] if not isinstance(one, dict) or one.get("devices") != []]
    if gone:
        _cut_what_names_them(raw, gone)


def _cut_what_names_them(raw: Raw, gone: set[str]) -> None:
    """A baseline and tables that are of arms which went."""

    def is_gone(label: object) -> bool:
        return isinstance(label, str) and label.partition("[")[0] in gone

    if is_gone(raw.get("baseline")):
        del raw["baseline"]
    if not isinstance(tables := raw.get("table"), list):
        return
    for table in tables:
        if isinstance(table, dict) and isinstance(table.get("rows"), list):
            table["rows"] = [one for one in table["rows"] if not is_gone(one)]
    raw["table"] = [
        one for one in tables if not isinstance(one, dict) or not (is_gone(one.get("over")) or one.get("rows") == [])
    ]


def _cut_sweep(raw: Raw, written: Raw) -> None:
    """Without paths to elements that went; a number follows its element. written: the lists before."""
    if not isinstance(sweep := raw.get("sweep"), dict):
        return
    found = {}
    for path, values in flattened(sweep):
        section, *keys = path.split(".")
        before = written.get(section)
        if keys and isinstance(before, list):
            named = [
                i for i, one in enumerate(before) if isinstance(one, dict) and keys[0] in (one.get("name"), str(i))
            ]
            kept = [i for i, one in enumerate(raw[section]) if any(one is before[j] for j in named)]
            if named and not kept:
                continue
            if kept and keys[0].isdecimal() and before[named[0]].get("name") != keys[0]:
                path = ".".join((section, str(kept[0]), *keys[1:]))
        found[path] = values
    raw["sweep"] = found


def _arms(raw: Raw) -> list[Raw]:
    """Those that name their devices."""
    engines = raw.get("engine")
    found = engines if isinstance(engines, list) else []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("devices"), list)]
