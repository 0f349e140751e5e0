"""The battery of a fake phone: its files follow a power over time, renewed as seldom as a real gauge does it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from tests.fakes.phone import FakePhone, put

FOLDER = "/sys/class/power_supply/battery"


class FakeBattery:
    """power_w: of `time.monotonic()`. Between `__enter__` and `__exit__` the files follow it.

    sign, per_ampere: how this phone writes its current (uA: 1e6). The last digit flickers, as a real converter's does;
    `stuck_at` holds the raw current where it is given.
    """

    def __init__(
        self,
        phone: FakePhone,
        power_w: Callable[[float], float],
        update_s: float = 0.1,
        sign: int = -1,
        per_ampere: float = 1e6,
        volts: float = 4.0,
        folder: str = FOLDER,
    ) -> None:
        self.sign = sign
        self.per_ampere = per_ampere
        self.stuck_at: int | None = None
        self.service_only = False
        """True: sysfs is denied; `cmd battery` and `dumpsys` tell."""
        self._phone = phone
        self._power_w = power_w
        self._update_s = update_s
        self._volts = volts
        self._current = phone.file(f"{folder}/current_now", "0\n")
        phone.file(f"{folder}/voltage_now", f"{volts * 1e6:.0f}\n")
        phone.file(f"{folder}/type", "Battery\n")
        self._flicker = itertools.cycle((0, 1, -1, 1, 0, -1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._renew()

    def deny_sysfs(self) -> None:
        """As SELinux does on most phones that are sold: the shell cannot read the nodes."""
        self.service_only = True
        for node in self._current.parent.iterdir():
            node.unlink()
        self._renew()

    def __enter__(self) -> FakeBattery:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begun_s = time.monotonic()
        for k in itertools.count(1):
            if self._stop.wait(max(0.0, begun_s + k * self._update_s - time.monotonic())):
                return
            self._renew()

    def _renew(self) -> None:
        amperes = self._power_w(time.monotonic()) / self._volts
        raw = self.stuck_at
        if raw is None:
            raw = round(self.sign * amperes * self.per_ampere) + next(self._flicker)
        if self.service_only:
            self._phone.answer("cmd battery get -f current_now", f"{raw}\n")
        else:
            put(self._current, f"{raw}\n")
