"""What the bundled model's own predictors do, beside the source's figures of models whose checkpoints are not at hand.

As `joulebench calibrate --estimator` measured it: in the profile that comes with the model, of prompts that were held
out. Four layers, 16 experts, top 2: a trend, and no reproduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from engines.profile import LayerAccuracy, PredictorName, ProfiledPredictions
from engines.profile_files import profile_folder, read_profile

BUNDLED = "bundled:tiny-qwen3-moe"
Q: PredictorName = "router q"
S: PredictorName = "router s"
ESTIMATOR: PredictorName = "estimator"


@cache
def predictions() -> ProfiledPredictions:
    """Raises `EngineError` for a profile that is not whole."""
    found = read_profile(profile_folder(BUNDLED)).predictions
    assert found is not None  # tests hold that the bundled profile has them
    return found


def held_out(predictor: PredictorName) -> list[LayerAccuracy]:
    """By layer."""
    return [one for one in predictions().accuracies if one.predictor == predictor and one.data == "held out"]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_recall(predictor: PredictorName) -> float:
    """Over layers; every layer has as many tokens."""
    return mean([one.recall for one in held_out(predictor)])


def mean_cosine(predictor: PredictorName) -> float:
    """Of what the router is shown with its true input. Of routers' predictors alone."""
    return mean([one.cosine for one in held_out(predictor) if one.cosine is not None])


def mean_by_rank(predictor: PredictorName) -> tuple[float, ...]:
    """Share of tokens whose predicted expert of that rank is the router's, the heaviest first."""
    ranks = zip(*(one.rank_alignment for one in held_out(predictor)), strict=True)
    return tuple(mean(list(of_rank)) for of_rank in ranks)


def most_gained() -> float:
    """Of all layers, by how much the estimator's recall is most above the router's from q."""
    pairs = zip(held_out(ESTIMATOR), held_out(Q), strict=True)
    return max(own.recall - router.recall for own, router in pairs)
