"""Parameters that would have no effect beside the others: an arm that differs from another in nothing but its name."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.capacity import CapacityParameters
from engines.techniques.layout.loads import SelectiveParameters
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.move.slices import SlicesParameters
from engines.techniques.place.hosts import HottestParameters
from engines.techniques.place.ndp import NdpParameters
from results.records import Record


class Need(NamedTuple):
    """What a parameter needs, to be read."""

    of: type[Record]
    names: tuple[str, ...]
    is_read: Callable[[Any], bool]
    needs: str


NEEDS = (
    Need(TiersParameters, ("group_size", "graph_bytes"), lambda p: p.grouped, "grouped = true"),
    Need(TiersParameters, ("decode_rows",), lambda p: p.decode_graphs == "single", 'decode_graphs = "single"'),
    Need(BlocksParameters, ("flop_per_byte",), lambda p: p.block_size == "intensity", 'block_size = "intensity"'),
    Need(
        BlocksParameters,
        ("block_count",),
        lambda p: p.block_size == "intensity" or not p.skip_padding_blocks,
        'block_size = "intensity" or skip_padding_blocks = false',
    ),
    Need(CapacityParameters, ("factor", "of"), lambda p: p.rows is None, "a capacity without rows"),
    Need(CapacityParameters, ("decode_graphs",), lambda p: p.rows == "max", 'rows = "max"'),
    Need(
        CapacityParameters,
        ("renormalise_survivors",),
        lambda p: p.rows != "max",
        'a capacity other than rows = "max", which holds all',
    ),
    Need(
        CapacityParameters,
        ("overflow",),
        lambda p: p.rows != "max" or p.overflow == "none",
        'a capacity other than rows = "max", which holds all',
    ),
    Need(CacheParameters, ("stay",), lambda p: p.evict == "static", 'evict = "static"'),
    Need(FetchParameters, ("stay",), lambda p: p.gpu_slots > 0, "gpu_slots"),
    Need(HottestParameters, ("alpha",), lambda p: p.h == "factor", 'h = "factor"'),
    Need(SlicesParameters, ("slots",), lambda p: p.prefetch, "prefetch = true"),
    Need(NdpParameters, ("costs_of", "as_shape"), lambda p: p.uses_gpu, "balanced = true or resident = true"),
)
IN_DECODING_ONLY = (
    Need(
        TiersParameters,
        ("multiples", "base", "align", "grouped", "group_size", "graph_bytes"),
        lambda p: p.decode_graphs == "same",
        'decode_graphs = "same" in a layout of decoding',
    ),
    Need(CapacityParameters, ("launch",), lambda p: False, "prefill: a decode step launches the experts of its tokens"),
)
IN_PREFILL_ONLY = (
    Need(TiersParameters, ("decode_graphs", "decode_rows"), lambda p: False, "no decode layout beside it"),
    Need(CapacityParameters, ("decode_graphs",), lambda p: False, "no decode layout beside it"),
    Need(SelectiveParameters, ("switch_alpha",), lambda p: False, "no decode layout beside it"),
)


def changed(record: Any) -> Set[str]:
    """Names of the parameters that are not what they would be of themselves."""
    fields = type(record).model_fields
    return {name for name in record.model_fields_set if getattr(record, name) != fields[name].default}


def idle(choice: object, given: Set[str], needs: tuple[Need, ...] = NEEDS) -> str | None:
    """Why one of the parameters that were given would have no effect, or None."""
    for need in needs:
        idle_names = [name for name in need.names if name in given]
        if isinstance(choice, need.of) and idle_names and not need.is_read(choice):
            return f"{idle_names[0]} needs {need.needs}, and has no effect here; remove it"
    return None
