"""The Neuron guide (004): our plans give the figures that it prints, and ours where it contradicts itself.

Expected values are the guide's own print or a closed form by hand.
"""

from __future__ import annotations

import math

import pytest

from engines.pricing.published_shapes import GPT_OSS_120B, PHI_3_5_MOE, QWEN3_30B_A3B
from harness.reproduce.findings import Finding
from harness.reproduce.neuron import findings, loading, ranks, tables
from harness.reproduce.neuron.plans import drawn_as

PRINTED: dict[str, float] = {
    "004-004": 16, "004-006": 2000, "004-007": 15, "004-008": 8, "004-009": 2048, "004-010": 3840, "004-011": 87.5,
    "004-012": 2.4, "004-014": 3584, "004-015": 7.14, "004-016": 79.2, "004-018": 480, "004-019": 25, "004-020": 3,
    "004-021": 40, "004-030": 128, "004-031": 50, "004-032": 64, "004-033": 50, "004-034": 8, "004-035": 50,
    "004-036": 256, "004-037": 1, "004-039": 1.25, "004-041": 512,
}  # fmt: skip
OTHERWISE: dict[str, float] = {
    "004-001": 2880 * 128 * 2 / 1e6,
    "004-002": 36 * 2880 * 128 * 2 / 1e6,
    "004-003": 100 * 36 * 2880 * 128 * 2 / (96 * 2**30),
    # 1000 tokens of the hot expert in ceil(1000 / 256) blocks, the other 1000 pairs in one block of each of 7.
    "004-013": math.ceil(1000 / 256) + 7,
    # 1 / (1 / M + 1 / K + 1 / N) FLOP a byte of bf16, for [M, K] @ [K, N].
    "004-028": 1 / (1 / 8192 + 1 / 4096 + 1 / 12288),
    "004-029": 1 / (1 / 32 + 1 / 4096 + 1 / 12288),
}
"""Where the guide contradicts itself: by hand."""


@pytest.fixture(scope="module")
def found() -> dict[str, Finding]:
    return {finding.claim: finding for finding in findings()}


@pytest.mark.parametrize("claim", PRINTED)
def test_what_the_guide_prints(found: dict[str, Finding], claim: str) -> None:
    ours = found[claim].ours
    assert isinstance(ours, float | int)
    assert ours == pytest.approx(PRINTED[claim], abs=0.05 if claim != "004-015" else 0.005)


@pytest.mark.parametrize("claim", OTHERWISE)
def test_what_it_should_have_printed(found: dict[str, Finding], claim: str) -> None:
    assert found[claim].ours == pytest.approx(OTHERWISE[claim], rel=1e-9)


def test_blocks_of_six_tokens(found: dict[str, Finding]) -> None:
    assert found["004-005"].ours == "[0, 2, 5, -1],[1, 4, -1, -1],[3, -1, -1, -1]"


def test_trn2_is_below_the_range_in_bf16_and_inside_it_in_fp8(found: dict[str, Finding]) -> None:
    assert found["004-017"].ours == pytest.approx((230.0, 447.93), rel=1e-4)


@pytest.mark.parametrize(("name", "batch"), [("DeepSeek", 16), ("GPT-OSS", 8), ("Llama 4", 8), ("DeepSeek", 32)])
def test_drawn_choices_need_as_many_experts_as_the_closed_form_says(name: str, batch: int) -> None:
    """E (1 - (1 - K / E)^B) on average."""
    e, k = loading.MODELS[name]
    expected = e * (1 - (1 - k / e) ** batch)
    assert loading.mean_loads(loading.MODELS[name], batch) == pytest.approx(expected, rel=0.04)


def test_popular_experts_are_drawn_more_often() -> None:
    loads = drawn_as([1, 2, 5], 4000, 1).tokens_per_expert_E().tolist()
    assert [load / 4000 for load in loads] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)


@pytest.mark.parametrize(("alpha", "batch", "is_all"), [(1.0, 31, False), (1.0, 32, True), (0.8, 25, False),
                                                       (0.8, 26, True)])  # fmt: skip
def test_switch_to_all_experts_of_deepseek(alpha: float, batch: int, is_all: bool) -> None:
    """8 x 32 = 256; 8 x 26 = 208 is above 0.8 x 256 = 204.8, and 200 is not."""
    assert loading.takes_all(loading.MODELS["DeepSeek"], batch, alpha) is is_all


def test_ranks_send_what_the_shapes_say() -> None:
    """Of N ranks a row goes to N - 1 others and a partial result comes back from each, four bytes a value; of a
    token's choice, two times K values."""
    for shape, n in ((PHI_3_5_MOE, 2), (QWEN3_30B_A3B, 8)):
        expected = (n - 1) * 4 * (2 * shape.hidden + 2 * shape.top_k)
        sent = ranks.sent_bytes(shape, n)
        assert sent.tensor_parallel == sent.all_gather == expected
        assert sent.all_to_all < expected


def test_a_rank_holds_its_share() -> None:
    """GPT-OSS-120B: 36 layers of 128 experts of 3 x 2880 x 2880 in bf16 are 229.3 GB."""
    assert ranks.rank_gb(GPT_OSS_120B, 1, 1) == pytest.approx(36 * 128 * 3 * 2880**2 * 2 / 1e9)
    assert ranks.rank_gb(GPT_OSS_120B, 4, 16) == pytest.approx(36 * 8 * 3 * 2880 * 720 * 2 / 1e9)
    assert ranks.widest_tensor_parallel(GPT_OSS_120B, 128) == 16


def test_load_balancing_never_makes_the_busiest_group_busier() -> None:
    for n in ranks.DEGREES:
        worst = ranks.worst_group(n)
        assert 1 <= worst.eplb <= worst.in_runs <= n


def test_every_table_is_drawn() -> None:
    names = [table.name for table in tables()]
    assert len(names) == len(set(names)) == 10
