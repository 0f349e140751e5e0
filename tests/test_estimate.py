"""The estimate before a run: weights per token against what the models' makers state, tokens and arrivals counted."""

from __future__ import annotations

import pytest

from engines.model.model_config import parse_model_config
from harness.estimate import CellEstimate, active_parameters, estimate, guessed_words
from harness.plan import build_plan
from harness.run_parts import RunParts
from tests.fakes.published import PUBLISHED
from tests.plans import FAST, raw_plan


@pytest.mark.parametrize(
    ("model", "stated_b"),
    [
        # 000-npumoe, Table 1.
        ("Phi-3.5-MoE-instruct", 6.6),
        # The makers' model pages.
        ("Mixtral-8x7B-v0.1", 12.9),
        ("DeepSeek-V3", 37.0),
    ],
)
def test_active_parameters_are_those_that_the_maker_states(model: str, stated_b: float) -> None:
    # The makers count the embedding; no token is multiplied with it.
    config = parse_model_config(PUBLISHED[model].config, 0)
    counted = active_parameters(config) + config.vocabulary_size * config.hidden
    assert counted / 1e9 == pytest.approx(stated_b, rel=0.025)


def estimated(workload: dict[str, object]) -> CellEstimate:
    plan = build_plan(raw_plan(workload=[workload], protocol=FAST | {"repeats": 2}))
    (found,) = estimate(plan, RunParts(plan.protocol))
    return found


def test_a_window_lasts_at_least_as_long_as_its_arrivals() -> None:
    lengths = {"name": "fixed_lengths", "prompt_tokens": 16, "new_tokens": 4, "limit": 3}
    closed, spread = estimated(lengths), estimated(lengths | {"arrivals_per_s": 0.001})
    for found in (closed, spread):
        assert (found.n_requests, found.prefill_tokens, found.decode_tokens) == (3, 3 * 16, 3 * 3)
    # Three arrivals at one in a thousand seconds, in each of two trials; the work is that of a moment.
    assert closed.seconds < 60 < 1000 < spread.seconds


def test_a_turn_on_own_answers_is_estimated_as_long_as_it_may_be() -> None:
    talk = {"name": "mt_bench", "limit": 1, "max_new_tokens": 10}
    plan = build_plan(raw_plan(workload=[talk]))
    first, second = RunParts(plan.protocol).requests(plan.cells[0])
    n_first, n_behind = len(first.prompt_ids), len(second.prompt_ids)
    assert estimated(talk).prefill_tokens == n_first + (n_first + 10 + n_behind)


def test_what_computes_elsewhere_than_on_this_cpu_is_said_not_to_be_probed() -> None:
    """A plan of a server's GPU was said to take as long as the CPU in front of it would."""
    own = {"name": "own", "technique": {"name": "dropless"}}
    server = {"name": "far", "runs": "openai", "url": "http://192.0.2.1:8000/v1"}

    def words(**changes: object) -> str:
        plan = build_plan(raw_plan(workload=[{"name": "fixed_lengths", "limit": 1}], **changes))
        return guessed_words([CellEstimate(c, 1, 1, 1, 1, 1.0) for c in plan.cells])

    assert words(engine=[own]).endswith("this machine's CPU")
    assert words(engine=[own, server]).endswith("which says nothing of the server of far")
    on_gpu = words(engine=[own], device=[{"name": "host", "computes": "cuda"}])
    assert on_gpu.endswith("which says nothing of the GPU of host")
