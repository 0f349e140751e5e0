"""How llama.cpp divides a token's work over unlike cores, against closed forms and what source 002 prints."""

from __future__ import annotations

import pytest

from devices.models import core_clusters
from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs import llama_cpp
from harness.reproduce.mnn_aecs.other_models import SHAPES, cost_ratio, is_anchor, parameters, predicted
from harness.reproduce.mnn_aecs.places import ANDROID, PHONES, Cell, cells


@pytest.mark.parametrize("model", ["Qwen2.5-1.5B", "Qwen2.5-3B", "Llama3.2-1B", "Llama3.2-3B"])
def test_products_are_all_weights_that_a_token_meets(model: str) -> None:
    shape = NAMED_SHAPES[SHAPES[model]]
    assert sum(one.times * one.rows * one.columns for one in llama_cpp.products(shape)) == parameters(model)


def test_a_narrow_product_waits_for_the_slowest_core_and_a_wide_one_is_shared() -> None:
    """Four cores of 2 and four of 1. 1536 rows are 24 pieces, under 4 x 8: 192 each, and the slow ones take 192. 2048
    are 32 pieces of 64: the slow cores begin a third one as the fast ones end their fourth, and end it at 3 x 64."""
    speeds = (2.0,) * 4 + (1.0,) * 4
    assert llama_cpp.seconds(llama_cpp.Product(1, 1536, 10), speeds) == 192 * 10
    assert llama_cpp.seconds(llama_cpp.Product(1, 2048, 10), speeds) == 3 * 64 * 10
    many = llama_cpp.seconds(llama_cpp.Product(1, 64 * 12000, 10), speeds)
    assert many == pytest.approx(64 * 12000 * 10 / 12), "each core as many pieces as it is fast"
    alike = [llama_cpp.seconds(llama_cpp.Product(1, rows, 10), (1.0,) * 8) for rows in (1536, 2048)]
    assert alike == [1536 * 10 / 8, 2048 * 10 / 8]


def test_only_unlike_cores_make_the_narrow_model_dear() -> None:
    """Over Qwen2.5-1.5B a token of Llama3.2-1B takes the ratio of parameters on the iPhone's two like cores, and on the
    Xiaomi, whose clocks differ by a fifth; much less where Table 2 has efficiency cores."""
    book = ledger()
    assert [len(llama_cpp.core_speeds(phone)) for phone in PHONES] == [8, 8, 8, 8, 8, 2, 2], "Table 8"
    assert llama_cpp.core_speeds("Mate 40 Pro") == pytest.approx((3.13, *(2.54,) * 3, *(0.4 * 2.05,) * 4))
    ratio = parameters("Llama3.2-1B") / parameters("Qwen2.5-1.5B")
    over = {phone: cost_ratio(phone, "llama.cpp", "Llama3.2-1B") for phone in PHONES}
    assert over["iPhone 12"] == pytest.approx(ratio, rel=1e-9)
    assert over["Xiaomi 15 Pro"] == pytest.approx(ratio, rel=0.01)
    for phone in ANDROID[:4]:
        found = over[phone]
        assert found is not None
        assert found < 0.8 * ratio, phone
        stated = [book.figure(cells()[Cell(phone, "llama.cpp", m, "energy")]) for m in ("Llama3.2-1B", "Qwen2.5-1.5B")]
        assert stated[0] / stated[1] < 0.85 * ratio, "and so the source has it"


@pytest.mark.parametrize("share", [0.3, 0.35, 0.4, 0.45, 0.5])
def test_what_llama_cpp_gains_does_not_hang_on_the_speed_of_an_efficiency_core(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By parameters two of the fifteen cells on Android are within 15 %; 0.4 is the search's model of a phone."""
    monkeypatch.setattr(core_clusters, "SCALES", {**core_clusters.SCALES, "efficiency": share})
    llama_cpp.token_seconds.cache_clear()
    try:
        off = {
            cell: predicted(*cell) / ledger().figure(claim) - 1  # type: ignore[operator]
            for cell, claim in cells().items()
            if cell.engine == "llama.cpp"
            and cell.quantity == "energy"
            and cell.phone in ANDROID
            and not is_anchor(cell)
        }
    finally:
        llama_cpp.token_seconds.cache_clear()
    assert len(off) == 15
    assert sum(abs(error) <= 0.15 for error in off.values()) >= 11
