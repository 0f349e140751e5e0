"""What `pip install` of a built wheel gives: every file, and a joulebench that measures without the repository."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

from tests.command import environment
from tests.fakes.random_models import copy_bundled

ROOT = Path(__file__).parents[1]
PACKAGES = ("joulebench", "harness", "engines", "devices", "workloads", "results", "plans")
WORKPLACE = "mein Rechner – 测试 ü"
TIMEOUT_S = 280


class Installed(NamedTuple):
    """A wheel in an environment of its own, in a folder whose name is not of one word and one alphabet."""

    folder: Path
    python: Path

    def call(self, *command: str | Path, expected_code: int = 0) -> subprocess.CompletedProcess[str]:
        # PYTHONPATH may name the repository, and this test is of a machine that has none.
        own = {k: v for k, v in environment().items() if not k.startswith("PYTHON")}
        done = subprocess.run(
            command, cwd=self.folder, env=own, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == expected_code, done.stdout + done.stderr
        return done

    def joulebench(self, *arguments: str | Path, expected_code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.call(self.python.with_name("joulebench"), *arguments, expected_code=expected_code)


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone: what lies about in a working tree gets into no wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked_files():
        if not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source],
        check=True,
    )
    (built,) = out.glob("joulebench-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("user") / WORKPLACE
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    # Dependencies come from the environment of the tests. A .pth file within a folder that a .pth names is not read,
    # so the editable install of this repository stays out.
    there = [p for p in (*site.getsitepackages(), site.getusersitepackages()) if Path(p).is_dir()]
    (packages / "dependencies.pth").write_text("\n".join(there) + "\n", encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )
    return Installed(folder, python)


def test_a_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {name for name in tracked_files() if name.split("/")[0] in PACKAGES}


def texts_of(path: Path) -> Iterator[str]:
    """What a file of a wheel may say to its user: strings of code without its docstrings; all of a plan."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield content
    elif "docs/" in content:
        tree = ast.parse(content)
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def test_no_message_sends_to_a_page_that_a_wheel_has_not() -> None:
    """ "See docs/engines" was all that it said of a server, and of a plan's techniques."""
    said = [ROOT / name for name in tracked_files() if name.split("/")[0] in PACKAGES]
    named = {(path.name, text) for path in said if path.suffix == ".py" or path.parent.name == "plans"
             for text in texts_of(path) if "docs/" in text}  # fmt: skip
    assert named == set()


def test_the_wheel_is_imported_and_not_the_repository(installed: Installed) -> None:
    code = "import joulebench, harness, engines, devices, workloads, results, sys; print(*(p.__file__ for p in (joulebench, harness, engines, devices, workloads, results)), sep='\\n')"  # noqa: E501
    for line in installed.call(installed.python, "-c", code).stdout.splitlines():
        assert Path(line).is_relative_to(installed.folder / "env"), line


def test_version_and_module_are_those_of_the_wheel(installed: Installed, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert installed.joulebench("--version").stdout == f"joulebench {version}\n"
    assert installed.call(installed.python, "-m", "joulebench", "--version").stdout == f"joulebench {version}\n"
    assert "python -m joulebench" in installed.call(installed.python, "-m", "joulebench", "run", "--help").stdout


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel(installed: Installed) -> None:
    """All its arms, workloads and devices; fewer items and one trial each, to be short."""
    installed.joulebench("init", "demo.toml", "--from", "demo")
    before = files_of(installed)
    short = ("protocol.repeats=1", "protocol.warmup=0", "protocol.idle_s=0", "workload.limit=1", "name=short")
    installed.joulebench("run", "demo.toml", *(part for setting in short for part in ("--set", setting)))
    run = installed.folder / "runs" / "short"
    summary = pd.read_csv(run / "summary.csv")
    cells = installed.joulebench("plan", "check", "demo.toml").stdout
    assert len(summary) == int(re.findall(r"ok, (\d+) cells", cells)[0])
    assert (run / "report.html").stat().st_size > 100_000
    trials = pd.read_csv(run / "trials.csv")
    assert set(trials["status"]) == {"ok"}
    # Everything that it wrote stands in the folder of the run.
    assert files_of(installed) == before


def files_of(installed: Installed) -> set[Path]:
    """Of its packages, bytecode left out."""
    return {p for p in (installed.folder / "env").rglob("*") if "__pycache__" not in p.parts}


@pytest.mark.slow
def test_the_first_plan_measures_a_model_folder_of_the_user(installed: Installed) -> None:
    model = copy_bundled(installed.folder / "Modelle" / "mein Modell ü")
    told = installed.joulebench("init", "mein Plan.toml").stdout
    steps = [line.partition("#")[0].strip() for line in told.splitlines() if line.startswith("  joulebench ")]
    for step in steps:
        settings = (f"model.source={model}", "workload.limit=2", "protocol.max_foreign_cpu_share=1")
        installed.joulebench(*shlex.split(step)[1:], *(part for setting in settings for part in ("--set", setting)))
    assert len(steps) == 3
    run = installed.folder / "runs" / "first"
    summary = pd.read_csv(run / "summary.csv")
    assert set(summary["engine"]) == {"dropless", "int4"}
    assert summary["all_j_per_token"].notna().all()
    assert "mein Modell ü" in (run / "report.html").read_text(encoding="utf-8")


def test_a_plan_is_never_overwritten(installed: Installed) -> None:
    plan = installed.folder / "mine.toml"
    plan.write_text("mine", encoding="utf-8")
    for path in (plan, installed.folder):
        done = installed.joulebench("init", path, expected_code=2)
        assert done.stderr == f"error: {path}: exists already and is left as it is; give another name\n"
    assert plan.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("joulebench pl", {"plan"}),
        ("joulebench plan ", {"check", "schema"}),
        ("joulebench list te", {"techniques"}),
        ("joulebench init --from de", {"demo"}),
    ],
)
def test_bash_completes_what_is_typed(installed: Installed, typed: str, offered: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("this machine has no bash")
    words = typed.split(" ")
    script = f"""
        PATH={shlex.quote(str(installed.python.parent))}:$PATH
        source <(joulebench --show-completion bash)
        COMP_WORDS=({" ".join(shlex.quote(w) for w in words)}) COMP_CWORD={len(words) - 1}
        _joulebench_completion joulebench
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    assert set(installed.call(bash, "-c", script).stdout.split()) == offered


def test_sources_are_reproduced_without_the_repository(installed: Installed) -> None:
    installed.joulebench("reproduce", "004", "--out", "reproduced")
    rows = pd.read_csv(installed.folder / "reproduced" / "reproduced.csv")
    assert set(rows["source"].astype(int)) == {4}
    assert (rows["verdict"] != "not computed").all()
    assert (installed.folder / "reproduced" / "004-neuron.html").is_file()
