"""The engine that `joulebench serve` answers with."""

from __future__ import annotations

from engines.base import unheard
from engines.model.quantised import Quantisation
from harness.serve_command import _engine
from results.records import Request
from tests.fakes.random_models import BUNDLED


def test_experts_that_are_copied_to_slots_are_served_and_answer_as_those_in_memory() -> None:
    """They were refused: weights lay in memory, and slots are filled from a file."""
    request = Request(
        request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(range(5, 25)), max_new_tokens=12,
        ignore_end_tokens=True,
    )  # fmt: skip
    answers = []
    for technique in ("dropless", '{ name = "lru", slots = 4 }'):
        engine = _engine(str(BUNDLED), technique, None, "float32", Quantisation(), 1, 64, False, None)
        answers.append(engine.run(request, unheard).token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12
    assert engine.take_counters().bytes_copied
