"""What is known of a model's routing before the first request: how often each expert of each layer is chosen, how
salient the tokens are that choose it, and what it gives on average.

Sources: §3.3 and §4.1 of NPUMoE (000) for the counts, 003 §3 for default vectors and predictions. `engines.profiling`
counts, `engines.profile_files` writes and reads. Legend: E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from engines.estimator import Estimator, EstimatorRecipe
from results.popularity import popularity
from results.records import Record

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ProfiledData(Record):
    """Prompts of one workload that a profile was counted over."""

    workload: str
    source: str
    """Where its items came from: "sample", "generated", a folder, a hub id."""
    n_prompts: int = Field(ge=1)


class ProfileOrigin(Record):
    """What a profile was counted on: it serves arms of the same model and the same tokenizer."""

    model: str
    """As it was named."""
    model_sha256: Sha256
    """Of config and weights, whatever their folder is called."""
    tokenizer_sha256: Sha256
    data_sha256: Sha256
    """Of the prompts' token ids, of the workloads' parameters, and of the data files that they were read from."""
    data: tuple[ProfiledData, ...] = Field(min_length=1)
    dtype: str
    """Of the weights while they were counted."""


Learnt = Literal["counts", "default vectors", "estimator"]
"""Parts of a profile. An estimator is trained by `joulebench calibrate` only; the others are found on the fly too."""

PredictorName = Literal["router q", "router s", "estimator", "hybrid"]
DataName = Literal["calibration", "held back", "held out"]
"""Tokens of the prompts that were counted; those of them that no estimator learnt from; those of other prompts. Beside
an estimator "calibration" is what it learnt from."""


class LayerAccuracy(Record):
    """Of the predictions of one layer's experts, by one predictor over some tokens."""

    predictor: PredictorName
    data: DataName
    layer: int = Field(ge=0)
    """Whose experts are predicted."""
    n_tokens: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)
    """recall@k: the share of a token's true experts that are among the predicted ones, the mean over tokens."""
    rank_alignment: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(min_length=1)
    """Of each rank by routing weight, the share of tokens whose predicted expert of that rank is the true one."""
    cosine: float | None = Field(ge=-1.000001, le=1.000001)
    """Of what the router is shown with its true input, the mean over tokens; None of an estimator, which guesses no
    input."""


class EstimatorOrigin(Record):
    """What an estimator was trained with. width: W, as it came out."""

    recipe: EstimatorRecipe
    width: int = Field(ge=1)
    n_parameters: int = Field(ge=1)
    n_tokens: int = Field(ge=1)
    """That its steps were drawn from."""


class ProfiledPredictions(Record):
    """How well the next layer's experts can be told before the layer is computed."""

    every: int = Field(ge=1)
    """Only every n-th token was looked at, so that the states fit in memory."""
    held_out: tuple[ProfiledData, ...]
    """Prompts that were neither counted nor learnt from; empty where the workloads keep no more."""
    held_out_sha256: Sha256 | None
    """Of their token ids; None where there are none."""
    accuracies: tuple[LayerAccuracy, ...] = Field(min_length=1)
    estimator: EstimatorOrigin | None
    estimated_layers: tuple[int, ...]
    """Layers after which a hybrid asks the estimator: of the tokens held back from it, its recall is above the
    router's."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Expert choices counted over calibration prompts. Immutable: the shapes derived from it are frozen."""

    tokens_per_expert: Mapping[int, tuple[int, ...]]
    """Layer -> n_{l,e} for e = 0 .. E-1; only sparse layers have an entry."""
    top_k: int
    n_prompts: int
    saliency_per_expert: Mapping[int, tuple[float, ...]] | None = None
    """Layer -> sum over the tokens that chose the expert of the L2 norm of their attention output (000 §3.2)."""
    default_vectors_EH: Mapping[int, Tensor] | None = None
    """Layer -> mean output of each expert, unweighted, over the tokens that chose it; zeros where none did (003). Where
    a family's weight multiplies what goes into an expert, the output is that of the weighted input."""
    origin: ProfileOrigin | None = None
    """None: counted on the fly, of the model that is there."""
    predictions: ProfiledPredictions | None = None
    estimator: Estimator | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_per_expert", "saliency_per_expert"):
            by_layer = getattr(self, name)
            if by_layer is not None:
                frozen = MappingProxyType({layer: tuple(per_expert) for layer, per_expert in by_layer.items()})
                object.__setattr__(self, name, frozen)
        if self.default_vectors_EH is not None:
            object.__setattr__(self, "default_vectors_EH", MappingProxyType(dict(self.default_vectors_EH)))

    def lacks(self, learns: frozenset[Learnt]) -> str | None:
        """What it was made without, of what a technique reads; None where it has all."""
        if "default vectors" in learns and self.default_vectors_EH is None:
            return "it has no default vectors"
        if "estimator" in learns and self.estimator is None:
            return "it has no estimator; calibrate with --estimator"
        return None

    @property
    def n_tokens(self) -> int:
        """Tokens that were routed; each chose top_k experts in each layer."""
        return sum(next(iter(self.tokens_per_expert.values()))) // self.top_k

    def relative_load(self, layer: int) -> tuple[Fraction, ...]:
        """n_{l,e} / mean_e n_{l,e}: 1 for every expert under perfect balance. Exact, for shapes are cut from it."""
        counts = self.tokens_per_expert[layer]
        return tuple(Fraction(count * len(counts), sum(counts)) for count in counts)

    def imbalance(self, layer: int) -> float:
        """r_l = max_e n_{l,e} / mean_e n_{l,e} (§4.1)."""
        return float(max(self.relative_load(layer)))

    def popularity(self, layer: int) -> tuple[int, ...]:
        """Experts from the most to the least chosen; the lower index first where counts are equal (§4.3)."""
        return popularity(self.tokens_per_expert[layer])
