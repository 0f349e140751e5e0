"""What a survey of attached phones says, one row a meter: for `joulebench devices`."""

from __future__ import annotations

from typing import NamedTuple

from results.records import Method


class AttachedMeter(NamedTuple):
    """One meter of one phone. The update period is known once a window was measured: it is observed."""

    device: str
    meter: str
    method: Method
    ready: bool
    remark: str
    """How it would be read, or why it cannot be, with the remedy."""
