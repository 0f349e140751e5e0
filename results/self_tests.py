"""What `joulebench doctor` finds of a device and its meters."""

from __future__ import annotations

from typing import Literal

from results.environments import Environment
from results.records import Method, Record


class Check(Record):
    """One thing looked at. ok None: nothing wrong, but worth knowing."""

    name: str
    ok: bool | None
    found: str
    remedy: str | None = None


class MeterTest(Record):
    """A meter while its device idled, worked, and idled again; power of what its total sums."""

    meter: str
    method: Method
    components: tuple[str, ...]
    note: str | None = None
    """What the adapter says: source, unit and sign that were decided, clock."""
    stated_update_s: float = 0.0
    """Update period that the adapter goes by; 0: every reading is fresh."""
    seen_update_s: float | None = None
    """Median distance of changes of its value under load; never below the distance of readings."""
    sample_interval_s: float
    relative_accuracy: float = 0.0
    """Gain error, one sigma: common to all windows, and so in no shortest window below."""
    idle_w: float | None = None
    load_w: float | None = None
    noise_w: float | None = None
    """Standard deviation of idle power over windows of ten updates."""
    sees_load: bool | None = None
    """Whether it rose with the load by more than three times its noise. None: nothing that it sees was loaded."""
    shortest_1_percent_s: float | None = None
    """Shortest window, from the load's start to its end, whose energy is known to 1 % (one sigma)."""
    shortest_5_percent_s: float | None = None
    reason: str | None = None
    """Why figures are None."""


class Agreement(Record):
    """Two meters of one unit, over the same load."""

    meters: tuple[str, str]
    unit: str
    energy_j: tuple[float, float]
    difference: float
    """Relative to their mean."""
    allowed: float
    """Two standard uncertainties of that difference."""

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.allowed


Verdict = Literal["ready", "to be fixed", "untested", "modelled only", "not ready"]
"""untested: nothing that its meters see could be put under load. modelled only: it has no meter. not ready: it did not
open."""


class SelfTest(Record):
    """What `joulebench doctor` found of a device."""

    device: str
    made_at: str
    """UTC, ISO 8601."""
    environment: Environment | None
    """None where the device did not open."""
    load: str | None = None
    checks: tuple[Check, ...]
    meters: tuple[MeterTest, ...] = ()
    agreements: tuple[Agreement, ...] = ()

    @property
    def verdict(self) -> Verdict:
        if self.environment is None:
            return "not ready"
        measuring = [m for m in self.meters if m.method not in ("modelled", "replayed")]
        if not measuring:
            return "modelled only"
        if any(c.ok is False for c in self.checks):
            return "to be fixed"
        return "ready" if any(m.sees_load for m in measuring) else "untested"
