"""Routing with the chances that published counts of experts have.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from engines.errors import EngineError
from engines.pricing.generated_routing import DrawnRouting, Floats
from results.records import Record


class _ExpertCounts(Record, extra="ignore"):
    """A file of counts: for each layer, how often each expert was chosen; by text domain, or of all texts together."""

    model: str = Field(max_length=200)
    num_experts: int = Field(ge=1, le=65536)
    top_k: int = Field(ge=1, le=65536)
    num_layers: int = Field(ge=1, le=1000)
    counts: dict[str, dict[int, list[int]]] | list[list[int]]


def counted_routing(path: Path, domain: str | None = None, reuse: float | None = None, seed: int = 0) -> DrawnRouting:
    """Chances as counts that somebody published have them; of a layer that was not counted, those of the nearest one.

    domain: one of the file's; None: all together. Raises `EngineError` for a file that is none.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        file = _ExpertCounts.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))[:80]
        why = f"{where}: {fault['msg']}" if where else fault["msg"]
        raise EngineError(f"{path}: no counts of experts ({why}); give a JSON of counts by layer") from error
    except (OSError, EOFError) as error:
        raise EngineError(f"{path}: no counts of experts ({error}); give a JSON of counts by layer") from error
    by_layer = _by_layer(file, domain, path)
    wrong = [
        layer
        for layer, own in by_layer.items()
        if len(own) != file.num_experts or min(own) < 0 or not sum(own) or not 0 <= layer < file.num_layers
    ]
    if wrong or not by_layer:
        raise EngineError(
            f"{path}: layers {wrong} have no counts of {file.num_experts} experts; give a number of 0 or more for each"
        )
    nearest = [min(by_layer, key=lambda known, layer=layer: abs(known - layer)) for layer in range(file.num_layers)]  # type: ignore[misc]
    chances_LE = np.stack([_capped(np.array(by_layer[layer], dtype=np.float64), file.top_k) for layer in nearest])
    told = f"published counts of {file.model}"
    told += "" if domain is None else f", {domain}"
    if len(by_layer) < file.num_layers:
        told += f", counted in layers {', '.join(map(str, sorted(by_layer)))}, others as the nearest"
    told += "" if reuse is None else f", reuse {reuse:g}"
    reuse_L = None if reuse is None else (reuse,) * file.num_layers
    return DrawnRouting(told, chances_LE, file.top_k, reuse_L, seed)


def _by_layer(file: _ExpertCounts, domain: str | None, path: Path) -> dict[int, list[int]]:
    if isinstance(file.counts, list):
        if domain is not None:
            raise EngineError(
                f"{path}: counts are of all texts together, and domain = {domain!r} asks for one; remove it"
            )
        return dict(enumerate(file.counts))
    if domain is not None and domain not in file.counts:
        raise EngineError(f"{path}: no domain {domain!r}; it has {', '.join(file.counts)}")
    found: dict[int, list[int]] = {}
    for name, layers in file.counts.items():
        if domain in (None, name):
            for layer, own in layers.items():
                before = found.get(layer, [0] * len(own))
                if len(before) != len(own):
                    raise EngineError(f"{path}: layer {layer} has {len(before)} experts, and {len(own)} in {name}")
                found[layer] = [a + b for a, b in zip(before, own, strict=True)]
    return found


def _capped(counts_E: Floats, top_k: int) -> Floats:
    """Chances that add up to K; of experts that would be above 1, the others have the rest."""
    chances_E: Floats = counts_E * top_k / counts_E.sum()
    while (over_E := chances_E > 1 + 1e-12).any():
        chances_E[over_E] = 1.0
        rest_E = chances_E < 1
        chances_E[rest_E] *= (top_k - (~rest_E).sum()) / chances_E[rest_E].sum()
    return chances_E
