"""The devices of a plan, built and not yet opened, and what of them an engine lets be seen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from devices.base import Clock, Device, Meter
from devices.conditions import host_environment
from devices.host import Host
from devices.models.device import ModelDevice, load_model_device
from devices.unseen import UnseenDevice
from engines.base import AsksServer, Engine
from harness.catalog import METERS
from harness.device_specs import (
    ANDROID_METERS,
    IOS_METERS,
    AndroidSpec,
    DeviceSpec,
    HostSpec,
    IPhoneSpec,
    ModelledSpec,
)
from harness.schema import TrialProtocol
from harness.state import state_folder

WaitListener = Callable[[str, str, float], None]
"""Told which device is waited for, why, and how many seconds are left."""

log = logging.getLogger(__name__)


def log_waiting(device: str, reason: str, left_s: float) -> None:
    log.info("%s: %s; waiting, %.0f s left", device, reason, left_s)


def clock_of(device: Device, host_clock: Clock) -> Clock:
    """A modelled device has a clock of its own."""
    return device.timeline if isinstance(device, ModelDevice) else host_clock


def seen_device(device: Device, engine: Engine, clock: Clock) -> Device:
    """The device, or one that reads nothing where what it reads is of a machine or a process that does not compute."""
    if isinstance(engine, AsksServer) and engine.why_unseen(any(m.method == "modelled" for m in device.meters)):
        return UnseenDevice(device, clock)
    return device


def build_device(spec: DeviceSpec, protocol: TrialProtocol, clock: Clock, on_wait: WaitListener) -> Device:
    """Not yet opened."""
    if isinstance(spec, ModelledSpec):
        return load_model_device(spec.sheet_ref, host_environment)
    if not isinstance(spec, HostSpec):
        return _phone(spec, protocol, clock, partial(on_wait, spec.name))
    constructors: dict[str, Callable[[], Meter]] = {
        name: partial(entry.build, protocol.sample_interval_s, clock, spec) for name, entry in METERS.items()
    }
    meters = (*spec.meters, *spec.cross_check)
    return Host(spec.name, meters, constructors, clock, "cpu" if spec.computes == "cpu" else "gpu")


def _phone(
    spec: AndroidSpec | IPhoneSpec, protocol: TrialProtocol, clock: Clock, on_wait: Callable[[str, float], None]
) -> Device:
    from devices.gates import Gates

    gates = Gates(protocol.max_temperature_c, protocol.min_charge_percent, protocol.gate_wait_s)
    interval_s = protocol.sample_interval_s
    if isinstance(spec, IPhoneSpec):
        from devices.ios.device import IosDevice

        wanted = [m for m in IOS_METERS if m in spec.meters or (m == "battery" and "auto" in spec.meters)]
        return IosDevice(spec.name, interval_s, clock, gates, on_wait, spec.app, wanted, state_folder=state_folder())
    from devices.android.device import AndroidDevice

    chosen = [m for m in ANDROID_METERS if m in spec.meters or (m == "battery" and "auto" in spec.meters)]
    return AndroidDevice(spec.name, interval_s, clock, gates, on_wait, meter_names=chosen, state_folder=state_folder())
