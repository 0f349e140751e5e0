"""The battery of a fake phone: what its gauge shows follows from the phone's power and the time at which it is read.

`phone.c` stands before libc in the phone's processes: whoever opens the gauge sees its last update. The updates come
by a schedule, as seldom as a real gauge's, and no thread of the tests has to be in time for them.
"""

from __future__ import annotations

import time
from pathlib import Path

from devices.clock import MonotonicClock
from tests.fakes.phone import FakePhone, library, put
from tests.fakes.waveforms import StepPower

FOLDER = "/sys/class/power_supply/battery"
DRAWS = "draws-battery"
"""In the phone's root: "<us since 1970> <watts>" a line. Its programs may write there what they draw."""


class FakeBattery:
    """Between `__enter__` and `__exit__` the phone's processes read its gauge, of a phone that draws `watts`.

    sign, per_ampere: how this phone writes its current (uA: 1e6). The last digit flickers, as a real converter's does;
    `stuck_at` holds the raw current where it is given.
    """

    def __init__(
        self,
        phone: FakePhone,
        watts: float,
        update_s: float = 0.1,
        sign: int = -1,
        per_ampere: float = 1e6,
        volts: float = 4.0,
        folder: str = FOLDER,
    ) -> None:
        self._phone = phone
        self._draws = phone.root / f"draws-{Path(folder).name}"
        self._draws.write_text(f"0 {watts}\n")
        self._sign = sign
        self._per_ampere = per_ampere
        self._volts = volts
        self._before: Path | None = None
        self._wall_ahead_s = time.time() - time.monotonic()
        self._text = f"@ {self._us()} {round(update_s * 1e6)} {self._draws}\n"
        self._node = phone.file(f"{folder}/current_now", "0\n")
        phone.file(f"{folder}/voltage_now", f"{volts * 1e6:.0f}\n")
        phone.file(f"{folder}/type", "Battery\n")
        self._set(0, None)

    def __enter__(self) -> FakeBattery:
        self._phone.before_libc, self._before = library(), self._phone.before_libc
        return self

    def __exit__(self, *_: object) -> None:
        self._phone.before_libc = self._before

    def draw(self, watts: float, from_s: float | None = None) -> None:
        """The phone's power from some time of the monotonic clock on, or from now."""
        with self._draws.open("a") as draws:
            draws.write(f"{self._us(from_s)} {watts}\n")

    def follow(self, power: StepPower, from_s: float) -> None:
        """Its second 0 is at `from_s` of the monotonic clock."""
        for at_s, watts in zip(power.edges_s[:-1].tolist(), power.watts.tolist(), strict=True):
            self.draw(watts, from_s + at_s)

    def change(self, sign: int | None = None, per_ampere: float | None = None, stuck_at: int | None = None) -> None:
        """What it shows from its next update on."""
        self._sign = self._sign if sign is None else sign
        self._per_ampere = self._per_ampere if per_ampere is None else per_ampere
        self._set(self._us(), stuck_at)

    def deny_sysfs(self) -> None:
        """As SELinux does on most phones that are sold: the shell cannot read the nodes, and `cmd battery` tells."""
        folder = self._node.parent
        self._node = self._phone.root / "answers" / "cmd battery get -f current_now"
        put(self._node, self._text)
        for node in folder.iterdir():
            node.unlink()

    def _set(self, from_us: int, stuck_at: int | None) -> None:
        per_watt = 0.0 if stuck_at is not None else self._sign * self._per_ampere / self._volts
        self._text += f"{from_us} {per_watt} {stuck_at or 0} {int(stuck_at is None)}\n"
        put(self._node, self._text)

    def _us(self, at_s: float | None = None) -> int:
        """Of the phone's wall clock, at a time of the monotonic one."""
        return round(((MonotonicClock().now_s() if at_s is None else at_s) + self._wall_ahead_s) * 1e6)
