"""Running text to hide needles in: generated sentences, or a text file; and where one of its sentences begins.

Generated text is plain prose about nothing in particular. It has no digits and no "magic", so nothing in it can be
mistaken for a needle.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workloads import files_read
from workloads.base import WorkloadError
from workloads.datasets import DAMAGED, find_file, parsed

Haystack = Callable[[random.Random], Iterator[str]]
"""Random state -> endless running text, word by word; another stretch for another random state."""

FOLDER_TEXTS = {
    "essays": "ruler/PaulGrahamEssays.json.gz",
    "public_domain": "ruler/haystack_public_domain.json.gz",
}
"""Texts of the data folder by the name that a plan gives them: RULER's own essays, and a novel without a copyright."""

_PEOPLE = (
    "the carpenter|a tired traveller|the baker's daughter|an old fisherman|the new teacher|my neighbour|the miller|"
    "a young doctor|the postman|the captain|two brothers|the gardener|a quiet clerk|the innkeeper|her cousin|the widow"
)
_PLACES = (
    "by the river|in the narrow street|behind the church|at the edge of the wood|on the market square|near the harbour|"
    "under the old bridge|in the upper room|at the garden gate|along the coast road|in the empty hall|on the hill"
)
_TIMES = (
    "early in the morning|after the long winter|toward evening|on the first day of spring|before the storm|that summer|"
    "while the bells were ringing|late at night|in the quiet hour after supper|as soon as the rain had stopped"
)
_THINGS = (
    "a basket of apples|an unfinished letter|the key of the cellar|a worn leather coat|three loaves of bread|a lantern|"
    "the broken clock|a bundle of dry wood|some faded ribbons|a map of the valley|the silver spoons|a bowl of soup"
)
_DEEDS = (
    "carried {thing} home|spoke of {thing} again and again|left {thing} on the table|looked for {thing} in vain|"
    "traded {thing} for a night's lodging|kept {thing} out of sight|remembered {thing} with a smile|mended {thing}"
)
_WEATHER = (
    "the wind turned to the north|a pale light lay over the fields|the road was white with dust|the rain came down in "
    "grey lines|the snow lay deep against the doors|the air smelled of hay|fog rose from the meadows|the stars came out"
)
_THOUGHTS = (
    "nothing had changed since the spring|the matter was better left alone|there would be time enough tomorrow|the "
    "house had grown too large|a promise was a promise|the tide would wait for no one|silence was the best answer"
)
_PATTERNS = (
    "{time} {who} {deed} {place}.|{weather}, and {who} {deed}.|{who} thought that {thought}, but {who2} {deed}.|"
    "when {who} came back, {weather}.|{place} {who} {deed}, for {thought}.|{who} and {who2} agreed that {thought}.|"
    "it was said {place} that {who} {deed}.|{time} {weather}.|nobody asked why {who} {deed} {place}."
)


def haystack(name: str, data_root: Path | None) -> tuple[Haystack, str]:
    """(text, what tables print as its source). A name of `FOLDER_TEXTS`, "generated", or the path of a text."""
    if name == "generated":
        return generated_text, "generated"
    if name not in FOLDER_TEXTS:
        path = find_file("haystack", name, data_root)
    elif data_root is None:
        raise WorkloadError(
            f'haystack = "{name}" is {FOLDER_TEXTS[name]} of the data folder, but no data folder was given; '
            'set JOULEBENCH_DATA, name a text file, or use "generated"'
        )
    else:
        path = data_root / FOLDER_TEXTS[name]
    return file_text(path), str(path)


def generated_text(rng: random.Random) -> Iterator[str]:
    """Words of sentences put together at random."""
    while True:
        yield from generated_sentence(rng).split()


def generated_sentence(rng: random.Random) -> str:
    """One sentence, put together at random."""

    def pick(options: str) -> str:
        return rng.choice(options.split("|"))

    text = pick(_PATTERNS).format(
        time=pick(_TIMES),
        who=pick(_PEOPLE),
        who2=pick(_PEOPLE),
        deed=pick(_DEEDS).format(thing=pick(_THINGS)),
        place=pick(_PLACES),
        weather=pick(_WEATHER),
        thought=pick(_THOUGHTS),
    )
    return text[0].upper() + text[1:]


def file_text(path: Path) -> Haystack:
    """Words of a text file, from the start of a random sentence; beyond the end it goes on from the beginning.

    Plain text, or a JSON object with the text under "text" (RULER's layout); `.gz` is unpacked.
    """
    words = _read(path).split()
    starts = sentence_starts(words)

    def stretch(rng: random.Random) -> Iterator[str]:
        place = rng.choice(starts)
        while True:
            yield words[place]
            place = (place + 1) % len(words)

    return stretch


_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*$")
_TITLES = frozenset(("Mr.", "Mrs.", "Ms.", "Messrs.", "Dr.", "St.", "Prof.", "Rev.", "Col.", "Capt.", "Lt.", "Sgt."))
_INITIAL = re.compile(r"\W*[A-Z]\.$")


def sentence_starts(words: Sequence[str]) -> list[int]:
    """Positions of the words that begin a sentence, the first word's 0 among them.

    A sentence ends with . ! or ?, before closing quotes, unless the word is a title or an initial ("Mr.", "J.") or the
    next one begins with a small letter. Whether a word begins a sentence depends on it and the word before alone, so
    the starts of a shorter stretch are the first ones of the longer.
    """
    starts = [0] if words else []
    for i in range(1, len(words)):
        before = words[i - 1]
        if before[-1].isalnum() or before[-1] == "," or not _SENTENCE_END.search(before):
            continue
        opened = before.lstrip("\"'“‘([")
        if opened not in _TITLES and not _INITIAL.match(before) and not words[i].lstrip("\"'“‘([")[:1].islower():
            starts.append(i)
    return starts


def _read(path: Path) -> str:
    files_read.note(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        if ".json" in path.suffixes:
            text = parsed(text)["text"]
    except (*DAMAGED, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(
            f'haystack {path}: {type(error).__name__} ({error}); UTF-8 text, or JSON with "text", is expected'
        ) from error
    except OSError as error:
        raise WorkloadError(f'haystack {path}: {error}; name a text file, or set haystack = "generated"') from error
    if not isinstance(text, str) or not text.split():
        raise WorkloadError(f"haystack {path}: no text found in it; name another file")
    return text
