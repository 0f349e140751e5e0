"""Opens a device for the doctor, with every meter it has and a load that it can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from devices.base import Device, DeviceError
from devices.clock import MonotonicClock
from devices.device_lock import DeviceBusyError
from devices.host import Host
from harness.device_building import WaitListener, build_device
from harness.device_specs import DeviceSpec
from harness.doctor import Load, examine, not_ready
from harness.inventory import probed_meters
from harness.loads import busy_loops, matrix_products, no_load
from harness.schema import TrialProtocol
from results.self_tests import SelfTest


def examine_device(
    spec: DeviceSpec,
    seconds: float,
    on_stage: Callable[[str], None],
    on_wait: WaitListener,
    protocol: TrialProtocol | None = None,
) -> SelfTest:
    """The self-test of `host` or of a phone. One that does not open, or is lost, is not ready.

    protocol: how long a phone is waited for. Raises `DeviceBusyError` where another process has it: that says nothing
    of the device.
    """
    clock, protocol = MonotonicClock(), protocol or TrialProtocol()
    refusals: dict[str, str] = {}
    if not spec.is_phone:
        probed = probed_meters(protocol.sample_interval_s)
        refusals = {name: found for name, found in probed.items() if isinstance(found, str)}
        spec = spec.model_copy(update={"meters": tuple(name for name in probed if name not in refusals)})
    device = build_device(spec, protocol, clock, on_wait)
    try:
        device.open()
        load = _load_of(device)
        return examine(device, clock, load, seconds, refusals, protocol.sample_interval_s, on_stage)
    except DeviceBusyError:
        raise
    except DeviceError as error:
        return not_ready(spec.name, str(error))
    finally:
        device.close()


def _load_of(device: Device) -> Load:
    from devices.android.device import AndroidDevice

    if isinstance(device, AndroidDevice):
        return partial(busy_loops, device, device.topology.n_cores)
    if not isinstance(device, Host):
        return no_load
    units = dict.fromkeys(c.computes for m in device.meters for c in m.channels)
    return partial(matrix_products, tuple(units))
