"""Trials of a large run in less memory: what each holds many of is kept as columns, and made into records when read.

A run of 100,000 trials has a million completions and scores. As records they take 25 kB a trial, most of it for names
and small objects that are the same in every trial. As columns it is a fifth. Who reads a trial sees the same records.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast, overload

from results.records import Record
from results.trials import Trial

R = TypeVar("R", bound=Record)
Column: TypeAlias = "tuple[Any, ...] | array[Any]"
Shared = dict[Any, Any]
PACKED: Final = ("completions", "energy", "scores")
MOST_MADE: Final = 60_000
"""Records that are kept as they are: tables ask the trials of a cell for them several times in a row."""
SHARED: Final = ("counters", "road", "active_weights", "requests_sha256", "derived_by", "data_source", "cell_id")
"""What is often the same in all trials of a cell."""
MOST_SHARED: Final = 50_000
INTS: Final = range(-(2**31), 2**31)
_NO_FIELDS: Final[set[str]] = set()


class PackedRecords(Sequence[R], Generic[R]):
    """Records of one kind, held as columns. Equal to a tuple of the same records."""

    __slots__ = ("_columns", "_kind", "_n", "_names", "_records")

    def __init__(self, records: Sequence[R], shared: Shared) -> None:
        """shared: columns that were seen before; an equal one is held once."""
        self._kind = type(records[0])
        self._n = len(records)
        names = tuple(records[0].__dict__)
        rows = [tuple(record.__dict__.values()) for record in records]
        columns = zip(names, zip(*rows, strict=True), strict=True)
        self._names: tuple[str, ...] = _once(names, names, shared)
        self._columns = tuple(_column(name, values, shared) for name, values in columns)
        self._records: tuple[R, ...] | None = None

    def _made(self) -> tuple[R, ...]:
        if self._records is None:
            kind, mark = self._kind, object.__setattr__
            names, made = self._names, []
            for values in zip(*map(_values, self._columns), strict=True):
                record = kind.__new__(kind)
                mark(record, "__dict__", dict(zip(names, values, strict=True)))
                mark(record, "__pydantic_fields_set__", _NO_FIELDS)
                mark(record, "__pydantic_extra__", None)
                mark(record, "__pydantic_private__", None)
                made.append(record)
            self._records = tuple(made)
            _keep(self)
            return tuple(made)
        return self._records

    def forget(self) -> None:
        """The records, not what they are made from."""
        self._records = None

    def column(self, name: str) -> Sequence[Any]:
        """One field of each record."""
        return _values(self._columns[self._names.index(name)])

    @property
    def same(self) -> tuple[int, ...]:
        """Equal where all columns are the same objects; not the other way round."""
        return tuple(map(id, self._columns))

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[R]:
        return iter(self._made())

    @overload
    def __getitem__(self, place: int) -> R: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[R, ...]: ...
    def __getitem__(self, place: int | slice) -> R | tuple[R, ...]:
        return self._made()[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedRecords | tuple) and self._made() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made())


_made: deque[PackedRecords[Any]] = deque()
_n_made = 0


def _keep(one: PackedRecords[Any]) -> None:
    global _n_made
    _made.append(one)
    _n_made += len(one)
    while _n_made > MOST_MADE and len(_made) > 1:
        oldest = _made.popleft()
        _n_made -= len(oldest)
        oldest.forget()


def packed(trial: Trial, shared: Shared) -> Trial:
    """The same trial. For one that was just read, and that nobody else holds. shared: one for all trials of a run."""
    held = trial.__dict__
    for name in PACKED:
        if held[name]:
            made: PackedRecords[Any] = PackedRecords(held[name], shared)
            # Most repeats have the same scores.
            held[name] = _once(made.same, made, shared) if name == "scores" else made
    for name in SHARED:
        if held[name] is not None:
            held[name] = _once((name, held[name]), held[name], shared)
    return trial


def column_of(records: Sequence[Record], name: str) -> Sequence[Any]:
    """One field of each record; of packed ones without making them."""
    # Asked by class: a sequence of any kind is told from others far more slowly, and this is asked millions of times.
    if type(records) is PackedRecords:
        return records.column(name)
    return [getattr(record, name) for record in records]


def _column(name: str, values: tuple[Any, ...], shared: Shared) -> Column:
    kinds = set(map(type, values))
    if kinds == {float}:
        column = array("d", values)
        # Times are all different; scores are not.
        return column if name != "value" else cast("Column", _once((name, column.tobytes()), column, shared))
    if kinds == {tuple} and any(values):
        flat = list(chain.from_iterable(values))
        inside = set(map(type, flat))
        if inside == {float} or (inside == {int} and all(one in INTS for one in (min(flat), max(flat)))):
            ends = tuple(accumulate(map(len, values), initial=0))
            return _once((name, ends), ends, shared), array("d" if inside == {float} else "i", flat)
    # Numbers that are equal may be written in two ways, as 0 and -0.
    return cast("Column", _once((name, repr(values) if float in kinds else values), values, shared))


def _values(column: Column) -> Sequence[Any]:
    if isinstance(column, tuple) and len(column) == 2 and isinstance(column[1], array):
        ends, flat = column
        return [tuple(flat[first:end]) for first, end in pairwise(ends)]
    return column


def _once(key: Any, value: Any, shared: Shared) -> Any:
    """An equal value of before, where there is one. What has no hash stays as it is."""
    try:
        if (found := shared.get(key)) is not None:
            return found
        if len(shared) < MOST_SHARED:
            shared[key] = value
    except TypeError:
        pass
    return value
