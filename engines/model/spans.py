"""What queries of a layer may look at, where that is less than all of the past. Without torch: prices need it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Span:
    """What one layer's queries may look at, beside causality.

    sliding: the last `n_tokens`, the query's own included. chunked: the query's own block of `n_tokens`.
    """

    kind: Literal["sliding", "chunked"]
    n_tokens: int

    def reaches(self, query: Any, key: Any) -> Any:
        """Whether the span of a query has a key, causal or not: arrays of positions, of torch or NumPy."""
        if self.kind == "sliding":
            return key > query - self.n_tokens
        return key // self.n_tokens == query // self.n_tokens

    def first_seen(self, query: int) -> int:
        """The first position that a query at this one sees."""
        if self.kind == "sliding":
            return max(0, query - self.n_tokens + 1)
        return query // self.n_tokens * self.n_tokens
