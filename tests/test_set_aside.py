"""Requests that a program of its own answers: loading, and a second reading of the prompt, are in no figure."""

from __future__ import annotations

import pytest

from results.derivation import phase_intervals
from results.metrics import latency_observations
from results.records import Completion, DerivedTime
from tests.run_builders import trial

# The program loads from 9 to 10 and prefills to 11; a second one loads and reads the prompt to 14, decodes to 16, and
# ends at 16.5.
ONE = Completion(
    request_id="r",
    sample_id="s",
    n_prompt_tokens=8,
    start_s=10.0,
    prefill_end_s=11.0,
    end_s=16.0,
    token_ids=(0, 0, 0),
    token_times_s=(11.0, 15.0, 16.0),
    set_aside_s=((9.0, 10.0), (11.0, 14.0), (16.0, 16.5)),
    is_spread=True,
)


def test_what_was_set_aside_is_in_no_latency() -> None:
    assert ONE.ttft_s == 1.0
    assert ONE.e2e_s == 3.0
    assert ONE.tpot_s == 1.0
    assert ONE.itl_s == ()


def test_what_was_set_aside_slows_no_phase() -> None:
    """8 prompt tokens in a second, and 2 tokens in two."""
    found = {o.phase: o.value for o in latency_observations(trial(completions=[ONE])) if o.metric == "throughput"}
    assert found == {"prefill": 8.0, "decode": 1.0}


def test_what_was_set_aside_is_in_no_phase_and_not_in_the_whole() -> None:
    assert phase_intervals([ONE], (8.0, 17.0)) == {
        "prefill": [(10.0, 11.0)],
        "decode": [(14.0, 16.0)],
        "all": [(8.0, 9.0), (10.0, 11.0), (14.0, 16.0), (16.5, 17.0)],
    }


@pytest.mark.parametrize("aside", [(), ((0.0, 10.0),), ((16.0, 99.0),)])
def test_what_lies_outside_a_request_does_not_shorten_it(aside: tuple[tuple[float, float], ...]) -> None:
    other = ONE.model_copy(update={"set_aside_s": aside})
    assert (other.ttft_s, other.e2e_s) == (1.0, 6.0)


@pytest.mark.parametrize(
    ("derived", "others"),
    [
        ((), {}),
        (("first token",), {"ttft": "derived"}),
        (("decode",), {"tpot": "derived", "itl": "derived", "e2e": "derived", "throughput decode": "derived"}),
        (("prefill",), {"ttft": "derived", "e2e": "derived", "throughput prefill": "derived"}),
    ],
)
def test_a_time_that_no_clock_told_is_derived_in_its_own_row(
    derived: tuple[DerivedTime, ...], others: dict[str, str]
) -> None:
    one = ONE.model_copy(update={"derived": derived})
    found = {
        f"{o.metric} {o.phase}" if o.metric == "throughput" else o.metric: o.method
        for o in latency_observations(trial(completions=[one]))
    }
    assert (
        found
        == dict.fromkeys(("ttft", "tpot", "itl", "e2e", "throughput prefill", "throughput decode"), "measured") | others
    )
