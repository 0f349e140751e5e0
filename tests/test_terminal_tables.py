"""Tables of the terminal: whole words where they have room, and nothing lost where they have none."""

from __future__ import annotations

import pytest

from harness.terminal import print_rows, print_verdicts

ROWS = [
    {
        "machine": "rtx5080-ndp",
        "technique": "prefetch-hint",
        "first_token_s": 0.0649,
        "bound_by": "gpu: reading memory, 100 % busy",
        "path": "/a/path/that/is/longer/than/words/of/text/are",
    }
]


def printed(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_rows(ROWS, False, "Techniques")
    return capsys.readouterr().out


def test_words_are_whole_where_they_have_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten columns short of all in one line, "prefetch-hin" stood over "t"."""
    told = printed(76, monkeypatch, capsys)
    for word in ("rtx5080-ndp", "prefetch-hint", "0.0649", "reading", "memory,"):
        assert word in told
    assert max(map(len, told.splitlines())) <= 76


@pytest.mark.parametrize("columns", range(30, 140, 3))
def test_no_column_is_lost(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(columns, monkeypatch, capsys)
    assert max(map(len, told.splitlines())) <= columns
    characters = sorted("".join(told.split()).replace("─", ""))
    expected = "".join(map(str, ROWS[0].values())) + "".join(ROWS[0]).replace("_", "") + "Techniques"
    assert characters == sorted(expected.replace(" ", ""))


def test_units_are_written_as_people_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ "energy j" and "average power w" stood over what `record` found."""
    monkeypatch.setenv("COLUMNS", "80")
    print_rows([{"duration_s": 3.0, "energy_j": 24.2, "average_power_w": 8.1}], False, "recorded")
    head = capsys.readouterr().out.splitlines()[2]
    assert head.split("  ")[1:] == ["duration s", " energy J", " average power W", ""]


VERDICTS = [
    ("1.", "REGRESSION", "dropless", "ruler_niah_single_2", "host", "TTFT", "6.914 ms", "8.321 ms", "[+18.9 %, +21 %]"),
    (
        "2.",
        "anchor: PASS",
        "npumoe-tg (align=8)",
        "hellaswag",
        "host",
        "energy, decode, modelled",
        "0.13 J",
        "0.14 J",
        "[0]",
    ),
]
TITLES = ("", "verdict", "arm", "workload", "device", "figure", "baseline", "now", "95 %")


@pytest.mark.parametrize("columns", range(70, 200, 3))
def test_words_of_verdicts_are_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 120 columns "ruler_niah" stood over "_single_2"."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_verdicts(TITLES, VERDICTS, {"baseline", "now", "95 %"})
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= columns
    assert sorted(told.replace("─", "").split()) == sorted(
        " ".join(" ".join(row) for row in (TITLES, *VERDICTS)).split()
    )


@pytest.mark.parametrize("columns", range(40, 70))
def test_a_verdict_is_whole_and_nothing_is_lost_where_words_have_no_room(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_verdicts(TITLES, VERDICTS, {"baseline", "now", "95 %"})
    told = capsys.readouterr().out
    assert "REGRESSION" in told
    expected = "".join("".join(row) for row in (TITLES, *VERDICTS)).replace(" ", "")
    assert sorted("".join(told.split()).replace("─", "")) == sorted(expected)


def test_words_of_wide_letters_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each takes two columns of a terminal."""
    arms = ("専門家の配置", "ベースライン", "🎉🎉🎉🎉🎉🎉")
    monkeypatch.setenv("COLUMNS", "33")
    print_rows([{"arm": arm, "technique": "prefetch-hint, dropless"} for arm in arms], False, "")
    told = capsys.readouterr().out
    assert all(arm in told for arm in arms)


@pytest.mark.parametrize("columns", [0, 1, 5, 29])
def test_nothing_is_lost_where_columns_say_that_there_is_no_room(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """COLUMNS=0, which some programs set, printed nothing at all, and COLUMNS=5 a table without a letter."""
    told = "".join(printed(columns, monkeypatch, capsys).split())
    assert sorted(told.replace("─", "")) == sorted("".join(printed(120, monkeypatch, capsys).split()).replace("─", ""))
