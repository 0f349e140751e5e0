"""Whether a model's experts fit where a technique keeps them, by the memories of a sheet."""

from __future__ import annotations

from collections.abc import Sequence

from devices.base import Unit
from devices.models.sheet import Sheet
from engines.errors import EngineError, NoRoomError
from engines.pricing.shapes import ModelShape


def lacks_room(units: Sequence[Unit], fetches: bool, sheet: Sheet, shape: ModelShape) -> NoRoomError | None:
    """Why they do not, as "N.S." of NDP units or else "oom"; or None: where nobody states a memory too.

    units: where experts are computed. fetches: whether they travel there. Those of NDP units lie in them; others that
    are fetched lie in the CPU's memory; else each unit holds a part, and that of the head and attention is not counted.
    """
    ndps = [unit for unit in units if unit.startswith("ndp:")]
    homes = ndps or (["cpu"] if fetches else list(units))
    capacities = [sheet.capacity_bytes(unit) for unit in homes]
    held_bytes = sum(one for one in capacities if one is not None)
    try:
        needed_bytes = shape.routed_bytes
    except EngineError:
        return None  # how many layers have experts is not known
    if None in capacities or needed_bytes <= held_bytes:
        return None
    return NoRoomError(
        "N.S." if ndps else "oom",
        f"{needed_bytes / 1e9:.1f} GB of experts of {shape.name}, and {', '.join(homes)}"
        f" of sheet {sheet.name} hold {held_bytes / 1e9:.1f} GB; use more units, or a smaller model",
    )
