"""Whether a model's weights fit where a technique keeps them, by the memories of a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from devices.base import Unit
from devices.models.sheet import Sheet
from engines.errors import EngineError, NoRoomError
from engines.pricing.shapes import ModelShape, sizes_of
from engines.techniques.base import MoveParameters
from engines.techniques.context import ModelSizes
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.move.slices import SlicesParameters
from engines.techniques.move.two_buffers import TwoBuffersParameters, buffer_size
from results.units import MIB, format_bytes

GPU: Unit = "gpu"


def lacks_room(
    units: Sequence[Unit],
    fetches: bool,
    sheet: Sheet,
    shape: ModelShape,
    backbone: Unit | None = None,
    cached_tokens: int = 0,
    n_kept: float = 0,
) -> NoRoomError | None:
    """Why they do not, as "N.S." of NDP units or else "oom"; or None: where nobody states a memory too.

    units: where experts are computed; they lie with the unit that stands in for it. fetches: whether they travel there.
    Those of NDP units lie in them; others that are fetched lie in the CPU's memory; else each unit holds a part.
    backbone: the unit that holds what every token passes through (attention, dense blocks, shared experts, head); None:
    that is not looked at. cached_tokens: of all sequences at their longest, whose keys and values lie beside that; 0
    where the requests are not known. A memory that all units share holds everything.
    """
    units = tuple(dict.fromkeys(map(sheet.computing, units)))
    backbone = None if backbone is None else sheet.computing(backbone)
    ndps = [unit for unit in units if unit.startswith("ndp:")]
    homes = ndps or (["cpu"] if fetches else list(units))
    try:
        experts_bytes, others_bytes = shape.routed_bytes, shape.others_bytes
    except EngineError:
        return None  # how many layers have experts is not known
    rest = _Rest(others_bytes, float(cached_tokens * shape.n_layers * shape.cached_values * shape.bytes_per_value))
    is_told = rest.cached_bytes >= SHOWN_BYTES
    cached = f" and {_told(rest.cached_bytes)} of keys and values of {cached_tokens} tokens" if is_told else ""
    if sheet.memory is not None and sheet.memory.capacity_bytes is not None:
        return _beyond(sheet.memory.capacity_bytes.value, experts_bytes, rest, cached, sheet, shape)
    lies_there = backbone in homes
    found = _lacking(
        homes, experts_bytes, rest if lies_there else NO_REST, f"of experts of {shape.name}", cached, sheet,
        "N.S." if ndps else "oom",
    )  # fmt: skip
    if found is None and backbone is not None and not lies_there:
        words = f"of what every token of {shape.name} passes through"
        kept_bytes = n_kept * shape.expert_bytes if backbone == GPU else 0.0
        beside = rest._replace(weights_bytes=0.0, kept_bytes=kept_bytes)
        return _lacking([backbone], others_bytes, beside, words, cached, sheet, "oom")
    return found


def kept_on_gpu(
    move: MoveParameters, units: Sequence[Unit], sizes: ModelSizes, n_held: int | None, n_run: int | None = None
) -> float:
    """Experts of all layers together that lie in a GPU's memory at once, fetched from elsewhere. units: where they are
    computed. sizes: of the model that is priced. n_held: as of `BuildContext.expert_slots`. n_run: layers with
    experts of the model that runs, where it is another: those that are priced take its plans in turn, and so do the
    experts that lie there. Raises `EngineError` where the memory holds too few."""
    if GPU not in units:
        return 0
    if isinstance(move, SlicesParameters) and move.prefetch:
        return move.slots_of_layer(sizes, n_held) * sizes.n_sparse_layers
    if isinstance(move, CacheParameters):
        return move.slots_of_model(sizes, n_held)
    if isinstance(move, FetchParameters):
        return move.gpu_slots * sizes.n_sparse_layers / (n_run or sizes.n_sparse_layers)
    if isinstance(move, TwoBuffersParameters):
        return 2 * buffer_size(sizes, n_held)
    return 0


def kept_of_shape(
    move: MoveParameters, units: Sequence[Unit], shape: ModelShape, n_held: int | None, n_run: int | None = None
) -> float:
    """The same at a model's shape; 0 of a dense one."""
    sizes = sizes_of(shape)
    return 0 if sizes is None else kept_on_gpu(move, units, sizes, n_held, n_run)


class _Rest(NamedTuple):
    """Beside the experts: weights that every token passes through, and keys and values. kept_bytes: of fetched experts,
    beside the former."""

    weights_bytes: float
    cached_bytes: float
    kept_bytes: float = 0.0

    @property
    def n_bytes(self) -> float:
        return self.weights_bytes + self.cached_bytes + self.kept_bytes


NO_REST = _Rest(0.0, 0.0)
SHOWN_BYTES = 50 * MIB
"""Of keys and values: fewer decide nothing."""


def _told(n_bytes: float) -> str:
    return format_bytes(round(n_bytes))


def _beyond(
    held_bytes: float, experts_bytes: float, rest: _Rest, cached: str, sheet: Sheet, shape: ModelShape
) -> NoRoomError | None:
    """Of units that share one memory."""
    if experts_bytes + rest.n_bytes <= held_bytes:
        return None
    shorter = ", a shorter context" if cached else ""
    return NoRoomError(
        "oom",
        f"{_told(experts_bytes)} of experts of {shape.name} beside {_told(rest.weights_bytes)} of the rest{cached}, and"
        f" the memory of sheet {sheet.name} holds {_told(held_bytes)}; take narrower weights{shorter} or a smaller"
        " model",
    )


def _lacking(
    homes: Sequence[Unit],
    n_bytes: float,
    rest: _Rest,
    what: str,
    cached: str,
    sheet: Sheet,
    result: Literal["N.S.", "oom"],
) -> NoRoomError | None:
    """rest: in the same memory. cached: its keys and values in words."""
    capacities = [sheet.capacity_bytes(unit) for unit in homes]
    held_bytes = sum(one for one in capacities if one is not None)
    if None in capacities or n_bytes + rest.n_bytes <= held_bytes:
        return None
    besides = shorter = ""
    if n_bytes <= held_bytes and rest.n_bytes:
        besides = f" beside {_told(rest.weights_bytes)} of the rest" if rest.weights_bytes else ""
        if rest.kept_bytes:
            besides, shorter = (
                f" beside {_told(rest.kept_bytes)} of experts that lie there",
                ", fewer of these experts",
            )
        if cached:
            besides, shorter = besides + cached, f"{shorter}, a shorter context"
    return NoRoomError(
        result,
        f"{_told(n_bytes)} {what}{besides}, and {', '.join(homes)} of sheet {sheet.name}"
        f" hold{'s' * (len(homes) == 1)} {_told(held_bytes)}; use narrower weights, more units{shorter}, or a smaller"
        " model",
    )
