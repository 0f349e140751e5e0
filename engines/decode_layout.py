"""What a technique computes for one decoded token, said before the token's experts are known.

A decode step that is one call of the kernels cannot ask Python between router and experts. So a technique says
beforehand which rows a choice leads to; the plan of the step, which the technique makes afterwards, must say the same,
and `engines.model.step_plans` holds the two against each other.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.calls import Width
from engines.errors import EngineError


@dataclass(frozen=True)
class DecodeLayout:
    """A chosen expert is called with all members of its group, each once and with its own number of rows.

    The first row of a chosen expert is the token's; all other rows are padding, computed as zeros and thrown away.
    rows_E: rows of each expert's call; None: one each. group_of_E: experts of one number, below E, are called together;
    None: each alone. n_padding_calls: then the last expert is called so often more, with rows of padding alone.

    widths, hidden: slices of the intermediate dimension, or of the model width, that make a whole: each call is made
    once for every slice, on the same rows. Empty: whole experts are called.
    """

    rows_E: tuple[int, ...] | None = None
    group_of_E: tuple[int, ...] | None = None
    n_padding_calls: int = 0
    widths: tuple[Width, ...] = ()
    hidden: tuple[Width, ...] = ()

    def __post_init__(self) -> None:
        rows_E, group_of_E = self.rows_E, self.group_of_E
        if rows_E is not None and min(rows_E, default=1) < 1:
            raise EngineError(f"rows {rows_E} leave an expert none for its token; give each 1 or more, or no layout")
        if group_of_E is not None and not set(group_of_E) <= set(range(len(group_of_E))):
            raise EngineError(f"groups {group_of_E} must be numbers from 0 to {len(group_of_E) - 1}, one an expert")
        if rows_E is not None and group_of_E is not None and len(rows_E) != len(group_of_E):
            raise EngineError(
                f"rows of {len(rows_E)} experts and groups of {len(group_of_E)}; name all experts in both"
            )
        if self.n_padding_calls < 0:
            raise EngineError(f"{self.n_padding_calls} calls of padding; give 0 or more")
        if self.widths and self.hidden:
            raise EngineError("slices of the intermediate dimension and of the model width; give one of them")
        for slices in (self.widths, self.hidden):
            if not _is_a_whole(slices):
                raise EngineError(f"slices {[tuple(part) for part in slices]} must follow one another from column 0 on")

    @property
    def is_plain(self) -> bool:
        """Whether it is one row for each chosen expert, and nothing else."""
        has_one_each = self.rows_E is None or set(self.rows_E) <= {1}
        is_each_alone = self.group_of_E is None or len(set(self.group_of_E)) == len(self.group_of_E)
        return has_one_each and is_each_alone and not self.n_padding_calls and not self.slices

    @property
    def slices(self) -> tuple[Width, ...]:
        return self.widths or self.hidden

    @property
    def n_experts(self) -> int | None:
        """None: it fits any number."""
        named = self.rows_E or self.group_of_E
        return None if named is None else len(named)


def _is_a_whole(slices: Sequence[Width]) -> bool:
    ends = [0, *(part.end for part in slices)]
    return all(part.first == end < part.end for part, end in zip(slices, ends, strict=False))


PLAIN = DecodeLayout()
