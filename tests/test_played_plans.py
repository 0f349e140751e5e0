"""Plans whose model does not run: routing of a named source is played, and priced on modelled devices."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.models.sheet import load_sheet
from engines.model.quantised import Quantisation
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES, quantised, sizes_of
from harness.cross.arms import FILLED, arms_on
from harness.plan import Plan, PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.session import PreparedCell, run_trial
from results.counters import EngineCounters
from results.records import NO_MODEL
from results.trials import Trial
from tests.command import joulebench
from tests.plans import BOOLQ, DROPLESS, FAST, HOST, M2_ULTRA, MODEL, Raw, raw_plan, write_plan

N_PROMPT, N_NEW, CHUNK = 96, 6, 64
GPU_NDP: Raw = {"name": "model:rtx5080-ndp"}
LENGTHS: Raw = {"name": "fixed_lengths", "prompt_tokens": N_PROMPT, "new_tokens": N_NEW, "limit": 2}
UNIFORM: Raw = {"shape": "olmoe-1b-7b", "routing": {"kind": "uniform", "seed": 3}}
FETCHED: Raw = {"name": "on-demand", "technique": {"name": "on-demand"}, "prefill_chunk": CHUNK}


def played_plan(**changes: Any) -> Raw:
    given: Raw = {"model": UNIFORM, "engine": [FETCHED], "workload": [LENGTHS], "device": [GPU_NDP]}
    return raw_plan(**(given | changes))


def checked(**changes: Any) -> tuple[Plan, RunParts]:
    draft = draft_plan(played_plan(**changes))
    parts = RunParts(draft.plan.protocol)
    return preflight(draft, parts), parts


def problems(**changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        checked(**changes)
    return list(caught.value.problems)


def trial_of(plan: Plan, parts: RunParts) -> tuple[PreparedCell, Trial]:
    (cell_plan,) = plan.cells
    arm = parts.arm(cell_plan)
    trial, _ = run_trial(arm, plan.protocol, 0)
    return arm, trial


# --- the figures -----------------------------------------------------------------------------------------------------

SAME = (
    ("rtx5080-ndp", "on-demand", {}, None),
    ("rtx5080-ndp", "fiddler", {}, None),
    ("rtx5080-ndp", "monde", {"ndps": 2}, None),
    ("rtx5080-ndp", "ndp", {"ndps": 2}, None),
    ("rtx5080-ndp", "router-pf", {}, 0.9),
    ("rtx5080-ndp", "prefetch-hint", {}, 0.7),
    ("m2-ultra", "npumoe-tg", {"align": 4}, None),
    ("m2-ultra", "blockwise", {"block_size": 8}, None),
)


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(("sheet", "technique", "given", "recall"), SAME, ids=[f"{one[1]}-{one[0]}" for one in SAME])
def test_a_run_gives_the_figures_of_the_cell(
    sheet: str, technique: str, given: Raw, recall: float | None, warmup: int
) -> None:
    """Of each request of a window: seconds, joules and counters are those of a cell with the requests before it."""
    engine = {"name": "arm", "technique": {"name": technique, **given}, "prefill_chunk": CHUNK}
    model = UNIFORM | ({} if recall is None else {"recall": recall})
    plan, parts = checked(
        model=model, engine=[engine], device=[{"name": f"model:{sheet}"}], protocol=FAST | {"warmup": warmup}
    )
    _, trial = trial_of(plan, parts)
    cells = [
        price_cell(
            Cell(
                load_sheet(sheet), NAMED_SHAPES["olmoe-1b-7b"], parameters(technique, **given), UniformRouting(3),
                N_PROMPT, N_NEW - 1, CHUNK, recall=recall, n_before=n_before,
            )
        )
        for n_before in range(2)
    ]  # fmt: skip
    for completion, cell in zip(trial.completions, cells, strict=True):
        assert completion.ttft_s == pytest.approx(cell.ttft_s, rel=1e-12)
        assert completion.tpot_s == pytest.approx(cell.tpot_s, rel=1e-12)
        assert completion.e2e_s == pytest.approx(cell.e2e_s, rel=1e-12)
    # What was fetched and not used is known where a window ends, and a cell is one request.
    left_out = {"prefetched_unused": None}
    total = EngineCounters.total([cell.counters for cell in cells])
    assert trial.counters is not None
    assert trial.counters.model_copy(update=left_out) == total.model_copy(update=left_out)
    known = [one for one, j in cells[0].joules.items() if j is not None]
    for component in known:
        (whole_j,) = [r.energy_j for r in trial.energy if r.phase == "all" and r.component == component]
        assert whole_j == pytest.approx(sum(cell.joules[component] or 0.0 for cell in cells), rel=1e-12)
    assert known or "ndp" in sheet


def test_what_was_prefetched_in_vain_is_counted_as_in_the_cell() -> None:
    engine = {"name": "ndp", "technique": {"name": "ndp", "ndps": 2}, "prefill_chunk": CHUNK}
    _, trial = trial_of(*checked(engine=[engine], workload=[LENGTHS | {"limit": 1}]))
    cell = Cell(
        load_sheet("rtx5080-ndp"), NAMED_SHAPES["olmoe-1b-7b"], parameters("ndp", ndps=2), UniformRouting(3),
        N_PROMPT, N_NEW - 1, CHUNK,
    )  # fmt: skip
    assert trial.counters == price_cell(cell).counters
    assert trial.counters is not None
    assert trial.counters.prefetched_unused


@pytest.mark.parametrize("forms", [{}, {"experts": "int4-g32"}])
def test_two_buffers_take_the_memory_that_cross_gives_them(forms: dict[str, str]) -> None:
    """A GPU that does not hold two layers of experts: what `cross` prices there, a plan is priced as."""
    sheet = load_sheet("rtx5080-ndp")
    shape = quantised(NAMED_SHAPES["olmoe-1b-7b"], Quantisation.model_validate(forms))
    capacity_bytes = (shape.others_bytes + 100 * shape.expert_bytes) / FILLED
    gpu = sheet.memories["gpu"].model_copy(update={"value": capacity_bytes})
    small = sheet.model_copy(update={"memories": {**sheet.memories, "gpu": gpu}})
    (arm,) = arms_on(small, shape, ("on-demand",))
    given = dict(arm.changed)["expert_memory"]
    engine = FETCHED | {"expert_memory": given} | ({"quantise": forms} if forms else {})
    plan, parts = checked(engine=[engine], workload=[LENGTHS | {"limit": 1}])
    _, trial = trial_of(plan, parts)
    cell = Cell(
        sheet, shape, parameters("on-demand"), UniformRouting(3), N_PROMPT, N_NEW - 1, CHUNK,
        expert_slots=arm.expert_slots,
    )  # fmt: skip
    assert trial.completions[0].e2e_s == pytest.approx(price_cell(cell).e2e_s, rel=1e-12)
    assert trial.counters == price_cell(cell).counters


def test_two_buffers_that_hold_no_token_are_refused() -> None:
    """Each holds the eight experts of a token of 2048 x 1024 x 3 values."""
    engine = FETCHED | {"expert_memory": 15 * 2 * 3 * 2048 * 1024}
    (found,) = problems(engine=[engine])
    assert "the memory for experts holds 15, and two buffers for the 8 experts of a token need 16" in found


def test_quantised_shapes_are_priced_as_such() -> None:
    forms = {"experts": "int4-g32", "head": "int8"}
    plan, parts = checked(engine=[FETCHED | {"quantise": forms}], workload=[LENGTHS | {"limit": 1}])
    _, trial = trial_of(plan, parts)
    shape = quantised(NAMED_SHAPES["olmoe-1b-7b"], plan.cells[0].engine.quantise)
    cell = price_cell(
        Cell(load_sheet("rtx5080-ndp"), shape, parameters("on-demand"), UniformRouting(3), N_PROMPT, N_NEW - 1, CHUNK)
    )
    assert trial.completions[0].e2e_s == pytest.approx(cell.e2e_s, rel=1e-12)
    # 16 layers of 64 experts of 3 x 2048 x 1024 values, 4 bits and a scale of 32 bits for each 32.
    n_values = 16 * 64 * 3 * 2048 * 1024
    n_parameters = n_values + 16 * 4 * 2048 * 2048 + 16 * 64 * 2048 + 2 * 50304 * 2048
    assert trial.n_parameters == n_parameters
    plain = trial_of(*checked(workload=[LENGTHS | {"limit": 1}]))[1]
    assert plain.weight_bytes == 2 * n_parameters
    head_saved = 2048 * 50304 * (16 - 8 - 32 / 2048) / 8
    assert plain.weight_bytes is not None
    assert trial.weight_bytes == pytest.approx(plain.weight_bytes - n_values * (16 - 5) / 8 - head_saved, abs=1)


def test_nothing_is_said_of_answers() -> None:
    _, trial = trial_of(*checked())
    assert trial.time_method == "modelled"
    assert trial.road is None
    assert not trial.scores
    assert f"not scored: {NO_MODEL}" in trial.notes
    assert all(c.text == "" and c.loglikelihood is None for c in trial.completions)


def test_the_heat_is_of_the_routing_that_was_played() -> None:
    _, trial = trial_of(*checked(workload=[LENGTHS | {"limit": 1}]))
    source, facts = UniformRouting(3), NAMED_SHAPES["olmoe-1b-7b"]
    sizes = sizes_of(facts)
    assert sizes is not None
    ids_LTK = source.ids_LTK(sizes, N_PROMPT + N_NEW - 1)
    assert trial.heat is not None
    assert [list(row) for row in trial.heat.chosen] == [
        np.bincount(ids_TK.reshape(-1), minlength=64).tolist() for ids_TK in ids_LTK
    ]


def test_a_dense_shape_needs_no_routing() -> None:
    arm = {"name": "dropless", "technique": {"name": "dropless"}, "prefill_chunk": CHUNK}
    plan, parts = checked(model={"shape": "llama-3.2-1b"}, engine=[arm], device=[M2_ULTRA])
    _, trial = trial_of(plan, parts)
    cell = price_cell(
        Cell(
            load_sheet("m2-ultra"), NAMED_SHAPES["llama-3.2-1b"], parameters("dropless"), UniformRouting(), N_PROMPT,
            N_NEW - 1, CHUNK,
        )
    )  # fmt: skip
    assert [c.e2e_s for c in trial.completions] == pytest.approx([cell.e2e_s] * 2, rel=1e-12)
    assert trial.heat is None


# --- what a plan says ------------------------------------------------------------------------------------------------


def test_every_cell_names_its_source_of_routing() -> None:
    plan, _ = checked(sweep={"model.routing.seed": [1, 2]})
    assert [c.cell.model for c in plan.cells] == [
        f"olmoe-1b-7b[seed={seed}]; routing: {UniformRouting(seed).name}" for seed in (1, 2)
    ]
    assert {c.cell.model_note for c in plan.cells} == {NO_MODEL}


def test_arms_are_compared_under_the_same_routing_only() -> None:
    plan, _ = checked(engine=[FETCHED, {"name": "all", "technique": {"name": "fiddler"}}],
                      sweep={"model.routing.seed": [1, 2]})  # fmt: skip
    by_id = {c.cell.cell_id: c for c in plan.cells}
    assert all(by_id[c.cell.reference_id or ""].model == c.model for c in plan.cells)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    np.savez(trace, experts=np.zeros((4, 3, 1), dtype=np.uint8), offsets=np.array([0, 4]))
    told = problems(
        model={"shape": "olmoe-1b-7b", "routing": {"kind": "trace", "path": str(trace), "of": "another"}},
        engine=[
            DROPLESS | {"threads": 2},
            {"name": "predicts", "technique": {"name": "est-pf"}},
            FETCHED | {"quantise": {"dense": "int8"}, "reuse_prefix": True},
            {"name": "oracle", "technique": {"name": "oracle"}},
        ],
        workload=[LENGTHS, BOOLQ],
        device=[GPU_NDP, HOST],
    )
    wanted = (
        "device host: measures what runs, and no model runs",
        "engine dropless: threads: no model runs",
        "engine on-demand: reuse_prefix: no model runs",
        "engine oracle: oracle checks what others compute",
        "workload boolq: asks texts, and no model runs that could read them; take fixed_lengths or azure_trace",
        "model.recall: missing; predicts predicts experts",
        "model.routing: the trace of another has 3 layers of 64 experts, top-1, and the model that is priced has 16",
    )
    for line in wanted:
        assert any(one.startswith(line) for one in told), (line, told)
    assert len(told) == len(wanted), told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": {"shape": "olmoe-1b-7b"}}, "model.routing: missing; a model that does not run says where"),
        ({"model": UNIFORM | {"source": MODEL}}, "model.source: names a model that runs, and shape one that does not"),
        ({"model": UNIFORM | {"dtype": "float32"}}, "model.dtype: is of weights that are loaded"),
        ({"model": {"source": MODEL, "routing": {"kind": "uniform"}}}, "model.routing: is of a model that does not"),
        ({"model": UNIFORM | {"shape": "qwen-9"}}, "model.shape: no shape 'qwen-9'; name a published model"),
        ({"model": UNIFORM | {"recall": 0.9}}, "model.recall: 0.9 is of predictions, and no engine makes any"),
        ({"model": UNIFORM | {"routing": {"kind": "drawn"}}}, "model.routing.kind: unknown kind 'drawn'; known"),
        ({"model": {"shape": "olmoe-1b-7b", "routing": {"kind": "generated", "imbalance": 0.5}}},
         "model.routing.imbalance: "),
        ({"engine": [FETCHED | {"quantise": {"dense": "int8"}}]},
         "engine on-demand: quantise.dense = 'int8': olmoe-1b-7b has no dense layer and no shared expert"),
        # 15 x 3 x 2048 x 1024 values of 5 bits
        ({"engine": [{"name": "pre", "technique": {"name": "ndp-tp-pre"}, "expert_memory": "58982400",
                      "quantise": {"experts": "int4-g32"}}]},
         "engine pre: expert_memory 58982400 bytes on model:rtx5080-ndp, of experts of 3932160 bytes: the memory for"
         " experts holds 15, and 1 in each of 16 layers need 16; write expert_memory = 62914560"),
        ({"device": [GPU_NDP | {"priced_as": "olmoe-1b-7b"}]}, "device model:rtx5080-ndp: priced_as stands for"),
        ({"model": {"shape": "llama-3.2-1b", "routing": {"kind": "uniform"}}}, "model.routing: llama-3.2-1b is dense"),
        ({"workload": [LENGTHS | {"prompt_tokens": 4096}]},
         "workload fixed_lengths: 2 of 2 requests are longer than the model's 4096 tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(changes: Raw, told: str) -> None:
    (found,) = problems(**changes)
    assert found.startswith(told)


@pytest.mark.parametrize(
    ("technique", "key", "why"),
    [
        ({"name": "router-pf", "source": "s"}, "source", "predictions have the recall that model.recall states"),
        ({"name": "prefetch-hint", "predictor": "estimator"}, "predictor", "predictions have the recall"),
        (
            {"name": "custom", "place": {"kind": "one_unit", "unit": "gpu"}, "backbone": "gpu",
             "route": {"kind": "predicted", "source": "s"}, "move": {"kind": "two_buffers"}},
            "source", "predictions have the recall",
        ),
        ({"name": "router-pf", "calibration_prompts": 20}, "calibration_prompts", "counts are those of the routing"),
        (
            {"name": "static", "unit": "gpu", "backbone": "gpu", "slots": 2, "calibration_prompts": 20},
            "calibration_prompts", "counts are those",
        ),
    ],
)  # fmt: skip
def test_what_only_a_model_that_runs_reads_of_a_technique_is_refused(technique: Raw, key: str, why: str) -> None:
    """The arm would be another under its name: no state is guessed from, and no prompt is read for calibration."""
    model = UNIFORM | ({"recall": 0.9} if technique["name"] != "static" else {})
    (found,) = problems(model=model, engine=[{"name": "arm", "technique": technique}], device=[GPU_NDP])
    assert found.startswith(f"engine arm: technique.{key}: no model runs, and {why}")
    assert found.endswith("; remove it")


def test_requests_beyond_the_shapes_context_can_be_left_out() -> None:
    """olmoe-1b-7b has 4096 positions by its config.json, as `tests.fakes.published` has it."""
    long = {"prompt_tokens": 4096, "too_long": "skip", "label": "long"}
    plan, _ = checked(workload=[LENGTHS, LENGTHS | long])
    assert [cell.cell.workload for cell in plan.cells] == ["fixed_lengths"]
    assert plan.left_out == ("long: 2 of 2 requests skipped: longer than 4096 tokens",)


def test_the_plan_of_the_page_passes_its_check() -> None:
    page = (Path(__file__).parents[1] / "docs" / "plans.md").read_text(encoding="utf-8")
    plans = [tomllib.loads(one) for one in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    (raw,) = (one for one in plans if "shape" in one["model"])
    draft = draft_plan(raw)
    assert len(preflight(draft, RunParts(draft.plan.protocol)).cells) == len(raw["engine"])


def test_a_model_that_fits_nowhere_is_a_result(tmp_path: Path) -> None:
    plan = write_plan(
        tmp_path / "plan.toml",
        played_plan(engine=[{"name": "gpu", "technique": {"name": "gpu"}}, FETCHED], model=UNIFORM
                    | {"shape": "qwen3-30b-a3b"}, workload=[LENGTHS | {"limit": 1, "new_tokens": 2}]),
    )  # fmt: skip
    ran = joulebench("run", plan, "--out", tmp_path / "run")
    assert ran.code == 0, ran.stderr
    assert "1 without figures (" in ran.stdout
    summary = (tmp_path / "run" / "summary.csv").read_text()
    assert "oom: 54.0 GiB of experts of qwen3-30b-a3b" in summary
    arms = (tmp_path / "run" / "arms.csv").read_text()
    assert f",{NO_MODEL}\n" in arms  # the reason why accuracy is missing
    heat = (tmp_path / "run" / "heat.csv").read_text().splitlines()
    assert all(line.endswith(",modelled") for line in heat[1:])
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (summary, arms, page, ran.stdout):
        assert "qwen3-30b-a3b; routing: generated, all experts alike, seed 3" in " ".join(text.split())


def test_a_run_goes_on_with_the_files_that_it_began_with(tmp_path: Path) -> None:
    """A config.json and a trace are inputs: another content is told, and not mixed in."""
    trace, config = tmp_path / "trace.npz", tmp_path / "own-model" / "config.json"
    config.parent.mkdir()
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 512,
        "intermediate_size": 128, "rms_norm_eps": 1e-6, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    config.write_text(json.dumps(raw))
    random = np.random.default_rng(0)
    experts_TLK = random.permuted(np.tile(np.arange(8, dtype=np.uint8), (40, 2, 1)), axis=2)[:, :, :2]
    np.savez(trace, experts=experts_TLK, offsets=np.array([0, 20, 40]))
    model = {"shape": str(config), "routing": {"kind": "trace", "path": str(trace), "of": "own-model"}}
    plan = write_plan(tmp_path / "plan.toml", played_plan(model=model))
    out = tmp_path / "run"
    assert joulebench("run", plan, "--out", out).code == 0
    assert joulebench("run", plan, "--out", out, "--resume").code == 0
    np.savez(trace, experts=experts_TLK[::-1], offsets=np.array([0, 20, 40]))
    changed = joulebench("run", plan, "--out", out, "--resume")
    assert changed.code != 0
    assert f"other inputs (routing {trace} sha256" in " ".join(changed.stderr.split())
    np.savez(trace, experts=experts_TLK, offsets=np.array([0, 20, 40]))
    config.write_text(json.dumps(raw | {"vocab_size": 101}))
    changed = joulebench("run", plan, "--out", out, "--resume")
    assert changed.code != 0
    assert "other inputs (config.json of shape own-model sha256" in " ".join(changed.stderr.split())


@pytest.mark.parametrize(
    ("technique", "memory", "words"),
    [
        # 128 x 48 x 9,437,184 are 58.0 GB.
        ({"name": "ndp"}, "900TB", "expert_memory 900000000000000 bytes are 900 TB"),
        ({"name": "ndp", "slots": 128}, None, "slots = 128 in each of 48 layers are 6144 experts, 58 GB"),
        (
            {"name": "lru", "slots": 128, "unit": "gpu", "backbone": "gpu"},
            None,
            "slots = 128 in each of 48 layers are 6144 experts, 58 GB",
        ),
        ({"name": "fiddler", "gpu_slots": 6144}, None, "gpu_slots = 6144 experts are 58 GB"),
    ],
)
def test_what_a_gpu_keeps_fits_into_its_memory(technique: Raw, memory: str | None, words: str) -> None:
    arm: Raw = {"name": "arm", "technique": technique} | ({} if memory is None else {"expert_memory": memory})
    (told,) = problems(model=UNIFORM | {"shape": "qwen3-30b-a3b"}, engine=[arm])
    assert told == f"engine arm: {words}, and the GPU of model:rtx5080-ndp holds 17.2 GB; lower it"


def test_narrow_experts_need_less_of_a_gpu() -> None:
    """48 of 128 experts in 48 layers: 21.7 GB at two bytes a value, and half of it at one."""
    model, arm = UNIFORM | {"shape": "qwen3-30b-a3b"}, {"name": "arm", "technique": {"name": "ndp", "slots": 48}}
    assert problems(model=model, engine=[arm])
    assert checked(model=model, engine=[arm | {"quantise": {"experts": "int8"}}])[0].cells
