"""The calls of a dispatch plan: which rows of which experts a unit computes at once.

Legend: E experts, S segments (the rows of one expert in one call), C calls, K kinds of calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from devices.base import Unit

Integers = NDArray[np.int64]


class Width(NamedTuple):
    """Columns [first, end) of a dimension: a part of an expert."""

    first: int
    end: int


@dataclass(frozen=True)
class CallKind:
    """What calls have in common.

    static: the shape was frozen before the routing was known, so that a unit without dynamic shapes can run the call.
    width: of the intermediate dimension; the parts' results add up. hidden: of the model width; the parts' sums before
    the activation add up, then each part makes its columns of the result. None computes whole experts.
    naive_launch: dispatched by a runtime that decides by itself where a graph goes. skips_padding: rows of padding are
    computed as any other, and not fetched. overlaps: does not wait for calls of other units that overlap too. once:
    other steps have other widths, so that slices are not kept.
    """

    unit: Unit = "cpu"
    static: bool = False
    width: Width | None = None
    naive_launch: bool = False
    hidden: Width | None = None
    skips_padding: bool = False
    overlaps: bool = False
    once: bool = False

    def __hash__(self) -> int:
        """Computed once: plans of every layer of every step are told by their kinds."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
            object.__setattr__(self, "_hash", known)
        return known

    @property
    def is_whole(self) -> bool:
        return self.width is None and self.hidden is None

    @cached_property
    def is_first_slice(self) -> bool:
        """Or whole: slices of an expert share the rows of its first."""
        return all(part is None or part.first == 0 for part in (self.width, self.hidden))


@dataclass(frozen=True)
class ExpertCall:
    """One launch: the experts of one graph, each over its own contiguous slice of the plan's rows.

    Expert i of the call owns `rows_per_expert[i]` rows, of which the first `valid_per_expert[i]` carry tokens and the
    rest are zero padding. Calls of different slices share rows. `weight_loads`: how many
    experts' weights the call loads; fewer than its experts where a call before left some there.
    """

    experts: tuple[int, ...]
    rows_per_expert: tuple[int, ...]
    valid_per_expert: tuple[int, ...]
    first_row: int
    kind: CallKind = CallKind()
    weight_loads: int | None = None
    """None: all of `experts`."""

    @property
    def n_rows(self) -> int:
        return sum(self.rows_per_expert)

    @property
    def n_valid(self) -> int:
        return sum(self.valid_per_expert)

    @property
    def unit(self) -> Unit:
        return self.kind.unit

    @property
    def static(self) -> bool:
        return self.kind.static

    @property
    def n_weight_loads(self) -> int:
        return len(self.experts) if self.weight_loads is None else self.weight_loads


@dataclass(frozen=True, eq=False)
class Calls(Sequence[ExpertCall]):
    """The calls of a plan, as arrays: call c has the segments starts_C[c] .. starts_C[c + 1].

    A plan of many experts is made and read without a loop over them; whoever wants calls one by one iterates.
    """

    expert_S: Integers
    rows_S: Integers
    valid_S: Integers
    first_row_S: Integers
    starts_C: Integers
    kinds: tuple[CallKind, ...]
    kind_C: Integers | None = None
    """Index into `kinds`; None: all calls are of the first."""
    weight_loads_C: Integers | None = None
    """None: as many as each call has segments. Of a slice, loads of that slice."""

    @staticmethod
    def of(calls: Iterable[ExpertCall]) -> Calls:
        """From calls one by one."""
        calls = tuple(calls)
        kinds = tuple(dict.fromkeys(call.kind for call in calls))
        n_segments = [len(call.experts) for call in calls]
        rows_S = integers(n for call in calls for n in call.rows_per_expert)
        first_row_S = integers(
            call.first_row + sum(call.rows_per_expert[:i]) for call in calls for i in range(len(call.experts))
        )
        return Calls(
            integers(e for call in calls for e in call.experts),
            rows_S,
            integers(n for call in calls for n in call.valid_per_expert),
            first_row_S,
            np.cumsum([0, *n_segments], dtype=np.int64)[:-1],
            kinds,
            integers(kinds.index(call.kind) for call in calls),
            integers(call.n_weight_loads for call in calls),
        )

    @cached_property
    def ends_C(self) -> Integers:
        return np.append(self.starts_C[1:], len(self.expert_S))

    @cached_property
    def call_S(self) -> Integers:
        """The call of each segment."""
        return np.repeat(np.arange(len(self.starts_C)), self.ends_C - self.starts_C)

    @cached_property
    def is_one_after_another(self) -> bool:
        """Whether the segments are the rows of the row space, whole experts, each row once and in order."""
        ends_S = self.first_row_S + self.rows_S
        is_dense = not len(ends_S) or (self.first_row_S[0] == 0 and bool((self.first_row_S[1:] == ends_S[:-1]).all()))
        return is_dense and all(kind.is_whole for kind in self.kinds)

    @property
    def loads_C(self) -> Integers:
        """Experts whose weights each call loads."""
        return self.ends_C - self.starts_C if self.weight_loads_C is None else self.weight_loads_C

    @property
    def n_weight_loads(self) -> int:
        """In whole experts: the slices of an expert are one load together, which is counted at the first."""
        if all(kind.is_first_slice for kind in self.kinds):
            return len(self.expert_S) if self.weight_loads_C is None else int(self.weight_loads_C.sum())
        assert self.kind_C is not None
        is_first_K = np.array([kind.is_first_slice for kind in self.kinds])
        return int(self.loads_C[is_first_K[self.kind_C]].sum())

    @property
    def n_rows_not_fetched(self) -> int | None:
        """Rows of padding that calls leave where they are; None where no call leaves any. Slices share their rows."""
        skips_K = np.array([kind.skips_padding and kind.is_first_slice for kind in self.kinds], dtype=np.bool_)
        if not skips_K.any():
            return None
        padded_S = self.rows_S - self.valid_S
        return int(padded_S.sum() if self.kind_C is None else padded_S[skips_K[self.kind_C][self.call_S]].sum())

    def kind(self, call: int) -> CallKind:
        return self.kinds[0 if self.kind_C is None else self.kind_C[call]]

    def __len__(self) -> int:
        return len(self.starts_C)

    @overload
    def __getitem__(self, call: int) -> ExpertCall: ...
    @overload
    def __getitem__(self, call: slice) -> Sequence[ExpertCall]: ...
    def __getitem__(self, call: int | slice) -> ExpertCall | Sequence[ExpertCall]:
        if isinstance(call, slice):
            return [self[c] for c in range(*call.indices(len(self)))]
        call = range(len(self))[call]
        segments = slice(self.starts_C[call], self.ends_C[call])
        return ExpertCall(
            tuple(self.expert_S[segments].tolist()),
            tuple(self.rows_S[segments].tolist()),
            tuple(self.valid_S[segments].tolist()),
            int(self.first_row_S[segments][0]),
            self.kind(call),
            None if self.weight_loads_C is None else int(self.weight_loads_C[call]),
        )

    def __iter__(self) -> Iterator[ExpertCall]:
        return (self[call] for call in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Calls):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def distinct(numbers: Integers) -> Integers:
    """Each once, ascending. Those of most plans are so already, which is faster seen than made."""
    return numbers if (numbers[1:] > numbers[:-1]).all() else np.unique(numbers)
