"""`joulebench coreml convert`: what is finished survives, and what cannot be done is told before it begins."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.coreml.manifest import GraphFunction, PackagePlan, read_manifest
from engines.errors import EngineError
from harness.coreml_convert import NoSpaceError, check_room, clear_unfinished, needed_bytes
from harness.external.coreml import CoremlSpec
from tests.command import Finished, joulebench, run_python, start
from tests.fakes.random_models import copy_bundled

pytest.importorskip("coremltools", reason="the extra coreml is not installed")

MODEL = "bundled:tiny-qwen3-moe"
SETTINGS = ("--profile", MODEL, "--chunk", "64", "--context", "64", "--attention", "stateless")


def convert(out: Path, *settings: str, model: str = MODEL) -> Finished:
    return joulebench("coreml", "convert", model, "--out", str(out), *(settings or SETTINGS))


def packages(folder: Path) -> dict[str, int]:
    """When each was written."""
    found = folder.glob("layer-*/*.mlpackage/Data/com.apple.CoreML/weights/weight.bin")
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in found if "/." not in str(path)}


def weights(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in packages(folder)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Finished]]:
    folder = tmp_path_factory.mktemp("whole") / "m"
    yield folder, convert(folder)
    shutil.rmtree(folder)


def test_a_model_is_converted_and_its_manifest_names_what_is_there(whole: tuple[Path, Finished]) -> None:
    folder, done = whole
    assert done.code == 0, done.stderr
    manifest = read_manifest(folder)
    named = {f"{package.path}/Data/com.apple.CoreML/weights/weight.bin" for package in manifest.packages}
    assert named == set(packages(folder))
    # One line a package where there is no terminal.
    assert sum(" of " in line and ".mlpackage" in line for line in done.stderr.splitlines()) == len(manifest.packages)
    assert "takes a Mac" in done.stdout
    assert f"joulebench coreml lint {shlex.quote(str(folder))}" in done.stdout
    # What was planned is what is stored, up to 64 bytes of header for each weight.
    for package in manifest.packages:
        held = (folder / package.path / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        assert package.weight_bytes <= held <= 1.1 * package.weight_bytes + 4096


def test_what_we_convert_passes_lint(whole: tuple[Path, Finished]) -> None:
    """Also at chunk 64, where the plan has tiers of 16 rows."""
    done = joulebench("coreml", "lint", str(whole[0]))
    assert done.code == 0, done.stdout
    assert "0 findings, 0 notes" in done.stdout


def test_a_conversion_that_is_finished_is_left_as_it_is(whole: tuple[Path, Finished]) -> None:
    folder, _ = whole
    before = packages(folder)
    done = convert(folder)
    assert done.code == 0, done.stderr
    assert "0 written" in done.stdout
    assert packages(folder) == before


def test_packages_are_whole_by_a_path_that_goes_up_too(whole: tuple[Path, Finished]) -> None:
    """All of `../packages` was told to be damaged: lint and a plan refused it, and a conversion wrote it anew."""
    folder, _ = whole
    upwards = folder / "layer-000" / ".." / ".." / folder.name
    before = packages(folder)
    assert joulebench("coreml", "lint", str(upwards)).code == 0
    assert "0 written" in convert(upwards).stdout
    assert packages(folder) == before


def test_a_package_that_was_cut_off_is_found_and_written_anew(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    """By lint, by a plan, and by the command that wrote it."""
    out = tmp_path / "m"
    shutil.copytree(whole[0], out)
    name = sorted(packages(out))[1]
    os.truncate(out / name, 1000)
    done = joulebench("coreml", "lint", str(out))
    assert done.code == 2
    (problem,) = done.problems
    assert f"{name.partition('.mlpackage')[0]}.mlpackage: its weights are cut off" in problem
    with pytest.raises(EngineError, match=r"1 are missing or cut off, first layer-000/experts-0\.mlpackage"):
        CoremlSpec.model_validate(
            {
                "name": "ane",
                "runs": "coreml",
                "technique": {"name": "npumoe"},
                "profile": MODEL,
                "prefill_chunk": 64,
                "context": 64,
                "packages": str(out),
                "predictor": "interpreter",
            }
        ).find()
    assert "1 written" in convert(out).stdout
    assert weights(out) == weights(whole[0])


@pytest.mark.parametrize("part", ["weights/weight.bin", "model.mlmodel"])
def test_bytes_that_changed_in_place_are_found_and_written_anew(
    whole: tuple[Path, Finished], part: str, tmp_path: Path
) -> None:
    out = tmp_path / "m"
    shutil.copytree(whole[0], out)
    before = packages(out)
    path = out / "layer-001/experts-0.mlpackage/Data/com.apple.CoreML" / part
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)
    (problem,) = joulebench("coreml", "lint", str(out)).problems
    if part != "model.mlmodel":  # a changed program may be none that can be read
        assert problem.endswith(
            f"experts-0.mlpackage: Data/com.apple.CoreML/{part} is not as it was written; convert it again"
        )
    assert "1 written" in convert(out).stdout
    assert joulebench("coreml", "lint", str(out)).code == 0
    assert weights(out) == weights(whole[0])
    assert len(packages(out).items() - before.items()) == 1, "others were written again"


def test_sums_are_those_of_sha256sum(whole: tuple[Path, Finished]) -> None:
    for layer in sorted(whole[0].glob("layer-*")):
        sums = [path.name for path in layer.glob("*.sha256")]
        assert {f"{Path(name).stem}.mlpackage" for name in sums} == {path.name for path in layer.glob("*.mlpackage")}
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", *sums], cwd=layer, check=True)


def test_lint_tells_what_a_conversion_lacks(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    """A package that the manifest names and that is gone; one without sums; a conversion that was killed."""
    out = tmp_path / "m"
    shutil.copytree(whole[0], out)
    shutil.rmtree(out / "layer-001/experts-0.mlpackage")
    (out / "layer-000/attention.sha256").unlink()
    done = joulebench("coreml", "lint", str(out))
    assert done.code == 2
    assert [line.removeprefix(f"error: {out}/") for line in done.problems] == [
        "layer-000/attention.mlpackage: has no attention.sha256 beside it, which says what was written; convert it"
        " again",
        "layer-001/experts-0.mlpackage: is missing; convert it again",
    ]
    (out / "manifest.json").rename(out / "conversion.json")
    (out / "layer-000/attention.sha256").write_bytes((whole[0] / "layer-000/attention.sha256").read_bytes())
    done = joulebench("coreml", "lint", str(out))
    assert done.code == 2
    (problem,) = done.problems
    assert "its conversion is not complete; give the same `joulebench coreml convert` again" in problem
    (out / "conversion.json").unlink()
    for command in (("lint", str(out)), ("convert", MODEL, "--out", str(out), *SETTINGS)):
        done = joulebench("coreml", *command)
        assert done.code == 2, command
        assert "manifest.json" in done.stderr
        assert "another folder" in done.stderr


@pytest.mark.slow
def test_a_killed_conversion_goes_on_where_it_was(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    out = tmp_path / "m"
    with (tmp_path / "output").open("w") as output:
        process = start("coreml", "convert", MODEL, "--out", str(out), *SETTINGS, output=output)
        until_s = time.monotonic() + 120
        while len(packages(out)) < 3 and time.monotonic() < until_s:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = packages(out)
    assert 3 <= len(kept) < len(packages(whole[0]))
    assert not (out / "manifest.json").exists()
    done = convert(out)
    assert done.code == 0, done.stderr
    now = packages(out)
    assert {name: now[name] for name in kept} == kept  # none was written again
    assert weights(out) == weights(whole[0])
    assert read_manifest(out) == read_manifest(whole[0])
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".convert.lock"]
    assert not list(out.glob("layer-*/.*"))


def test_a_folder_of_other_settings_is_refused(whole: tuple[Path, Finished]) -> None:
    folder, _ = whole
    before = packages(folder)
    done = convert(folder, "--profile", MODEL, "--chunk", "128", "--context", "64", "--attention", "stateless")
    assert done.code == 2
    (problem,) = done.problems[-1:]
    assert str(folder) in problem
    assert "chunk" in problem
    assert packages(folder) == before


def test_a_model_that_was_moved_is_the_same_model(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    out = tmp_path / "m"
    shutil.copytree(whole[0], out)
    (out / "manifest.json").rename(out / "conversion.json")
    shutil.rmtree(out / "layer-003/experts-0.mlpackage")
    before = packages(out)
    done = convert(out, *SETTINGS, model=str(copy_bundled(tmp_path / "elsewhere")))
    assert done.code == 0, done.stderr
    after = packages(out)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"layer-003/experts-0.mlpackage/Data/com.apple.CoreML/weights/weight.bin"}
    assert read_manifest(out).model == str(tmp_path / "elsewhere")


def test_a_manifest_that_is_damaged_is_told_with_what_helps(tmp_path: Path) -> None:
    """The same folder would be refused again."""
    (tmp_path / "manifest.json").write_text("{")
    done = convert(tmp_path)
    assert done.code == 2
    assert "Invalid JSON" in done.problems[-1]
    assert done.problems[-1].endswith("convert into another folder with `joulebench coreml convert`")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = convert(tmp_path)
    assert done.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "model")
    held = bytearray((model / "model.safetensors").read_bytes())
    held[-1] ^= 1
    (model / "model.safetensors").write_bytes(held)
    done = convert(tmp_path / "m", model=str(model))
    assert done.code == 2
    assert "it was counted with another model" in done.problems[-1]
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--technique", "npumoe"), "profile"),
        (("--technique", "dropless", "--profile", MODEL), "learns nothing"),
        (("--technique", "lru"), "weights are constants of a graph"),
        (("--technique", "nothing"), "joulebench list techniques"),
        (("--technique", "dropless"), "it places nothing on the npu"),
        (("--weights", "int4", "--profile", MODEL), "allow it by --int4-known-to-crash"),
    ],
)
def test_what_cannot_be_converted_is_told_before_it_begins(
    settings: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = convert(tmp_path / "m", *settings)
    assert done.code == 2
    assert said in done.problems[-1]
    assert not (tmp_path / "m").exists()


WITHOUT_COREMLTOOLS = """
    import sys
    sys.modules["coremltools"] = None
    from harness.cli import main
    main()
"""


LEFT_BEHIND = """
    import sys
    sys.modules["coremltools"] = type(sys)("coremltools")
    from harness.cli import main
    main()
"""
"""As Python sees an empty folder of that name."""


def test_without_coremltools_the_command_that_installs_it_is_told(whole: tuple[Path, Finished], tmp_path: Path) -> None:
    """Once, also where there are many packages."""
    for command in (("convert", MODEL, "--out", str(tmp_path / "m"), *SETTINGS), ("lint", str(whole[0]))):
        for how in (WITHOUT_COREMLTOOLS, LEFT_BEHIND):
            done = run_python(how, "coreml", *command)
            assert done.code == 2, done
            (problem,) = done.problems
            assert "pip install 'joulebench[coreml]'" in problem


def test_scikit_learn_is_not_imported_with_coremltools_and_can_be_later() -> None:
    code = """
    import sys
    from engines.coreml.toolkit import load_coremltools
    load_coremltools()
    print("sklearn" in sys.modules, any(name.startswith("sklearn.") for name in sys.modules))
    """
    done = run_python(code)
    assert (done.code, done.stdout) == (0, "False False\n"), done.stderr


@pytest.mark.parametrize(
    ("does", "left"),
    [("pass", "none"), ("del sys.modules['sklearn']", "none"), ("sys.modules['sklearn'] = sys", "sys")],
)
def test_why_coremltools_does_not_load_is_told_whatever_its_import_did_to_scikit_learn(does: str, left: str) -> None:
    code = f"""
    import sys
    from engines.coreml import toolkit
    def import_module(name):
        {does}
        raise ImportError("its own reason")
    toolkit.importlib.import_module = import_module
    try:
        toolkit.load_coremltools()
    except toolkit.EngineError as error:
        print(getattr(sys.modules.get("sklearn"), "__name__", "none"), "sklearn" in sys.modules, error)
    """
    done = run_python(code)
    assert done.stdout.startswith(f"{left} {left == 'sys'} coremltools is installed"), done.stderr
    assert "(ImportError: its own reason)" in done.stdout


def test_all_that_is_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    """A line each, and coremltools among them."""
    out, absent = tmp_path / "m", str(tmp_path / "absent")
    settings = ("--technique", "lru", "--profile", absent, "--weights", "int4")
    done = run_python(WITHOUT_COREMLTOOLS, "coreml", "convert", MODEL, "--out", str(out), *settings)
    assert done.code == 2, done
    wanted = ("coremltools", "lru learns nothing", "weights int4", "weights are constants of a graph")
    assert len(done.problems) == len(wanted)
    assert all(said in problem for said, problem in zip(wanted, done.problems, strict=True)), done.problems
    done = run_python(WITHOUT_COREMLTOOLS, "coreml", "convert", absent, "--out", str(out), "--profile", MODEL)
    assert ["coremltools" in problem or absent in problem for problem in done.problems] == [True, True]
    done = run_python(WITHOUT_COREMLTOOLS, "coreml", "lint", absent)
    assert [word in problem for word, problem in zip(("coremltools", absent), done.problems, strict=True)] == [
        True,
        True,
    ]
    assert not out.exists()


def a_package(n_bytes: int) -> PackagePlan:
    function = GraphFunction(name="group_64", kind="experts", rows=64, experts=(0,))
    return PackagePlan(
        path="layer-000/experts-0.mlpackage", layer=0, role="experts", functions=(function,), weight_bytes=n_bytes
    )


def test_room_is_looked_for_before_work(tmp_path: Path) -> None:
    """Ten packages of 1 EB are on no disk; ten of one byte are."""
    with pytest.raises(NoSpaceError, match=r"1\.2e\+07 TB are needed for 10 packages and .*B are free; make room"):
        check_room(tmp_path / "not" / "yet", 10 * [a_package(10**18)])
    check_room(tmp_path / "not" / "yet", 10 * [a_package(1)])
    assert not (tmp_path / "not").exists()
    # All weights once, the heaviest two more times while it is written, and 256 MiB.
    assert needed_bytes([a_package(100), a_package(40)]) == 340 + 256 * 2**20
    assert needed_bytes([]) == 0


def test_what_a_killed_conversion_left_is_cleared_and_the_rest_is_not(tmp_path: Path) -> None:
    for name in ("layer-000/.77-experts-0.mlpackage/Data", "layer-000/experts-1.mlpackage", ".work/tmp1"):
        (tmp_path / name).mkdir(parents=True)
    clear_unfinished(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "layer-000",
        "layer-000/experts-1.mlpackage",
    ]


def test_a_disk_that_fills_up_keeps_what_is_finished(tmp_path: Path) -> None:
    """No file may be larger than 400 kB, as if the disk were full: attention fits, a group of experts does not."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        from harness.cli import main
        main()
    """
    out = tmp_path / "m"
    done = run_python(code, "coreml", "convert", MODEL, "--out", str(out), *SETTINGS)
    assert done.code == 7, done
    assert "the same command goes on" in done.problems[-1]
    assert len(packages(out)) >= 1
    assert convert(out).code == 0
    assert json.loads((out / "manifest.json").read_text())["format"] == 1
