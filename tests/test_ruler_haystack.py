"""Running text for needles: where its sentences begin, and files that are none."""

from __future__ import annotations

import gzip
import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from tests.data_folder import data_folder
from tests.fakes.damaged import BROKEN_GZIP, unreadable
from workloads.base import WorkloadError
from workloads.haystack import FOLDER_TEXTS, generated_text, haystack, sentence_starts


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("He said “Go.” Nobody went.", ["He said “Go.”", "Nobody went."]),
        ("“Go!” said she. (They went.) All was still", ["“Go!” said she.", "(They went.)", "All was still"]),
        ("Mr. Smith met Dr. Jones. J. R. Brown did not.", ["Mr. Smith met Dr. Jones.", "J. R. Brown did not."]),
        ("It costs 3.50 a piece, or less... they say.", ["It costs 3.50 a piece, or less... they say."]),
        ("", []),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, sentences: list[str]) -> None:
    words = text.split()
    starts = sentence_starts(words)
    assert [" ".join(words[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=False)] == sentences


@pytest.mark.parametrize("name", FOLDER_TEXTS)
def test_nearly_every_sentence_begins_where_nltk_begins_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needles go between sentences; lm-eval takes them from NLTK's punkt, here from one trained on like text."""
    import nltk

    root = data_folder()
    monkeypatch.setattr(nltk.data, "path", [str(root / "ruler" / "nltk_data_trained")])
    words = json.loads(gzip.decompress((root / FOLDER_TEXTS[name]).read_bytes()))["text"].split()[:30_000]
    text, ours = " ".join(words), set(sentence_starts(words))
    word_at = _words_by_character(words)
    theirs, place = set(), 0
    for sentence in nltk.sent_tokenize(text):
        place = text.index(sentence, place)
        # punkt also cuts inside a word (“time.)The”), where nothing can be put.
        theirs |= {word_at[place]} if place in word_at else set()
        place += len(sentence)
    assert len(ours & theirs) / len(ours) > 0.99
    # A novel's “Oh!” | said he. is cut by punkt and not by us.
    assert len(ours & theirs) / len(theirs) > (0.99 if name == "essays" else 0.85)


def _words_by_character(words: list[str]) -> dict[int, int]:
    """Number of a word by the place of its first character in the joined text."""
    places, place = {}, 0
    for i, word in enumerate(words):
        places[place] = i
        place += len(word) + 1
    return places


def test_generated_text_has_nothing_that_could_be_a_needle() -> None:
    words = list(islice(generated_text(random.Random(3)), 5000))
    assert not re.search(r"\d|magic", " ".join(words))
    assert len(sentence_starts(words)) > 200


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.txt", None),
        ("empty.txt", b" \n"),
        ("binary.txt", b"\xff\xfe\x00"),
        ("other.json", b'{"words": "none"}'),
        ("list.json", b"[1]"),
        ("numbers.json", b'{"text": 3}'),
        ("broken.json", b'{"text": '),
        ("half a character.json", rb'{"text": "some text \ud83d"}'),
        ("plain.txt.gz", b"not packed"),
        ("cut.txt.gz", gzip.compress(b"some text " * 500, mtime=0)[:-12]),
        ("broken.txt.gz", BROKEN_GZIP),
    ],
)
def test_a_haystack_without_text_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=re.escape(str(tmp_path / name))):
        haystack(name, tmp_path)


def test_a_haystack_that_may_not_be_read_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = unreadable(tmp_path / "own.txt")
    with pytest.raises(WorkloadError, match=re.escape(str(path))):
        haystack("own.txt", tmp_path)


def test_a_haystack_may_lie_where_joulebench_is_called_or_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "here.txt").write_text("Here.")
    (tmp_path / "data" / "there.txt").write_text("There.")
    monkeypatch.chdir(tmp_path)
    for name, place in (("here.txt", "here.txt"), ("there.txt", str(tmp_path / "data" / "there.txt"))):
        text, source = haystack(name, tmp_path / "data")
        assert (next(text(random.Random(0))).lower(), source) == (name.replace("txt", ""), place)
