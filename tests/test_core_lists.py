"""Lists of cores read and written: what /proc prints, what a plan says, and what neither may."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.core_lists import core_words, parse_cores


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,2", {0, 2}), ("0-1, 6", {0, 1, 6}), ("7,2 - 3", {2, 3, 7})],
)
def test_lists_name_their_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no core"),
        (" ", "names no core"),
        ("a", "is no list of cores"),
        ("0-", "is no list of cores"),
        ("-1", "is no list of cores"),
        ("0,,1", "is no list of cores"),
        ("0-1-2", "is no list of cores"),
        ("٣", "is no list of cores"),
        ("3-1", 'runs backwards at "3-1"; write "1-3"'),
        ("0-2,1", "names core 1 twice"),
        ("4,4", "names core 4 twice"),
        ("0-99999", "names core 99999, and cores end at 8191"),
    ],
)
def test_what_is_no_set_of_cores_is_told(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_cores(text)


@given(st.frozensets(st.integers(0, 8191), min_size=1, max_size=40))
def test_words_are_read_as_the_cores_that_they_were_made_of(cores: frozenset[int]) -> None:
    assert parse_cores(core_words(cores)) == cores


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux prints its list there")
def test_words_are_the_kernels_own() -> None:
    with open("/proc/self/status", encoding="ascii") as status:
        (printed,) = (line.split()[1] for line in status if line.startswith("Cpus_allowed_list:"))
    assert core_words(os.sched_getaffinity(0)) == printed
