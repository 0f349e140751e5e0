"""A device in whose stead another machine computes: nothing that can be read here says anything of it."""

from __future__ import annotations

from collections.abc import Sequence

from devices.base import Clock, Device, Meter
from results.environments import Conditions, Environment


class UnseenDevice:
    """In the place of `here`, whose meters, CPU and heat are those of the machine that only asks."""

    meters: Sequence[Meter] = ()

    def __init__(self, here: Device, clock: Clock) -> None:
        self.name = here.name
        self._here, self._clock = here, clock

    def open(self) -> None:
        """Nothing is."""

    def environment(self) -> Environment:
        return self._here.environment()

    def conditions(self) -> Conditions:
        return Conditions(at_s=self._clock.now_s())

    def cpu_seconds(self) -> None:
        """Not known."""

    def close(self) -> None:
        """Whoever opened the other closes it."""
