"""When a program's last words came: with the piece that brought their end, whatever lines were taken out before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from devices.timed_text import TimedText, last_arrival_s


def written(*pieces: str) -> TimedText:
    """The first came at 1 s, the next at 2 s, and so on."""
    text = TimedText()
    for at_s, piece in enumerate(pieces, 1):
        text.add(piece.encode(), float(at_s))
    return text


def test_words_are_there_once_their_last_letter_is() -> None:
    text = written("do", "ne", "\n", "more")
    assert text.arrived_s("done") == 2.0
    assert text.arrived_s("do") == 1.0
    assert text.arrived_s("more") == 4.0
    assert text.arrived_s("none") is None


def test_words_that_came_again_came_when_they_were_there_last() -> None:
    assert written("done\n", "done\n", "and more").arrived_s("done") == 2.0


def test_words_of_two_bytes_a_letter_are_counted_in_bytes() -> None:
    assert written("ä", "öü", "!").arrived_s("öü") == 2.0


@given(st.lists(st.text("ab\n", max_size=5), max_size=8), st.integers(0, 4), st.text("ab", min_size=1, max_size=3))
def test_lines_that_were_taken_out_do_not_move_the_rest(pieces: list[str], n_lines: int, words: str) -> None:
    """Against the pieces themselves: the first that ends behind the words."""
    text, whole = written(*pieces), "".join(pieces)
    n_lines = min(n_lines, whole.count("\n"))
    lines = [text.take_line().decode() for _ in range(n_lines)]
    assert lines == whole.split("\n")[:n_lines]
    taken_out = sum(len(line) + 1 for line in lines)
    assert text.text.decode() == whole[taken_out:]
    at = whole.rfind(words, taken_out)
    ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
    expected = None if at < 0 else next(float(i) for i, end in enumerate(ends, 1) if end >= at + len(words))
    assert text.arrived_s(words) == expected


def test_of_several_the_last_counts_and_one_without_the_words_does_not() -> None:
    several = [written("done"), written("", "", "done"), written("", "done"), written("nothing")]
    assert last_arrival_s(several, "done") == 3.0
    assert last_arrival_s(several, "gone") is None
