"""What the products with weights came to: operations a second, and bytes of weights a second.

Derived from the time of a phase, its tokens, and the weights that a token needs (`results.records.ActiveWeights`):

    prefill   2 FLOP x parameters of the layers x prompt tokens computed / seconds of prefill
    decode    2 FLOP x (parameters of the layers + of the head) x tokens / seconds of decoding
    weights   bytes of the layers and of the head x tokens / seconds of decoding, where each token is a step of its own

Where the last layer leaves out most of a prompt's tokens (`last_layer`), each is counted as one that is left out.

It is what a token needs, whatever was done for it: padding, experts that a technique computes besides, and weights that
it loads twice are not in it, nor what it leaves out. Nor is attention over the tokens before, or the reading of their
keys and values. So both are lower bounds of what the machine did where nothing was left out.
"""

from __future__ import annotations

from itertools import pairwise

from results.metrics import Observation, busy_s, in_numbers, tokens_of
from results.records import ActiveWeights, Completion, Phase
from results.request_columns import edges_s
from results.trials import Trial

RATE, READ = "compute_rate", "weight_read_rate"
FLOP_UNIT, BYTE_UNIT = "GFLOP/s", "GB/s"
ACHIEVED_METRICS: tuple[tuple[str, Phase, str], ...] = (
    (RATE, "prefill", FLOP_UNIT),
    (RATE, "decode", FLOP_UNIT),
    (READ, "decode", BYTE_UNIT),
)
NOT_TOLD = "the engine does not tell which weights a token needs, or the run is from before this was kept"
PRICED = "not derived for modelled machines: a sheet prices their operations"
TOGETHER = "requests were answered together: how many tokens a step had is not known"


@in_numbers
def achieved_observations(trial: Trial) -> list[Observation]:
    if trial.active_weights is None:
        return unseen_achieved(PRICED if trial.time_method == "modelled" else NOT_TOLD)
    return [
        Observation(metric, phase, unit, "derived" if value is not None else "missing", value, reason)
        for metric, phase, unit in ACHIEVED_METRICS
        for value, reason in (_rate(trial, trial.active_weights, metric, phase),)
    ]


def unseen_achieved(reason: str) -> list[Observation]:
    return [Observation(metric, phase, unit, "missing", None, reason) for metric, phase, unit in ACHIEVED_METRICS]


def _rate(trial: Trial, weights: ActiveWeights, metric: str, phase: Phase) -> tuple[float | None, str | None]:
    n_tokens, seconds = tokens_of(trial, phase), busy_s(trial, phase)
    if n_tokens == 0 or seconds == 0:
        return None, f"no {phase} tokens in this trial" if n_tokens == 0 else f"{phase} took no time on this clock"
    if metric == READ:
        if _overlap(trial.completions):
            return None, TOGETHER
        return (weights.n_bytes + weights.head_bytes) * n_tokens / seconds / 1e9, None
    n_parameters = weights.n_parameters + weights.head_parameters
    if phase == "prefill":
        n_parameters = weights.n_parameters if weights.prompt_parameters is None else weights.prompt_parameters
    return 2 * n_parameters * n_tokens / seconds / 1e9, None


def _overlap(completions: tuple[Completion, ...]) -> bool:
    """Whether two requests were in decoding at once."""
    spans = sorted(zip(*edges_s(completions, "decode"), strict=True))
    return any(begin_s < end_s for (_, end_s), (begin_s, _) in pairwise(spans))
