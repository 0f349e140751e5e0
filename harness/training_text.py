"""What the bundled model is trained on: generated text in the forms of the workloads, cut to sequences.

Five kinds of document: needles in a haystack (RULER's texts), passages with yes-or-no questions (BoolQ's prompt),
everyday situations with the ending that fits (HellaSwag's prompt), dialogues (the chat template), prose. A document is
a list of pieces, each a text and whether it is an answer: answers weigh more in the loss. Every document is drawn from
its own number, so training can stop and go on anywhere, and validation items come from streams that are never drawn
here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.model.tokenizer import Tokenizer
from engines.tiny.model import ASSISTANT, END, USER
from engines.tiny.training import Batch, Stage
from workloads.everyday import situation
from workloads.haystack import generated_sentence
from workloads.passages import passage
from workloads.ruler import answer_start, in_lines, in_prose, key_words, needle, question
from workloads.ruler_samples import lm_eval_text
from workloads.small_talk import dialogue

MIXES = {
    "copying": {"drills": 0.4, "pairs": 0.15, "passages": 0.35, "dialogues": 0.1},
    "all": {
        "needles": 0.45, "drills": 0.08, "passages": 0.3, "situations": 0.05, "dialogues": 0.07, "prose": 0.05,
    },
}  # fmt: skip
"""Shares of the sequences by kind of document."""
DECIDING_WEIGHT = 6.0
"""Of the tokens that decide an answer (yes or no, the first digit of a value) beside 1 of those that follow from them:
who has the first digits finds the others without looking at the key again."""
N_QUESTIONS = (3, 6)
"""About a passage that stands alone, at least and at most."""


class Piece(NamedTuple):
    text: str
    weight: float = 0.0
    """In the loss, as part of an answer; 0: no answer."""


Document = list[Piece]


def batch(step: int, stage: Stage, tokenizer: Tokenizer, seed: int) -> Batch:
    """Sequences of one training step. The same for the same step, stage and seed.

    A document of needles fills a row; short documents follow each other in one.
    """
    rng = random.Random(f"lessons/{seed}/{step}")
    length, mix = stage.length, MIXES[stage.lessons]
    ids_NL = np.zeros((stage.n_rows, length), np.int64)
    answer_NL = np.zeros((stage.n_rows, length), np.float32)
    valid_NL = np.zeros((stage.n_rows, length), np.bool_)
    kinds, shares = list(mix), list(mix.values())
    for row in range(stage.n_rows):
        filled = 0
        kind = rng.choices(kinds, shares)[0]
        for ids, answers in _encoded(_documents(kind, stage, tokenizer, rng), tokenizer):
            n = min(len(ids), length - filled)
            span = slice(filled, filled + n)
            ids_NL[row, span], answer_NL[row, span], valid_NL[row, span] = ids[:n], answers[:n], True
            filled += n
            if filled > 0.9 * length:
                break
    return Batch(ids_NL, answer_NL, valid_NL)


def _encoded(
    documents: Iterator[Document], tokenizer: Tokenizer
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """(token ids, what each weighs as part of an answer).

    Pieces meet where the pre-tokenizer splits: encoded one by one, they are what the joined text would give.
    """
    for document in documents:
        ids: list[int] = []
        answers: list[float] = []
        for piece in document:
            own = tokenizer.encode(piece.text)
            ids += own
            answers += [piece.weight] * len(own)
        yield np.array(ids, np.int64), np.array(answers, np.float32)


def _documents(kind: str, stage: Stage, tokenizer: Tokenizer, rng: random.Random) -> Iterator[Document]:
    draw: Callable[[random.Random], Document] = {
        "needles": lambda r: needles_document(stage.length, tokenizer, r),
        "pairs": lambda r: pairs_document(stage.length, tokenizer, r),
        "drills": lambda r: drill_document(stage.length, tokenizer, r),
        "passages": passages_document,
        "situations": situations_document,
        "dialogues": dialogue_document,
        "prose": prose_document,
    }[kind]
    while True:
        yield draw(rng)


def needles_document(length: int, tokenizer: Tokenizer, rng: random.Random) -> Document:
    """Needles in a text that fills `length` tokens, but for a sentence or line, and some of them asked for.

    The text is prose, or RULER's one line again and again, or other needles. A line is counted with a blank before it;
    with the line break that stands there it may be a token longer, and a batch cuts what is too long at its end. (The
    bundled model was trained so; counting otherwise would make another model.)
    """
    n_needles = rng.choice([1, 2, 3, 4] if length <= 256 else [1, 2, 4, 4, 6, 8])
    needles = [_key_and_value(rng) for _ in range(n_needles)]
    asked = needles[: min(n_needles, rng.randint(1, 2 if length <= 256 else 4))]
    text = rng.choices(["prose", "line", "needles"], [0.7, 0.1, 0.2])[0]
    line: str = lm_eval_text("prepare_niah.py", "haystack")
    draw: dict[str, Callable[[], str]] = {
        "prose": lambda: generated_sentence(rng),
        "line": lambda: line,
        "needles": lambda: needle(*_key_and_value(rng)),
    }
    units: list[str] = []
    # Where nothing stands between two needles of prose there are two blanks, a token that is not in the sum.
    left = (
        length - n_needles - sum(len(tokenizer.encode(piece.text)) for piece in _frame([], needles, asked, text, rng))
    )
    while True:
        unit = draw[text]()
        left -= len(tokenizer.encode(f" {unit}"))
        if left < 0:
            return _frame(units, needles, asked, text, rng)
        units.append(unit)


def drill_document(length: int, tokenizer: Tokenizer, rng: random.Random) -> Document:
    """Needles, and the same again in another order: the matching of keys and nothing else, at three times the rate."""
    needles: list[tuple[str, str]] = []
    left = length
    while left > 0 and len(needles) < 12:
        needles.append(_key_and_value(rng))
        left -= 2 * len(tokenizer.encode(f" {needle(*needles[-1])}"))
    needles = needles[: max(1, len(needles) - (left < 0))]
    document = [Piece(" ".join(needle(*pair) for pair in needles))]
    for key, value in rng.sample(needles, len(needles)):
        before, _, after = f" {needle(key, value)}".partition(f" {value}")
        document += [Piece(before), Piece(f" {value[0]}", DECIDING_WEIGHT), Piece(f"{value[1:]}{after}", 1.0)]
    return [*document, Piece(END)]


def pairs_document(length: int, tokenizer: Tokenizer, rng: random.Random) -> Document:
    """Words with a digit each, and the same again in another order: what a key is for, far denser than in drills."""
    _, nouns = key_words()
    pairs: dict[str, int] = {}
    left = length - 1
    while True:
        word, digit = rng.choice(nouns), rng.randrange(10)
        left -= 2 * len(tokenizer.encode(f" {word}: {digit}."))
        if left < 0:
            break
        pairs[word] = digit
    document = [Piece("".join(f" {word}: {digit}." for word, digit in pairs.items()))]
    for word in rng.sample(list(pairs), len(pairs)):
        document += [Piece(f" {word}:"), Piece(f" {pairs[word]}", DECIDING_WEIGHT), Piece(".")]
    return [*document, Piece(END)]


def _key_and_value(rng: random.Random) -> tuple[str, str]:
    adjectives, nouns = key_words()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}", str(rng.randrange(1_000_000, 10_000_000))


def _frame(
    units: list[str],
    needles: list[tuple[str, str]],
    asked: list[tuple[str, str]],
    text: str,
    rng: random.Random,
) -> Document:
    """RULER's prompt over the units of text, the first question answered, and further ones in the same words."""
    hide = in_prose if text == "prose" else in_lines
    places = sorted((rng.randint(0, len(units)), i) for i in range(len(needles)))
    context = hide(units, [(place, needle(*needles[i])) for place, i in places])
    head, _, tail = question("\0", asked[0][0]).partition("\0")
    document = [Piece(head + context)]
    for key, value in asked:
        document.append(Piece(tail.replace(asked[0][0], key)))
        # The key is said again: that, too, has to be found in the text.
        before, _, after = f" {answer_start(key)}".partition(f" {key}")
        document += [Piece(before), Piece(f" {key}", 1.0), Piece(after)]
        document += [Piece(f" {value[0]}", DECIDING_WEIGHT), Piece(f"{value[1:]}.{END}", 1.0)]
    return document


def passages_document(rng: random.Random) -> Document:
    """One passage with several questions, or a few passages with one each, as few-shot prompts have them."""
    document: Document = []
    n_passages = rng.choice([1, 1, 2, 3])
    for i in range(n_passages):
        text, questions = passage(rng, rng.randint(*N_QUESTIONS) if n_passages == 1 else 1)
        document.append(Piece(("\n\n" if i else "") + text))
        for asked, label in questions:
            document += [Piece(f"\nQuestion: {asked}?\nAnswer:"), Piece(" yes" if label else " no", DECIDING_WEIGHT)]
    return [*document, Piece(END)]


def situations_document(rng: random.Random) -> Document:
    """A few situations with the right ending of each."""
    document: Document = []
    for i in range(rng.randint(1, 4)):
        row = situation(rng, kept_for_validation=False)
        start = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        ending = row["endings"][int(row["label"])]
        document += [Piece(("\n\n" if i else "") + start), Piece(f" {ending}", 1.0)]
    return [*document, Piece(END)]


def dialogue_document(rng: random.Random) -> Document:
    """A conversation in the chat template's form."""
    document: Document = []
    for said, answered in dialogue(rng):
        document += [Piece(f"{USER}{said}{END}{ASSISTANT}"), Piece(f"{answered}{END}", 1.0)]
    return document


def prose_document(rng: random.Random) -> Document:
    """Sentences and nothing else."""
    return [Piece(" ".join(generated_sentence(rng) for _ in range(rng.randint(3, 12))) + END)]


def texts(n_documents: int, seed: int) -> Iterator[str]:
    """Documents of all kinds as plain text, to train a tokenizer on; keys of needles above all: they are rare words."""
    rng = random.Random(f"texts/{seed}")
    adjectives, nouns = key_words()
    for _ in range(n_documents):
        keys = [f"{rng.choice(adjectives)}-{rng.choice(nouns)}" for _ in range(4)]
        yield " ".join(needle(key, str(rng.randrange(10_000_000))) for key in keys)
        for draw in (passages_document, situations_document, dialogue_document, prose_document):
            yield "".join(piece.text for piece in draw(rng) if piece.text)
