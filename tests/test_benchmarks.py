"""The arithmetic of the benchmarks: what limits are divided by, which rows a part of a race replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benchmarks.engine_speed import FORMS, PROMPTS, Rates, conditions, not_taken
from tests.benchmarks.limits import best
from tests.benchmarks.llama_cpp import Form, stored_form
from tests.benchmarks.measurement import Measurement, command_line, merged, page, read_json, write_page
from tests.benchmarks.race_models import (
    MODELS,
    active_weights,
    build_model,
    decode_bytes,
    is_sparse,
    prefill_flop,
)
from tests.benchmarks.timing import Instant, between

MOE, DENSE, FINE = MODELS


def row(
    conditions: str, ours: float = 1.0, command: str = "python -m tests.benchmarks.x", **more: float
) -> Measurement:
    return Measurement(
        metric="decode",
        ours=ours,
        unit="token/s",
        conditions=conditions,
        machine="m",
        date="d",
        command=command,
        **more,
    )


@pytest.mark.parametrize("name", MODELS)
def test_active_weights_are_the_matrices_of_the_model_that_transformers_builds(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
    share = MODELS[name]["num_experts_per_tok"] / MODELS[name]["num_experts"] if is_sparse(name) else 1.0
    counted = 0.0
    for parameter_name, parameter in model.model.layers.named_parameters():
        if parameter.dim() > 1:
            counted += parameter.numel() * (share if ".experts." in parameter_name else 1.0)
    assert active_weights(name) == counted


def test_the_dense_model_is_of_the_active_size_of_the_sparse_one() -> None:
    assert active_weights(DENSE) == pytest.approx(active_weights(MOE), rel=0.02)


def test_prefill_counts_each_pair_of_query_and_key_that_causal_attention_computes() -> None:
    n = 5
    attention = sum(2 * 2 * (query + 1) for query in range(n)) * 8 * 16 * 64
    assert prefill_flop(DENSE, n) == 2 * active_weights(DENSE) * n + attention


def test_decode_reads_weights_head_and_a_cache_of_16_bits() -> None:
    no_context = decode_bytes(DENSE, 4.5, 0)
    assert no_context == (active_weights(DENSE) + 2048 * 1024) * 4.5 / 8
    assert decode_bytes(DENSE, 4.5, 100) - no_context == 100 * 8 * 2 * 8 * 64 * 2


def test_the_limit_is_the_way_with_the_best_median_not_the_best_turn() -> None:
    limit = best({"steady": [10.0, 10.0, 10.0], "lucky once": [5.0, 5.0, 30.0]})
    assert (limit.rate, limit.way) == (10.0, "steady")


def test_a_neighbour_of_more_than_a_tenth_of_the_machine_disturbs_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    start = Instant(at_s=0.0, busy_s=50.0, own_s=5.0)
    assert between(start, Instant(at_s=10.0, busy_s=50.0 + 20.0, own_s=5.0 + 18.5)).is_quiet
    assert not between(start, Instant(at_s=10.0, busy_s=50.0 + 20.0, own_s=5.0 + 17.5)).is_quiet


def test_disturbed_turns_count_only_where_quiet_ones_are_too_few_and_then_say_so() -> None:
    rates = Rates(quiet=[10.0, 12.0], disturbed=[2.0])
    assert rates.summary(2) == (11.0, "2 turns")
    assert rates.summary(3) == (10.0, "DISTURBED: 1 of 3 turns")


def test_a_part_replaces_all_rows_of_its_conditions_and_no_others() -> None:
    kept = [row("a", 1.0), row("a", 2.0), row("b", 3.0)]
    assert [(m.conditions, m.ours) for m in merged(kept, [row("a", 9.0)])] == [("b", 3.0), ("a", 9.0)]


def test_the_command_names_the_arguments_so_that_a_shell_takes_them() -> None:
    argv = ["/somewhere/tests/benchmarks/engine_speed.py", "dense, width 2048", "--turns", "1"]
    assert command_line(argv) == "python -m tests.benchmarks.engine_speed 'dense, width 2048' --turns 1"


def test_a_page_made_by_two_commands_says_which_row_is_whose() -> None:
    lines = page("t", [row("a", command="first"), row("b", command="second")], "r").splitlines()
    assert [line.rsplit("|", 2)[-2].strip() for line in lines if line.startswith("| decode")] == ["1", "2"]
    assert [line for line in lines if line.startswith(("1. ", "2. "))] == [
        "1. d, m. Made by `first`.",
        "2. d, m. Made by `second`.",
    ]


def test_a_page_made_by_one_command_has_no_column_for_it() -> None:
    lines = page("t", [row("a"), row("b")], "r").splitlines()
    assert "run" not in lines[4]
    assert lines[-1] == "d, m. Made by `python -m tests.benchmarks.x`."


def test_rows_come_back_from_the_json_as_they_were(tmp_path: Path) -> None:
    found = [row("a", peer=2.0, ratio=0.5), row("b")]
    assert read_json("x", tmp_path) == []
    write_page("x", "t", found, "r", tmp_path)
    assert read_json("x", tmp_path) == found


def test_the_page_names_the_figures_that_it_lacks() -> None:
    everything = [row(conditions(name, form, n)) for name in MODELS for form in FORMS for n in PROMPTS]
    assert not_taken(everything) == "none"
    lacking = [m for m in everything if not m.conditions.startswith(f"{DENSE}, bf16")]
    assert not_taken(lacking[1:]) == f"{MOE}, f32, prompt [512]; {DENSE}, bf16"


@pytest.mark.parametrize(
    ("name", "n_dimensions", "form", "stored"),
    [
        ("blk.0.attn_norm.weight", 1, "q4_0", "f32"),
        ("blk.0.ffn_gate_inp.weight", 2, "f16", "f32"),
        ("blk.0.ffn_up_exps.weight", 3, "q4_0", "q4_0"),
        ("output.weight", 2, "q4_0", "q8_0"),
        ("output.weight", 2, "q8_0", "q8_0"),
    ],
)
def test_a_gguf_keeps_norms_and_routers_fp32(name: str, n_dimensions: int, form: Form, stored: Form) -> None:
    assert stored_form(name, n_dimensions, form) == stored
