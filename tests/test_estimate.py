"""The estimate before a run: its count of weights per token against what the models' makers state."""

from __future__ import annotations

import pytest

from engines.model_config import parse_model_config
from harness.estimate import active_parameters
from tests.fakes.published import PUBLISHED


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
