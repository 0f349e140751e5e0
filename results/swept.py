"""What a sweep set of an arm or a workload, as it stands in its label: "tiers[cores=0,1,prefill_chunk=64]"."""

from __future__ import annotations

import re
from typing import NamedTuple

_LABEL = re.compile(r"(?P<name>.+?)\[(?P<values>\w+=.*)\](?P<number>#\d+)?", re.DOTALL)
"""A name may hold brackets itself: "tiers [cold]" was swept by nothing."""
_BETWEEN_KEYS = re.compile(r",(?=[A-Za-z_]\w*=)")
"""A value may hold commas itself: cores "0,1"."""


class LabelParts(NamedTuple):
    """values: what stands between the brackets; empty: nothing was swept. number: "#1", of one of several alike."""

    name: str
    values: str = ""
    number: str = ""


def parts_of(label: str) -> LabelParts:
    """Of an arm or a workload."""
    found = _LABEL.fullmatch(label)
    return LabelParts(label) if found is None else LabelParts(found["name"], found["values"], found["number"] or "")


def swept_values(suffix: str) -> dict[str, str]:
    """By the last name of each path. suffix: what stands between the brackets."""
    return {key: value for key, equals, value in (p.partition("=") for p in _BETWEEN_KEYS.split(suffix)) if equals}
