"""Generated passages with yes-or-no questions, in BoolQ's schema: for training the bundled model, and for asking it.

A passage states a few facts, each of one subject, about half of them negated. A question puts one of them in the
affirmative: the answer is yes where the passage affirms it and no where it negates it, so it takes the right sentence
to know. Splits draw from unlike random streams, and a passage of three to six facts from lists of ten to twenty names
does not occur twice, so a split asks nothing of another.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from workloads.datasets import Row

_PEOPLE = (
    "anna boris carla david elena farid grace hugo irene jonas katya liam maria nadia oscar paula quentin rosa samuel "
    "teresa victor wendy yusuf zoe"
)
_TOWNS = (
    "arden brookfield calder dunmore eastham fairview glenby harlow ironbridge kingsley linden marlow norwood oakham "
    "penrith redhill stanton thornbury upton westport"
)
_FOODS = (
    "apples bread cheese dates eggs fish grapes honey lemons melons nuts olives pears plums rice salad soup tomatoes"
)
_COLOURS = "black blue brown green grey orange pink purple red silver white yellow"
_THINGS = (
    "basket bicycle boat bottle bucket carpet chair coat curtain door gate hammer jacket kettle ladder lamp letter "
    "mirror pillow ribbon saddle table tent wagon"
)
_SHOPS = "bakery bank cinema clinic garden gallery library market museum pool school theatre workshop"
_DAYS = "monday tuesday wednesday thursday friday saturday sunday"
_ANIMALS = "cats cows dogs ducks geese goats hens horses pigs rabbits sheep"
_JOBS = "baker carpenter clerk doctor farmer gardener miller painter pilot sailor tailor teacher"


class _Relation(NamedTuple):
    """A kind of fact: how it is affirmed, negated and asked, and what it is about."""

    affirmed: str
    negated: str
    question: str
    subjects: str
    objects: str
    """Both are words with spaces between them."""


_RELATIONS = (
    _Relation("{s} lives in {o}.", "{s} does not live in {o}.", "does {s} live in {o}", _PEOPLE, _TOWNS),
    _Relation("{s} likes {o}.", "{s} does not like {o}.", "does {s} like {o}", _PEOPLE, _FOODS),
    _Relation("{s} keeps {o}.", "{s} does not keep {o}.", "does {s} keep {o}", _PEOPLE, _ANIMALS),
    _Relation("{s} works as a {o}.", "{s} does not work as a {o}.", "does {s} work as a {o}", _PEOPLE, _JOBS),
    _Relation("the {s} is {o}.", "the {s} is not {o}.", "is the {s} {o}", _THINGS, _COLOURS),
    _Relation(
        "the {s} belongs to {o}.", "the {s} does not belong to {o}.", "does the {s} belong to {o}", _THINGS, _PEOPLE
    ),
    _Relation("the {s} is closed on {o}.", "the {s} is not closed on {o}.", "is the {s} closed on {o}", _SHOPS, _DAYS),
)


class _Fact(NamedTuple):
    relation: _Relation
    subject: str
    object: str
    is_so: bool

    @property
    def sentence(self) -> str:
        form = self.relation.affirmed if self.is_so else self.relation.negated
        text = form.format(s=self.subject, o=self.object)
        return text[0].upper() + text[1:]


N_FACTS = (3, 6)
"""Facts of a passage, at least and at most."""
N_ROWS = 400
"""Of a split."""


def passage(rng: random.Random, n_questions: int) -> tuple[str, list[tuple[str, int]]]:
    """(passage, [(question, 1 for yes or 0 for no)]): each of another fact, and no more than there are."""
    facts = _facts(rng, rng.randint(*N_FACTS))
    text = f"{facts[0].subject.capitalize()} -- " + " ".join(fact.sentence for fact in facts)
    asked = rng.sample(facts, len(facts))[:n_questions]
    return text, [(fact.relation.question.format(s=fact.subject, o=fact.object), int(fact.is_so)) for fact in asked]


def boolq_rows(split: str, n_rows: int = N_ROWS) -> list[Row]:
    """Rows of a split; as many yes as no, but for chance."""
    rows = []
    for i in range(n_rows):
        text, [(question, label)] = passage(random.Random(f"passages/{split}/{i}"), 1)
        rows.append({"passage": text, "question": question, "label": label})
    return rows


def _facts(rng: random.Random, n: int) -> list[_Fact]:
    """Facts of unlike subjects; half of the passages keep to two relations, so that subjects can be mixed up."""
    relations = rng.sample(_RELATIONS, 2) if rng.random() < 0.5 else list(_RELATIONS)
    facts: dict[str, _Fact] = {}
    while len(facts) < n:
        relation = rng.choice(relations)
        fact = _Fact(
            relation, rng.choice(relation.subjects.split()), rng.choice(relation.objects.split()), rng.random() < 0.5
        )
        if fact.subject != fact.object:
            facts.setdefault(fact.subject, fact)
    return list(facts.values())
