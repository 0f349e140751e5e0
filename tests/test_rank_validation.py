"""Prices of two processes: amounts by hand, and fits on times that were made of known prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devices.models.sheet import Sheet, parse_sheet
from engines.curves.host import QUICK, made_model
from engines.curves.host import THIN as OF_FITS
from engines.curves.rounds import Piece, Point
from engines.made_models import MadeSizes
from tests.benchmarks import model_validation
from tests.benchmarks.validated_ranks import ENDLESS, N_RANKS, Ranks, fitted_sheets, ranks_of, sheet_with
from tests.toy_sheet import figure

SIZES = (
    MadeSizes(64, 32, 8, 2, 2, 4, 2, head_dim=16),
    MadeSizes(96, 16, 4, 2, 3, 2, 2, head_dim=16),
    MadeSizes(32, 48, 8, 4, 4, 2, 1, head_dim=16),
)
THIN = MadeSizes(16, 16, 4, 2, 6, 2, 1, head_dim=8)
PROMPTS, CHUNK, N_NEW = (24, 40), 32, 3
N_STEPS = (1, 2)
EACH_S, BYTE_S, WEIGHT_S, EACH_OF_TOKEN_S, TOKEN_S = 3e-4, 2e-9, 4e-10, 5e-5, 2e-4
ATTENTION_S = 1e-10


@pytest.fixture(scope="module")
def cpu() -> Sheet:
    per_byte = "\n".join(
        f"{kernel} = {{ s_per_moved_byte = {figure(1e-10)} }}"
        for kernel in ("norm", "residual", "gather_dynamic", "gather_static", "padding", "scatter")
    )
    return parse_sheet(
        f"""
name = "host"
description = "round numbers"
source = "hand"
[units.cpu.kernels]
expert_ffn = {{ s_per_flop = {figure(1e-11)} }}
attention = {{ s_per_flop = {figure(1e-11)}, s_per_weight_byte = {figure(ATTENTION_S)} }}
router = {{ s_per_flop = {figure(1e-11)} }}
lm_head = {{ s_per_flop = {figure(1e-11)} }}
{per_byte}
""",
        "host",
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ranks]:
    """No process starts: nothing is measured."""
    folder = tmp_path_factory.mktemp("made")
    made = [made_model(folder, sizes, "fp32", seed) for seed, sizes in enumerate((*SIZES, THIN))]
    return [one for own in made for one in ranks_of(own, PROMPTS, CHUNK, N_NEW, own is made[-1])]


def attention_bytes(sizes: MadeSizes) -> int:
    """Of a layer: queries and output of all heads, keys and values of those that have some."""
    return 4 * 2 * sizes.hidden * sizes.head_dim * (sizes.n_heads + sizes.n_kv_heads)


def test_amounts_of_two_processes_by_hand(ranks: list[Ranks], cpu: Sheet) -> None:
    free = sheet_with(cpu, {"bytes_per_s": ENDLESS})
    for sizes, own in zip((*SIZES, THIN), zip(ranks[::2], ranks[1::2], strict=True), strict=True):
        for one, n_steps, n_prompt in zip(own, N_STEPS, PROMPTS, strict=True):
            prefill, decode = one.priced([free])[0].amounts
            # The choice of experts, rows and results, each both ways; every process reads all of attention.
            assert prefill["launches"] == 6 * sizes.n_layers * n_steps
            assert prefill["attention_bytes"] == N_RANKS * sizes.n_layers * n_steps * attention_bytes(sizes)
            told = 8 * sizes.top_k * n_prompt * sizes.n_layers
            assert told < prefill["moved_bytes"] <= told + 8 * sizes.hidden * n_prompt * sizes.n_layers
            assert decode["launches"] == pytest.approx(2 * sizes.n_layers)
            assert (prefill["tokens"], decode["tokens"]) == (0, 1)
            assert decode["attention_bytes"] == pytest.approx(N_RANKS * sizes.n_layers * attention_bytes(sizes))


def points(ranks: Sequence[Ranks], cpu: Sheet) -> list[Point]:
    """A token of the model of next to no work takes a time of its own."""
    free, found = sheet_with(cpu, {"bytes_per_s": ENDLESS}), list[Point]()
    for one in ranks:
        (prefill_s, decode_s), (prefill, decode) = one.priced([free])[0]
        prefill_s += EACH_S * prefill["launches"] + BYTE_S * prefill["moved_bytes"]
        prefill_s += WEIGHT_S * prefill["attention_bytes"]
        decode_s += 1.0 if one.sends_alone else TOKEN_S + EACH_OF_TOKEN_S * decode["launches"]
        for phase, seconds in (("prefill", prefill_s), ("decode", decode_s)):
            found.append(Point(Piece(phase, "made", {}), seconds, 3, True))
    return found


def test_prices_of_two_processes_come_back(ranks: list[Ranks], cpu: Sheet) -> None:
    made = points(ranks, cpu)
    sheets = fitted_sheets(cpu, ranks, made)
    prefill, decode = sheets.prefill.links["ranks"], sheets.decode.links["ranks"]
    assert prefill.latency_s is not None
    assert decode.latency_s is not None
    assert prefill.latency_s.value == pytest.approx(EACH_S, rel=1e-4)
    assert 1 / prefill.bytes_per_s.value == pytest.approx(BYTE_S, rel=1e-4)
    assert decode.latency_s.value == pytest.approx(EACH_OF_TOKEN_S, rel=1e-4), "without the model of next to no work"
    once: Any = sheets.decode.units["cpu"].kernels["decode_step"]
    assert once.s_per_launch.value == pytest.approx(TOKEN_S, rel=1e-4)
    assert "decode_step" not in sheets.prefill.units["cpu"].kernels
    of_weights: Any = sheets.prefill.units["cpu"].kernels["attention"]
    assert of_weights.s_per_weight_byte.value == pytest.approx(ATTENTION_S + WEIGHT_S, rel=1e-4)
    unchanged: Any = sheets.decode.units["cpu"].kernels["attention"]
    assert unchanged.s_per_weight_byte.value == ATTENTION_S
    for i, one in enumerate(ranks):
        modelled = one.modelled(sheets)
        assert modelled.prefill_s == pytest.approx(made[2 * i].seconds, rel=1e-4)
        if not one.sends_alone:
            assert modelled.decode_s == pytest.approx(made[2 * i + 1].seconds, rel=1e-4)


def test_work_of_one_process_has_its_threads_after_a_turn_of_ranks(ranks: list[Ranks]) -> None:
    before = torch.get_num_threads()

    def seconds() -> tuple[float, float]:
        torch.set_num_threads(before + 1)
        return 1.0, 2.0

    run: Any = SimpleNamespace(seconds=seconds)
    one = Ranks(run, ranks[0].engine, Path(), ranks[0].shape, False)
    assert one.seconds() == (1.0, 2.0)
    assert torch.get_num_threads() == before


class RoundsBeganError(Exception):
    pass


def test_two_processes_are_measured_in_the_rounds_of_their_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    taking_turns: list[Any] = []

    def started(made: MadeSizes, prompts: Sequence[int], *_: object) -> list[Any]:
        return [SimpleNamespace(made=made, n=n, engine=SimpleNamespace(close=lambda: None)) for n in prompts]

    def fit(*_: object, beside: Sequence[Any]) -> None:
        taking_turns.extend(beside)
        raise RoundsBeganError

    monkeypatch.setattr(model_validation, "made_model", lambda folder, sizes, *_: sizes)
    monkeypatch.setattr(model_validation, "ranks_of", started)
    monkeypatch.setattr(model_validation, "fit_unit", fit)
    with pytest.raises(RoundsBeganError):
        model_validation.validated_ranks(QUICK, is_quick=False)
    requests = [(one.made, one.n) for one in taking_turns if hasattr(one, "made")]
    assert {(sizes, 160) for sizes in model_validation.HELD_OUT} < set(requests)
    fitted = {sizes for sizes, _ in requests} - set(model_validation.HELD_OUT)
    assert fitted == {*QUICK.sizes, OF_FITS}
    assert len(requests) == len(set(requests)) == len(model_validation.HELD_OUT) + 3 * len(fitted)


@pytest.mark.parametrize(
    ("is_quiet", "words", "n_written"),
    [(True, [], 3), (False, [], 0), (False, ["--even-if-busy"], 3), (True, ["--quick"], 0), (True, ["ranks"], 1)],
)
def test_a_disturbed_piece_leaves_its_rows_of_the_page(
    is_quiet: bool, words: list[str], n_written: int, monkeypatch: pytest.MonkeyPatch, cpu: Sheet
) -> None:
    """Each piece is written when it is done."""
    written: list[object] = []
    found = model_validation.Validated(cpu, [], is_quiet)
    monkeypatch.setattr(model_validation, "of_piece", lambda *_: found)
    monkeypatch.setattr(model_validation, "write_page", lambda *page: written.append(page))
    monkeypatch.setattr("sys.argv", ["model_validation", *words])
    model_validation.main()
    assert len(written) == n_written
