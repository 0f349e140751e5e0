"""Latencies of one request by hand: tokens that came together, and stretches that were set aside."""

from __future__ import annotations

import pytest

from results.latencies import first_token_s, gaps_s, lasting_s, n_behind_first, per_token_s

EACH_S = (2.0, 2.5, 3.5, 5.5)
TOGETHER_S = (2.0, 2.0, 2.0, 5.0, 5.0)
"""A server's first chunk brought three tokens, its second two."""


def test_what_is_set_aside_is_no_part_of_a_latency() -> None:
    """Of 1 to 5 s: 0.5 s before it, 1 s within, 0.25 s that reaches beyond, and 2 s behind."""
    aside = ((0.5, 1.0), (2.0, 3.0), (4.75, 5.5), (6.0, 8.0))
    assert lasting_s(1.0, 5.0, ()) == 4.0
    assert lasting_s(1.0, 5.0, aside) == 2.75
    assert lasting_s(0.75, 5.0, aside) == 2.75, "0.25 s more, and these are aside"
    assert first_token_s(1.0, EACH_S, ()) == first_token_s(1.0, EACH_S, aside) == 1.0
    assert per_token_s(EACH_S, aside) == (3.5 - 1.0 - 0.75) / 3


def test_tokens_of_the_first_chunk_are_none_of_decoding() -> None:
    assert [n_behind_first(times_s) for times_s in (EACH_S, TOGETHER_S, (2.0, 2.0), (2.0,), ())] == [3, 2, 0, 0, 0]
    assert per_token_s(EACH_S, ()) == pytest.approx(3.5 / 3)
    assert per_token_s(TOGETHER_S, ()) == 1.5
    assert per_token_s((2.0, 2.0), ()) is None
    assert first_token_s(1.0, (), ()) is None


def test_times_between_tokens_have_the_mean_of_all() -> None:
    assert gaps_s(EACH_S, is_spread=False) == (0.5, 1.0, 2.0)
    assert gaps_s(TOGETHER_S, is_spread=False) == (3.0, 0.0)
    assert sum(gaps_s(TOGETHER_S, is_spread=False)) / 2 == per_token_s(TOGETHER_S, ())
    assert gaps_s(EACH_S, is_spread=True) == gaps_s((2.0,), is_spread=False) == gaps_s((), is_spread=False) == ()
