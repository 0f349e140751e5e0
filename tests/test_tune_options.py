"""What `joulebench tune` is asked: options and plans that cannot be meant are told at once, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.terminal import EXIT_BAD_PLAN
from tests.command import joulebench
from tests.plans import MODEL


def test_an_option_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    found = joulebench("tune", "plan.toml", "--model", "/other", "--requests", "9")
    told = [line.split(":")[1].strip() for line in found.problems]
    assert told == ["--model", "--requests", "plan.toml"]  # the options, and that there is no such plan
    found = joulebench("tune", "--check", "here", "--slowdown", "20%")
    assert "--slowdown: has no part in --check" in found.stderr


@pytest.mark.parametrize("pairs", ["0", "1"])
def test_a_check_of_fewer_pairs_than_two_is_refused(pairs: str) -> None:
    found = joulebench("tune", "--check", "here", "--pairs", pairs)
    assert found.code == 2
    (problem,) = found.problems
    assert problem.startswith(f"error: --pairs {pairs}: a check needs 2 pairs or more")


def test_problems_of_options_and_of_the_plan_are_told_together_and_once(tmp_path: Path) -> None:
    away = str(tmp_path / "away")
    bad = ("--slowdown", "much", "--name", "a b", "--model", away, "--engine", "none")
    found = joulebench("tune", *bad, "--search", "aecs", "--constant", "alpha=x", "--constant", "beta=1")
    assert found.code == 2
    told = [line.removeprefix("error: ").split(":")[0] for line in found.problems]
    cores = ["--slowdown much", "--name a b", "--constant alpha=x", "--constant beta=1"]
    assert told == [*cores, "--engine none", "model.source"]
    found = joulebench(
        "tune",
        *bad,
        "--search",
        "aecs",
        "--constant",
        "alpha=1",
        "--space",
        "engine.cores=1",
        "--space",
        "device.x=[1]",
    )
    told = [line.removeprefix("error: ").split(":")[0] for line in found.problems]
    swept = ["--slowdown much", "--name a b", "--search aecs", "--constant alpha=1", "--engine none"]
    assert told == [*swept, "model.source", "--space engine.cores=1", "--space device.x"]


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        (("--search", "exhaustive"), {"tree": "fig6", "least_gain": "0.05"}),
        (("--exhaustive",), {"tree": "fig6"}),
        (("--objective", "latency"), {"alpha": "1", "w_per_ghz2": "0.5", "static_w": "2"}),
        ((), {"w_per_ghz2": "0.5", "scale_prime": "2", "idle_factor": "0.1"}),
        ((), {"w_per_thread": "2"}),
        (("--search", "aecs-measured"), {"static_w": "2"}),
        (("--search", "aecs", "--constant", "alpha=0"), {"static_w": "2"}),
    ],
)
def test_a_constant_that_nothing_would_read_is_refused(options: tuple[str, ...], idle: dict[str, str]) -> None:
    given = [word for key, value in idle.items() for word in ("--constant", f"{key}={value}")]
    found = joulebench("tune", *options, *given)
    assert found.code == EXIT_BAD_PLAN
    told = [line.removeprefix("error: ").split(":")[0] for line in found.problems]
    assert told == [f"--constant {key}={value}" for key, value in idle.items()]
    assert all("has no effect" in line for line in found.problems)


@pytest.mark.parametrize("search", ["aecs", "aecs-code", "aecs-measured", "ios"])
def test_a_search_that_probes_once_refuses_what_only_a_race_reads(search: str) -> None:
    """It makes as many probes as its two stages need, in the order of its tree: --probes 1 limited nothing."""
    found = joulebench("tune", "--search", search, "--probes", "1", "--seed", "3", "--name", "a b")
    assert [line.removeprefix("error: ").split(":")[0] for line in found.problems] == [
        "--probes",
        "--seed",
        "--name a b",
    ]
    assert f"--search {search} probes each candidate once, in its own order" in found.problems[0]
    (told,) = joulebench("tune", "--search", "tree", "--probes", "40", "--seed", "3", "--name", "a b").problems
    assert "--name a b" in told


def test_a_constant_that_something_reads_is_not_refused() -> None:
    """Candidates of a search by code are tried in the order of their estimated power, whatever alpha is."""
    for options in (
        ("--search", "aecs-code", "--constant", "alpha=0", "--constant", "static_w=2"),
        ("--search", "exhaustive", "--constant", "alpha=0.5", "--constant", "static_w=2"),
        ("--objective", "pareto", "--constant", "alpha=1", "--constant", "w_per_thread=2"),
        ("--objective", "latency", "--constant", "least_gain=0.05"),
    ):
        found = joulebench("tune", *options, "--name", "a b")
        assert [line.split(":")[1].strip() for line in found.problems] == ["--name a b"]


def test_a_key_that_the_engine_has_not_is_told_beside_what_else_is_wrong() -> None:
    found = joulebench("tune", "--name", "a b", "--space", "engine.nope=[1,2]", "--space", "engine.threads=[1,2]")
    assert ["--name a b" in found.problems[0], "nope" in found.problems[1], len(found.problems)] == [True, True, 2]


def test_a_plan_that_is_wrong_is_told_whole_and_once_and_not_once_a_candidate(tmp_path: Path) -> None:
    found = joulebench("tune", "--device", "nope", "--engine", "none", "--model", str(tmp_path / "away"))
    assert found.code == 2
    told = [line.removeprefix("error: ").split(":")[0] for line in found.problems]
    assert sorted(told) == ["--engine none", "device[0].name", "model.source"]
    (told_near,) = joulebench("tune", "--engine", "llamacpp").problems
    assert "did you mean llama.cpp?" in told_near


@pytest.mark.parametrize("engine", ["dropless", "llama.cpp"])
def test_an_engine_that_does_not_go_onto_the_phone_is_refused_before_the_phone_is_asked(engine: str) -> None:
    found = joulebench("tune", "--device", "adb:FAKE0001", "--engine", engine)
    assert found.code == EXIT_BAD_PLAN
    assert "no engine of the plan goes onto it" in found.stderr


@pytest.mark.parametrize("engine", ['engine = "tuned:here"', 'engine = ["tuned:here"]'])
def test_what_a_search_found_is_no_arm_to_tune(tmp_path: Path, engine: str) -> None:
    """It was told that [[engine]] is missing."""
    (tmp_path / "plan.toml").write_text(
        f'schema = 1\n{engine}\n[model]\nsource = "{MODEL}"\n[[device]]\nname = "host"\n'
    )
    found = joulebench("tune", str(tmp_path / "plan.toml"))
    told = "error: engine: tuned:here is what a search found; write the arm that is to be tuned, or measure the profile"
    assert (found.code, found.problems) == (2, [f"{told} again with --check"])
    beside = joulebench("tune", str(tmp_path / "plan.toml"), "--set", "nonsense").problems
    assert len(beside) == 2
    assert beside[0].startswith("error: --set nonsense: ")
    assert beside[1] == f"{told} again with --check"


def test_bad_options_are_told_at_once(tmp_path: Path) -> None:
    found = joulebench("tune", "--slowdown", "much", "--objective", "cheap", "--weights-limit", "big")
    assert found.code == 2
    assert len(found.problems) == 3
    assert joulebench("tune", "--seed", "-1").code == 2
    found = joulebench("tune", "--space", "workload.limit=[1,2]", "--space", "engine.prefill_chunk=64")
    assert [line.split(":")[0] for line in found.problems] == ["error"] * 2
    for options in (("--exhaustive",), ("--objective", "latency"), ("--space", "engine.threads=[1,2]")):
        (problem,) = joulebench("tune", "--search", "aecs", *options).problems
        assert "aecs" in problem
