"""Whatever TOML can write in a field: a plan that runs, or problems in words, and never a crash."""

from __future__ import annotations

import datetime
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.model.checkpoints import CheckpointFacts
from harness.catalog import TECHNIQUES
from harness.device_specs import DEVICE_KINDS
from harness.model_specs import ModelSpec
from harness.plan import MAX_BYTES, PlanError, draft_plan, load_plan, read_draft
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.schema import EngineSpec, StopSpec, TrialProtocol
from harness.sweep import set_value
from harness.workload_specs import SPEC_OF
from tests.command import joulebench
from tests.plans import BOOLQ, DROPLESS, HOST, MODEL, TIERS, raw_plan, write_plan

LONG = "a" * 300


@pytest.fixture(autouse=True, scope="module")
def _no_network() -> Iterator[None]:
    """A text may read as a model of the hub."""
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def facts() -> dict[str, CheckpointFacts]:
    """Read once for all plans of this file."""
    bench = RunParts(TrialProtocol())
    return {MODEL: bench.facts(MODEL)}


def problems(raw: dict[str, Any], facts: dict[str, CheckpointFacts] | None = None) -> list[str]:
    """All of a plan, as `plan check` tells them; none of a plan that can run."""
    draft = draft_plan(raw)
    bench = RunParts(draft.plan.protocol)
    bench._facts |= facts or {}
    try:
        preflight(draft, bench)
    except PlanError as error:
        return list(error.problems)
    return []


# --- what every place refuses -----------------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "a\nb"}, ["name: must be one line", r"'a\nb'"]),
        ({"engine": [DROPLESS | {"name": "\x1b[31mred"}]}, ["engine[0].name: must be one line", r"'\x1b[31mred'"]),
        ({"workload": [BOOLQ | {"label": "a\x9bb"}]}, ["workload[0].label: must be one line", r"'a\x9bb'"]),
        ({"engine": [DROPLESS | {"name": "a\u202eb"}]}, ["engine[0].name: must be one line", r"'a\u202eb'"]),
        ({"model": {"source": "a\0b"}}, ["model.source: must be one line", r"'a\x00b'"]),
        ({"device": [HOST | {"a\x1bb": 1}]}, ["device[0]: the key", r"'a\x1bb'", "one line"]),
        ({"model": {"source": "a" * 10_000_000}}, ["model.source: must be at most 4096", "10000000", "aaa..."]),
        ({"engine": [DROPLESS | {"prefill_chunk": nested(5000)}]}, ["engine[0].prefill_chunk[0]", "16 deep"]),
        ({"protocol": {"repeats": 10**400}}, ["protocol.repeats", "18 digits", "a number of 401 digits"]),
        ({"protocol": {"idle_s": datetime.date(2020, 1, 2)}}, ["protocol.idle_s", "date", "in quotes"]),
        ({"sweep": {"engine.prefill_chunk": [64, 10**400]}}, ["sweep.engine.prefill_chunk[1]", "401 digits"]),
        # in one place
        ({"schema": True}, ["schema: this joulebench reads schema 1, found true"]),
        ({"schema": 1.0}, ["schema: this joulebench reads schema 1, found 1.0"]),
        ({"name": "n" * 101}, ["name: names the run's folder, so at most 100 characters; found 101"]),
        ({"model": {"source": ""}}, ["model.source: must be a text that is not empty, found ''"]),
        (
            {"engine": [DROPLESS | {"name": "n" * 101}]},
            ["engine[0].name: must have at most 100 characters, found 101"],
        ),
        ({"name": " "}, ["name: must be a text that is not empty"]),
        ({"engine": [DROPLESS | {"threads": 10**8}]}, ["engine[0].threads", "less than or equal to 1024", "100000000"]),
        ({"protocol": {"repeats": 10**9}}, ["protocol.repeats", "less than or equal to 100000", "1000000000"]),
        ({"protocol": {"idle_s": 1e300}}, ["protocol.idle_s", "less than or equal to 86400", "1e+300"]),
        ({"workload": [{"name": "fixed_lengths", "limit": 10**9}]}, ["workload[0].limit", "or equal to 100000"]),
        ({"protocol": {"stop": 5}}, ["protocol.stop: must be a table, found 5", "max_repeats, metric, min_repeats"]),
        ({"protocol": {"stop": {"hours": 1}}}, ["protocol.stop.hours: unknown key", "`stop = { minutes = 60 }`"]),
        (
            {"protocol": {"stop": {"minutes": 30, "hours": 1}}},
            ["protocol.stop.hours: unknown key; time is given in minutes"],
        ),
        (
            {"engine": [DROPLESS | {"quantise": 5}]},
            ["engine[0].quantise: must be a table", "attention_arithmetic, cache, dense"],
        ),
        (
            {"workload": [{"name": "lm_eval", "task": "arc_easy", "data_files": 5}]},
            ["workload[0].data_files: must be a table, found 5", "KEY ="],
        ),
    ],
)
def test_what_no_run_could_take_is_one_short_line(changes: dict[str, Any], expected: list[str]) -> None:
    (line,) = draft_plan(raw_plan() | changes).problems
    for part in expected:
        assert part in line
    assert len(line) < 400


def test_a_told_place_is_told_once_and_its_neighbours_too() -> None:
    found = draft_plan(raw_plan(protocol={"repeats": 10**400, "warmup": -1, "stop": {"metric": "x\n"}})).problems
    assert [line.split(":")[0] for line in found] == ["protocol.repeats", "protocol.stop.metric", "protocol.warmup"]


def test_a_problem_never_reaches_the_terminal_as_a_command_of_it() -> None:
    (line,) = PlanError(["folder a\x1b[31m\nsecond\u2028 line " + "x" * 5000]).problems
    assert line.startswith(r"folder a\x1b[31m second line xxx")
    assert len(line) == 1000


# --- files and paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [LONG, f"/tmp/{LONG}", "~no such user/x", "", "/dev/null", ".", os.sep])
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (lambda path: {"model": {"source": path}}, "model.source: "),
        (lambda path: {"device": [HOST | {"watts_sheet": path}]}, "device host: watts_sheet: "),
        (
            lambda path: {"device": [{"name": "host", "meters": ["replay"], "recording": path}]},
            "device host: recording: ",
        ),
        (lambda path: {"workload": [{"name": "fidelity", "text": path}]}, "workload fidelity: "),
        (
            lambda path: {"workload": [{"name": "ruler_niah_single_2", "length": 512, "haystack": path}]},
            "workload ruler_niah_single_2: ",
        ),
    ],
    ids=["model", "watts", "recording", "text", "haystack"],
)
def test_a_path_of_nothing_is_one_line(
    changes: Any, where: str, path: str, facts: dict[str, CheckpointFacts], tmp_path: Path
) -> None:
    (line,) = problems(raw_plan(**changes(path)), facts)
    assert line.startswith(where)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"some text\nof five words\n"),
        ("notes.csv", b"a,b\n1,2\n"),
        ("notes.parquet", b"some text"),
        ("notes.csv", b"\xff\xfe\x00"),
        ("notes.csv", b""),
        ("notes.csv", b"time_s,cpu_w\n0,1\n1,nan\n"),
    ],
)
def test_a_recording_that_is_none_is_refused_before_the_run(
    tmp_path: Path, name: str, content: bytes, facts: dict[str, CheckpointFacts]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    device = {"name": "host", "meters": ["replay"], "recording": str(path)}
    (line,) = problems(raw_plan(device=[device]), facts)
    assert line.startswith("device host: recording: ")
    assert name in line


def test_a_recording_that_can_be_played_passes(tmp_path: Path, facts: dict[str, CheckpointFacts]) -> None:
    path = tmp_path / "power.csv"
    path.write_text("time_s,cpu_w\n" + "".join(f"{i},5\n" for i in range(100)), encoding="utf-8")
    device = {"name": "host", "meters": ["replay"], "recording": str(path)}
    assert problems(raw_plan(device=[device]), facts) == []


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name = ", b"x = " + b"[" * 5000, b"active_w_per_core = true"])
def test_a_watts_sheet_that_is_none_is_one_line(
    tmp_path: Path, content: bytes, facts: dict[str, CheckpointFacts]
) -> None:
    (tmp_path / "sheet.toml").write_bytes(content)
    (line,) = problems(raw_plan(device=[HOST | {"watts_sheet": str(tmp_path / "sheet.toml")}]), facts)
    assert line.startswith("device host: watts_sheet: watts sheet ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x = " + b"[" * 5000 + b"]" * 5000, "too deep in each other"),
        (b"x = " + b"9" * 5000, "a number of thousands of digits"),
        (b"x = '" + b"a" * MAX_BYTES + b"'", "has more than 1,048,576 bytes"),
    ],
)
def test_a_file_beyond_all_plans_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    (line,) = caught.value.problems
    assert expected in line


def test_a_path_that_no_file_can_have_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"cannot be read as text \(File name too long\)"):
        load_plan(Path(LONG))


def test_a_folder_that_cannot_be_is_refused_before_the_plan_is_checked(tmp_path: Path) -> None:
    done = joulebench("run", str(tmp_path / "no plan.toml"), "--out", LONG)
    (line,) = done.problems
    assert (done.code, line) == (
        2,
        f"error: --out {LONG[:80]}: no folder can be there (File name too long); name another",
    )


# --- one round --------------------------------------------------------------------------------------------------------


def test_settings_schema_and_files_are_told_in_one_round(tmp_path: Path) -> None:
    plan = write_plan(
        tmp_path / "plan.toml",
        raw_plan(
            model={"source": str(tmp_path / "absent")},
            engine=[DROPLESS | {"prefill_chunk": 0}, TIERS],
            workload=[BOOLQ | {"data": "folder"}, {"name": "nope"}],
            device=[HOST | {"watts_sheet": "/no/sheet.toml"}],
        ),
    )
    settings_ = ("protocol.repeats", "protocol.idle_s=-1", 'name="a"\nname = "b"', "protocol.warmup=" + "[" * 5000)
    done = joulebench("plan", "check", str(plan), *(part for s in settings_ for part in ("--set", s)))
    assert done.code == 2
    assert done.stdout == ""
    told = [line.removeprefix("error: ") for line in done.problems]
    for expected, line in zip(
        [
            "--set protocol.repeats: no '='",
            '--set name="a" name = "b": must be one line',
            "--set protocol.warmup=[[[[",
            "engine[0].prefill_chunk: must be greater than or equal to 1, found 0",
            "workload[1].name: unknown name 'nope'",
            "protocol.idle_s: must be greater than or equal to 0, found -1",
            f"model.source: {tmp_path / 'absent'}: no folder",
            "device host: watts_sheet: watts sheet '/no/sheet.toml' cannot be read",
        ],
        told,
        strict=True,
    ):
        assert line.startswith(expected)


def test_data_is_looked_at_beside_a_problem_of_an_arm(tmp_path: Path, facts: dict[str, CheckpointFacts]) -> None:
    raw = raw_plan(engine=[DROPLESS | {"prefill_chunk": 0}], workload=[BOOLQ | {"data": "folder"}])
    assert [line.split(":")[0] for line in problems(raw, facts)] == ["engine[0].prefill_chunk", "workload boolq"]


@pytest.mark.slow
def test_an_endless_plan_is_not_told_without_end(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan() | {f"key{i}": i for i in range(500)})
    done = joulebench("plan", "check", str(plan))
    assert len(done.problems) == 101
    assert done.problems[-1] == "error: and 400 more problems"


def test_a_second_line_of_a_setting_sets_nothing(tmp_path: Path) -> None:
    draft = read_draft(write_plan(tmp_path / "plan.toml", raw_plan()), ["protocol.repeats=2\nname='other'"])
    assert draft.plan.name == "small"
    assert len(draft.problems) == 1


# --- anything ---------------------------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [LONG, "/", "..", "/dev/null", "~", "host", "model:", "adb:", "ios:", "replay", "bundled:", "x\0y"]
    ),
    st.integers(1, 3).map(lambda n: "b" * 3000 * n),
)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-1, 3),
    st.sampled_from([10**8, 10**18, 2**63, 10**400]),
    st.floats(),
    st.sampled_from([0.0, 1e308, 1e-320]),
)
DATES = st.sampled_from([datetime.date(1979, 5, 27), datetime.time(7, 32), datetime.datetime(1979, 5, 27, 7, 32)])
TOML = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), DATES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
) | st.integers(10, 40).map(nested)


def places() -> list[tuple[Any, ...]]:
    """Every key of every section, as a path into a plan with one element of each kind."""
    found: list[tuple[Any, ...]] = [(key,) for key in ("schema", "name", "baseline", "model", "engine", "workload")]
    found += [("device",), ("protocol",), ("sweep",), ("engine", 0), ("workload", 0), ("device", 0), ("no such key",)]
    found += [("model", key) for key in ModelSpec.model_fields]
    found += [("engine", 0, key) for key in EngineSpec.model_fields]
    found += [("engine", 0, "quantise", key) for key in ("experts", "nope")]
    found += [("device", 0, key) for key in sorted({key for kind in DEVICE_KINDS for key in kind.model_fields})]
    found += [("protocol", key) for key in TrialProtocol.model_fields]
    found += [("protocol", "stop", key) for key in StopSpec.model_fields]
    found += [("sweep", path) for path in ("engine.prefill_chunk", "device.host.recording", "model.source", "engine")]
    for entry in TECHNIQUES.values():
        found += [("engine", 0, "technique", key) for key in entry.parameters.model_fields]
    return found


def with_value(raw: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    target: Any = raw
    for key in place[:-1]:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    target[place[-1]] = value
    return raw


def assert_a_plan_or_lines(raw: dict[str, Any], facts: dict[str, CheckpointFacts]) -> None:
    for line in problems(raw, facts):
        assert line.isprintable()
        assert 0 < len(line) <= 1000


@given(st.sampled_from(places()), TOML)
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_in_any_place_is_a_plan_or_lines(
    facts: dict[str, CheckpointFacts], place: tuple[Any, ...], value: Any
) -> None:
    technique = next((n for n, e in TECHNIQUES.items() if place[-1] in e.parameters.model_fields), "dropless")
    arm = {"name": "arm", "technique": {"name": technique}}
    assert_a_plan_or_lines(with_value(raw_plan(engine=[arm]), place, value), facts)


WORKLOAD_PLACES = [
    (name, key)
    for name in ("boolq", "sharegpt", "fixed_lengths", "fidelity", "ruler_niah_single_2", "mt_bench", "azure_trace")
    for key in (*(key for key in SPEC_OF[name].model_fields if key != "name"), "nope")
]


@given(st.sampled_from(WORKLOAD_PLACES), TOML.filter(lambda value: value not in (10**5, "hub")))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_asked_of_a_workload_is_a_plan_or_lines(
    facts: dict[str, CheckpointFacts], place: tuple[str, str], value: Any
) -> None:
    name, key = place
    short = {"limit": 2, "length": 300, "num_fewshot": 0, "max_turns": 1, "max_new_tokens": 4}
    asked = {k: v for k, v in short.items() if k in SPEC_OF[name].model_fields}
    assert_a_plan_or_lines(raw_plan() | {"workload": [{"name": name, **asked, key: value}]}, facts)


@given(st.text(max_size=30), st.text(max_size=30))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_setting_is_a_plan_or_lines(tmp_path: Path, path: str, value: str) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    for assignment in (f"{path}={value}", path, f"protocol.{path}={value}", f"protocol.repeats={value}"):
        for line in read_draft(plan, [assignment]).problems:
            PlanError([line])
    assert tomllib.loads(plan.read_text(encoding="utf-8")) == raw_plan()


@pytest.mark.parametrize("path", ["engine[1].threads", "engine.1.threads"])
def test_set_takes_a_path_as_errors_name_it(path: str) -> None:
    raw = raw_plan(engine=[DROPLESS, TIERS])
    set_value(raw, f"{path}=3")
    assert [engine.get("threads") for engine in raw["engine"]] == [None, 3]
