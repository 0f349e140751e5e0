"""How much longer answers are than prompts in the data sets of source 002 (Fig. 3), counted in words.

Counted once in public files (data/SOURCES.md of the test data names them), and again by a test where they are at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.reproduce.findings import Finding


class Counted(NamedTuple):
    """Words, split at blanks, of all prompts and of all answers; chat templates and instructions left out."""

    name: str
    n_rows: int
    prompt_words: int
    answer_words: int

    @property
    def ratio(self) -> float:
        return self.answer_words / self.prompt_words


COUNTED = (
    Counted("ShareGPT", 687, 123679, 545024),
    Counted("RoleBench", 2534, 39750, 170281),
)
"""ShareGPT: every human and gpt message of a sample of conversations. RoleBench: the role-specific questions of new
roles, as many as the authors' testbed counts, with the first of their reference answers."""


def findings() -> Iterable[Finding]:
    yield Finding(
        "002-034",
        tuple(counted.ratio for counted in COUNTED),
        "data",
        note="words of answers over words of prompts: ShareGPT (a sample of 687 conversations), RoleBench",
        explanation=(
            "words alone; the authors' public testbed counts tokens of whole prompts: 349 an answer and 107 a prompt"
            " in a turn of ShareGPT (3.3), 83 and 39 in RoleBench (2.1), where a question has 16 words, so that most"
            " of a prompt is no question"
        ),
    )
