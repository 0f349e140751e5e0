"""The cross table: what goes where, the front, and what binds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from devices.models.efficiency import Efficiency
from devices.models.sheet import available_sheets, load_sheet, parse_sheet
from engines.model.quantised import Quantisation
from engines.pricing.cells import lacks_room_for, parameters
from engines.pricing.model_shape import ModelShape
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import quantised, shape_named
from engines.techniques.presets import PRESETS
from harness.cross.arms import Arm, arms_on
from harness.cross.pages import Machine
from harness.cross.table import Question, Row, are_bounds, cross_table, dominates, records, row_of, with_front
from tests.toy_sheet import figure

QWEN = shape_named("qwen3-30b-a3b")
SMALL = ModelShape("small", 2, 64, 4, 2, 16, 0, 8, 2, 32, 100)


def row(*costs: float | None, machine: str = "m", name: str = "a") -> Row:
    ttft_s, tpot_s, joules = costs
    arm = Arm(name)
    return Row(machine, arm, "ok", None, ttft_s, tpot_s, j_per_token=joules, lost_prefill=0.0, lost_decode=0.0)


def test_the_front_is_what_nothing_is_better_than() -> None:
    """Against the definition, written out: another is at most as much in all, and less in one."""
    random = np.random.default_rng(3)
    rows = [row(*random.integers(1, 5, 3).astype(float)) for _ in range(60)]
    for found in with_front(rows):
        better = [
            other
            for other in rows
            if other.costs is not None
            and found.costs is not None
            and all(a <= b for a, b in zip(other.costs, found.costs, strict=True))
            and any(a < b for a, b in zip(other.costs, found.costs, strict=True))
        ]
        assert found.on_front == (not better)


def test_sums_in_another_order_dominate_nothing() -> None:
    assert not dominates((1.0, 2.0 - 1e-12), (1.0, 2.0))
    assert not dominates((0.5,), (1.0, 2.0))
    assert dominates((1.0, 1.9), (1.0, 2.0))


def test_arms_that_cost_the_same_are_told_together() -> None:
    """A sum in another order is the same; an arm off the front may have its like, too."""
    rows = with_front([
        row(1.0, 2.0, 3.0, name="a"),
        row(1.0, 2.0 - 1e-12, 3.0, name="b"),
        row(2.0, 1.0, 3.0, name="c"),
        row(2.0, 2.0, 3.0, name="d"),
        row(2.0, 2.0, 3.0, name="e"),
        Row("m", Arm("f"), "oom", "too large"),
    ])  # fmt: skip
    assert [found.front_words for found in rows] == ["yes, as b", "yes, as a", "yes", "", "", ""]
    assert [found.equals for found in rows] == [("b",), ("a",), (), ("e",), ("d",), ()]
    machine = Machine(load_sheet("a6000"), False, rows[:-1], rows[-1:], "", [])
    assert machine.answer == (
        "First token soonest: a and b (1 s); least time per token: c (1 s); on the front: a = b, c"
    )
    assert [record["same_costs_as"] for record in records(rows)] == ["b", "a", "", "e", "d", ""]


def test_launching_binds_where_nothing_works_for_longer_than_the_busiest_works() -> None:
    """Launches of a second behind which microseconds of work hide; then the same without a queue, where the unit is
    busy while it launches."""
    told = {}
    for depth in (1, 64):
        text = f"""
            name = "slow"
            description = "launches alone take time"
            source = "hand"
            [units.cpu]
            [units.gpu]
            queue_depth = {figure(depth)}
            roofline = {{ bytes_per_s = {figure(1e15)}, flops_per_s = {figure(1e15)}, s_per_launch = {figure(1.0)} }}
        """
        sheet = parse_sheet(text, "slow")
        (found,) = (
            row for row in cross_table(Question(SMALL, UniformRouting(), 8, 2, 4), [sheet], ("gpu",)) if row.ttft_s
        )
        told[depth] = found.binds_prefill, found.binds_decode
    assert told[1] == ("gpu: launching, 100 % busy",) * 2
    assert told[64] == ("launching: for 100 % of the time nothing works",) * 2


def test_techniques_stand_on_units_that_a_machine_has() -> None:
    arms = {arm.name: arm for arm in arms_on(load_sheet("m2-ultra"), QWEN)}
    assert arms["npumoe-tg"].why_not is None
    assert arms["npumoe-tg (unit=cpu)"].why_not is None
    assert "no links" in str(arms["on-demand"].why_not)
    assert "only ratios" in str(arms["gpu"].why_not)
    assert {arm.technique for arm in arms.values()} == set(PRESETS)


def test_a_sheet_without_links_has_one_memory_only_where_it_says_so() -> None:
    sheet = load_sheet("a6000").model_copy(update={"links": {}})
    told = {arm.why_not for one in (sheet, load_sheet("m2-ultra")) for arm in arms_on(one, QWEN, ("on-demand",))}
    assert told == {
        "its weights travel, and its sheet has no links",
        "its weights travel, and its sheet has one memory for all units and no links",
    }


@pytest.mark.parametrize("name", available_sheets())
def test_what_a_machine_lacks_is_known_before_anything_is_priced(name: str) -> None:
    """Of every technique: nothing ends in the middle of its cell."""
    sheet, question = load_sheet(name), Question(SMALL, UniformRouting(), 4, 1, 4)
    arms = [arm for arm in arms_on(sheet, SMALL) if arm.why_not is None]
    found = {arm.name: row_of(question, arm, sheet) for arm in arms}
    assert {arm: row.why_not for arm, row in found.items() if row.result == "not priced"} == {}


def test_rows_that_no_link_carries_are_known_before_anything_is_priced() -> None:
    """No weights travel, but rows do: pricing slices ends in the first layer there, and duplex where a token reaches
    the other unit."""
    whole, question = load_sheet("rtx5080-ndp"), Question(SMALL, UniformRouting(), 4, 1, 4)
    sheet = whole.model_copy(update={"links": {}})
    told = "rows of experts travel from gpu to ndp:0, and its sheet has no link between them"
    assert [arm.why_not for arm in arms_on(sheet, SMALL, ("ndp-tp", "duplex"))] == [told, told]
    assert [arm.why_not for arm in arms_on(whole, SMALL, ("ndp-tp",))] == [None]
    unasked = row_of(question, Arm("ndp-tp", parameters=parameters("ndp-tp")), sheet)
    assert "activations would travel from gpu to ndp:0" in str(unasked.why_not)


def test_a_gpu_without_a_way_to_the_host_takes_nothing_that_is_fetched_from_there() -> None:
    fetched = ("on-demand", "prefetch-hint", "router-pf", "est-pf", "hybrid-pf")
    arms = arms_on(load_sheet("trn2"), QWEN, (*fetched, "gpu"))
    told = "its weights come from the memory of cpu, and its sheet has no link from there to gpu"
    assert [(arm.technique, arm.why_not) for arm in arms] == [*((one, told) for one in fetched), ("gpu", None)]


def test_a_unit_that_another_stands_in_for_is_no_unit_of_the_machine() -> None:
    """Experts "moved" from a CPU to the GPU that it stands in for would travel for nothing."""
    sheet = load_sheet("a6000")
    assert "npu" not in sheet.units
    with_stand_in = sheet.model_copy(update={"stands_in": {"npu": "cpu"}})
    expected = [(arm.name, arm.why_not is None) for arm in arms_on(sheet, QWEN)]
    found = arms_on(with_stand_in, QWEN)
    assert [(arm.name, arm.why_not is None) for arm in found] == expected
    assert {arm.why_not for arm in found if arm.technique == "npumoe"} == {
        f"it is made for npu, and this machine has {', '.join(sheet.units)}"
    }


def test_a_gpu_keeps_the_experts_that_fit_in_nine_tenths_of_it() -> None:
    """48 layers of 128 experts of 3 x 2048 x 768 values; attention 2048 x 128 x 2 x (32 + 4); embedding and head."""
    sheet = load_sheet("a6000")
    (arm,) = arms_on(sheet, QWEN, ("moe-ondemand",))
    capacity_bytes = sheet.memories["gpu"].value
    every_token_bytes = 2 * (48 * 2048 * 128 * 2 * 36 + 2 * 2048 * 151936)
    n = (0.9 * capacity_bytes - every_token_bytes) // (2 * 3 * 2048 * 768)
    assert dict(arm.changed) == {"unit": "gpu", "gpu_slots": int(n)}
    (cache,) = arms_on(sheet, QWEN, ("lru",))
    assert dict(cache.changed) == {"unit": "gpu", "slots": int(n) // 48}


def test_a_cache_beside_one_memory_has_slots_for_half_of_the_experts_and_is_warm() -> None:
    (arm,) = arms_on(load_sheet("m2-ultra"), QWEN, ("lru",))
    assert dict(arm.changed) == {"slots": 64}
    sheet = load_sheet("a6000")
    question = Question(QWEN, UniformRouting(), 4, 1, 4)
    (kept, loaded) = (arms_on(sheet, QWEN, (name,))[0] for name in ("lru", "on-demand"))
    assert [question.cell(one, sheet).n_before for one in (kept, loaded)] == [1, 0]


def test_buffers_take_what_a_gpu_has_left_where_it_does_not_hold_two_layers() -> None:
    """Two of 128 experts of 9.4 MB are 2.4 GB, and what every token needs is 3.1 GB."""
    sheet = load_sheet("a6000")

    def found(capacity_bytes: int) -> Arm:
        gpu = sheet.memories["gpu"].model_copy(update={"value": capacity_bytes})
        (arm,) = arms_on(sheet.model_copy(update={"memories": {**sheet.memories, "gpu": gpu}}), QWEN, ("on-demand",))
        return arm

    expert_bytes, every_token_bytes = 2 * 3 * 2048 * 768, 2 * (48 * 2048 * 128 * 2 * 36 + 2 * 2048 * 151936)
    assert (found(10**10).changed, found(10**10).expert_slots) == ((), None)
    arm, n = found(4 * 10**9), int((0.9 * 4e9 - every_token_bytes) // expert_bytes)
    assert 2 * QWEN.top_k <= n < 256
    assert (arm.changed, arm.expert_slots) == ((("expert_memory", n * expert_bytes),), n)
    question = Question(QWEN, UniformRouting(), 4, 1, 4)
    small = sheet.model_copy(
        update={"memories": {**sheet.memories, "gpu": sheet.memories["gpu"].model_copy(update={"value": 4 * 10**9})}}
    )
    assert row_of(question, arm, small).why_not is None
    # 16 experts of one token do not fit twice.
    assert found(every_token_bytes + 10 * expert_bytes).expert_slots is None


@pytest.mark.parametrize("name", ["ndp-tp-pre", "ndp"])
@pytest.mark.parametrize(("shape", "stated"), [("mixtral-8x7b", 1), ("phi-3.5-moe", 2)])
def test_a_gpu_beside_ndp_units_prefetches_what_it_can_hold(name: str, shape: str, stated: int) -> None:
    """Source 001: "incremented until no additional experts can be accommodated"; one of Mixtral's, TopK of Phi's."""
    (arm,) = arms_on(load_sheet("rtx5080-ndp"), shape_named(shape), (name,))
    assert dict(arm.changed)["slots"] == stated
    assert arm.why_not is None


def test_experts_make_room_for_the_keys_and_values_of_the_request() -> None:
    """32 layers of 2 x 8 x 128 values of two bytes: 4 GiB of 32,768 tokens, more than a tenth of 16 GiB, beside 2.99
    GiB that every token of Phi-3.5-MoE passes through. The 9 GiB that are left hold 61 of its experts of 150 MiB; one
    of each of 32 layers."""
    phi, sheet = shape_named("phi-3.5-moe"), load_sheet("rtx5080-ndp")
    techniques = ("ndp-tp-pre", "ndp", "moe-ondemand", "fiddler", "monde", "lru", "static")
    question = Question(phi, UniformRouting(), prompt_tokens=32_768, decode_steps=0)
    arms = {arm.technique: arm for arm in question.arms_on(sheet, techniques)}
    assert {dict(arms[name].changed)["slots"] for name in ("ndp-tp-pre", "ndp", "lru", "static")} == {1}
    # Two less: a token's experts, for the slots that all layers of `static` share.
    n = int((2**34 - 4 * 2**30 - phi.others_bytes) / 157_286_400) - 2
    assert n == 59
    assert {dict(arms[name].changed)["gpu_slots"] for name in ("moe-ondemand", "fiddler", "monde")} == {n}
    assert {name: str(lacks_room_for(question.cell(arm, sheet))) for name, arm in arms.items()} == dict.fromkeys(
        techniques, "None"
    )


def test_a_gpu_that_holds_no_expert_of_each_layer_prefetches_none() -> None:
    sheet = load_sheet("rtx5080-ndp")
    gpu = sheet.memories["gpu"]
    small = sheet.model_copy(update={"memories": {**sheet.memories, "gpu": gpu.model_copy(update={"value": 8e9})}})
    (arm,) = arms_on(small, shape_named("mixtral-8x7b"), ("ndp",))
    assert arm.why_not == "the memory of its GPU does not hold one expert of each layer"


def test_a_model_too_large_for_any_machine_ends_no_table() -> None:
    """DeepSeek-V3 in 16 bits: 58 layers of 256 experts of 3 x 7168 x 2048 values, 1.3 TB; DIMMs hold 206 GB."""
    question = Question(shape_named("deepseek-v3"), UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4)
    sheets = [load_sheet(name) for name in available_sheets()]
    rows = cross_table(question, sheets, ("moe-ondemand", "ndp-tp", "ndp-tp-pre", "ndp"))
    assert {one.result for one in rows if one.machine == "rtx5080-ndp"} == {"N.S.", "oom"}
    assert {one.result for one in rows if one.arm.technique == "ndp"} == {"N.S.", "not priced"}
    assert all(one.ttft_s is None for one in rows)


def test_a_dense_model_has_no_experts_to_keep() -> None:
    question = Question(shape_named("qwen2.5-0.5b"), UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4)
    rows = cross_table(question, [load_sheet("rtx5080-ndp")], ("moe-ondemand", "lru", "static", "ndp", "fiddler"))
    assert {str(one.why_not).removeprefix(f"{one.arm.technique} ").partition(";")[0] for one in rows} == {
        "places experts, and qwen2.5-0.5b has none", "custom places experts, and qwen2.5-0.5b has none",
    }  # fmt: skip


def test_a_gpu_that_holds_all_experts_has_nothing_to_load() -> None:
    for arm in arms_on(load_sheet("a100"), QWEN, ("lru", "static", "moe-ondemand")):
        assert "nothing is left to load" in str(arm.why_not)


def test_rows_price_what_fits_and_say_why_the_others_are_not_there() -> None:
    question = Question(SMALL, UniformRouting(), prompt_tokens=8, decode_steps=2, chunk=8, recall=0.5)
    rows = cross_table(question, [load_sheet("rtx5080-ndp")], ("gpu", "router-pf", "ndp-tp", "anemll", "duplex"))
    by_name = {one.arm.technique: one for one in rows}
    for name in ("gpu", "router-pf", "ndp-tp"):
        assert by_name[name].result == "ok"
        assert by_name[name].j_per_token is None
        assert "states no power" in str(by_name[name].no_joules)
    assert by_name["gpu"].lost_decode == 0
    lost = by_name["router-pf"].lost_decode
    assert lost is not None
    assert 0 < lost < 1
    assert by_name["router-pf"].lost_prefill == 0
    assert str(by_name["gpu"].binds_decode).startswith("gpu: reading memory")
    assert (by_name["anemll"].result, by_name["duplex"].result) == ("not priced", "not priced")
    assert "npu" in str(by_name["anemll"].why_not)


def test_an_arm_that_stands_elsewhere_under_another_name_says_so() -> None:
    """It said which keys of a plan to set, and the table has none. What a sheet is not for is told no other name."""
    (found,) = arms_on(load_sheet("a100"), QWEN, ("dropless",))
    assert found.why_not == (
        "attention would be on cpu, where its sheet prices no attention; on its gpu it is the technique gpu"
    )
    (found,) = arms_on(load_sheet("m2-ultra-table4"), QWEN, ("dropless",))
    assert "on its" not in str(found.why_not)


def test_a_model_that_fits_nowhere_is_out_of_memory() -> None:
    question = Question(QWEN, UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4)
    (found,) = cross_table(question, [load_sheet("a6000")], ("gpu",))
    assert found.result == "oom"
    assert found.costs is None


def test_ranks_work_side_by_side() -> None:
    """A token's experts over two chips in columns: half their bytes on each, at 2.9 TB/s; all else as on one chip."""
    question = Question(QWEN, UniformRouting(), prompt_tokens=4, decode_steps=2, chunk=4)
    one, two = cross_table(question, [load_sheet("trn2")], ("gpu", "tensor-parallel"))
    assert one.tpot_s is not None
    assert two.tpot_s is not None
    half_s = 48 * 8 * 3 * 2048 * 768 * 2 / 2 / 2.9e12
    # What ranks send each other is small beside it.
    assert one.tpot_s - two.tpot_s == pytest.approx(half_s, rel=0.02)


def test_bytes_over_links_are_of_a_decoded_token() -> None:
    """On demand every chosen expert travels: 48 layers of 8 experts of 3 x 2048 x 768 values of two bytes, 3.62 GB."""
    question = Question(QWEN, UniformRouting(), prompt_tokens=16, decode_steps=2, chunk=16)
    (found,) = cross_table(question, [load_sheet("a100")], ("on-demand",))
    assert found.moved_bytes_per_token == pytest.approx(48 * 8 * 3 * 2048 * 768 * 2, rel=1e-3)


def test_a_sheet_with_shares_of_its_peaks_is_no_bound() -> None:
    """Rooflines alone are; with the share that a launch reaches, or a line of its own, times are a guess."""
    alone = load_sheet("a100")
    roofline = alone.units["gpu"].roofline
    assert roofline is not None
    share = Efficiency.model_validate(
        {"by": "flops", "points": [{"at": 1e6, "share": 0.5, "kind": "assumed", "origin": "a test"}]}
    )
    gpu = alone.units["gpu"].model_copy(update={"roofline": roofline.model_copy(update={"flops_share": share})})
    shared = alone.model_copy(update={"units": {**alone.units, "gpu": gpu}})
    assert [are_bounds(one) for one in (alone, shared, load_sheet("m2-ultra"))] == [True, False, False]


@pytest.mark.parametrize(
    ("fitted", "asked", "told"),
    [
        ("fp32", "", "fitted with weights in fp32, and experts of 16 bits are asked"),
        ("fp32", "fp32", None),
        ("bf16", "", None),
        ("int8", "fp32", "fitted with weights in int8, and experts of 32 bits are asked"),
        ("int8", "int8", None),
        (None, "fp32", None),
    ],
)
def test_a_sheet_fitted_with_other_weights_says_so(fitted: str | None, asked: str, told: str | None) -> None:
    sheet = load_sheet("a6000").model_copy(update={"fitted_weights": fitted})
    form = {"experts": asked} if asked else {}
    shape = quantised(QWEN, Quantisation.model_validate(form))
    said: list[str] = []
    cross_table(Question(shape, UniformRouting(0), 16, 1, 16), [sheet], ("gpu",), said.append)
    doubts = [line for line in said if "fitted with" in line]
    assert len(doubts) == (told is not None)
    assert all(str(told) in line and line.startswith("a6000: ") for line in doubts)


# --- the page --------------------------------------------------------------------------------------------------------


def test_shares_of_a_page_are_plain_numbers() -> None:
    from harness.cross.pages import context

    share = context(Question(SMALL, UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4), [], [], None)["shown"][
        "share"
    ]
    assert [share(one) for one in (None, 0, 0.0051, 0.098, 0.64, 0.996, 1)] == [
        "–",
        "0",
        "0.51 %",
        "10 %",
        "64 %",
        "100 %",
        "100 %",
    ]


def test_hostile_words_of_a_sheet_are_escaped(tmp_path: Path) -> None:
    from harness.cross.pages import write_page

    sheet = load_sheet("a100").model_copy(update={"description": "<script>alert(1)</script>"})
    question = Question(SMALL, UniformRouting(), prompt_tokens=4, decode_steps=1, chunk=4)
    rows = cross_table(question, [sheet], ("gpu",))
    rows.append(replace(rows[0], result="not priced", ttft_s=None, why_not="<img src=x>"))
    page = write_page(question, [sheet], rows, None, tmp_path).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page
