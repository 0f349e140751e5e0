"""Power sensors that Linux shows in sysfs: which rails there are, what they supply, how to read their watts.

A Jetson has INA3221 chips, three rails each, that the kernel shows in one of two ways:

    hwmon  (Linux 5 and later)  inN_label; inN_input mV x currN_input mA
    iio    (L4T of Linux 4)     rail_name_N; in_powerN_input mW

Other computers have hwmon sensors of whole parts (power1_average or power1_input in uW, energy1_input in uJ): the
package of a GPU, or the input of a server (ACPI power meter).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from devices.base import Unit
from devices.nvidia_gpu import MAX_GPU_POWER_W, OVER_LIMIT
from devices.sysfs import read_number, read_word

WHOLE_BOARD = ("VDD_IN", "POM_5V_IN", "VIN")
"""Rails that feed a Jetson module or board, and so contain the others. An AGX has none: its rails add up."""
INA3221_SHUNT_STEP_V = 40e-6
"""Datasheet of the INA3221: the least step of its shunt voltage."""
INA3221_UPDATE_S = 0.1
"""Assumed where the driver does not say: longer than its usual settings."""
ACPI_AVERAGED_S = 1.0
"""Of ACPI power meters that do not state the interval over which they average."""
LEAST_ACCURACY_PERCENT = 50.0
"""Less, as the 0 % of firmware that does not know it, and all of 100 % are not believed."""
GPU_UPDATE_S = 0.1
"""Assumed for GPU drivers, which do not say."""
MAX_JETSON_POWER_W = 1e3
"""Several times the largest module's: more is an error of a sensor."""
W_PER_UW = J_PER_UJ = 1e-6
W_PER_MW = 1e-3


@dataclass(frozen=True)
class Rail:
    """One sensor. `read` gives W (power) or J (counter), and raises `DeviceError`."""

    name: str
    kind: Literal["power", "counter"]
    read: Callable[[], float]
    step: float
    """Least change of a reading, in its unit; 0 where it is not known."""
    update_period_s: float
    computes: Unit
    is_whole: bool = False
    """It supplies what all other rails supply."""
    max_power_w: float | None = None
    """More cannot flow there."""
    is_part: bool = False
    """Another rail of the same device contains it."""
    averaged_s: float | None = None
    """A reading is the mean of this time before it; None: of an instant, or nobody says."""
    relative_error: float | None = None
    """The most by which it is off, as its driver states; None: it does not."""


def jetson_rails(drivers: Path) -> list[Rail]:
    """Rails of all INA3221 under /sys/bus/i2c/drivers."""
    rails: list[Rail] = []
    for driver in ("ina3221", "ina3221x"):
        for chip in sorted((drivers / driver).glob("*-*")):
            for folder in sorted(chip.glob("hwmon/hwmon*")):
                rails += _ina3221_hwmon(folder)
            for folder in sorted(chip.glob("iio:device*")):
                rails += _ina3221_iio(folder)
    return rails


def _ina3221_hwmon(folder: Path) -> list[Rail]:
    interval_ms = read_word(folder / "update_interval")
    rails = []
    for label in sorted(folder.glob("in[123]_label")):
        n = label.name[2]
        name = read_word(label)
        # NC: not connected. A channel that is switched off answers with an error.
        if not name or name == "NC" or read_word(folder / f"in{n}_enable") == "0":
            continue
        volts, amperes = folder / f"in{n}_input", folder / f"curr{n}_input"
        rails.append(
            Rail(
                name,
                "power",
                partial(_product_w, volts, amperes),
                _step_w(folder / f"shunt{n}_resistor", volts),
                _stated_s(interval_ms, INA3221_UPDATE_S),
                _supplies(name),
                name in WHOLE_BOARD,
                MAX_JETSON_POWER_W,
            )
        )
    return rails


def _ina3221_iio(folder: Path) -> list[Rail]:
    return [
        Rail(
            name,
            "power",
            partial(_scaled, folder / f"in_power{n}_input", W_PER_MW),
            W_PER_MW,
            INA3221_UPDATE_S,
            _supplies(name),
            name in WHOLE_BOARD,
            MAX_JETSON_POWER_W,
        )
        for label in sorted(folder.glob("rail_name_*"))
        if (n := label.name.rpartition("_")[2]) and (name := read_word(label)) and name != "NC"
    ]


def _scaled(path: Path, unit: float) -> float:
    return read_number(path) * unit


def _stated_s(interval_ms: str | None, unstated_s: float) -> float:
    """Whole ms, so 0 is less than one, or not known: no period of an age that a reading may have."""
    return (float(interval_ms) / 1e3 if interval_ms and interval_ms.isdecimal() else 0.0) or unstated_s


def _product_w(millivolt: Path, milliampere: Path) -> float:
    return read_number(millivolt) * read_number(milliampere) * 1e-6


def _step_w(shunt: Path, volts: Path) -> float:
    """40 uV over the shunt, times the voltage."""
    microohm, millivolt = read_word(shunt), read_word(volts)
    if not microohm or not millivolt or float(microohm) <= 0:
        return 0.0
    return INA3221_SHUNT_STEP_V / (float(microohm) * 1e-6) * float(millivolt) * 1e-3


def _supplies(name: str) -> Unit:
    return "gpu" if "GPU" in name else "npu" if name == "CV" else "cpu"


def hwmon_rails(hwmon: Path) -> list[Rail]:
    """Sensors of known drivers under /sys/class/hwmon: other chips measure disks, power supplies, and so on."""
    rails: list[Rail] = []
    n_of_driver: dict[str, int] = {}
    for folder in sorted(hwmon.glob("hwmon*"), key=_number):
        driver = read_word(folder / "name") or ""
        n = n_of_driver[driver] = n_of_driver.get(driver, -1) + 1
        if driver == "amdgpu":
            rails += _first_power(folder, f"amdgpu{n}", "gpu", GPU_UPDATE_S, max_power_w=_max_gpu_power_w(folder))
        elif driver in ("i915", "xe"):
            rails += _energy(folder, f"{driver}{n}")
        elif driver == "power_meter":
            rails += _acpi_power(folder, f"machine{n}")
    return rails


def _acpi_power(folder: Path, name: str) -> list[Rail]:
    """Each reading is a mean over an interval that can be set (Linux, acpi_power_meter.rst)."""
    averaged_s = _stated_s(read_word(folder / "power1_average_interval"), ACPI_AVERAGED_S)
    found = _first_power(folder, name, "cpu", averaged_s, is_whole=True)
    error = _stated_error(read_word(folder / "power1_accuracy"))
    return [replace(rail, averaged_s=averaged_s, relative_error=error) for rail in found]


def _stated_error(accuracy: str | None) -> float | None:
    """Of an accuracy such as `98.0%`. Linux's driver prints thousandths behind the point, without zeros before them:
    98.050 % as `98.50%`."""
    found = re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,3}))?%?", accuracy or "")
    percent = int(found[1]) + int(found[2] or 0) / 1000 if found else 0.0
    return (100.0 - percent) / 100.0 if LEAST_ACCURACY_PERCENT <= percent < 100.0 else None


def _max_gpu_power_w(folder: Path) -> float:
    """From the highest limit that can be set (uW); 0 where it cannot be."""
    limit_uw = read_word(folder / "power1_cap_max")
    limit_w = float(limit_uw) * W_PER_UW if limit_uw and limit_uw.isdecimal() else 0.0
    return min(OVER_LIMIT * limit_w, MAX_GPU_POWER_W) if limit_w > 0 else MAX_GPU_POWER_W


def _first_power(
    folder: Path,
    name: str,
    computes: Unit,
    update_period_s: float,
    is_whole: bool = False,
    max_power_w: float | None = None,
) -> list[Rail]:
    files = [folder / file for file in ("power1_average", "power1_input") if (folder / file).exists()]
    if not files:
        return []
    watts = partial(_scaled, files[0], W_PER_UW)
    return [Rail(name, "power", watts, W_PER_UW, update_period_s, computes, is_whole, max_power_w)]


def _energy(folder: Path, name: str) -> list[Rail]:
    """xe labels its counters card and pkg; the card contains the package."""
    found = []
    for path in sorted(folder.glob("energy*_input")):
        label = read_word(path.with_name(path.name.replace("_input", "_label")))
        found.append((label, path))
    labels = [label for label, _ in found]
    return [
        Rail(
            f"{name} {label}" if label else name,
            "counter",
            partial(_scaled, path, J_PER_UJ),
            J_PER_UJ,
            GPU_UPDATE_S,
            "gpu",
            max_power_w=MAX_GPU_POWER_W,
            is_part=label == "pkg" and "card" in labels,
        )
        for label, path in found
    ]


def _number(folder: Path) -> int:
    digits = re.search(r"(\d+)$", folder.name)
    return int(digits[1]) if digits else 0
