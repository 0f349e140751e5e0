"""No claim that needs no machine is left out."""

from __future__ import annotations

import csv

import pytest

from tests.claims import PAGE, page, sources
from tests.data_folder import data_folder


@pytest.mark.parametrize("source", ["003"])
def test_every_analytic_row_of_a_source_has_a_claim(source: str) -> None:
    """Of the rows that are marked so: claims/claims.csv lies beside the data folder."""
    path = data_folder().parent / "claims" / "claims.csv"
    if not path.is_file():
        pytest.skip(f"no claims at {path}")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] == source]
    analytic = {row["id"] for row in rows if row["how_to_reproduce"].startswith("ANALYTIC")}
    assert analytic
    own = {claim.id for claims in sources().values() for claim in claims}
    assert sorted(analytic - own) == []
    assert sorted(name for name in own if name.startswith(source) and name not in {row["id"] for row in rows}) == []


def test_the_page_is_what_the_claims_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(sources()), "python -m tests.claims writes it"
