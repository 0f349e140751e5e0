"""Whether a model's weights fit where a technique keeps them, by the memories of a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from devices.base import Unit
from devices.models.sheet import Sheet
from engines.errors import EngineError, NoRoomError
from engines.pricing.shapes import ModelShape


def lacks_room(
    units: Sequence[Unit], fetches: bool, sheet: Sheet, shape: ModelShape, backbone: Unit | None = None
) -> NoRoomError | None:
    """Why they do not, as "N.S." of NDP units or else "oom"; or None: where nobody states a memory too.

    units: where experts are computed. fetches: whether they travel there. Those of NDP units lie in them; others that
    are fetched lie in the CPU's memory; else each unit holds a part. backbone: the unit that holds what every token
    passes through (attention, dense blocks, shared experts, head); None: that is not looked at. Keys and values are not
    counted: how many there are hangs on the requests. A memory that all units share holds everything.
    """
    ndps = [unit for unit in units if unit.startswith("ndp:")]
    homes = ndps or (["cpu"] if fetches else list(units))
    try:
        experts_bytes, others_bytes = shape.routed_bytes, shape.others_bytes
    except EngineError:
        return None  # how many layers have experts is not known
    if sheet.memory is not None and sheet.memory.capacity_bytes is not None:
        return _beyond(sheet.memory.capacity_bytes.value, experts_bytes, others_bytes, sheet, shape)
    lies_there = backbone in homes
    found = _lacking(
        homes, experts_bytes, others_bytes if lies_there else 0.0, f"of experts of {shape.name}", sheet,
        "N.S." if ndps else "oom",
    )  # fmt: skip
    if found is None and backbone is not None and not lies_there:
        words = f"of what every token of {shape.name} passes through"
        return _lacking([backbone], others_bytes, 0.0, words, sheet, "oom")
    return found


def _beyond(
    held_bytes: float, experts_bytes: float, others_bytes: float, sheet: Sheet, shape: ModelShape
) -> NoRoomError | None:
    """Of units that share one memory."""
    if experts_bytes + others_bytes <= held_bytes:
        return None
    return NoRoomError(
        "oom",
        f"{experts_bytes / 1e9:.1f} GB of experts of {shape.name} beside {others_bytes / 1e9:.1f} GB of the rest, and"
        f" the memory of sheet {sheet.name} holds {held_bytes / 1e9:.1f} GB; take narrower weights or a smaller model",
    )


def _lacking(
    homes: Sequence[Unit], n_bytes: float, besides_bytes: float, what: str, sheet: Sheet, result: Literal["N.S.", "oom"]
) -> NoRoomError | None:
    """besides_bytes: of what every token passes through, in the same memory."""
    capacities = [sheet.capacity_bytes(unit) for unit in homes]
    held_bytes = sum(one for one in capacities if one is not None)
    if None in capacities or n_bytes + besides_bytes <= held_bytes:
        return None
    besides = "" if n_bytes > held_bytes or not besides_bytes else f" beside {besides_bytes / 1e9:.1f} GB of the rest"
    return NoRoomError(
        result,
        f"{n_bytes / 1e9:.1f} GB {what}{besides}, and {', '.join(homes)} of sheet {sheet.name}"
        f" hold {held_bytes / 1e9:.1f} GB; use narrower weights, more units, or a smaller model",
    )
