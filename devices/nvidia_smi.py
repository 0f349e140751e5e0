"""What `nvidia-smi -q -x` tells of the GPUs: their power and limits, heat, clocks, and what slows them down.

The XML changed over the years: power_readings became gpu_power_readings, power_draw split into an average and an
instant, throttle reasons became event reasons. Figures that a GPU does not have are "N/A", "[Not Supported]", or not
there: None here.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devices.base import DeviceError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

TIMEOUT_S = 20.0
"""A driver without persistence mode takes seconds to wake a GPU; one that hangs does not come back."""
_QUANTITY = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?) (W|MiB|C)")
_BYTES_PER_MIB = 2**20


@dataclass(frozen=True)
class GpuReport:
    """One GPU at the time of the report."""

    product: str
    power_w: float | None
    """The instantaneous one where it is told beside the average."""
    power_limit_w: float | None
    """That in force."""
    temperature_c: float | None
    memory_bytes: int | None
    is_split: bool
    """By MIG."""
    event_reasons: frozenset[str]
    """Words of `devices.nvidia_throttle`."""


@dataclass(frozen=True)
class SmiReport:
    driver: str | None
    gpus: tuple[GpuReport, ...]


def parse_nvidia_smi(xml: str) -> SmiReport:
    """A report from its XML. Raises `DeviceError` where it is none."""
    from xml.etree import ElementTree

    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise DeviceError(f"nvidia-smi: no XML ({error}): {xml[:200]!r}") from error
    if root.tag != "nvidia_smi_log":
        raise DeviceError(f"nvidia-smi: <{root.tag}> is not a report; expected <nvidia_smi_log>")
    return SmiReport(_text(root, "driver_version"), tuple(_gpu(gpu) for gpu in root.findall("gpu")))


def read_nvidia_smi(program: str = "nvidia-smi") -> SmiReport:
    """The GPUs now. Raises `DeviceError`."""
    try:
        ended = subprocess.run(
            [program, "-q", "-x"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise DeviceError(f"nvidia-smi: {error.strerror}; is NVIDIA's driver installed?") from error
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"nvidia-smi: no answer in {TIMEOUT_S:g} s; is the driver hung? See the kernel's log"
        ) from error
    if ended.returncode != 0:
        raise DeviceError(f"nvidia-smi failed ({ended.returncode}): {(ended.stderr or ended.stdout).strip()}")
    return parse_nvidia_smi(ended.stdout)


def _gpu(gpu: Element) -> GpuReport:
    memory_mib = _quantity(gpu, "fb_memory_usage/total")
    return GpuReport(
        product=_text(gpu, "product_name") or "unknown",
        power_w=_quantity(
            gpu,
            "gpu_power_readings/instant_power_draw",
            "gpu_power_readings/power_draw",
            "power_readings/power_draw",
        ),
        power_limit_w=_quantity(
            gpu,
            "gpu_power_readings/current_power_limit",
            "power_readings/enforced_power_limit",
            "power_readings/power_limit",
        ),
        temperature_c=_quantity(gpu, "temperature/gpu_temp"),
        memory_bytes=None if memory_mib is None else round(memory_mib * _BYTES_PER_MIB),
        is_split=_text(gpu, "mig_mode/current_mig") == "Enabled",
        event_reasons=frozenset(_active_reasons(gpu)),
    )


def _active_reasons(gpu: Element) -> list[str]:
    return [
        reason.tag.removeprefix(f"clocks_{kind}_reason_")
        for kind in ("event", "throttle")
        for reason in gpu.findall(f"clocks_{kind}_reasons/*")
        if reason.text == "Active"
    ]


def _text(element: Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return text or None


def _quantity(element: Element, *paths: str) -> float | None:
    """The first of these that is a number with its unit."""
    for path in paths:
        if found := _QUANTITY.fullmatch(_text(element, path) or ""):
            return float(found[1])
    return None
