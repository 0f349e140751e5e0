"""Cases of a parametrised test, of which few are in the fast part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def marked(cases: Iterable[Any], mark: pytest.MarkDecorator, *, but: Iterable[Any]) -> list[Any]:
    """All of them, with the mark on each but those named, which have to be among them."""
    cases, spared = list(cases), list(but)
    assert [case for case in spared if case not in cases] == []
    return [case if case in spared else pytest.param(*_values(case), marks=mark) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
