"""A run without compiled kernels cannot be taken for one with them, nor arms on unlike roads for arms on one."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from engines.base import unheard
from engines.kernels.compile import SOURCES, compilers, lacking
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.quantised import Form, Quantisation
from engines.oracle import OracleParameters
from engines.reference import ReferenceEngine
from engines.road import build
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters
from results.environments import TORCH_ALONE, Build, Road
from results.records import Request
from results.report.html import html_text
from results.roads import arithmetic_notes, comparable_roads, road_notes, road_words
from results.store import Store
from results.summary import summary
from results.trial_tables import trials
from tests.command import run_python
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer
from tests.plans import BOOLQ, FAST, raw_plan, write_plan
from tests.run_builders import cell, run, trial

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: there is one road only")
KERNELS = Road(arithmetic="kernels", decoding="fused", n_threads=2, instruction_set="AVX2", build="0123456789ab")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


GENERATE = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=3)
LOGLIKELIHOOD = Request(
    request_id="r", sample_id="s", kind="loglikelihood", prompt_ids=(5, 6, 7), continuation_ids=(8, 9)
)


@needs_compiler
def test_engine_tells_how_it_decoded_what_it_was_asked(checkpoint: Checkpoint) -> None:
    dropless = ReferenceEngine(checkpoint, DroplessParameters(), threads=1)
    dropless.run(LOGLIKELIHOOD, unheard)
    assert dropless.take_road().decoding is None, "nothing was decoded"
    dropless.run(GENERATE, unheard)
    alone = dropless.take_road()
    assert (alone.arithmetic, alone.decoding, alone.n_threads, alone.device) == ("kernels", "fused", 1, "cpu")
    assert alone.build == str(build().sha256)[:12]
    dropless.run_batch([GENERATE, GENERATE], unheard)
    assert dropless.take_road().decoding == "fused"
    waiting = ReferenceEngine(checkpoint, DroplessParameters(), threads=1, plans_first=True)
    waiting.run(GENERATE, unheard)
    assert waiting.take_road() == alone.model_copy(update={"decoding": "plan by plan"})
    waiting.run_batch([GENERATE, GENERATE], unheard)
    assert waiting.take_road().decoding == "plan by plan"
    oracle = ReferenceEngine(checkpoint, OracleParameters(), threads=1)
    oracle.run(GENERATE, unheard)
    assert oracle.take_road() == alone.model_copy(update={"decoding": "plan by plan", "prefill": "expert by expert"}), (
        "one token and one expert at a time, by its definition"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("shard", "form", "prefill"),
    [
        ("intermediate", None, "grouped"),
        ("intermediate", "int8", "grouped"),
        ("hidden", None, "expert by expert"),
    ],
)
def test_engine_tells_how_it_prefilled_slices_of_experts(shard: str, form: Form | None, prefill: str) -> None:
    loaded = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32, Quantisation(experts=form))
    technique = CustomParameters.model_validate({"place": {"kind": "shards", "shard": shard, "cores": 2}})
    engine = ReferenceEngine(loaded, technique, threads=1)
    engine.run(LOGLIKELIHOOD, unheard)
    assert engine.take_road().prefill == prefill
    assert engine.take_road().prefill is None, "nothing was prefilled since"


SHARDS = {"place": {"kind": "shards", "cores": 2}}


@needs_compiler
@pytest.mark.parametrize(
    ("family", "technique", "decoding"),
    [
        # Norms of OLMoE's queries are over all heads: the kernels compute its experts, and not its layers whole.
        ("olmoe", {}, "layer by layer"),
        # Slices are known beforehand, whatever is chosen.
        ("olmoe", SHARDS, "layer by layer"),
        # Experts that the kernels do not know.
        ("gpt-oss", {}, "plan by plan"),
        ("gpt-oss", SHARDS, "plan by plan"),
        ("llama4", {}, "plan by plan"),
    ],
)
def test_decoding_that_waits_for_plans_is_a_road_of_its_own(
    family: str, technique: dict[str, object], decoding: str, tmp_path: Path
) -> None:
    write_family(tmp_path, CASES[family])
    copy_tokenizer(tmp_path)
    loaded = load_checkpoint(str(tmp_path), torch.float32)
    engine = ReferenceEngine(loaded, CustomParameters.model_validate(technique), threads=1)
    engine.run(GENERATE, unheard)
    assert engine.take_road().decoding == decoding


def test_arms_that_wait_for_plans_are_not_compared_with_those_that_do_not() -> None:
    by_layer, by_plan = (KERNELS.model_copy(update={"decoding": d}) for d in ("layer by layer", "plan by plan"))
    assert comparable_roads([trial(road=by_layer)]) != comparable_roads([trial(road=by_plan)])
    assert noted(by_layer, by_layer, by_plan) == [
        "gsm8k · host: the arms differ in how they were computed too, not in their techniques alone (tiers: decoding"
        " layer by layer; oracle: decoding plan by plan)."
    ]  # fmt: skip


def test_arms_that_prefilled_in_unlike_ways_are_told_and_a_store_of_before_is_read() -> None:
    old = {"arithmetic": "kernels", "decoding": "fused", "n_threads": 2, "instruction_set": "AVX2",
           "build": "0123456789ab"}  # fmt: skip
    assert Road.model_validate(old) == KERNELS
    grouped, single = (KERNELS.model_copy(update={"prefill": p}) for p in ("grouped", "expert by expert"))
    assert noted(grouped, grouped, single) == [
        "gsm8k · host: the arms differ in how they were computed too, not in their techniques alone (tiers: prefill"
        " grouped; oracle: prefill expert by expert)."
    ]  # fmt: skip
    assert comparable_roads([trial(road=grouped)]) != comparable_roads([trial(road=single)])


def test_arithmetic_of_an_accelerator_is_torchs(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters(), threads=1, compute_dtype=torch.bfloat16)
    engine.run(GENERATE, unheard)
    road = engine.take_road()
    assert (road.arithmetic, road.dtype, road.build, road.decoding) == ("torch", "bfloat16", None, "plan by plan")
    assert road.instruction_set == torch.backends.cpu.get_cpu_capability()


COMPILED = [
    ("x86-64-v3", "AVX2"),
    ("x86-64-v3 -mavxvnni", "AVX2 with VNNI"),
    ("x86-64-v4", "AVX-512 without VNNI"),
    ("x86-64-v4 -mavx512vnni", "AVX-512"),
    ("x86-64", "SSE2"),
]


NATIVE_MACROS = {
    "avx2": "__AVX2__",
    "fma": "__FMA__",
    "avx_vnni": "__AVXVNNI__",
    "avx512f": "__AVX512F__",
    "avx512vl": "__AVX512VL__",
    "avx512bw": "__AVX512BW__",
    "avx512dq": "__AVX512DQ__",
    "avx512_vnni": "__AVX512VNNI__",
}


@needs_compiler
@pytest.mark.skipif("JOULEBENCH_KERNEL_FLAGS" in os.environ, reason="kernels for another processor are asked for")
def test_kernels_say_what_this_processor_has() -> None:
    """As the kernel of the system lists it, but for what the compiler does not know or leaves out: GCC 10 has no
    AVX-VNNI, and a virtual machine may list what it does not let programs use."""
    listed, found = Path("/proc/cpuinfo"), build()
    lines = listed.read_text().splitlines() if listed.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    command = [*next(compilers()).command, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    defined = {words[1] for line in done.stdout.splitlines() if len(words := line.split()) > 1}
    has = {flag for flag, macro in NATIVE_MACROS.items() if flag in flags and macro in defined}
    if not {"avx2", "fma"} <= has:
        pytest.skip("a processor with another list, or without AVX2")
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= has:
        assert found.instruction_set == ("AVX-512" if "avx512_vnni" in has else "AVX-512 without VNNI")
    else:
        assert found.instruction_set == ("AVX2 with VNNI" if "avx_vnni" in has else "AVX2")
    assert str(found.flags).startswith("-O3")
    assert str(found.flags).endswith(" -march=native")


@needs_compiler
@pytest.mark.parametrize(("march", "named"), COMPILED)
def test_kernels_say_what_they_would_be_compiled_for(march: str, named: str) -> None:
    """Their source as the compiler reads it: on any x86, whatever it has, and in a fraction of a second."""
    if "x86" not in platform.machine():
        pytest.skip("names of x86")
    command = [*next(compilers()).command, "-std=c++17", *f"-march={march}".split(), "-E", "-P", "-x", "c++"]
    if subprocess.run([*command, os.devnull], capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler does not know -march={march}")
    (source,) = (path for path in SOURCES if path.name == "kernels.cpp")
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
    told = re.findall(r'joulebench_instruction_set\(\)\s*{\s*return "([^"]+)";\s*}', done.stdout)
    assert told == [named]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("march", "named"), COMPILED)
def test_kernels_say_what_they_were_compiled_for(march: str, named: str, tmp_path: Path) -> None:
    if "x86" not in platform.machine():
        pytest.skip("names of x86")
    needed = {"AVX2 with VNNI": "avx_vnni", "AVX-512": "avx512_vnni", "AVX-512 without VNNI": "avx512f"}.get(named)
    if needed and lacking([needed]):
        pytest.skip(f"this processor lacks {needed}, and refuses such kernels")
    script = "from engines.road import build; b = build(); print(b.instruction_set, b.flags)"
    own = {"JOULEBENCH_KERNEL_FLAGS": f"-march={march} -O0", "XDG_CACHE_HOME": str(tmp_path)}
    done = run_python(script, variables=own)
    assert done.code == 0, done.stderr
    assert done.stdout.startswith(f"{named} -O3")
    assert done.stdout.strip().endswith(f" -march={march} -O0")


COMMAND_LINE = "from harness.cli import main; main()"


@pytest.mark.parametrize("has_kernels", [True, False])
def test_store_csv_report_and_terminal_say_what_computed(has_kernels: bool, tmp_path: Path) -> None:
    if has_kernels and build().road == "torch":
        pytest.skip("no kernels here")
    plan = write_plan(tmp_path / "plan.toml", raw_plan(workload=[BOOLQ | {"limit": 1}], protocol=FAST))
    (tmp_path / "empty").mkdir()
    without = {"PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    out = tmp_path / "run"
    command = ("run", str(plan), "--out", str(out))
    done = run_python(COMMAND_LINE, *command, variables={} if has_kernels else without)
    assert done.code == 0, done.stderr
    store = Store.view(out)
    stored, (one,) = store.info().environments["host"].build, store.trials()
    store.close()
    assert stored is not None
    assert one.road is not None
    assert stored.road == one.road.arithmetic == ("kernels" if has_kernels else "torch")
    words = str(stored.sha256)[:12] if has_kernels else "no C++ compiler found"
    page = (out / "report.html").read_text()
    assert " ".join(done.stdout.split()).count(words) == 1  # two lines said why, one below the other
    assert words in page
    assert (f"the engine ran on torch alone, {TORCH_ALONE}" in page) is not has_kernels
    for table in ("trials.csv", "summary.csv"):
        (road,) = pd.read_csv(out / table)["road"].unique()
        assert road.startswith(f"{stored.road}, "), table
    assert ("the engine runs on torch alone" in done.stderr) is not has_kernels


def noted(first: Road | None, second: Road | None, third: Road | None) -> list[str]:
    """Two repeats of one arm, and another arm."""
    cells = [cell("c1", engine="tiers"), cell("c2", engine="oracle")]
    repeats = [trial("c1", 0, road=first), trial("c1", 1, road=second), trial("c2", 0, road=third)]
    return road_notes(run(cells, repeats))


def test_a_name_with_a_comma_does_not_run_into_the_next() -> None:
    by_plan = KERNELS.model_copy(update={"decoding": "plan by plan"})
    cells = [cell("c1", engine="router-pf, q"), cell("c2", engine="hint"), cell("c3", engine="lru")]
    trials = [trial("c1", 0, road=by_plan), trial("c2", 0, road=by_plan), trial("c3", 0, road=KERNELS)]
    (told,) = road_notes(run(cells, trials))
    assert "(“router-pf, q”, hint: decoding plan by plan; lru: decoding fused)" in told


def test_arms_and_repeats_on_unlike_roads_are_told() -> None:
    slow = KERNELS.model_copy(update={"decoding": "layer by layer"})
    other_build = KERNELS.model_copy(update={"build": "ba9876543210"})
    assert noted(KERNELS, KERNELS, KERNELS) == []
    assert noted(None, None, None) == []
    assert noted(KERNELS, KERNELS, slow) == [
        "gsm8k · host: the arms differ in how they were computed too, not in their techniques alone (tiers: decoding"
        " fused; oracle: decoding layer by layer)."
    ]  # fmt: skip
    (mixed,) = noted(KERNELS, other_build, KERNELS)
    assert mixed == (
        "gsm8k · host: the repeats of tiers were computed in unlike ways (tiers, oracle: build 0123456789ab;"
        " tiers: build ba9876543210); trust no mean of them."
    )


def test_roads_of_modelled_seconds_are_not_told_as_a_difference() -> None:
    """A sheet's seconds are the same whatever computed the tokens."""
    slow = KERNELS.model_copy(update={"decoding": "layer by layer"})
    cells = [cell("c1", engine="tiers"), cell("c2", engine="oracle")]
    own = [trial("c1", 0, road=KERNELS), trial("c2", 0, road=slow)]
    modelled = [t.model_copy(update={"time_method": "modelled"}) for t in own]
    assert len(road_notes(run(cells, own))) == 1
    assert road_notes(run(cells, modelled)) == []


def test_tables_name_every_road_of_a_cell() -> None:
    repeats = [trial("c1", 0, road=KERNELS), trial("c1", 1, road=KERNELS.model_copy(update={"n_threads": 1}))]
    made = run([cell("c1")], repeats)
    threads = ("2 threads", "1 thread")
    words = [f"kernels, AVX2, fp32 arithmetic, build 0123456789ab, {n}, decoding fused" for n in threads]
    assert list(trials(made)["road"]) == words
    assert list(summary(made)["road"]) == [" / ".join(words)]


@pytest.mark.parametrize("to", ["int8", "bf16"])
def test_rounding_arithmetic_is_told_of_a_road_and_beside_arms_of_fp32(to: str) -> None:
    rounding = KERNELS.model_copy(update={"rounds_inputs": True, "rounded_to": to})
    cells = [cell("c1"), cell("c2", engine="other")]
    made = run(cells, [trial("c1", 0, road=KERNELS), trial("c2", 0, road=rounding)])
    assert f"{to} arithmetic" in road_words(rounding)
    assert "fp32 arithmetic" in road_words(KERNELS)
    (note,) = road_notes(made)
    assert note.endswith(f"(reference: fp32 arithmetic; other: {to} arithmetic).")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rounds_inputs": True, "rounded_to": "int8", "attention_rounded_to": "bf16"}, "int8 (attention bf16)"),
        ({"rounds_inputs": True, "rounded_to": "int8", "attention_rounded_to": "int8"}, "int8 (attention int8)"),
        ({"rounds_inputs": True, "rounded_to": "bf16", "attention_rounded_to": "bf16"}, "bf16"),
        ({"rounds_inputs": True, "rounded_to": "bf16", "attention_rounded_to": "int8"}, "bf16 (attention int8)"),
        ({"attention_rounded_to": "bf16"}, "fp32 (attention bf16)"),
        (
            {"rounds_inputs": True, "rounded_to": "bf16", "attention_rounded_to": "fp32"},
            "bf16 (attention fp32)",
        ),
        ({"cache_rounded_to": "fp16"}, "fp32 (cache fp16)"),
        ({"attention_rounded_to": "bf16", "cache_rounded_to": "bf16"}, "fp32 (attention bf16 and cache bf16)"),
    ],
)
def test_attention_and_a_cache_of_another_form_than_products_are_told(changes: dict[str, Any], told: str) -> None:
    own = KERNELS.model_copy(update=changes)
    cells = [cell("c1"), cell("c2", engine="other")]
    made = run(cells, [trial("c1", 0, road=KERNELS), trial("c2", 0, road=own)])
    assert f"{told} arithmetic" in road_words(own)
    (note,) = road_notes(made)
    assert note.endswith(f"(reference: fp32 arithmetic; other: {told} arithmetic).")


def test_the_summary_has_the_settings_of_an_arm() -> None:
    settings = {"experts": "int4-g32", "arithmetic": "int8", "dtype": "float32"}
    (told,) = summary(run([cell("c1", engine_parameters=settings)], [trial("c1", 0)]))["engine_parameters"]
    assert json.loads(told) == settings


@pytest.mark.parametrize(("rounded", "widths"), [((True,), "int8"), ((False,), "fp32"), ((True, False), "fp32, int8")])
def test_a_run_says_its_arithmetic_where_all_arms_have_the_same_too(rounded: tuple[bool, ...], widths: str) -> None:
    roads = [KERNELS.model_copy(update={"rounds_inputs": rounds}) for rounds in rounded]
    cells = [cell(f"c{i}", engine=f"arm{i}") for i in range(len(roads))]
    made = run(cells, [trial(f"c{i}", 0, road=road) for i, road in enumerate(roads)])
    made.info.environments["host"] = made.info.environments["host"].model_copy(update={"build": BUILT})
    (note,) = arithmetic_notes(made)
    assert note.endswith(f"torch AVX512; {widths} arithmetic.")


def test_a_gpu_is_not_said_to_compute_by_the_kernels_of_the_cpu() -> None:
    gpu = Road(arithmetic="torch", decoding="layer by layer", device="cuda", dtype="bfloat16", n_threads=2)
    expected = "host: computed by torch on cuda, bfloat16, 2 threads, decoding layer by layer."
    assert arithmetic_notes(run([cell("c1")], [trial("c1", 0, road=gpu)])) == [expected]
    assert arithmetic_notes(run([cell("c1")], [trial("c1", 0)])) == [], "a run from before it was kept"


BUILT = Build(
    road="kernels", compiler="g++ 12.2.0", flags="-O3 -march=native", instruction_set="AVX2",
    sha256="0123456789ab" + 52 * "c", torch_instruction_set="AVX512",
)  # fmt: skip


def test_another_engine_alone_is_not_said_to_compute_by_our_kernels() -> None:
    other = Road(arithmetic="llama-bench", decoding=None, n_threads=2)
    for roads, expected in (((other,), "llama-bench, 2 threads"), ((other, KERNELS), "kernels for AVX2")):
        made = run([cell("c1")], [trial("c1", i, road=road) for i, road in enumerate(roads)])
        made.info.environments["host"] = made.info.environments["host"].model_copy(update={"build": BUILT})
        (note,) = arithmetic_notes(made)
        assert note.startswith(f"host: computed by {expected}")


def test_page_names_the_build_of_the_machine() -> None:
    made = run([cell("c1")], [trial("c1", 0, road=KERNELS)])
    machine = made.info.environments["host"]
    made.info.environments["host"] = machine.model_copy(update={"build": BUILT})
    expected = "kernels for AVX2, build 0123456789ab (g++ 12.2.0; -O3 -march=native); torch AVX512"
    assert expected in html_text(made).replace("&#43;", "+")
