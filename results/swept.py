"""What a sweep set of an arm or a workload, as it stands in its label: "tiers[cores=0,1,prefill_chunk=64]"."""

from __future__ import annotations

import re
from typing import Final

SWEPT: Final = "["
"""Between a name and the values that a sweep gave it."""
_BETWEEN_KEYS = re.compile(r",(?=[A-Za-z_]\w*=)")
"""A value may hold commas itself: cores "0,1"."""


def swept_values(suffix: str) -> dict[str, str]:
    """By the last name of each path. suffix: what stands between the brackets."""
    return {key: value for key, equals, value in (p.partition("=") for p in _BETWEEN_KEYS.split(suffix)) if equals}
