"""How a user names a source of routing: a table of a plan, or the same as one line of TOML on the command line.

{ kind = "uniform" }                                              each token chooses K of E, all alike
{ kind = "generated", imbalance = 4, entropy_bits = 6.5, reuse = 0.3 }
{ kind = "counts", path = "olmoe_expert_counts.json.gz" }         chances of published counts
{ kind = "trace", path = "trace.npz", of = "gpt-oss-20b" }        what routers chose
{ kind = "fitted", path = "trace.npz", of = "gpt-oss-20b" }       drawn, with the figures of a trace
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from devices.toml_records import told
from engines.errors import EngineError
from engines.pricing.counted_routing import counted_routing
from engines.pricing.generated_routing import fitted_to, generated
from engines.pricing.routing_sources import RecordedRouting, RoutingSource, UniformRouting, read_trace, sizes_told
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.techniques.context import ModelSizes
from results.records import Record

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]


class UniformSpec(Record):
    kind: Literal["uniform"] = "uniform"
    seed: Seed = 0

    def source(self, sizes: ModelSizes) -> RoutingSource:
        return UniformRouting(self.seed)


class GeneratedSpec(Record):
    """imbalance: most chosen over mean. entropy_bits: None: the most that the imbalance allows. reuse: of the experts
    of a token, the share that the one before it chose too; None: as tokens that choose apart have it."""

    kind: Literal["generated"] = "generated"
    imbalance: float = Field(1.0, ge=1, allow_inf_nan=False)
    entropy_bits: float | None = Field(None, ge=0, allow_inf_nan=False)
    reuse: Share | None = None
    seed: Seed = 0

    def source(self, sizes: ModelSizes) -> RoutingSource:
        return generated(sizes, self.imbalance, self.entropy_bits, self.reuse, self.seed)


class CountsSpec(Record):
    """path: a JSON of counts by layer, or its .gz. domain: one of the file's; None: all texts together."""

    kind: Literal["counts"] = "counts"
    path: str = Field(min_length=1)
    domain: str | None = Field(None, min_length=1)
    reuse: Share | None = None
    seed: Seed = 0

    def source(self, sizes: ModelSizes) -> RoutingSource:
        return counted_routing(Path(self.path).expanduser(), self.domain, self.reuse, self.seed)


class TraceSpec(Record):
    """path: an .npz with experts [tokens, layers, K] and offsets of sequences. of: the model whose routers chose."""

    kind: Literal["trace"] = "trace"
    path: str = Field(min_length=1)
    of: str = Field(min_length=1, max_length=200)

    def source(self, sizes: ModelSizes) -> RoutingSource:
        return self.trace(sizes)

    def trace(self, sizes: ModelSizes) -> RecordedRouting:
        check_is_of(self.of, sizes)
        return read_trace(Path(self.path).expanduser(), self.of, sizes.n_experts)


def check_is_of(model: str, sizes: ModelSizes) -> None:
    """Whether a trace of a model that is known by name can be one of these sizes: numbers of experts alone do not tell
    a trace of 32 experts from one of 128. Raises `EngineError`."""
    shape = NAMED_SHAPES.get(model)
    known = None if shape is None else sizes_of(shape)
    if shape is None or known is None:
        found = None if shape is None else f"{model} has no experts"
    else:
        own, wanted = ((one.n_sparse_layers, one.n_experts, one.top_k) for one in (known, sizes))
        found = None if own == wanted else f"{model} has {sizes_told(own)}"
        found = found and f"{found}, and the model that is priced has {sizes_told(wanted)}"
    if found is not None:
        raise EngineError(f"the trace is of {model}; {found}; take a trace of that model, or a generator")


class FittedSpec(TraceSpec):
    """Drawn with the imbalance, entropy and reuse of each layer of a trace."""

    kind: Literal["fitted"] = "fitted"  # type: ignore[assignment]
    seed: Seed = 0

    def source(self, sizes: ModelSizes) -> RoutingSource:
        return fitted_to(self.trace(sizes), self.seed)


RoutingSpec = Annotated[UniformSpec | GeneratedSpec | CountsSpec | TraceSpec | FittedSpec, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[RoutingSpec] = TypeAdapter(RoutingSpec)


def parse_routing(text: str) -> RoutingSpec:
    """From an inline table of TOML, or the name of a kind alone. Raises `EngineError` that lists every problem."""
    try:
        raw = tomllib.loads(f"routing = {text}")["routing"] if text.strip().startswith("{") else {"kind": text.strip()}
        return _ADAPTER.validate_python(raw, strict=True)
    except tomllib.TOMLDecodeError as error:
        raise EngineError(f'{text}: no table of TOML ({error}); write it as {{ kind = "generated", ... }}') from error
    except ValidationError as error:
        problems = [told(one, n_outer=1) for one in error.errors()]  # behind the name of its kind
        raise EngineError(f"{text}: {'; '.join(problems)}") from error


def routing_of_spec(spec: RoutingSpec, sizes: ModelSizes) -> RoutingSource:
    """Of that model: it was asked for a token. Raises `EngineError`."""
    source = spec.source(sizes)
    source.ids_LTK(sizes, 1)
    return source
