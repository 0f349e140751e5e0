"""Which code and which sheet price a modelled device: kept with each of its trials."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from devices.models.sheet import SheetRef, sheet_sha256
from results.derivation import PricedBy


@cache
def pricing_digest() -> str:
    """Of the code between a trial's operations and their seconds and joules: this package."""
    whole = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()


def priced_by(ref: SheetRef) -> PricedBy:
    """As that sheet prices now. Raises `OSError`."""
    return PricedBy(pricing_digest(), sheet_sha256(ref))
