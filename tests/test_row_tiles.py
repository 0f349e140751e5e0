"""Rows that an expert is priced for: arithmetic takes them in tiles, but for few of them, as the kernels do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from devices.base import DeviceError
from devices.models.figures import SheetFigure
from devices.models.operation import Operation, operation_seconds, price_of
from devices.models.sheet import Sheet, parse_sheet
from engines.curves.pieces import most_few_flops
from engines.kernels import native
from engines.model.quantised import Form, bits_of_value
from engines.pricing.model_shape import WeightBits
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape
from engines.pricing.travels import Travels
from tests.toy_sheet import figure, host, plan_of_rows

KERNELS = Path(native.__file__).parent


FLOPS_A_ROW = 2 * 3 * 8 * 16
"""Three matrices of 8 x 16, two FLOP a value."""


def computed_rows(sheet: Sheet, *rows: int) -> list[float]:
    """Of each expert, by its FLOP."""
    return [one.flops / FLOPS_A_ROW for one in expert_operations(sheet, *rows)]


def expert_operations(sheet: Sheet, *rows: int, bytes_per_value: float = 4) -> list[Operation]:
    bits = WeightBits(*(8 * bytes_per_value for _ in WeightBits._fields))
    shape = ModelShape("toy", 1, 8, 2, 1, 4, 0, 4, 1, 16, 32, 4, bits=bits)
    found = operations(PricedStep(sum(rows), sum(rows)), [plan_of_rows(*rows)], shape, "cpu", None, Travels(sheet))
    return [one for one in found if one.kernel == "expert_ffn"]


def in_tiles(most_few: float, tile: int) -> Sheet:
    """most_few: FLOP for a weight byte up to which rows are few."""
    sheet = host(few=f", few_rows = {{ most_flops_per_weight_byte = {most_few!r}, s_per_flop = {figure(3.0)} }}")
    unit = sheet.units["cpu"].model_copy(update={"row_tile": SheetFigure(value=tile, kind="assumed", origin="test")})
    return sheet.model_copy(update={"units": {"cpu": unit}})


def test_rows_fill_tiles_unless_they_are_few_or_those_of_a_layer_in_the_mean() -> None:
    """Tiles of 8, and up to 4 rows are few: 9 rows take 16, but none of a layer with 4 in the mean."""
    sheet = in_tiles(2.25, 8)
    assert computed_rows(sheet, 3, 9) == [3, 16]
    assert computed_rows(sheet, 3, 4) == [3, 4]
    assert computed_rows(sheet, 9, 1, 2) == [9, 1, 2]
    assert computed_rows(sheet, 9, 1, 3) == [16, 1, 3]
    assert computed_rows(sheet, 9, 1, 5) == [16, 1, 8]
    assert computed_rows(sheet, 8, 16, 1) == [8, 16, 1]


def test_an_expert_with_many_rows_is_priced_as_few_where_its_layer_has_few_in_the_mean() -> None:
    """One FLOP takes 3 s there, and 1 s of many rows. 9 rows beside 1 and 2 fill no tile."""
    sheet = in_tiles(2.25, 8)

    def seconds(*rows: int) -> list[float]:
        return [operation_seconds(sheet, one) for one in expert_operations(sheet, *rows)]

    assert seconds(9, 1, 2) == [3 * n * FLOPS_A_ROW for n in (9, 1, 2)]
    assert seconds(9, 1, 3) == [16 * FLOPS_A_ROW, 3 * FLOPS_A_ROW, 9 * FLOPS_A_ROW]


def limit_of_the_kernels(name: str) -> int:
    """As `kernels/*.h` have it."""
    texts = (path.read_text(encoding="utf-8") for path in KERNELS.glob("*.h"))
    (value,) = {match for text in texts for match in re.findall(rf"constexpr int\w* {name} = (\d+);", text)}
    return int(value)


def by_the_kernels(rows: Sequence[int], tile: int) -> list[int]:
    """What `compute_experts` makes of a layer: all calls by the kernels of few rows, or those of few rows alone."""
    if sum(rows) <= limit_of_the_kernels("kMeanNarrowRows") * len(rows):
        return list(rows)
    few = limit_of_the_kernels("kMaxTokens")
    return [n if n <= few else -(-n // tile) * tile for n in rows]


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize(
    "rows",
    [(8, 8), (8, 9), (9, 9), (7, 9), (1, 15), (1, 16), (29, 1, 1, 1), (30, 1, 1, 1), (8, 17, 1), (1, 8, 9, 100)],
)
def test_a_fitted_sheet_of_any_form_computes_the_rows_that_the_kernels_do(form: Form, rows: tuple[int, ...]) -> None:
    """As many rows are few in each form, though its sheet has them in FLOP for a byte, and models of other widths have
    other shares of scales."""
    sheet = in_tiles(most_few_flops("expert_ffn", bits_of_value(form, 1024) / 8), 16)
    n_bytes = bits_of_value(form, 512) / 8
    found = expert_operations(sheet, *rows, bytes_per_value=n_bytes)
    assert [one.flops / FLOPS_A_ROW for one in found] == by_the_kernels(rows, 16)
    price = sheet.units["cpu"].kernels["expert_ffn"]
    all_are_few = sum(rows) <= limit_of_the_kernels("kMeanNarrowRows") * len(rows)
    for one, n in zip(found, rows, strict=True):
        is_few = all_are_few or n <= limit_of_the_kernels("kMaxTokens")
        assert price_of(sheet, one) is (price.few_rows if is_few else price)


@pytest.mark.parametrize("rows", ["0", "2.5", "1e9"])
def test_a_tile_has_a_whole_number_of_rows(rows: str) -> None:
    with pytest.raises(DeviceError, match="must be"):
        parse_sheet(
            'name = "host"\ndescription = "x"\nsource = "x"\n[units.cpu]\n'
            f'row_tile = {{ value = {rows}, kind = "stated", origin = "x" }}',
            "host",
        )
