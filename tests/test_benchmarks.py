"""The arithmetic of the benchmarks: what limits are divided by, which rows a part of a race replaces."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.road import build
from engines.techniques.presets import DroplessParameters
from tests.benchmarks.decode_roads import BUNDLED as BUNDLED_NAME
from tests.benchmarks.decode_roads import arms_of, loader, rate, ratio_of_turns, readied, request
from tests.benchmarks.engine_speed import instructions_here, unheld
from tests.benchmarks.limits import DensePrefill, Limits, best, rate_of
from tests.benchmarks.llama_cpp import Form, LlamaBench, stored_form
from tests.benchmarks.loading import LoadFailedError, layers_of, load, resident_bytes, write_checkpoint
from tests.benchmarks.measurement import (
    FOLDER,
    Measurement,
    all_threads,
    beside,
    beside_other_machines,
    command_line,
    merged,
    page,
    read_json,
    was_quiet,
    write_page,
)
from tests.benchmarks.processors import generation
from tests.benchmarks.race_forms import FORMS, PROMPTS, conditions
from tests.benchmarks.race_models import (
    MODELS,
    REAL,
    VOCABULARY,
    active_weights,
    asked_flop,
    build_model,
    decode_bytes,
    is_sparse,
    prefill_flop,
    random_request,
    shape,
)
from tests.benchmarks.speed_summary import Peer, by_model, lowest_of_models, not_taken
from tests.benchmarks.timing import Figure, Instant, Timed, Turns, between
from tests.fakes.random_models import BUNDLED, copy_bundled

MOE, DENSE, _ = MODELS


def row(
    conditions: str, ours: float = 1.0, command: str = "python -m tests.benchmarks.x", **more: float | None
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


@pytest.mark.parametrize("name", MODELS | REAL)
def test_active_weights_are_the_matrices_of_the_model_that_transformers_builds(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
    share = shape(name)["num_experts_per_tok"] / shape(name)["num_experts"] if is_sparse(name) else 1.0
    counted = 0.0
    for parameter_name, parameter in model.model.layers.named_parameters():
        if parameter.dim() > 1:
            counted += parameter.numel() * (share if ".experts." in parameter_name else 1.0)
    assert active_weights(name) == counted


@pytest.mark.parametrize(
    ("name", "layers_of_it", "billions"),
    [("Qwen3-0.6B", 1, 0.44), ("Qwen3-4B", 1, 3.6), ("6 of the 48 layers of Qwen3-30B-A3B", 8, 29.9)],
)
def test_real_shapes_have_as_many_weights_without_embedding_as_their_model_cards_say(
    name: str, layers_of_it: int, billions: float
) -> None:
    with torch.device("meta"):
        model = build_model(name)
    counted = layers_of_it * sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert counted / 1e9 == pytest.approx(billions, rel=0.015)


def test_the_dense_model_is_of_the_active_size_of_the_sparse_one() -> None:
    assert active_weights(DENSE) == pytest.approx(active_weights(MOE), rel=0.02)


def test_prefill_counts_each_pair_of_query_and_key_that_causal_attention_computes() -> None:
    n = 5
    attention = sum(2 * 2 * (query + 1) for query in range(n)) * 8 * 16 * 64
    assert prefill_flop(DENSE, n) == 2 * active_weights(DENSE) * n + attention


def test_a_prompt_asked_about_at_its_end_needs_keys_and_values_of_the_others_in_the_last_layer() -> None:
    n, hidden = 5, 1024
    kept = (n - 1) * 2 * 2 * hidden * 8 * 64
    whole_layer = 2 * active_weights(DENSE) // 8
    attention = sum(2 * 2 * (query + 1) for query in range(n)) * 7 * 16 * 64 + 2 * 2 * n * 16 * 64
    assert asked_flop(DENSE, n) == whole_layer * (7 * n + 1) + kept + attention


def test_decode_reads_weights_head_and_a_cache_of_16_bits() -> None:
    no_context = decode_bytes(DENSE, 4.5, 0)
    assert no_context == (active_weights(DENSE) + 2048 * 1024) * 4.5 / 8
    assert decode_bytes(DENSE, 4.5, 100) - no_context == 100 * 8 * 2 * 8 * 64 * 2


def test_the_limit_is_the_way_with_the_best_median_not_the_best_turn() -> None:
    limit = best({"steady": Turns([10.0, 10.0, 10.0]), "lucky once": Turns([5.0, 5.0, 30.0])}, 3)
    assert (limit.figure.median, limit.way) == (10.0, "steady")


def test_the_limit_of_prefill_is_the_best_way_of_the_same_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.limits.read_ways", dict)
    rates = {"fp32": {"ours": 2e11, "other": 1e11}, "int8": {"ours": 5e11, "other": 6e11}}
    limits = Limits(1, {by: {who: partial(float, rate) for who, rate in ways.items()} for by, ways in rates.items()})  # type: ignore[misc]
    limits.turn()
    found = {by: limits.flop_per_s(by) for by in ("fp32", "int8")}  # type: ignore[arg-type]
    assert {by: (limit.figure.median, limit.way) for by, limit in found.items()} == {
        "fp32": (2e11, "ours"),
        "int8": (6e11, "other"),
    }


def test_a_rate_is_that_of_the_fastest_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([3.0, 2.0, 4.0])
    monkeypatch.setattr("tests.benchmarks.limits.timed", lambda work: Timed(next(seconds), True))
    assert rate_of(100, lambda: None)() == 50


def test_a_prefill_of_the_dense_model_is_told_in_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaBench, "prefill", lambda self, gguf, n_prompt: 10.0)
    found = DensePrefill(LlamaBench("llama-bench"), Path("f32.gguf"), DENSE, n_prompt=1).flop_per_s()
    # Two operations a weight, and of one key two for qk and two for pv in 8 layers of 16 heads of 64.
    assert found == 10 * (2 * active_weights(DENSE) + 4 * 8 * 16 * 64)


def test_a_neighbour_of_more_than_a_tenth_of_the_machine_disturbs_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    start = Instant(at_s=0.0, busy_s=50.0, own_s=5.0)
    assert between(start, Instant(at_s=10.0, busy_s=50.0 + 20.0, own_s=5.0 + 18.5)).is_quiet
    assert not between(start, Instant(at_s=10.0, busy_s=50.0 + 20.0, own_s=5.0 + 17.5)).is_quiet


def test_disturbed_turns_count_only_where_quiet_ones_are_too_few_and_then_say_so() -> None:
    turns = Turns(quiet=[10.0, 12.0], disturbed=[2.0])
    assert turns.figure(2) == Figure(11.0, "2 turns", True)
    assert turns.figure(3) == Figure(10.0, "DISTURBED: 1 of 3 turns", False)


def test_a_disturbed_figure_is_told_without_a_ratio() -> None:
    quiet, disturbed = Figure(30.0, "3 turns", True), Figure(10.0, "DISTURBED: 3 of 3 turns", False)
    assert beside("decode", "token/s", "here", quiet, Figure(20.0, "3 turns", True), "peer", 2.0).ratio == 1.5
    row = beside("decode", "token/s", "here", quiet, disturbed, "peer", 2.0)
    assert (row.peer, row.ratio, row.target) == (10.0, None, None)
    assert row.note == "ours 3 turns, peer DISTURBED: 3 of 3 turns"


def test_a_part_replaces_all_rows_of_its_conditions_and_no_others() -> None:
    kept = [row("a", 1.0), row("a", 2.0), row("b", 3.0)]
    assert [(m.conditions, m.ours) for m in merged(kept, [row("a", 9.0)])] == [("b", 3.0), ("a", 9.0)]


def test_a_disturbed_race_does_not_replace_quiet_rows() -> None:
    quiet, disturbed = row("a", peer=2.0, ratio=0.5), row("a", peer=2.0, ratio=None)
    assert was_quiet([quiet, row("b")], [disturbed])
    assert not was_quiet([quiet], [quiet])
    assert not was_quiet([quiet, disturbed], [disturbed])
    assert not was_quiet([row("b", peer=2.0, ratio=0.5)], [disturbed])


@pytest.mark.parametrize(
    ("built_for", "has_more", "label"),
    [("AVX2", True, "AVX2 held"), ("AVX2", False, "AVX2"), ("AVX-512", True, "AVX-512"), (None, True, "torch alone")],
)
def test_a_row_says_that_its_kernels_were_held_to_less_than_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, has_more: bool, label: str
) -> None:
    monkeypatch.setattr("tests.benchmarks.engine_speed.loaded", lambda: SimpleNamespace(instruction_set=built_for))
    monkeypatch.setattr("tests.benchmarks.engine_speed.has", lambda instruction_set: has_more)
    monkeypatch.setattr("tests.benchmarks.engine_speed.generation", lambda: "Zen 9")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("MKL_ENABLE_INSTRUCTIONS", raising=False)
    assert instructions_here() == f"{label} (Zen 9)"
    lacking = ["ONEDNN_MAX_CPU_ISA=AVX2", "MKL_ENABLE_INSTRUCTIONS=AVX2"] if label == "AVX2 held" else []
    assert unheld() == lacking


@pytest.mark.parametrize(
    ("named", "called"),
    [
        ("AMD EPYC (family 25, model 1)", "Zen 3"),
        ("AMD EPYC (family 25, model 17)", "Zen 4"),
        ("AMD EPYC (family 25, model 97)", "Zen 4"),
        ("AMD EPYC (family 26, model 2)", "Zen 5"),
        ("AMD EPYC (family 26, model 128)", "family 26 model 128"),
        ("Intel(R) Xeon(R) Processor (family 6, model 143)", "Sapphire Rapids"),
        ("Intel(R) Xeon(R) Processor (family 6, model 1)", "family 6 model 1"),
        ("aarch64 (implementer 0x41, part 0xd40)", "aarch64 (implementer 0x41, part 0xd40)"),
    ],
)
def test_rows_name_the_generation_of_a_processor(named: str, called: str) -> None:
    assert generation(named) == called


def test_the_command_names_the_arguments_so_that_a_shell_takes_them() -> None:
    argv = ["/somewhere/tests/benchmarks/engine_speed.py", "dense, width 2048", "--turns", "1"]
    assert command_line(argv) == "python -m tests.benchmarks.engine_speed 'dense, width 2048' --turns 1"
    with_folder = [argv[0], "--fits", "/tmp/of-mine/fits"]
    assert command_line(with_folder) == "python -m tests.benchmarks.engine_speed --fits fits"


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


def test_what_was_found_here_replaces_rows_of_this_machine_alone(tmp_path: Path) -> None:
    there = row("a", 1.0).model_copy(update={"machine": "another"})
    write_page("x", "t", [row("a", 2.0), row("b", 3.0), there], "r", tmp_path)
    found = beside_other_machines("x", [row("a", 4.0)], tmp_path)
    assert [(m.conditions, m.ours, m.machine) for m in found] == [("a", 4.0, "m"), ("a", 1.0, "another")]
    assert "another" in page("t", found, "r")


def test_rows_come_back_from_the_json_as_they_were(tmp_path: Path) -> None:
    found = [row("a", peer=2.0, ratio=0.5), row("b")]
    assert read_json("x", tmp_path) == []
    write_page("x", "t", found, "r", tmp_path)
    assert read_json("x", tmp_path) == found


def test_the_page_names_the_figures_that_it_lacks() -> None:
    everything = [row(conditions(name, form, n, "AVX2")) for name in MODELS for form in FORMS for n in PROMPTS]
    assert not_taken(everything) == "none"
    lacking = [m for m in everything if not m.conditions.startswith(f"{DENSE}, bf16,")]
    assert not_taken(lacking[1:]) == (
        f"AVX2, prompt 512: f32 of {MOE}; bf16 of {DENSE}. AVX2, prompt 4096: bf16 of {DENSE}"
    )
    both = [*everything, *(row(conditions(name, "f32", PROMPTS[0], "AVX-512")) for name in MODELS)]
    others = ", ".join(form for form in FORMS if form != "f32")
    assert not_taken(both) == (
        f"AVX-512, prompt 512: {others} of all models. AVX-512, prompt 4096: {', '.join(FORMS)} of all models"
    )


def raced(name: str, form: str, prefill: float | None, decode: float | None) -> list[Measurement]:
    """Beside llama.cpp and, at half the ratio, beside the limits."""
    at = row(conditions(name, form, 512, "AVX2"))
    return [
        at.model_copy(update={"metric": metric, "peer_name": peer, "ratio": None if ratio is None else share * ratio})
        for metric, limit, ratio in (("prefill", "large GEMM", prefill), ("decode", "streaming read", decode))
        for peer, share in (("llama.cpp f32", 1.0), (limit, 0.5))
    ]


def test_the_summary_tells_each_model_and_the_lowest_of_all() -> None:
    found = [*raced(MOE, "f32", 2.0, 1.5), *raced(DENSE, "f32", 1.25, 1.75), *raced(DENSE, "int8", None, 1.0)]
    assert by_model(found).splitlines()[-2:] == [
        "| f32 | 2.00 / 1.50 | 1.00 / 0.75 | 1.25 / 1.75 | 0.62 / 0.88 |  |  |",
        "| int8 |  |  | — / 1.00 | — / 0.50 |  |  |",
    ]
    lowest = dict(line.strip("| ").split(" | ") for line in lowest_of_models(found, 512, "llama.cpp").splitlines()[2:])
    assert lowest == {"f32": "1.25 / 1.50", "int8": "— / 1.00"}


@pytest.mark.parametrize(
    ("n_prompt", "peers"), [(512, ("llama.cpp",)), (4096, ("llama.cpp",)), (512, ("large GEMM", "streaming read"))]
)
def test_the_page_on_the_engine_has_the_tables_of_the_race(n_prompt: int, peers: tuple[Peer, ...]) -> None:
    text = (FOLDER.parent / "engine.md").read_text(encoding="utf-8")
    assert lowest_of_models(read_json("engine-speed"), n_prompt, *peers) in text


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


def test_peaks_are_read_from_the_kernels_status_of_a_process() -> None:
    status = "Name:\tpython\nVmHWM:\t  413728 kB\nVmRSS:\t  413000 kB\nRssAnon:\t  200044 kB\nThreads:\t2\n"
    assert resident_bytes(status) == {"VmHWM": 413728 * 1024, "RssAnon": 200044 * 1024}
    assert resident_bytes("Name:\tpython\nState:\tZ (zombie)\n") == {}


def test_the_checkpoint_to_load_is_as_large_as_asked_and_as_transformers_names_it(tmp_path: Path) -> None:
    import transformers

    n_bytes = write_checkpoint(tmp_path, "bfloat16", 1)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig.from_pretrained(tmp_path))
    assert n_bytes == sum(parameter.numel() for parameter in model.parameters()) * 2
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) == pytest.approx(n_bytes, rel=1e-3)
    embedding_and_head = 2 * 2048 * 1024 * 2
    assert layers_of(4.0, "bfloat16") * (n_bytes - embedding_and_head) == pytest.approx(4e9, rel=0.02)


def test_a_watched_load_tells_its_peaks_and_one_beyond_its_limit_its_last_words() -> None:
    found = load("joulebench", BUNDLED, "float32", limit_bytes=4 << 30)
    assert 0 < found.ready_s < found.first_token_s
    assert len(found.token_ids) == 4
    assert 0 < found.peak_private_bytes < found.peak_resident_bytes
    with pytest.raises(LoadFailedError, match=r"\w"):  # whichever import was the first to ask for too much
        load("joulebench", BUNDLED, "float32", limit_bytes=32 << 20)


def test_arms_of_the_roads_decode_the_rows_that_they_are_named_after() -> None:
    """The bundled model has four layers of 16 experts, two a token: blocks that suffice for any routing are 2 + 15."""
    has_kernels = build().road == "kernels"
    for name, arm in arms_of(16, BUNDLED_NAME).items():
        engine, rows_per_token, road = readied(loader(BUNDLED_NAME, torch.float32), "fp32", arm)
        rows = 2 * (32 if "32 rows" in name else 4 if "4 rows" in name else 1)
        assert rows_per_token == 4 * (17 if "sufficient" in name else rows)
        waits = "planned" in name
        assert road == ("fused" if has_kernels and not waits else "plan by plan")
        if "all experts" in name:
            assert rate(engine, request(1)) > 0
            assert engine.take_counters().misses == 0


def test_a_turn_is_compared_with_the_same_turn_of_the_baseline() -> None:
    assert ratio_of_turns([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]) == 3.0


def test_no_end_token_ends_an_answer_of_a_race(tmp_path: Path) -> None:
    """The time was told to be of all tokens, and an answer that ended early looked several times as fast."""
    folder = copy_bundled(tmp_path / "ends-at-once")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": list(range(VOCABULARY))}))
    engine = ReferenceEngine(load_checkpoint(str(folder), torch.float32), DroplessParameters())
    requests = [random_request(5, 7, str(n)) for n in range(2)]
    assert requests[0].prompt_ids != requests[1].prompt_ids
    heard: list[str] = []
    answers = engine.run_batch(requests, lambda event, at_s: heard.append(event))
    assert [answer.n_generated for answer in answers] == [7, 7]
    # decode_batches takes the time between the last two: of all tokens but the first ones.
    assert heard[-2:] == ["prefill end", "request end"]
    ended = engine.run(requests[0].model_copy(update={"ignore_end_tokens": False}), lambda event, at_s: None)
    assert ended.n_generated == 1


@pytest.mark.parametrize(
    "name", ["decode-batches", "engine-speed", "kept-cache", "last-layer", "long-prompts", "real-shapes"]
)
def test_no_page_tells_other_threads_than_its_rows_have(name: str) -> None:
    """One was written by a process of one thread, and said so of rows of two."""
    remarks = (FOLDER / f"{name}.md").read_text(encoding="utf-8").partition("\n|")[0]
    (told,) = re.findall(r"\d+ threads", remarks)
    machines = {row.machine for row in read_json(name)}
    assert machines
    assert [machine for machine in machines if f", {told}," not in machine] == []


def test_a_race_is_not_run_with_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit, match="OMP_NUM_THREADS"):
        all_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert all_threads() == torch.get_num_threads()
