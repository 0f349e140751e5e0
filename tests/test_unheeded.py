"""Keys that are valid and change nothing are told before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.base import unheard
from engines.reference import ReferenceEngine
from harness import device_problems
from harness.device_problems import blind_warning
from harness.device_specs import AndroidSpec, HostSpec
from harness.matrix import external_engines, own_engines
from harness.model_specs import ModelSpec
from harness.plan import build_plan, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.schema import PROTOCOL
from harness.unheeded import unheeded_attention, unheeded_forms, unheeded_of_protocol
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.plans import BOOLQ, DROPLESS, HERE, HOST, M2_ULTRA, MODEL, raw_plan
from workloads.datasets import SAMPLES


def warnings_of(**changes: Any) -> list[str]:
    draft = draft_plan(raw_plan(**changes))
    return list(preflight(draft, RunParts(draft.plan.protocol)).warnings)


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        ({"repeats": 7, "stop": {"metric": "ttft_s"}}, "protocol.repeats = 7 changes nothing: stop decides"),
        ({"repeats": 7, "stop": {"minutes": 3}}, "protocol.repeats = 7 changes nothing: stop decides"),
        (
            {"contention_retries": 5, "max_foreign_cpu_share": 1.0},
            "protocol.contention_retries = 5 changes nothing: with max_foreign_cpu_share = 1 no window is taken again",
        ),
        ({"seed": 7}, 'protocol.seed = 7 changes nothing: it is of order = "shuffled"'),
        ({"max_temperature_c": 35.0}, "protocol.max_temperature_c = 35.0 changes nothing: it is of a phone's battery"),
        ({"min_charge_percent": 80.0}, "protocol.min_charge_percent = 80.0 changes nothing: it is of a phone's"),
        ({"gate_wait_s": 5.0}, "protocol.gate_wait_s = 5.0 changes nothing: it is of a phone's battery"),
    ],
)
def test_a_key_that_changes_nothing_is_told(protocol: dict[str, Any], told: str) -> None:
    """A plan for a laptop with max_temperature_c ran however hot it was, without a word."""
    (found,) = warnings_of(protocol=protocol)
    assert found.startswith(told)


@pytest.mark.parametrize(
    "protocol",
    [
        {},
        {"repeats": 7, "seed": 7, "order": "shuffled"},
        {"contention_retries": 5, "max_foreign_cpu_share": 0.99},
        {"repeats": 3, "max_temperature_c": 40.0, "stop": {"metric": "e2e_s"}},
        {"min_charge_percent": 80.0, "stop": {"minutes": 3, "until_charge_percent": 60}},
    ],
)
def test_what_is_read_or_is_the_default_is_not_told(protocol: dict[str, Any]) -> None:
    assert warnings_of(protocol=protocol) == []


@pytest.mark.parametrize("protocol", [{"repeats": 9}, {"stop": {"metric": "ttft_s"}}])
def test_repeats_of_modelled_devices_alone_are_told(protocol: dict[str, Any]) -> None:
    (found,) = warnings_of(protocol=protocol, device=[M2_ULTRA])
    assert found.startswith(f"protocol.{next(iter(protocol))}")
    assert "is priced once" in found
    assert warnings_of(protocol=protocol, engine=[DROPLESS | HERE], device=[M2_ULTRA, HOST]) == []


@pytest.mark.parametrize(
    "protocol",
    [
        {"cooldown_s": 5.0},
        {"sample_interval_s": 0.1},
        {"max_foreign_cpu_share": 0.5},
        {"contention_retries": 5},
        {"contention_retries": 5, "max_foreign_cpu_share": 1.0},
        {"retries": 9},
    ],
)
def test_what_is_of_measured_windows_is_told_of_modelled_devices_alone(protocol: dict[str, Any]) -> None:
    (found,) = warnings_of(protocol=protocol, device=[M2_ULTRA])
    assert found.startswith(f"protocol.{next(iter(protocol))} = ")
    mixed = {key: value for key, value in protocol.items() if key != "contention_retries"}
    assert warnings_of(protocol=mixed, engine=[DROPLESS | HERE], device=[M2_ULTRA, HOST]) == []


@pytest.mark.parametrize("protocol", [{"max_foreign_cpu_share": 1.0}, {"contention_retries": 0}, {"retries": 0}])
def test_what_a_modelled_device_does_anyway_is_not_told(protocol: dict[str, Any]) -> None:
    assert warnings_of(protocol=protocol, device=[M2_ULTRA]) == []


FIXED = {"name": "fixed_lengths", "limit": 3, "prompt_tokens": 8, "new_tokens": 2}


def test_a_limit_that_the_sample_does_not_reach_is_told() -> None:
    """The plan of the README asks 200 items of HellaSwag, and without data got the 14 of the sample."""
    n_items = len((SAMPLES / "boolq_validation.jsonl").read_text("utf-8").splitlines())
    (told,) = warnings_of(workload=[BOOLQ | {"limit": n_items + 1}, FIXED])
    assert told.startswith(f"workload boolq: limit {n_items + 1} is more than the {n_items} items of the sample")
    assert warnings_of(workload=[BOOLQ | {"limit": n_items}]) == []
    (told,) = warnings_of(workload=[BOOLQ], sweep={"workload.boolq.limit": [n_items, n_items + 2, n_items + 1]})
    assert f"limit {n_items + 2} is more than the {n_items} items" in told


def test_a_warmup_that_is_longer_than_its_workload_is_told() -> None:
    """warmup = 100 of three requests was a warm-up of three, without a word. BoolQ asks an item twice: yes, no."""
    found = warnings_of(workload=[BOOLQ, FIXED], protocol={"warmup": 4})
    assert found == [
        "protocol.warmup = 4: workload fixed_lengths has 3 requests, and a warm-up answers each of them once; lower it"
    ]
    assert len(warnings_of(workload=[BOOLQ, FIXED], protocol={"warmup": 5})) == 2
    assert warnings_of(workload=[BOOLQ, FIXED], protocol={"warmup": 3}) == []


BF16 = {"attention": "bf16", "arithmetic": "bf16"}


@pytest.mark.parametrize(
    ("quantise", "is_told"),
    [
        (BF16 | {"attention_arithmetic": "bf16"}, True),
        (BF16 | {"attention_arithmetic": "fp32"}, False),
        (BF16, False),
        ({"attention": "bf16", "attention_arithmetic": "bf16"}, False),
        ({"experts": "bf16", "arithmetic": "bf16", "attention_arithmetic": "bf16"}, False),
        ({"experts": "bf16", "arithmetic": "bf16", "attention_arithmetic": "fp32"}, True),
    ],
)
def test_arithmetic_that_attention_has_without_it_is_told(quantise: dict[str, Any], is_told: bool) -> None:
    """It made a second arm, with the figures of the first."""
    draft = draft_plan(raw_plan(engine=[DROPLESS | {"quantise": quantise}]))
    (engine,), (model,) = own_engines(draft.named.engines), draft.named.models
    assert isinstance(model.spec, ModelSpec)
    told = unheeded_attention(engine, model.spec)
    asked = quantise.get("attention_arithmetic")
    assert (told is not None) == is_told
    assert told is None or told.startswith(
        f'engine dropless: quantise.attention_arithmetic = "{asked}" changes nothing'
    )


@pytest.mark.parametrize(
    ("dtype", "quantise", "told"),
    [
        ("bfloat16", {"experts": "bf16", "head": "int8"}, 'quantise.experts = "bf16" changes nothing'),
        ("float16", {"head": "fp16"}, 'quantise.head = "fp16" changes nothing'),
        (
            "float32",
            {"experts": "fp32", "head": "fp32", "cache": "fp16"},
            'quantise.experts = "fp32" and quantise.head = "fp32" change nothing',
        ),
        ("float32", {"experts": "bf16"}, None),
        ("bfloat16", {"experts": "fp32"}, None),
        ("bfloat16", {"head": "bf16", "arithmetic": "bf16"}, None),
    ],
)
def test_weights_that_the_model_holds_so_anyway_are_told(
    dtype: str, quantise: dict[str, Any], told: str | None
) -> None:
    """An arm "bf16" of a model in bfloat16 was a second arm with the weights of the first."""
    draft = draft_plan(raw_plan(model={"source": MODEL, "dtype": dtype}, engine=[DROPLESS | {"quantise": quantise}]))
    (engine,) = own_engines(draft.named.engines)
    models = [model.spec for model in draft.named.models if isinstance(model.spec, ModelSpec)]
    found = unheeded_forms(engine, models)
    assert (found is None) == (told is None)
    assert found is None or found.startswith(f"engine dropless: {told}: model.dtype = ")


def test_weights_that_one_model_of_a_sweep_does_not_hold_so_are_not_told() -> None:
    """Nor those that a sweep goes through: one of its values is what there is without it."""
    told = 'quantise.head = "fp32" changes nothing'
    arms = [DROPLESS | {"quantise": {"head": "fp32"}}]
    assert told in "".join(warnings_of(engine=arms))
    assert told not in "".join(warnings_of(engine=arms, sweep={"model.dtype": ["float32", "bfloat16"]}))
    swept = {"engine.quantise.head": ["fp32", "int8"]}
    assert told not in "".join(warnings_of(engine=[DROPLESS], sweep=swept))
    swept = {"engine.quantise": [{"head": "fp32"}, {"head": "int8"}]}
    assert told not in "".join(warnings_of(engine=[DROPLESS], sweep=swept))


def test_arithmetic_that_a_sweep_names_is_not_told() -> None:
    sweep = {"engine.quantise.attention_arithmetic": ["fp32", "bf16"]}
    draft = draft_plan(raw_plan(engine=[DROPLESS | {"quantise": BF16}], sweep=sweep))
    (model,) = draft.named.models
    assert isinstance(model.spec, ModelSpec)
    engines = own_engines(draft.named.engines)
    assert [unheeded_attention(engine, model.spec) for engine in engines] == [None, None]


def test_the_one_repeat_that_a_modelled_device_gets_is_not_told() -> None:
    assert warnings_of(protocol={"repeats": 1}, device=[M2_ULTRA]) == []


def test_a_phone_reads_what_is_of_its_battery() -> None:
    protocol = PROTOCOL.read({"max_temperature_c": 35.0, "min_charge_percent": 80.0, "gate_wait_s": 5.0})
    assert list(unheeded_of_protocol(protocol, [HostSpec(name="host"), AndroidSpec(name="adb:1")])) == []


def test_a_moment_for_longrope_is_told_where_the_model_has_none(tmp_path: Path) -> None:
    arms = [DROPLESS | {"long_rope": "when_reached"}]
    (found,) = warnings_of(engine=arms)
    assert "long_rope changes nothing: bundled:tiny-qwen3-moe has no LongRoPE" in found
    write_family(tmp_path, CASES["phi3-long-rope"])
    assert warnings_of(model={"source": str(tmp_path)}, engine=arms) == []


ARMS: tuple[dict[str, Any], ...] = (
    {"technique": {"name": "oracle"}},
    {"technique": {"name": "dropless"}},
    {"technique": {"name": "npumoe-t"}},
    {"technique": {"name": "coreml-naive"}},
    {"technique": {"name": "coreml-naive", "decode_graphs": "same"}},
    {"technique": {"name": "all-experts"}},
    {"technique": {"name": "ndp-tp"}},
    {"technique": {"name": "fiddler", "costs_of": "rtx5080-ndp"}},
    {"technique": {"name": "monde", "costs_of": "rtx5080-ndp"}},
    {"technique": {"name": "ndp", "costs_of": "rtx5080-ndp"}},
    {"technique": {"name": "on-demand"}},
    {"technique": {"name": "on-demand"}, "expert_memory": "6MB"},
    {"technique": {"name": "lru"}, "expert_memory": "6MB"},
    {"technique": {"name": "router-pf"}},
    {"technique": {"name": "router-pf"}, "expert_memory": "6MB"},
)


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_decoding_is_told_where_an_engine_takes_that_road_by_itself(arm: dict[str, Any]) -> None:
    plan = raw_plan(engine=[arm | {"name": "a"}, arm | {"name": "b", "decoding": "plan by plan"}])
    draft = draft_plan(plan)
    parts = RunParts(draft.plan.protocol)
    found = preflight(draft, parts)
    request = Request(request_id="r", sample_id="r", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=3)
    roads = []
    for cell in found.cells:
        engine = parts.arm(cell).engine
        assert isinstance(engine, ReferenceEngine)
        engine.run(request, unheard)
        roads.append(engine.take_road().decoding)
    parts.close()
    told = [warning for warning in found.warnings if "decoding changes nothing" in warning]
    assert len(told) == (roads[0] == roads[1]), roads
    assert all(warning.startswith("engine b: ") for warning in told)


BY_PLAN = {"decoding": "plan by plan"}
LRU = {"technique": {"name": "lru"}, "name": "lru", "expert_memory": "6MB"}
WAITING = {"technique": {"name": "router-pf"}, "name": "waiting", "expert_memory": "6MB"}
"""Predicted experts in a cache: each layer waits for its plan, whatever the plan says (decision 0025)."""


@pytest.mark.parametrize(
    ("engines", "baseline", "told"),
    [
        ([DROPLESS | BY_PLAN, LRU], None, [("dropless", "lru")]),
        ([DROPLESS, LRU | BY_PLAN], "lru", [("lru", "dropless")]),
        ([DROPLESS | BY_PLAN, WAITING], None, []),
        ([DROPLESS | BY_PLAN, LRU | BY_PLAN], None, []),
        ([DROPLESS, LRU], None, []),
        ([DROPLESS, LRU | BY_PLAN, WAITING], None, [("lru", "dropless")]),
        ([DROPLESS | BY_PLAN, LRU, WAITING], "waiting", []),
    ],
)
def test_arms_that_will_have_no_ratio_by_what_the_plan_chose_are_told_before_they_run(
    engines: list[dict[str, Any]], baseline: str | None, told: list[tuple[str, str]]
) -> None:
    changes: dict[str, Any] = {"engine": engines, "device": [HOST]} | ({"baseline": baseline} if baseline else {})
    found = [line for line in warnings_of(**changes) if "no ratio" in line]
    assert [line.partition(": times")[0] for line in found] == [
        f'engine {chosen}: decoding = "plan by plan", and {other} is decoded in one call of the kernels where they know'
        " the model's layers"
        for chosen, other in told
    ]


def test_decoding_of_a_modelled_device_is_told() -> None:
    arm = DROPLESS | {"decoding": "plan by plan"}
    (found,) = warnings_of(engine=[arm], device=[M2_ULTRA])
    assert found == (
        "engine dropless: decoding changes nothing: a modelled device prices what is called, however it is decoded"
        " here; remove it"
    )
    assert warnings_of(engine=[arm], device=[M2_ULTRA, HOST]) == []


@pytest.mark.parametrize(("threads", "told"), [(2, "2"), ({"decode": 1}, "1 for decode")])
def test_threads_of_a_modelled_device_are_told(threads: object, told: str) -> None:
    """Two arms that differ in them alone had the same figures, without a word."""
    arms = [DROPLESS, DROPLESS | {"name": "b", "threads": threads}]
    assert warnings_of(engine=arms, device=[M2_ULTRA]) == [
        f"engine b: threads = {told} changes nothing: a sheet prices its unit as a whole; remove it"
    ]
    assert warnings_of(engine=arms, device=[M2_ULTRA, HOST]) == []


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ({"meters": ["nvml"]}, "nvml sees GPUs alone, and an engine computes on the CPU"),
        (
            {"meters": ["rapl"], "computes": "cuda"},
            "rapl sees the CPU alone, and an engine computes on the GPU: joules leave out what it draws; name"
            ' "nvml", "zeus" or "auto"',
        ),
        (
            {"meters": ["rapl", "modelled"], "computes": "mps"},
            "rapl, modelled see the CPU alone, and an engine computes on the GPU: joules leave out what it draws; name"
            ' "auto"',
        ),
        ({"meters": ["nvml", "rapl"]}, None),
        ({"meters": ["nvml"], "computes": "cuda"}, None),
        ({"meters": ["auto"], "computes": "cuda"}, None),
        ({"meters": ["zeus"]}, None),
    ],
)
def test_meters_that_look_away_from_the_engine_are_told(device: dict[str, Any], told: str | None) -> None:
    """A GPU at rest has joules too: they stood beside the tokens of a CPU."""
    draft = draft_plan(raw_plan(device=[HOST | device]))
    (host,) = (device.spec for device in draft.named.devices)
    warning = blind_warning(host, own_engines(draft.named.engines), ())
    assert (warning is None) == (told is None)
    assert f"device host: {told or ''}" in (warning or "device host: ")


def test_meters_beside_an_arm_that_is_elsewhere_are_not_told() -> None:
    (found,) = warnings_of(device=[HOST | {"meters": ["nvml"]}])
    assert found.endswith('joules leave out what it draws; set computes = "cuda", or name a meter of the CPU')
    server = {"name": "server", "runs": "openai", "url": "http://127.0.0.1:1/v1"}
    program = {"name": "program", "runs": "llama-bench", "program": "llama-bench", "model_file": "m.gguf"}
    may = (
        "device host: nvml sees GPUs alone: what the CPU computes for program is in no joules; name a meter of the CPU"
    )
    does = (
        "device host: nvml sees GPUs alone, and an engine computes on the CPU: joules leave out what it draws; name a"
        " meter of the CPU"
    )
    for arms, host, told in (
        ([server], {"meters": ["nvml"]}, None),
        ([program], {"meters": ["nvml"]}, may),
        ([program], {"meters": ["nvml"], "computes": "cuda"}, may),
        ([program], {"meters": ["rapl"]}, None),
        ([program], {"meters": ["rapl"], "computes": "cuda"}, None),
        ([program, DROPLESS], {"meters": ["nvml"]}, does),
        ([program, DROPLESS], {"meters": ["nvml"], "computes": "cuda"}, may),
    ):
        draft = draft_plan(raw_plan(device=[HOST | host], engine=arms))
        (device,) = (device.spec for device in draft.named.devices)
        engines = draft.named.engines
        assert blind_warning(device, own_engines(engines), external_engines(engines)) == told, (arms, host)


def test_a_server_that_may_compute_on_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`auto` takes a meter of the CPU, and the joules of vLLM's GPU were in none, without a word."""
    here = {"name": "server", "runs": "openai", "url": "http://127.0.0.1:1/v1", "flavour": "vllm"}
    told = (
        "device host: auto sees no GPU, and this machine has one: where server computes on it, its joules are in none"
        ' of these; write meters = ["nvml", "rapl"]'
    )
    driver = tmp_path / "version"
    monkeypatch.setattr(device_problems, "NVIDIA_DRIVER", driver)

    def warned(arm: dict[str, Any], **host: Any) -> str | None:
        named = draft_plan(raw_plan(device=[HOST | {"meters": ["auto"]} | host], engine=[arm])).named
        (device,) = (device.spec for device in named.devices)
        return blind_warning(device, [], external_engines(named.engines))

    assert warned(here) is None  # no driver of NVIDIA's
    driver.touch()
    assert warned(here) == told
    assert warned(here, meters=["rapl"]) == told.replace("auto", "rapl")
    assert warned(here, meters=["nvml", "rapl"]) is None
    assert warned(here | {"flavour": "joulebench"}) is None  # which computes on the CPU
    assert warned(here | {"url": "http://192.0.2.1:1/v1"}) is None  # elsewhere: all joules are missing, which is told


def test_a_report_tells_too_that_joules_are_of_a_part_that_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood in the plan's check alone: the page showed millijoules of a token, of a GPU that did nothing."""
    monkeypatch.setattr(device_problems, "SEE_NO_CPU", frozenset({"modelled"}))
    plan = build_plan(raw_plan(device=[HOST | {"meters": ["modelled"]}]))
    parts = RunParts(plan.protocol)
    try:
        notes = parts.arm(plan.cells[0]).unmeasured.notes
    finally:
        parts.close()
    (told,) = notes
    assert told.startswith("device host: modelled sees GPUs alone, and an engine computes on the CPU")
