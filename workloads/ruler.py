"""RULER's needles in a haystack: facts in a long text, asked for at its end.

A needle gives a "special magic number" of seven digits, or a UUID, for a key of two words, or a UUID. The eight tasks
differ in what surrounds it (`NeedleTask`); an answer scores the share of the asked values that are in it, in any place.

For the same keys, values, words and places the prompt is lm-eval's, character by character, with its two blanks where
needles meet. Where the draws differ:

- prose is split into sentences by a rule of ours (`haystack.sentence_starts`), not by NLTK's downloaded model;
- the asked needle's depth is the plan's, or spread evenly over the samples; lm-eval draws it, from the 40 depths that
  the other needles have here too. Between lines it never lies below the last one there, at depth 100 it does here;
- the text starts at another sentence for every sample, at the same word for all samples there;
- keys are never of three words ("ad hoc-rose": 0.2 % there), and no two keys or values of a sample are equal.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, repeat
from pathlib import Path
from typing import Literal

from pydantic import Field

from workloads.haystack import Haystack, haystack, sentence_starts
from workloads.ruler_samples import Prompt, RulerParameters, RulerTask, english_words_of, lm_eval_text

Values = Literal["numbers", "uuids"]
Place = tuple[int, str]
"""(how many units of text stand before it, needle)."""

DEPTHS_PERCENT = tuple(round(100 * i / 39) for i in range(40))
"""Where lm-eval puts needles into prose."""


class NeedleParameters(RulerParameters):
    """What a plan may say about a task that asks for one needle."""

    depth_percent: float | None = Field(default=None, ge=0, le=100)
    """Where the asked needle lies, 0 at the start of the text; None: spread evenly over the samples."""


class HaystackParameters(RulerParameters):
    """What a plan may say about a task that asks for several needles in prose."""

    haystack: str = "generated"
    """"generated", "repeat" (RULER's lines about grass and sky), "essays" or "public_domain" (texts of the data
    folder), or the path of a text, also below that folder."""


class NeedleInHaystackParameters(NeedleParameters, HaystackParameters):
    """What a plan may say about a task that asks for one needle in prose."""


@dataclass(frozen=True)
class NeedleTask:
    """What makes a needle task, in lm-eval's words."""

    name: str
    text: Literal["prose", "lines", "needles"] = "prose"
    """What surrounds the needles: prose, one line repeated, or other needles."""
    keys: Literal["words", "uuids"] = "words"
    values: Values = "numbers"
    n_keys: int = 1
    n_values: int = 1
    """For each key."""
    n_asked: int = 1
    """Keys that are asked for."""

    @property
    def n_answers(self) -> int:
        return self.n_asked * self.n_values


class RulerNeedles(RulerTask):
    """Needles in a haystack, as a workload."""

    def __init__(self, task: NeedleTask, parameters: RulerParameters, data_root: Path | None) -> None:
        self._needle_task = task
        self._haystack_name = parameters.haystack if isinstance(parameters, HaystackParameters) else task.text
        self._depth_percent = parameters.depth_percent if isinstance(parameters, NeedleParameters) else None
        self._prose: Haystack | None = None
        source = "generated"
        if task.text == "prose" and self._haystack_name != "repeat":
            self._prose, source = haystack(self._haystack_name, data_root)
        super().__init__(task.name, f"ruler_{task.name}", parameters, source)

    def _identity(self) -> str:
        depth = "" if self._depth_percent is None else f"/depth{self._depth_percent:g}"
        text = "" if self._haystack_name in ("generated", self._needle_task.text) else f"/{self._haystack_name}"
        return f"{super()._identity()}{depth}{text}"

    def _sample(self, sample_id: str, number: int) -> NeedleSample:
        depth = _spread(number) if self._depth_percent is None else self._depth_percent
        return NeedleSample(self._needle_task, sample_id, depth, self._prose, self.length)


class NeedleSample:
    """Keys, values, depths and the asked keys of one sample; the text around them grows with its size.

    `units`: the text in words (prose) or lines, as far as it was needed.
    """

    def __init__(
        self, task: NeedleTask, sample_id: str, depth_percent: float, prose: Haystack | None, length: int
    ) -> None:
        """depth_percent: of the first asked needle. prose None: the text is lines. length: no text has more units."""
        # A random state from the id: a sample is the same whatever the limit, and whatever was built before it.
        rng = random.Random(sample_id)
        self.task = task
        n_needles = task.n_keys * task.n_values
        self.keys = _distinct(_draws(task.keys, rng), task.n_keys)
        self.values = _distinct(_draws(task.values, rng), n_needles)
        # The first keys are the asked ones: which place a key takes in the text is random anyway.
        self.asked = self.keys[: task.n_asked]
        self.outputs = self.values[: task.n_answers]
        self.depths_percent: list[float] = [depth_percent, *rng.sample(DEPTHS_PERCENT, n_needles - 1)]
        self._is_prose = prose is not None
        self._source = (prose or self._lines)(random.Random(f"{sample_id}/text"))
        self.units: list[str] = []
        self._length = length

    @property
    def sizes(self) -> range:
        # lm-eval, too, has no fewer lines than needles.
        return range(1 if self._is_prose else len(self.values), self._length)

    def prompt(self, size: int) -> Prompt:
        self.units += islice(self._source, max(size - len(self.units), 0))
        units = self.units[:size]
        hide = in_prose if self._is_prose else in_lines
        starts = sentence_starts(units) if self._is_prose else list(range(size))
        bounds = [*starts, size]
        needles = [
            needle(self.keys[i // self.task.n_values], value, self.task.values) for i, value in enumerate(self.values)
        ]
        places = [
            (bounds[int(len(starts) * (depth / 100))], text)
            for depth, text in zip(self.depths_percent, needles, strict=True)
        ]
        # Stable: of needles at one place the asked one comes first.
        context = hide(units, sorted(places, key=lambda place: place[0]))
        query = listed(self.asked)
        return Prompt(
            question(context, query, self.task.values, self.task.n_answers),
            answer_start(query, self.task.values, self.task.n_answers),
        )

    def _lines(self, rng: random.Random) -> Iterator[str]:
        if self.task.text != "needles":
            return repeat(lm_eval_text("prepare_niah.py", "haystack"))
        others = zip(_draws(self.task.keys, rng), _draws(self.task.values, rng), strict=True)
        shown = {*self.keys, *self.values}
        return (needle(key, value, self.task.values) for key, value in others if not shown & {key, value})


niah_single_1 = partial(RulerNeedles, NeedleTask("niah_single_1", text="lines"))
niah_single_2 = partial(RulerNeedles, NeedleTask("niah_single_2"))
niah_single_3 = partial(RulerNeedles, NeedleTask("niah_single_3", values="uuids"))
niah_multikey_1 = partial(RulerNeedles, NeedleTask("niah_multikey_1", n_keys=4))
niah_multikey_2 = partial(RulerNeedles, NeedleTask("niah_multikey_2", text="needles"))
niah_multikey_3 = partial(RulerNeedles, NeedleTask("niah_multikey_3", text="needles", keys="uuids", values="uuids"))
niah_multivalue = partial(RulerNeedles, NeedleTask("niah_multivalue", n_values=4))
niah_multiquery = partial(RulerNeedles, NeedleTask("niah_multiquery", n_keys=4, n_asked=4))


def in_prose(words: Sequence[str], places: Sequence[Place]) -> str:
    """Needles between words, in the order of their places; two blanks where nothing stands between two, as lm-eval."""
    parts, last = [], 0
    for place, text in places:
        parts += [" ".join(words[last:place]), text]
        last = place
    return " ".join([*parts, " ".join(words[last:])])


def in_lines(lines: Sequence[str], places: Sequence[Place]) -> str:
    """Needles between lines, in the order of their places."""
    hidden, last = [], 0
    for place, text in places:
        hidden += [*lines[last:place], text]
        last = place
    return "\n".join([*hidden, *lines[last:]])


def needle(key: str, value: str, values: Values = "numbers") -> str:
    text: str = lm_eval_text("prepare_niah.py", "NEEDLE")
    return text.format(type_needle_v=values, key=key, value=value)


def question(context: str, query: str, values: Values = "numbers", n_answers: int = 1) -> str:
    """The prompt; in the singular, as lm-eval's builder puts it, when one value is asked for."""
    template: str = lm_eval_text("niah_utils.py", "TEMPLATE")
    if n_answers == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    return template.format(type_needle_v=_noun(values, n_answers), context=context, query=query)


def answer_start(query: str, values: Values = "numbers", n_answers: int = 1) -> str:
    verb = "is" if n_answers == 1 else "are"
    return f"The special magic {_noun(values, n_answers)} for {query} mentioned in the provided text {verb}"


def listed(keys: Sequence[str]) -> str:
    """ "a", or "a, b, and c"."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _noun(values: Values, n_answers: int) -> str:
    return values.removesuffix("s") if n_answers == 1 else values


def _draws(kind: Literal["words", "numbers", "uuids"], rng: random.Random) -> Iterator[str]:
    adjectives, nouns = key_words()
    while True:
        if kind == "words":
            yield f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        elif kind == "numbers":
            yield str(rng.randrange(1_000_000, 10_000_000))
        else:
            yield str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(draws: Iterator[str], n: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[next(draws)] = None
    return list(found)


def _spread(i: int) -> float:
    """Depth in percent of sample i: van der Corput's sequence, 0, 50, 25, 75, 12.5, ... Any prefix is evenly spread."""
    depth, step = 0.0, 50.0
    while i:
        depth += step * (i & 1)
        i, step = i >> 1, step / 2
    return depth


@cache
def key_words() -> tuple[list[str], list[str]]:
    """Adjectives and nouns for keys, as in RULER, but without those of two words."""
    adjectives, nouns = (
        sorted(word for word in english_words_of(kind) if " " not in word) for kind in ("adjective", "noun")
    )
    return adjectives, nouns
