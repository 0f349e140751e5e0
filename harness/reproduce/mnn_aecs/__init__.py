"""MNN-AECS (002): what we find for each of its claims, and its tables and figures drawn again.

places          which row states what                       arithmetic     what follows from its own figures
other_models    a model from another                         fixed_lengths  Figures 8 to 10
llama_cpp       how it divides work over unlike cores
phone_fit       constants of the phones' sheets              searches       AECS and exhaustive search under noise
search_rows     Tables 7 and 11                              lengths        prompts and answers of its data sets
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.reproduce.findings import Finding
from harness.reproduce.redrawn import SourceTable


def findings() -> Iterable[Finding]:
    from harness.reproduce.mnn_aecs import arithmetic, fixed_lengths, lengths, other_models, search_rows

    yield from arithmetic.findings()
    yield from map(arithmetic.explained, other_models.findings())
    yield from fixed_lengths.findings()
    yield from lengths.findings()
    yield from search_rows.findings()


def tables() -> Iterable[SourceTable]:
    from harness.reproduce.mnn_aecs.tables import redrawn

    return redrawn()
