"""What a technique is shown: the costs and sizes that it is built from, and what the engine knows of one layer.

Legend: T tokens, H model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from devices.base import Unit
from engines.dispatch import Prediction, Routing
from engines.errors import EngineError
from engines.profile import Profile
from engines.residency import Counts, Residency, Slots

if TYPE_CHECKING:
    from engines.model.model_config import ModelConfig
    from engines.model.weights import ModelWeights

ChunkPhase = Literal["prefill", "decode"]


class HiddenState(NamedTuple):
    """What a layer knows when its experts are about to run.

    residual_TH: what the experts' result is added to. router_input_TH: the same, normed: what the router and the
    experts read. shared_TH: what the shared experts made of it; None where there are none.
    """

    residual_TH: Tensor
    router_input_TH: Tensor
    shared_TH: Tensor | None


class Asks(NamedTuple):
    """What a decision must be shown, beyond routing. slots: the memories whose contents are kept, and their size.
    waits: for nothing more, but experts are copied as it says before they run."""

    hidden_state: bool = False
    counts: bool = False
    slots: Mapping[Unit, Slots] = MappingProxyType({})
    waits: bool = False


NOTHING = Asks()


@dataclass(frozen=True)
class LayerInput:
    """All that a technique may see of one layer and one chunk.

    phase tells a one-token tail of a prefill from a decode step. saliency_T: the L2 norm of each token's attention
    output, or None where nothing ranks by it. The rest is there where a decision `Asks` for it, else None.
    routing: the router's choice; to place, lay out and move it is what the route made of it.
    predicted: what an earlier layer of this step guessed for this one. prefill_left: tokens of the step's prompts that
    are read after this chunk. guess: what this layer guessed for a later one inside of the step, whose state is gone.
    """

    layer: int
    phase: ChunkPhase
    routing: Routing
    saliency_T: Tensor | None = None
    hidden_state: HiddenState | None = None
    residency: Residency | None = None
    counts: Counts | None = None
    predicted: Routing | None = None
    prefill_left: int | None = None
    guess: Prediction | None = None


class ModelSizes(NamedTuple):
    """The sizes that a technique may count on. expert_bytes: of one expert's weights, all three matrices.
    activation_bytes: of a value in the dtype in which activations are computed; fp32 on the CPU.

    n_layers: all, dense ones included. n_sparse_layers: those with experts.
    """

    n_experts: int
    top_k: int
    hidden: int
    expert_width: int
    expert_bytes: int
    n_layers: int
    n_sparse_layers: int
    activation_bytes: int = 4


def check_slots(n_slots: int | None, sizes: ModelSizes) -> None:
    """n_slots: of each layer, as a plan gives them. Raises `EngineError` for more than a layer has experts."""
    if n_slots is not None and n_slots > sizes.n_experts:
        raise EngineError(f"slots = {n_slots} in each layer, and a layer has {sizes.n_experts} experts; lower it")


class Costs(Protocol):
    """What calls cost on the units of a machine: of a sheet, or measured."""

    def call_s(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        """Seconds of one call: its launch, its experts' weights, its rows (padding included); infinite where the unit
        does not take it. share: of each expert's intermediate columns."""
        ...

    def call_j(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        """Joules of the same call, of its unit and of the memory; infinite alike."""
        ...

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        """Seconds in which so many bytes travel. Raises `DeviceError` where nothing links the two."""
        ...

    def capacity_bytes(self, unit: Unit) -> float | None:
        """Of the unit's own memory; None where that is not stated."""
        ...


class HasModel(Protocol):
    """The model that computes, for predictors that ask its own norms and routers; a `Transformer` is one."""

    config: ModelConfig
    weights: ModelWeights


@dataclass(frozen=True)
class BuildContext:
    """What a technique is built from, before the first request. chunk: tokens of a prefill step."""

    chunk: int
    sizes: ModelSizes | None = None
    """None: of a dense model, which places nothing."""
    profile: Profile | None = None
    costs: Costs | None = None
    model: HasModel | None = None
    expert_slots: int | None = None
    """How many experts of all layers fit in the memory that the plan gives them; None: no limit is given."""
    priced_sizes: ModelSizes | None = None
    """Of the model that `costs` are of; None: `sizes`."""
    moved_expert_bytes: int | None = None
    """Of one expert as it travels here; None: none does, and its transfers are counted."""
    counted_expert_bytes: int | None = None
    """Of one expert then; None: `sizes.expert_bytes`."""
    ranks: int = 1
    """Processes that compute it together."""
    units: tuple[Unit, ...] = ()
    """Where experts are computed, as the place says."""
    apart_from: Unit | None = None
    """The unit that has the tokens, where others compute from memories of their own: weights travel between them."""
    routers_order: bool = False
    """Whether the decode step of the model itself adds experts up in the order in which the router names them, and not
    by their numbers."""
    foretells: Callable[[int], Prediction | None] | None = None
    """What a route guesses after that layer, where no model runs whose state it could ask; None: its own predictor."""

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Those with experts: as the model says, or behind the dense ones. Empty of a dense model."""
        if self.model is not None and self.model.config.moe is not None:
            return tuple(sorted(self.model.config.moe.sparse_layers))
        sizes = self.sizes
        return () if sizes is None else tuple(range(sizes.n_layers - sizes.n_sparse_layers, sizes.n_layers))

    @property
    def exchanged_sizes(self) -> ModelSizes | None:
        """Whose widths activations have that units send each other: those of the model that is priced."""
        return self.priced_sizes or self.sizes

    @property
    def bytes_to_move(self) -> int:
        """Of one expert."""
        for told in (self.moved_expert_bytes, self.counted_expert_bytes):
            if told is not None:
                return told
        return 0 if self.sizes is None else self.sizes.expert_bytes
