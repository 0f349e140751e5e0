"""From points to a sheet and back: pieces of small made models, with times that were made of known prices."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devices.models.device import TimelineMeter
from devices.models.fit import FitError
from devices.models.sheet import Sheet, parse_sheet
from devices.models.sheet_text import sheet_text
from devices.models.timeline import Timeline
from engines.base import PhaseListener
from engines.curves.host import QUICK, THIN, WHOLE, FittedUnit, Grid, MadeModel, made_model
from engines.curves.machine import FittedMachine, points_text, residual_rows, sheet_of_units
from engines.curves.pieces import CALLS, Bench, tiled
from engines.curves.prices import EXPERTS_FEW, FEW, Known, Residual, add_engine_prices, kernel_prices, link_prices
from engines.curves.rounds import Measured, Piece, Point
from engines.curves.steps import EngineRun, fetches, priced, request_of
from engines.made_models import MadeSizes
from engines.model.quantised import PLAIN_DTYPES
from engines.techniques.presets import preset_parameters
from harness.device_specs import ModelledSpec
from harness.fitted_sheets import shape_on
from harness.model_specs import ModelSpec
from harness.schema import EngineSpec
from results.records import Request
from tests.toy_sheet import toy_sheet

SIZES = (
    MadeSizes(32, 16, 8, 2, 2, 2, 1, head_dim=16, vocabulary=2048),
    MadeSizes(48, 64, 4, 2, 1, 2, 2, head_dim=16, vocabulary=2048),
    MadeSizes(64, 32, 8, 4, 3, 4, 1, head_dim=8, vocabulary=2048),
)
TILE, QUERY_TILE = 8, 16
PRICES = {
    "norm.moved_bytes": 1e-10,
    "residual.moved_bytes": 2e-10,
    "router.flops": 3e-11,
    "expert_ffn.weight_bytes": 4e-11,
    "expert_ffn.flops": 5e-12,
    "expert_ffn.moved_bytes": 2e-10,
    "expert_ffn.few.weight_bytes": 6e-11,
    "expert_ffn.few.flops": 7e-12,
    "rows.moved_bytes": 8e-10,
    "attention.weight_bytes": 9e-11,
    "attention.flops": 1e-11,
    "attention.moved_bytes": 6e-10,
    "attention.few.weight_bytes": 2e-11,
    "scores.moved_bytes": 3e-10,
    "scores.flops": 4e-12,
    "lm_head.few.weight_bytes": 5e-11,
    "lm_head.few.flops": 6e-12,
    "lm_head.flops": 7e-12,
    CALLS: 1e-6,
}
LINK = {"copy.launches": 1e-4, "copy.moved_bytes": 1e-10, CALLS: 3e-4}


def made_s(amounts: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """By the prices; experts and scores are those of rows and queries that fill tiles."""
    named = {
        "expert_ffn.flops": amounts.get(tiled(TILE), 0.0),
        "expert_ffn.moved_bytes": amounts.get(tiled(TILE, "expert_ffn.moved_bytes"), 0.0),
        "scores.flops": amounts.get(tiled(QUERY_TILE, "scores.flops"), 0.0),
    }
    return sum(price * named.get(name, amounts.get(name, 0.0)) for name, price in prices.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[MadeModel]:
    folder = tmp_path_factory.mktemp("made")
    return [made_model(folder, sizes, "fp32", seed) for seed, sizes in enumerate(SIZES)]


@pytest.fixture(scope="module")
def points(models: list[MadeModel]) -> list[Point]:
    pieces = [
        piece
        for one in models
        for work in Bench(one.name, one.model, one.shape).pieces((16, 40, 96), (0, 24, 200), (1, 2, 4), (128,))
        for piece in work.pieces
    ]
    return [Point(piece, made_s(piece.amounts, PRICES), 3, True) for piece in pieces]


def copied() -> Iterator[Point]:
    for n in (1.0, 4.0):
        for n_bytes in (1e5, 3e6):
            amounts = {"copy.launches": n, "copy.moved_bytes": n * n_bytes, CALLS: 1.0}
            yield Point(Piece("copy", f"{n} of {n_bytes}", amounts), made_s(amounts, LINK), 3, True)


@pytest.fixture(scope="module")
def fitted(points: list[Point]) -> FittedMachine:
    prices = kernel_prices(points)
    link = link_prices(prices.residuals, list(copied()))
    everything = Measured((*points, *copied()), 0.01, 3, 99, 0)
    unit = FittedUnit(4.0, prices, link, everything)
    sheet = sheet_of_units("mine", "fp32", 2, {"cpu": unit})
    return FittedMachine(sheet, ("made of known prices",), {"cpu": unit})


def test_every_price_comes_back(points: list[Point]) -> None:
    found = kernel_prices(points)
    assert {kernel: tile.size for kernel, tile in found.tiles.items()} == {"expert_ffn": TILE, "scores": QUERY_TILE}
    assert found.constants == pytest.approx({n: v for n, v in PRICES.items() if n != CALLS}, rel=1e-4)
    assert max(abs(one.miss) for one in found.residuals) < 1e-6


def test_all_curves_that_cannot_be_fitted_are_told_at_once(points: list[Point]) -> None:
    left = [one for one in points if one.piece.curve not in ("norm", "router")]
    with pytest.raises(FitError, match=r"norm cannot be fitted.*router cannot be fitted"):
        kernel_prices(left)


def test_copies_give_a_link(fitted: FittedMachine) -> None:
    """What a call takes, however many it asks for, is in none of the link's figures."""
    link = fitted.sheet.links["file"]
    assert link.latency_s is not None
    assert (link.latency_s.value, link.bytes_per_s.value) == pytest.approx((1e-4, 1e10), rel=1e-4)


def test_copies_that_take_as_long_whatever_their_size_have_a_rate_that_misses_them() -> None:
    """1 ms for a copy of 0.1 and of 3 MB: no rate is near both, and the residual says so."""
    points = [one._replace(seconds=1e-3 * one.piece.amounts["copy.launches"]) for one in copied()]
    residuals: list[Residual] = []
    link = link_prices(residuals, points)
    assert "latency_s" not in link
    assert max(abs(one.miss) for one in residuals) > 0.5


def test_the_written_sheet_is_read_as_it_was(fitted: FittedMachine) -> None:
    again = parse_sheet(fitted.text("mine"), "mine")
    assert again == fitted.sheet
    assert again.fitted_weights == "fp32"
    assert (again.is_fitted_here, again.fitted_value_bytes) == (True, 2)
    figures = [
        figure
        for kernel in tomllib.loads(fitted.text("mine"))["units"]["cpu"]["kernels"].values()
        for figure in kernel.values()
        if isinstance(figure, dict) and "kind" in figure
    ]
    assert {figure["kind"] for figure in figures} == {"fitted"}
    assert all("shapes, median residual" in figure["origin"] for figure in figures)


def test_a_sheet_says_how_far_it_misses_the_requests_of_its_fit(fitted: FittedMachine) -> None:
    """Ten prompts that are missed by 1 to 10 %, too fast and too slow in turn, and one token by 20 %."""
    unit = fitted.fitted["cpu"]
    missed = [("prefill", (-1) ** n * n / 100) for n in range(1, 11)] + [("decode", 0.2)]
    whole = [Residual(Point(Piece(curve, "made", {}), 2.0, 3, True), 2.0 * (1 + miss)) for curve, miss in missed]
    prices = replace(unit.prices, residuals=[*unit.prices.residuals, *whole])
    sheet = sheet_of_units("mine", "fp32", 2, {"cpu": unit._replace(prices=prices)})
    told = (
        "the prices miss whole requests that they were fitted on: prefill by 5.5 % (median of 10; 90th percentile"
        " 9.1 %), a decoded token by 20 % (median of 1; 90th percentile 20 %)"
    )
    assert parse_sheet(sheet_text(sheet), "mine").fit_words == told
    assert fitted.sheet.fit_words is None, "it was fitted on no whole request"
    notes = [channel.note for channel in TimelineMeter(Timeline(sheet)).channels]
    assert notes
    assert all(note is not None and note.endswith(told) for note in notes)


@pytest.mark.parametrize("text", ['a "quoted" \\ word', "tab\tand\nline", "\x7f\u2028", "[units.cpu]", "é"])
def test_strings_of_any_kind_are_written(text: str) -> None:
    sheet = toy_sheet().model_copy(update={"description": text, "source": text})
    assert tomllib.loads(sheet_text(sheet))["description"] == text


def test_a_sheet_of_the_toy_machine_is_read_as_it_was() -> None:
    assert parse_sheet(sheet_text(toy_sheet()), "toy") == toy_sheet()


def test_a_whole_request_is_priced_by_the_written_sheet(fitted: FittedMachine, models: list[MadeModel]) -> None:
    """The engine's own time, fitted on whole requests that were made of known seconds a step and a layer, comes back;
    and with it the sheet gives the time of another request. Few rows take 0.6 of their line within a token, and all of
    it where experts of a prompt have few: one of its chunks has as few tokens."""
    own = {"step.launches": 1e-3, "layer.launches": 2e-4, "decode_step.launches": 5e-4, "decode_layer.launches": 3e-5}
    prices = kernel_prices([p for p in fitted.measured["cpu"].points if p.piece.curve != "copy"])

    def with_few(factor: float, lines: str = FEW) -> Sheet:
        unit = FittedUnit(4.0, prices.with_few(factor, lines), None, fitted.measured["cpu"])
        return sheet_of_units("few", "fp32", 1, {"cpu": unit})

    alone, twice, experts, within = with_few(1), with_few(2), with_few(2, EXPERTS_FEW), with_few(0.6)
    runs, points, known = [], list[Point](), list[Known]()
    for one in models:
        for n_prompt, chunk in ((41, 40), (64, 64), (96, 48)):
            engine = one.engine(chunk, 1)
            run = EngineRun(one.name, engine, one.shape, request_of(n_prompt, 3, 2048), chunk)
            sheets = alone, twice, experts, within
            of_sheets = [priced(engine, sheet, one.shape, "cpu", run.request) for sheet in sheets]
            for piece, once_s, twice_s, experts_s, within_s in zip(run.pieces, *of_sheets, strict=True):
                known.append(Known(once_s, twice_s - once_s, experts_s - once_s))
                in_calls_s = 0.4 * known[-1].experts_few_s if piece.curve == "prefill" else 0.0
                points.append(Point(piece, within_s + in_calls_s + made_s(piece.amounts, own), 3, True))
            runs.append((one, engine, run))
    few_alone = prices.constants["expert_ffn.few.weight_bytes"]
    add_engine_prices(prices, points, known)
    assert {name: prices.constants[name] for name in own} == pytest.approx(own, rel=1e-3)
    assert prices.constants["expert_ffn.few.weight_bytes"] == pytest.approx(0.6 * few_alone, rel=1e-3)
    assert prices.constants["prompt_few_rows.weight_bytes"] == pytest.approx(0.4 * few_alone, rel=1e-3)
    assert any(known_s.experts_few_s > 0 for known_s in known[::2])
    unit = FittedUnit(4.0, prices, None, fitted.measured["cpu"])
    whole = sheet_of_units("whole", "fp32", 1, {"cpu": unit})
    for (one, engine, run), prefill, decode in zip(runs, points[::2], points[1::2], strict=True):
        found = priced(engine, whole, one.shape, "cpu", run.request)
        assert found == pytest.approx((prefill.seconds, decode.seconds), rel=1e-3)


def test_residuals_of_the_csv_follow_from_the_sheet(fitted: FittedMachine) -> None:
    """Recomputed from the two files alone: prices of the TOML times amounts of the CSV, and what is beside."""
    kernels = tomllib.loads(fitted.text("mine"))["units"]["cpu"]["kernels"]
    link = tomllib.loads(fitted.text("mine"))["links"]["file"]
    cpu = tomllib.loads(fitted.text("mine"))["units"]["cpu"]
    tiles = {"expert_ffn": int(cpu["row_tile"]["value"]), "scores": int(cpu["query_tile"]["value"])}
    rows = list(csv.DictReader(io.StringIO(points_text(fitted))))
    assert len(rows) == len(fitted.measured["cpu"].points)
    terms = {"weight_bytes": "s_per_weight_byte", "moved_bytes": "s_per_moved_byte", "flops": "s_per_flop"}
    for row in rows:
        expected = float(row["beside_s"])
        for name, amount in row.items():
            kernel, _, what = name.rpartition(".")
            if not amount or what not in terms or kernel == "copy":
                continue
            few = kernel.endswith(".few")
            own = kernels["scatter" if kernel == "rows" else kernel.removesuffix(".few")]
            line = own.get("few_rows", {}) if few else own
            is_tiled = kernel in tiles and (what == "flops" or (kernel == "expert_ffn" and what == "moved_bytes"))
            name = f"{name} by {tiles[kernel]}" if is_tiled else name
            expected += line.get(terms[what], {"value": 0.0})["value"] * float(row[name])
        if row["curve"] == "copy":
            expected += link["latency_s"]["value"] * float(row["copy.launches"])
            expected += float(row["copy.moved_bytes"]) / link["bytes_per_s"]["value"]
        assert float(row["predicted_s"]) == pytest.approx(expected, rel=1e-4)
        assert float(row["residual"]) == pytest.approx(float(row["predicted_s"]) / float(row["measured_s"]) - 1)


def test_the_terminal_tells_each_curve(fitted: FittedMachine) -> None:
    rows = {row["curve"]: row for row in residual_rows(fitted)}
    assert rows["norm"]["points"] == 9
    assert rows["copy"]["median_miss"] < 1e-4


def test_pieces_compute_what_they_say(models: list[MadeModel]) -> None:
    """Each runs, and takes time."""
    works = list(Bench("m", models[0].model, models[0].shape).pieces((16,), (8,), (1,), (24,)))
    torch.set_num_threads(1)
    assert all(work.seconds()[0] > 0 for work in works)


def test_timelines_of_the_sheet_know_what_stands_in(fitted: FittedMachine) -> None:
    assert fitted.sheet.computing("npu") == "cpu"
    assert Timeline(fitted.sheet).now_s() == 0


def test_amounts_of_experts_by_hand(models: list[MadeModel]) -> None:
    """Four rows for each of two experts in each layer: three matrices of 32 x 16, two FLOP a value and row. Weights in
    fp32, and rows that count two bytes a value, as in every sheet."""
    work = next(
        w.pieces[0]
        for w in Bench("m", models[0].model, models[0].shape).pieces((96,), (8,), (4,), ())
        if w.pieces[0].curve == "few rows"
    )
    values = 3 * 32 * 16
    assert work.amounts["expert_ffn.few.flops"] == 2 * (2 * 4 * 2 * values)
    assert work.amounts["expert_ffn.few.weight_bytes"] == 2 * (2 * 4 * values)
    assert work.amounts["rows.moved_bytes"] == 2 * (2 * 8 * 32 * 2)


def test_pieces_with_many_rows_by_hand(models: list[MadeModel]) -> None:
    """24 rows of each of 8 experts, in both layers: once of tokens, once of padding but for one. Three matrices of
    32 x 16; 16 values lie between products, which count two bytes each. Tiles of 16 compute 32 rows."""
    bench = Bench("m", models[0].model, models[0].shape)
    _, tokens, blocks = [w.pieces[0] for w in bench.pieces((40,), (0,), (), (24,)) if w.pieces[0].curve == "experts"]
    for piece in (tokens, blocks):
        assert piece.amounts[tiled(8)] == 2 * (8 * 24 * 2 * 3 * 32 * 16)
        assert piece.amounts[tiled(16)] == 2 * (8 * 32 * 2 * 3 * 32 * 16)
        assert piece.amounts[tiled(8, "expert_ffn.moved_bytes")] == 2 * (8 * 24 * 16 * 2)
        assert piece.amounts["expert_ffn.weight_bytes"] == 2 * (8 * 3 * 32 * 16 * 4)
    assert tokens.amounts["rows.moved_bytes"] == 2 * (2 * 8 * 24 * 32 * 2)


@pytest.mark.parametrize("grid", [WHOLE, QUICK])
def test_pieces_have_as_many_rows_as_blocks_have(grid: Grid) -> None:
    """No piece had more than half of them, and blocks were priced by up to a fifth too fast."""
    assert preset_parameters("blockwise").model_validate({}).model_dump()["block_size"] in grid.many


def test_an_expert_with_few_rows_beside_others_is_of_their_line(models: list[MadeModel]) -> None:
    """Of four experts of 48 x 64, which get 11, 10, 6 and 7 rows, up to eight are few, and the others fill tiles."""
    made, n_tokens, values = models[1], 17, 3 * 48 * 64
    (piece,) = next(iter(Bench("m", made.model, made.shape).calls((n_tokens,)))).pieces
    ids_TK = torch.rand(n_tokens, 4, generator=torch.Generator().manual_seed(n_tokens)).argsort(-1)[:, :2]
    rows = ids_TK.flatten().bincount().tolist()
    few, many = [n for n in rows if n <= 8], [n for n in rows if n > 8]
    assert few
    assert sum(rows) > 8 * len(rows), "not all of them are few in the mean"
    assert piece.amounts["expert_ffn.few.flops"] == 2 * values * sum(few)
    assert piece.amounts["expert_ffn.few.weight_bytes"] == 4 * values * len(few)
    assert piece.amounts["expert_ffn.weight_bytes"] == 4 * values * len(many)
    assert piece.amounts[tiled(16)] == 2 * values * sum(-(-n // 16) * 16 for n in many)


def test_a_layer_whose_experts_have_few_rows_in_the_mean_is_of_that_curve(models: list[MadeModel]) -> None:
    """Two tokens give no expert more than two rows; 96 give more in the mean, and other code computes them."""
    works = Bench("m", models[0].model, models[0].shape).calls((2, 96))
    curves = [piece.curve for work in works for piece in work.pieces]
    assert curves == ["few rows", "experts", *3 * ["attention"]]


@pytest.mark.parametrize("grid", [WHOLE, QUICK])
def test_each_line_of_experts_has_points_that_tell_a_call_from_the_bytes_that_it_reads(
    grid: Grid, tmp_path: Path
) -> None:
    """Without them the fit gave a call 1.4 ms of the bytes, and whole prompts were priced a fifth too fast."""
    thin = made_model(tmp_path, THIN, "fp32", 0)
    curves = [work.pieces[0].curve for work in Bench("thin", thin.model, thin.shape).calls(grid.tokens)]
    assert {"few rows", "experts"} <= set(curves)


@pytest.mark.parametrize(("form", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("int8", "bfloat16")])
def test_a_plan_is_priced_by_the_bytes_that_its_sheet_was_fitted_on(
    form: str, dtype: str, fitted: FittedMachine, tmp_path: Path
) -> None:
    """Rows, keys and values too: a fit counted four bytes a value of theirs, and a plan two, at the same price."""
    made = made_model(tmp_path / "made", SIZES[0], form, 0)
    (tmp_path / "mine.toml").write_text(fitted.text("mine"))
    quantise = {} if form in PLAIN_DTYPES else dict.fromkeys(("experts", "attention", "head"), form)
    engine = EngineSpec.model_validate({"name": "own", "technique": {"name": "dropless"}, "quantise": quantise})
    device = ModelledSpec.model_validate({"sheet": str(tmp_path / "mine.toml")})
    model = ModelSpec.model_validate({"source": "made", "dtype": dtype})
    asked = shape_on(device, engine, model, made.checkpoint.config)
    counted = ("expert_bytes", "attention_bytes", "head_bytes", "router_bytes", "bytes_per_value")
    assert [getattr(asked, name) for name in counted] == [getattr(made.shape, name) for name in counted]


def test_layers_that_fetch_are_those_of_the_median_token_and_experts_those_of_the_whole_prompt() -> None:
    """As their times are: the first tokens find less in a cache."""

    class Engine:
        observer: Any = None

        def reset(self) -> None:
            pass

        def run(self, request: Request, on_phase: PhaseListener) -> None:
            for n_fetching in (4, 3):
                self.observer.step(4, 4, "prefill", [SimpleNamespace(transfers=[0, 1])] * n_fetching)
            for n_fetching in (4, 1, 1):
                plans = [SimpleNamespace(transfers=[0] * (i < n_fetching)) for i in range(4)]
                self.observer.step(1, 9, "decode", plans)

    engine: Any = Engine()
    found = fetches(engine, request_of(8, 4, 16))
    assert (found.of_prompt, found.of_token) == (14, 1)
    assert engine.observer is None
