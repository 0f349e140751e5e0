"""The systems of Speculating Experts (source 003)."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.route import PredictedParameters
from engines.techniques.systems.preset import ON_GPU, Preset

_SOURCE = "003 Speculating experts"
_AHEAD = TwoBuffersParameters()
SYSTEMS = (
    Preset(
        "on-demand",
        "experts lie on the host; each is fetched when its layer asks for it",
        f"{_SOURCE}, §5.1",
        Choices(ON_GPU, ExactParameters(), "gpu", move=TwoBuffersParameters(prefetch=False)),
        fixed=(
            "naive_launch",
            "prefetch",
        ),
    ),
    Preset(
        "prefetch-hint",
        "predicted experts are fetched a layer ahead, missed ones on demand; equals the oracle",
        f"{_SOURCE}, §4",
        Choices(ON_GPU, ExactParameters(), "gpu", route=PredictedParameters(executes="router"), move=_AHEAD),
        fixed=("naive_launch", "prefetch", "executes", "speculate_prefill"),
    ),
    Preset(
        "router-pf",
        "experts as the next router says of a guess at its input: fetched a layer ahead and executed",
        f"{_SOURCE}, §4",
        Choices(ON_GPU, ExactParameters(), "gpu", route=PredictedParameters(), move=_AHEAD),
        fixed=("naive_launch", "prefetch", "executes", "predictor"),
    ),
    Preset(
        "est-pf",
        "experts as a trained estimator says: fetched a layer ahead and executed",
        f"{_SOURCE}, §6",
        Choices(ON_GPU, ExactParameters(), "gpu", route=PredictedParameters(predictor="estimator"), move=_AHEAD),
        fixed=("naive_launch", "prefetch", "executes", "predictor", "source"),
    ),
    Preset(
        "hybrid-pf",
        "the estimator for layers that it tells better than their router; fetched a layer ahead and executed",
        f"{_SOURCE}, §6",
        Choices(ON_GPU, ExactParameters(), "gpu", route=PredictedParameters(predictor="hybrid"), move=_AHEAD),
        fixed=("naive_launch", "prefetch", "executes", "predictor", "source"),
    ),
)
