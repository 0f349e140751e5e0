"""What a plan names is looked at before anything runs: data, sheets, checkpoints, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.plan import Plan, PlanError, build_plan, draft_plan, read_draft
from harness.preflight import preflight
from harness.run_parts import RunParts
from tests.command import joulebench
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import write_random_model
from tests.plans import BOOLQ, DROPLESS, HERE, HOST, M2_ULTRA, NPUMOE, PHONE, TIERS, raw_plan, write_plan


def checked(**changes: Any) -> Plan:
    draft = draft_plan(raw_plan(**changes))
    return preflight(draft, RunParts(draft.plan.protocol))


def problems(**changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        checked(**changes)
    return list(caught.value.problems)


@pytest.mark.parametrize("quantise", [{"experts": "bf16", "arithmetic": "bf16"}, {"attention_arithmetic": "bf16"}])
def test_an_arm_that_this_processor_does_not_multiply_is_left_out_and_the_plan_is_no_worse(
    quantise: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.kernels.compile.lacking", list)
    monkeypatch.setattr("engines.kernels.tables.why_not_bf16", lambda: "this processor lacks it")
    arm = {"name": "rounding", "technique": {"name": "dropless"}, "quantise": quantise}
    plan = checked(engine=[TIERS | HERE, arm], device=[HOST])
    assert [c.cell.engine for c in plan.cells] == [TIERS["name"]]
    assert any("lacks AVX-512 BF16" in line for line in plan.skipped)


def test_what_a_model_has_learnt_is_noted_on_every_cell() -> None:
    plan = checked(engine=[TIERS | HERE, NPUMOE], device=[HOST, M2_ULTRA])
    assert [c.cell.model_note for c in plan.cells] == ["trained on generated text"] * 2


def test_cells_say_when_long_rotary_factors_are_taken_where_the_model_has_them(tmp_path: Path) -> None:
    write_family(tmp_path, CASES["phi3-long-rope"])
    arms = [DROPLESS, DROPLESS | {"name": "as in transformers", "long_rope": "when_reached"}]
    cells = checked(model={"source": str(tmp_path)}, engine=arms).cells
    assert [c.cell.engine_parameters["long_rope"] for c in cells] == ["at_once", "when_reached"]
    assert cells[0].cell.cell_id != cells[1].cell.cell_id
    assert all("long_rope" not in c.cell.engine_parameters for c in checked(engine=arms).cells)


def test_a_note_does_not_change_what_a_cell_is() -> None:
    raw = raw_plan()
    assert checked().plan_hash == build_plan(raw).plan_hash


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_torch_does_not_see_is_told_before_anything_runs() -> None:
    (found,) = problems(device=[HOST | {"computes": "cuda"}])
    assert "device host: computes: torch" in found
    assert "sees no cuda device" in found


def test_where_the_engine_computes_is_the_hosts_to_say() -> None:
    (found,) = problems(engine=[NPUMOE], device=[M2_ULTRA | {"computes": "mps"}])
    assert found.startswith("device[0].computes: is for the host")


def test_cells_that_compute_elsewhere_are_other_cells_and_say_so() -> None:
    here, there = build_plan(raw_plan(device=[HOST], sweep={"device.computes": ["cpu", "cuda"]})).cells
    assert here.cell.cell_id != there.cell.cell_id
    assert ("computes" in here.cell.engine_parameters, there.cell.engine_parameters["computes"]) == (False, "cuda")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"device": [{"name": "host", "meters": ["replay"], "recording": "/no/power.csv"}]},
            ["device host: recording", "/no/power.csv"],
        ),
        ({"device": [HOST | {"watts_sheet": "/no/sheet.toml"}]}, ["device host: watts_sheet", "/no/sheet.toml"]),
        (
            {"workload": [{"name": "ruler_niah_single_2", "length": 10**6, "limit": 1}]},
            ["workload ruler_niah_single_2", "1000000", "lower"],
        ),
        ({"workload": [BOOLQ | {"data": "folder"}]}, ["workload boolq", "no data folder was given"]),
        (
            {"device": [PHONE]},
            [
                "device adb:R58M42ABCDE: no engine",
                "computes on this host",
                "joulebench record --device adb:R58M42ABCDE",
            ],
        ),
    ],
)
def test_what_is_not_there_is_one_line(changes: dict[str, Any], expected: list[str]) -> None:
    (line,) = problems(**changes)
    for part in expected:
        assert part in line


def test_a_dense_model_has_no_experts_to_place(tmp_path: Path) -> None:
    write_random_model(tmp_path / "dense", "qwen2")
    (line,) = problems(model={"source": str(tmp_path / "dense")}, engine=[TIERS])
    assert "engine tiers" in line
    assert "npumoe-t places experts" in line
    assert "use dropless" in line


@pytest.mark.parametrize(
    ("kind", "quantise", "expected"),
    [
        (
            "qwen3-moe",
            {"experts": "int4-g64"},
            ["model.layers.0.mlp.experts.0.down_proj.weight", "int4-g64", "multiple of 64, not 48", "use int8"],
        ),
        ("qwen3-moe", {"attention": "int4-g128"}, ["self_attn.q_proj.weight", "multiple of 128, not 64"]),
        ("qwen3-moe", {"head": "int4-g128"}, ["lm_head.weight", "multiple of 128, not 64"]),
        ("qwen2", {"dense": "mxfp4"}, ["model.layers.0.mlp.down_proj.weight", "multiple of 64, not 96"]),
        ("qwen2", {"experts": "int8"}, ["quantise.experts has no effect", "the model is dense", "name dense"]),
        ("qwen3-moe", {"dense": "int8"}, ["quantise.dense has no effect", "no layer is dense"]),
    ],
)
def test_forms_that_do_not_fit_are_told_before_weights_are_read(
    tmp_path: Path, kind: str, quantise: dict[str, str], expected: list[str]
) -> None:
    write_random_model(tmp_path, kind)
    # The headers are there, and none of the values.
    path = tmp_path / "model.safetensors"
    header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    path.write_bytes(header + bytes(path.stat().st_size - len(header)))
    arm = {"name": "narrow", "technique": {"name": "dropless"}, "quantise": quantise}
    (line,) = problems(model={"source": str(tmp_path)}, engine=[arm])
    assert line.startswith("engine narrow: ")
    for part in expected:
        assert part in line


def test_problems_of_several_parts_are_told_together() -> None:
    found = problems(
        workload=[BOOLQ, {"name": "ruler_niah_single_2", "length": 10**6, "limit": 1}],
        device=[HOST | {"watts_sheet": "/no/sheet.toml"}],
        engine=[TIERS, TIERS | {"name": "again"}],
    )
    assert [line.split(":")[0] for line in found] == ["device host", "workload ruler_niah_single_2"]


def test_a_device_whose_settings_clash_still_has_its_files_looked_at(tmp_path: Path) -> None:
    (tmp_path / "text.csv").write_text("nothing of watts")
    device = {"name": "host", "meters": ["replay"], "watts_sheet": "mine.toml", "recording": str(tmp_path / "text.csv")}
    draft = draft_plan(raw_plan(device=[device]))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    told = " | ".join(caught.value.problems)
    assert "watts_sheet: has no effect" in told
    assert "device host: recording: " in told
    assert "device host: watts_sheet: watts sheet 'mine.toml' cannot be read" in told


def test_an_unsound_sweep_is_told_without_a_baseline_that_it_would_have_made() -> None:
    draft = draft_plan(raw_plan(engine=[DROPLESS], baseline="dropless[threads=1]", sweep={"engine.threads": []}))
    assert [problem.partition(":")[0] for problem in draft.problems] == ["sweep.engine.threads"]


def test_a_baseline_that_is_no_arm_names_each_arm_once() -> None:
    (problem,) = draft_plan(raw_plan(engine=[DROPLESS], baseline="zzzz")).problems
    assert problem.count(DROPLESS["name"]) == 1


def test_what_a_part_with_a_wrong_setting_names_is_looked_at_in_the_same_round() -> None:
    narrow = {"quantise": {"dense": "int8"}}  # the bundled model has no dense layer
    arms = [
        DROPLESS | narrow | {"name": "no such setting", "thread": 1},
        DROPLESS | narrow | {"name": "unlike settings", "max_batch": 2, "reuse_prefix": True},
        DROPLESS | narrow | {"name": "no such place", "devices": ["moon"]},
    ]
    replay = HOST | {"meters": ["replay"], "recording": "absent.parquet", "watts_shet": "generic"}
    found = problems(engine=arms, device=[replay])
    for told in (
        "engine[0].thread: unknown key",
        "engine no such setting: quantise.dense has no effect",
        "engine[1].max_batch: a batch keeps nothing",
        "engine unlike settings: quantise.dense has no effect",
        "engine[2].devices: the plan has no device 'moon'",
        "engine no such place: quantise.dense has no effect",
        "device[0].watts_shet: unknown key",
        "device host: recording: no file absent.parquet",
    ):
        assert sum(problem.startswith(told) for problem in found) == 1, told
    assert len(found) == 8
    found = problems(model={"source": "bundled:absent", "dtype": "float8"})
    assert [problem.partition(":")[0] for problem in found] == ["model.dtype", "model.source"]


@pytest.mark.parametrize(
    "changes",
    [
        {"device": [HOST | {"meters": ["replay"], "recording": "r" * 300}]},
        {"device": [HOST | {"watts_sheet": "r" * 300}]},
        {"model": {"source": "bundled:" + "r" * 300}},
        {"workload": [{"name": "lm_eval", "task": "r" * 300}]},
    ],
)
def test_a_long_value_is_told_in_part(changes: dict[str, Any]) -> None:
    (problem,) = problems(**changes)
    assert "..." in problem
    assert len(problem) < 200


def test_a_path_is_told_whole_as_far_as_somebody_may_look_for_it() -> None:
    deep = "/data/" + "results-of-the-first-phone/" * 12 + "power.csv"
    (problem,) = problems(device=[HOST | {"meters": ["replay"], "recording": deep}])
    assert problem.startswith(f"device host: recording: no file {deep}; ")
    (problem,) = problems(device=[HOST | {"meters": ["replay"], "recording": "/tmp/" + "r/" * 1500}])
    assert "r/r...r/r" in problem or "r/...r/" in problem
    assert len(problem) < 600


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("fast", "fa\u200bst", r"'fast' and 'fa\u200bst'"),
        ("caf\u00e9", "cafe\u0301", r"'caf\xe9' and 'cafe\u0301'"),
        ("fast", "fast\ufe0f", r"'fast' and 'fast\ufe0f'"),
        ("fast", "fast\u00a0", r"'fast' and 'fast\xa0'"),
    ],
)
def test_names_that_look_the_same_are_refused_and_told_apart(first: str, second: str, told: str) -> None:
    (problem,) = draft_plan(raw_plan(engine=[DROPLESS | {"name": first}, DROPLESS | {"name": second}])).problems
    assert problem == f"engine: the names {told} look the same; give each its own"
    labelled = [BOOLQ | {"label": first}, BOOLQ | {"label": second}]
    (problem,) = draft_plan(raw_plan(workload=labelled)).problems
    assert problem == f"workload: the names {told} look the same; give each its own"


def test_a_name_that_cannot_be_seen_is_refused() -> None:
    (problem,) = draft_plan(raw_plan(engine=[DROPLESS | {"name": "\u200b"}])).problems
    assert problem == r"engine: the name '\u200b' cannot be seen; give another"


NO_NPU = "has no unit 'npu' for 'expert FFN'; it has ['cpu', 'gpu']: choose a placement that keeps to these"


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ({"name": "npumoe", "costs_of": "m2-ulra"}, "costs_of: no sheet 'm2-ulra'; did you mean m2-ultra?"),
        ({"name": "npumoe", "costs_of": "a100"}, f"costs_of: sheet a100 {NO_NPU}"),
        ({"name": "npumoe", "costs_of": "a100", "objective": "joules"}, f"costs_of: sheet a100 {NO_NPU}"),
        ({"name": "npumoe", "as_shape": "phi-3.5-mo"}, "as_shape: no shape 'phi-3.5-mo'; did you mean phi-3.5-moe?"),
        (
            {"name": "custom", "place": {"kind": "shards", "cores": 64, "shard": "intermediate"}},
            "64 cores cannot share 48 columns of an expert",
        ),
    ],
)
def test_names_and_slices_that_no_trial_could_build_are_told_before_it(
    technique: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    write_family(tmp_path, CASES["qwen2-moe"])
    found = problems(model={"source": str(tmp_path)}, engine=[{"name": "a", "technique": technique}])
    assert f"engine a: {expected}" in found


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"kind": "tierz"}, "engine[0].technique.layout.kind: unknown kind 'tierz'; did you mean tiers?"),
        (
            {"kind": "tiers", "alignn": 4},
            "engine[0].technique.layout.alignn: unknown key, found 4; did you mean align?",
        ),
        ({}, 'engine[0].technique.layout: has no kind, found {}; add kind = "..."'),
    ],
)
def test_choices_are_told_by_their_kind(layout: dict[str, Any], expected: str) -> None:
    engine = {"name": "a", "technique": {"name": "custom", "layout": layout}}
    assert expected in problems(engine=[engine])


# --- parameters of a technique beside devices and models --------------------------------------------------------------

ON_PHI = M2_ULTRA | {"priced_as": "phi-3.5-moe"}
GIB = 1 << 30


@pytest.mark.parametrize(
    ("technique", "device", "expected"),
    [
        ({"name": "npumoe", "costs_of": "m2-ultra-table4"}, ON_PHI, "costs_of is read by the host only"),
        ({"name": "npumoe", "as_shape": "phi-3.5-moe"}, ON_PHI, "as_shape is read by the host only"),
        ({"name": "npumoe", "overlap": True}, HOST, "overlap is read by a modelled device only"),
        ({"name": "dropless", "unit": "gpu"}, HOST, "unit is read by a modelled device only"),
        ({"name": "dropless", "backbone": "npu"}, HOST, "backbone is read by a modelled device only"),
        ({"name": "custom", "backbone": "npu"}, HOST, "backbone is read by a modelled device only"),
    ],
)
def test_a_parameter_that_no_device_of_the_arm_reads_is_refused(
    technique: dict[str, Any], device: dict[str, Any], expected: str
) -> None:
    (line,) = problems(engine=[{"name": "a", "technique": technique}], device=[device])
    assert line.startswith(f"engine a: {expected}, and has no effect on ")


@pytest.mark.parametrize("name", ["npumoe", "anemll", "coreml-naive", "gpu"])
def test_what_a_preset_says_of_units_may_stand_on_the_host(name: str) -> None:
    assert len(checked(engine=[{"name": "a", "technique": {"name": name}}]).cells) == 1


def test_naming_all_devices_of_a_plan_leaves_nothing_unchecked(tmp_path: Path) -> None:
    """`--device` of a plan's only device is the plan itself."""
    engine = {"name": "a", "technique": {"name": "dropless", "backbone": "gpu"}}
    draft = read_draft(write_plan(tmp_path / "plan.toml", raw_plan(engine=[engine])), devices=["host"])
    parts = RunParts(draft.plan.protocol)
    try:
        with pytest.raises(PlanError, match=r"backbone is read by .* only, and has no effect on "):
            preflight(draft, parts)
    finally:
        parts.close()


def test_a_sweep_follows_the_devices_that_were_taken(tmp_path: Path) -> None:
    """A number named the arm that took the place of one that went, and a device's name one that was not there."""
    engines: list[Any] = [{"name": name, "technique": {"name": "dropless"}} for name in ("theirs", "ours", "last")]
    engines[0]["devices"] = [M2_ULTRA["name"]]
    sweep = {"engine.1.threads": [1, 2], "engine.0.prefill_chunk": [8], "engine.theirs.reuse_prefix": [True],
             f"device.{M2_ULTRA['name']}.priced_as": ["phi-3.5-moe"], "device.1.label": ["x"]}  # fmt: skip
    raw = raw_plan(engine=engines, device=[HOST, M2_ULTRA], sweep=sweep)
    plan = read_draft(write_plan(tmp_path / "plan.toml", raw), devices=["host"]).sound()
    assert [cell.cell.label.partition(" ")[0] for cell in plan.cells] == ["ours[threads=1]", "ours[threads=2]", "last"]


def test_a_parameter_that_one_device_reads_of_two_is_taken() -> None:
    technique = {"name": "npumoe", "as_shape": "phi-3.5-moe", "overlap": True}
    assert len(checked(engine=[{"name": "a", "technique": technique}], device=[HOST, ON_PHI]).cells) == 2


def test_costs_of_a_model_that_chooses_other_experts_are_refused() -> None:
    """As `priced_as` is: 16 experts, top 2, of the bundled model against 128, top 8."""
    (line,) = problems(engine=[{"name": "a", "technique": {"name": "npumoe", "as_shape": "qwen3-30b-a3b"}}])
    assert line.startswith("engine a: as_shape: cannot price this model as qwen3-30b-a3b: it has 16 experts, top-2")


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ({"name": "npumoe-tg", "graph_bytes": 1}, "graph_bytes = 1 holds no expert of 157286400 bytes"),
        ({"name": "npumoe", "graph_bytes": 1}, "graph_bytes = 1 holds no expert of 157286400 bytes"),
        (
            {"name": "npumoe-tg", "graph_bytes": 4 * GIB, "group_size": 16},
            "graph_bytes = 4294967296 with group_size = 16 makes graphs above the 1288490189 bytes that model:m2-ultra",
        ),
    ],
)
def test_graphs_that_would_not_run_where_the_arm_says_are_refused(technique: dict[str, Any], expected: str) -> None:
    (line,) = problems(engine=[{"name": "a", "technique": technique}], device=[ON_PHI])
    assert line.startswith(f"engine a: {expected}")


def test_graphs_within_the_limit_of_the_sheet_are_taken() -> None:
    """8 of 150 MiB stay below 1.2 GiB, whatever `graph_bytes` would allow; and tiny experts fit on the host."""
    fits = {"name": "npumoe-tg", "graph_bytes": 4 * GIB, "group_size": 8}
    assert len(checked(engine=[{"name": "a", "technique": fits}], device=[ON_PHI]).cells) == 1


@pytest.mark.parametrize(
    ("technique", "expected"),
    [
        ({"name": "npumoe"}, "attention npu, experts npu or cpu, in decoding npu"),
        ({"name": "npumoe", "decode_graphs": "same"}, "attention npu, experts npu or cpu"),
        ({"name": "npumoe-tg", "decode_graphs": "cpu"}, "attention npu, experts npu, in decoding cpu"),
        ({"name": "npumoe-tg"}, "attention npu, experts npu"),
    ],
)
def test_a_placement_says_where_experts_may_run(technique: dict[str, Any], expected: str) -> None:
    (cell,) = checked(engine=[{"name": "a", "technique": technique}], device=[ON_PHI]).cells
    assert cell.cell.placement == expected


@pytest.mark.parametrize(
    ("technique", "chunk", "expected"),
    [
        # 256 x 2 / 16 = 32 rows an expert of 512: 480 of 512 are padding.
        ({"name": "blockwise"}, 256, ["an expert gets 32 of a chunk of 256 tokens", "93.8 % of the rows are padding"]),
        ({"name": "blockwise", "block_size": 64}, 256, []),
        ({"name": "blockwise", "block_size": "intensity"}, 256, []),
        ({"name": "blockwise"}, 2048, []),
    ],
)
def test_blocks_that_a_chunk_leaves_mostly_empty_are_noted(
    technique: dict[str, Any], chunk: int, expected: list[str]
) -> None:
    draft = draft_plan(raw_plan(engine=[{"name": "a", "technique": technique, "prefill_chunk": chunk}]))
    warnings = preflight(draft, RunParts(draft.plan.protocol)).warnings
    assert len(warnings) == bool(expected)
    assert all(part in warnings[0] for part in expected)


@pytest.mark.slow
def test_what_is_hardly_meant_is_told_by_every_command_that_reads_a_plan(tmp_path: Path) -> None:
    """Before anything runs: of 512 rows of a block 32 are used."""
    arm = {"name": "a", "technique": {"name": "blockwise"}, "prefill_chunk": 256}
    plan = write_plan(tmp_path / "plan.toml", raw_plan(engine=[arm]))
    for command in (["plan", "check"], ["run", "--dry-run"], ["run", "--out", str(tmp_path / "run")]):
        done = joulebench(*command, str(plan))
        assert done.code == 0, done.stderr
        words = " ".join((done.stdout + done.stderr).split())
        assert "93.8 % of the rows are padding; lengthen prefill_chunk or lower block_size" in words, command
    assert words.index("93.8 %") < words.index("trial 1"), "before anything runs"
