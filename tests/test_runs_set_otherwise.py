"""What two runs rest on: settings, files, variables and protocol that differ are told with their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from results.environments import Conditions
from results.history.index import open_history
from results.history.marks import mark
from results.history.otherwise import otherwise_than_before
from results.history.regress import Asked, regress
from results.history.rests import changed_rests
from results.history.settings import Settings, changed_settings
from results.report import regress_page
from results.report.caveats import caveats_of
from results.runs import OWN_CODE
from results.store import Store
from tests.command import joulebench
from tests.compared_runs import between, read
from tests.histories import made_trial, write_history, write_run
from tests.run_builders import ENVIRONMENT, cell, reading

SLOW, FAST = ("governor powersave, 400 to 2600 MHz", "turbo off"), ("governor performance, 400 to 4700 MHz", "turbo on")


def test_an_arm_that_was_set_otherwise_is_told(tmp_path: Path) -> None:
    own = {"dtype": "float32", "experts": "int8"}
    folders = [
        write_run(tmp_path / name, [cell("c1", engine_parameters=settings)], [made_trial("c1", 0, 1.0)])
        for name, settings in (("a", own), ("b", {**own, "dtype": "bfloat16", "arithmetic": "int8"}), ("same", own))
    ]
    differs = "reference: the plan's settings differ: arithmetic not set → int8, dtype float32 → bfloat16."
    assert differs in between(folders[0], folders[1]).notes
    assert not any("settings differ" in note for note in between(folders[0], folders[2]).notes)


def test_a_technique_that_was_set_otherwise_is_told_of_one_arm_and_not_of_two(tmp_path: Path) -> None:
    folders = {
        name: write_run(tmp_path / name, [cell("c1", **said)], [made_trial("c1", 0, 1.0)])
        for name, said in {
            "a": {"technique": "tiers", "technique_changes": {}},
            "slots": {"technique": "tiers", "technique_changes": {"slots": 8}},
            "other": {"technique": "dropless", "technique_changes": {}},
            "before": {"technique": "tiers"},
            "arm": {"engine": "two", "technique": "dropless", "technique_changes": {}},
        }.items()
    }

    def told(name: str, **arms: str) -> list[str]:
        notes = between(folders["a"], folders[name], **arms).notes
        return [note for note in notes if "settings differ" in note]

    assert told("slots") == ["reference: the plan's settings differ: slots not set → 8."]
    assert told("other") == ["reference: the plan's settings differ: technique tiers → dropless."]
    assert told("before") == []
    assert told("arm", arm_a="reference", arm_b="two") == []


def test_files_variables_and_protocol_that_differ_are_told_and_a_file_that_moved_is_the_same(tmp_path: Path) -> None:
    def of(name: str, protocol: Mapping[str, object] | None = None, **inputs: str) -> Path:
        own = {
            "model.safetensors of model m": "sha256:" + "a" * 64,
            "model.safetensors of model n": "sha256:" + "a" * 64,
            "data file /here/items.jsonl": "sha256:" + "b" * 64,
            OWN_CODE: "sha256:" + "c" * 64,
        } | inputs
        cells = [cell("c1", model="m"), cell("c2", model="n", engine="other")]
        trials = [made_trial(one.cell_id, 0, 1.0) for one in cells]
        return write_run(tmp_path / name, cells, trials, inputs=own, protocol=protocol)

    first = of("a")

    def told(second: Path) -> list[str]:
        return [note for note in between(first, second).notes if "differ:" in note or "The code" in note]

    assert told(of("same")) == []
    assert told(of("weights", **{"model.safetensors of model m": "sha256:" + "d" * 64})) == [
        "Files, variables, clock rules or protocol of the two runs differ: model.safetensors of model m sha256"
        " aaaaaaaaaaaa → sha256 dddddddddddd."
    ]
    assert told(of("variable", protocol={"warmup": 0, "repeats": 9}, OMP_NUM_THREADS="1")) == [
        "Files, variables, clock rules or protocol of the two runs differ: OMP_NUM_THREADS not set → 1,"
        " protocol.warmup not set (the default) → 0."
    ]
    assert told(of("code", **{OWN_CODE: "sha256:" + "d" * 64})) == [
        f"The code of joulebench differs, though both call it {ENVIRONMENT.joulebench}."
    ]
    run = read(first)
    elsewhere = {
        one.name.replace("/here/", "/there/"): one.value for one in run.info.inputs if one.name.startswith("data file")
    }
    rests = run.rests
    moved = {name: value for name, value in rests.items() if "/here/" not in name} | elsewhere
    assert changed_rests(rests, moved, "m", "host") == []


def test_weights_and_sheets_of_other_models_and_devices_are_not_told() -> None:
    weights, sheet = "model.safetensors of model n", "hardware sheet m2-ultra"
    one = {"model.safetensors of model m": "sha256:" + "a" * 64, weights: "sha256:" + "b" * 64, sheet: "old"}
    other = one | {weights: "sha256:" + "c" * 64, sheet: "new"}

    def told(model: str, device: str) -> list[str]:
        return changed_rests(one, other, model, device)

    of_weights = f"{weights} sha256 {'b' * 12} → sha256 {'c' * 12}"
    for model in ("m", "m[source=m]", "m (random weights)"):
        assert told(model, "host") == [], model
    for model in ("n", "n[source=n]", "n (random weights)"):
        assert told(model, "host") == [of_weights], model
    for device in ("model:m2-ultra", "model:m2-ultra[fabric=x]"):
        assert told("m", device) == [f"{sheet} old → new"], device
    assert told("m", "model:m2-ultra-table4") == []


def of_clocks(folder: Path, day: int, *policies: tuple[str, ...] | None, device: str = "host") -> Path:
    """One trial for each; None: the device does not tell."""
    trials = [
        made_trial("c1", i, 1.0, conditions=(Conditions(at_s=0.0), Conditions(at_s=1.0, cpu_policy=policy)))
        for i, policy in enumerate(policies)
    ]
    return write_run(folder, [cell("c1", device=device)], trials, day, inputs={OWN_CODE: "sha256:" + "c" * 64})


def test_clocks_that_are_set_by_other_rules_are_told_of_their_device(tmp_path: Path) -> None:
    words = f"clocks of host {'; '.join(SLOW)} → {'; '.join(FAST)}"
    slow, same, fast = (
        of_clocks(tmp_path / name, day, policy)
        for day, (name, policy) in enumerate({"slow": SLOW, "same": SLOW, "fast": FAST}.items())
    )
    (note,) = [note for note in between(slow, fast).notes if "clocks of" in note]
    assert note == f"Files, variables, clock rules or protocol of the two runs differ: {words}."
    assert not any("clocks of" in note for note in between(slow, same).notes)
    with open_history(tmp_path) as history:
        told = otherwise_than_before(history.runs)
    than = "the run rests on other files, variables, clock rules or protocol than same"
    assert {run: [one.sentence for one in changed] for run, changed in told.items()} == {"fast": [f"{than}: {words}"]}


def test_another_power_limit_of_gpus_is_told_and_of_one_that_nobody_saw_nothing(tmp_path: Path) -> None:
    high, low, unseen = (
        write_run(
            tmp_path / name,
            [cell("c1")],
            [made_trial("c1", 0, 1.0, conditions=(Conditions(at_s=0.0, cpu_policy=SLOW, gpu_limits=limits),))],
            day,
            inputs={OWN_CODE: "sha256:" + "c" * 64},
        )
        for day, (name, limits) in enumerate({"high": ("gpu0: 300 W",), "low": ("gpu0: 200 W",), "none": None}.items())
    )
    differ = "Files, variables, clock rules or protocol of the two runs differ: "
    words = "power limits of GPUs of host gpu0: 300 W → gpu0: 200 W."
    assert [note for note in between(high, low).notes if "limits" in note] == [f"{differ}{words}"]
    assert not any("limits" in note for note in between(low, unseen).notes)


def test_a_meter_that_sees_other_parts_than_in_the_run_before_is_told(tmp_path: Path) -> None:
    """Of one meter: its joules would be compared, for certain."""
    seen = {"both": ("cpu0", "gpu0"), "same": ("cpu0", "gpu0"), "gpu": (), "none": None}
    runs = [
        write_run(
            tmp_path / name,
            [cell("c1")],
            [
                made_trial("c1", 0, 1.0)
                if parts is None
                else made_trial("c1", 0, 1.0, energy=tuple(reading("all", 4.0, component=p) for p in ("total", *parts)))
            ],
            day,
            inputs={OWN_CODE: "sha256:" + "c" * 64},
        )
        for day, (name, parts) in enumerate(seen.items())
    ]
    both, same, gpu, none = runs
    differ = "Files, variables, clock rules or protocol of the two runs differ: "
    words = "parts seen by nvml on host cpu0, gpu0 → one part."
    assert [note for note in between(both, gpu).notes if "parts seen" in note] == [f"{differ}{words}"]
    assert not any("parts seen" in note for pair in ((both, same), (both, none)) for note in between(*pair).notes)


def test_trials_whose_joules_are_read_in_two_ways_that_disagree_are_told_of_their_side(tmp_path: Path) -> None:
    """Else a counter that went over to another unit would be an arm that costs ten times as much, for certain."""
    doubted = {"disagreements": ("gpu0: counter 6950 J, power samples 695 J: they DISAGREE",)}
    sound, odd = (
        write_run(
            tmp_path / name,
            [cell("c1")],
            [made_trial("c1", i, 1.0, energy_j=4.0, **(doubted if i < n_doubted else {})) for i in range(3)],
            day,
        )
        for day, (name, n_doubted) in enumerate({"sound": 0, "odd": 2}.items())
    )
    told = "in 2 of 3 trials that count two readings of the same joules disagree: trust neither."
    assert [note for note in between(sound, odd).notes if "disagree" in note] == [f"B: {told}"]
    with open_history(tmp_path) as history:
        assert {run.folder: list(run.remarks) for run in history.runs} == {"sound": [], "odd": [told]}
    with Store.view(odd) as store:
        caveats = [caveat.text for caveat in caveats_of(store.data(), "host")]
    assert caveats == ["in 2 of 3 trials two readings of the same joules disagree"]


def test_of_clocks_that_nobody_saw_nothing_is_told_and_they_hide_no_change(tmp_path: Path) -> None:
    """The run between does not tell; the last had both rules, one after the other."""
    slow, unseen, both = (
        of_clocks(tmp_path / name, day, *policies)
        for day, (name, policies) in enumerate({"a": (SLOW,), "b": (None,), "c": (SLOW, FAST)}.items())
    )
    assert not any("clocks of" in note for pair in ((slow, unseen), (unseen, both)) for note in between(*pair).notes)
    with open_history(tmp_path) as history:
        told = otherwise_than_before(history.runs)
    words = f"clocks of host {'; '.join(SLOW)} → {'; '.join(SLOW)} then {'; '.join(FAST)}"
    assert [one.words for changed in told.values() for one in changed] == [words]
    assert list(told) == ["c"]


def test_code_that_was_changed_under_its_version_is_told_beside_the_change(tmp_path: Path) -> None:
    """Of a checkout in which something is mended the version stays: beside what got slower stood nothing."""
    newer = ENVIRONMENT.model_copy(update={"joulebench": "9.0"})
    told = f"with it changed: code of joulebench {ENVIRONMENT.joulebench} sha256 {'1' * 12}; sha256 {'7' * 12}"
    for name, environments, expected in (
        ("same", {}, (True, False)),
        # Of another version the code is another one, too.
        ("newer", dict.fromkeys(range(14, 24), newer), (False, True)),
    ):
        write_history(
            tmp_path / name, 24, lambda day, arm: 1.05 if day >= 14 else 1.0, environments=environments,
            inputs=lambda day: {OWN_CODE: f"sha256:{('7' if day >= 14 else '1') * 64}"},
        )  # fmt: skip
        with open_history(tmp_path / name) as history:
            mark(history, "good", ["run000", "run001", "run002"], add=False)
            (one,) = regress(history, "good", Asked(metrics=("e2e",))).judged
        why = regress_page.why(one)
        assert (told in why, "with it changed: joulebench" in why) == expected, why
        page = tmp_path / f"{name}.html"
        assert joulebench("history", str(tmp_path / name), "--html", str(page)).code == 0
        assert (told.removeprefix("with it changed: ") in page.read_text("utf-8")) == expected[0]


def test_of_a_long_list_of_words_what_changed_is_told_alone() -> None:
    """A server's build stood twice in the line of each figure, to say that one number in it differed."""
    build = "vllm 0.11, model sha256 615463: dropless, float32, chunk {}; model {}"
    one, other = ({"build": build.format(chunk, "tiny"), "threads": 2} for chunk in (512, 4))
    assert changed_settings(_settings(one), _settings(other)) == ["build chunk 512 → chunk 4"]
    both = {"build": build.format(4, "small"), "threads": 2}
    assert changed_settings(_settings(one), _settings(both)) == ["build chunk 512, model tiny → chunk 4, model small"]
    assert changed_settings(_settings(one), _settings({"build": "vllm 0.12", "threads": 2})) == [
        f"build {one['build']} → vllm 0.12"
    ]
    assert changed_settings(_settings({"threads": 2}), _settings({"threads": 4})) == ["threads 2 → 4"]


def _settings(engine: dict[str, object]) -> Settings:
    return Settings(technique="openai", engine=engine, changes={})
