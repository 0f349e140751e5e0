"""What is loaded was built here, by us, and is whole; every damage costs a line and seconds, never the run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.kernels import cache, library
from engines.kernels.compile import FLAGS_VARIABLE, NATIVE, CompileError
from engines.kernels.library import load_first
from results.own_cache import cache_folder, prepared
from tests.kernel_builds import build_only, library_in, load_anew, program, stamps, user_cache

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: there is nothing to keep")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return user_cache(tmp_path, monkeypatch)


def test_kernels_are_built_once_and_kept_for_the_user_alone(folder: Path) -> None:
    first = load_anew()
    assert first.kernels is not None
    assert first.manifest is not None
    before = stamps(folder)
    assert load_anew().manifest == first.manifest
    assert stamps(folder) == before
    kept = library_in(folder)
    assert first.manifest.sha256 == hashlib.sha256(kept.read_bytes()).hexdigest()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def cut_short(folder: Path) -> None:
    os.truncate(library_in(folder), 5000)


def changed_in_one_byte(folder: Path) -> None:
    contents = bytearray(library_in(folder).read_bytes())
    contents[-1] ^= 1
    library_in(folder).write_bytes(contents)


def replaced_by_a_link(folder: Path) -> None:
    kept = library_in(folder)
    kept.symlink_to(kept.rename(kept.with_suffix(".elsewhere")))


def writable_by_all(folder: Path) -> None:
    library_in(folder).chmod(0o777)


def manifest_of_somebody_else(folder: Path) -> None:
    next(folder.glob("*.json")).chmod(0o666)


def manifest_that_is_no_json(folder: Path) -> None:
    next(folder.glob("*.json")).write_bytes(b"\xff{")


def manifest_that_names_another_file(folder: Path) -> None:
    path = next(folder.glob("*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": "../" * 21 + "x"}))


def manifest_that_says(**changed: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = next(folder.glob("*.json"))
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return damage


DAMAGES = [
    cut_short, changed_in_one_byte, replaced_by_a_link, writable_by_all, manifest_of_somebody_else,
    manifest_that_is_no_json, manifest_that_names_another_file, manifest_that_says(n_bytes=-5),
    manifest_that_says(n_bytes=10**14), manifest_that_says(n_bytes=10**30), manifest_that_says(command="g++ 'x"),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_library_that_is_not_what_was_built_is_told_and_built_anew(
    damage: object, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_only(folder)
    assert callable(damage)
    damage(folder)
    found = load_anew()
    assert found.kernels is not None
    (line,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert line.startswith("kernels in the cache are not used, and forgotten: ")
    assert str(folder) in line
    caplog.clear()
    assert load_anew().kernels is not None
    assert not caplog.records, "the damage was mended"


@as_root
def test_library_of_another_user_is_not_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_only(folder)
    os.chown(library_in(folder), 12345, -1)
    assert load_anew().kernels is not None
    assert "belongs to user 12345, not to you (0)" in caplog.text
    assert library_in(folder).stat().st_uid == 0


@as_root
def test_folder_of_another_user_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    found = load_anew()
    assert found.kernels is not None, "built for this process alone"
    assert "belongs to user 12345, not to you (0); set XDG_CACHE_HOME" in caplog.text
    assert list(folder.iterdir()) == []


def test_folder_that_others_could_write_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load_anew().kernels is not None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_library_without_our_functions_is_built_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As one that a change of the manifest's meaning could leave: whole by size and hash, and of no use."""
    build_only(folder)
    kept, manifest = library_in(folder), next(folder.glob("*.json"))
    foreign = folder / "foreign.cpp"
    foreign.write_text('extern "C" void somebody() {}')
    subprocess.run(["c++", "-shared", "-fPIC", str(foreign), "-o", str(kept)], check=True)
    contents = kept.read_bytes()
    told = {"sha256": hashlib.sha256(contents).hexdigest(), "n_bytes": len(contents)}
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | told))
    kept.rename(folder / f"kernels-{told['sha256'][:16]}.so")  # type: ignore[index]
    assert load_anew().kernels is not None
    assert "undefined symbol: joulebench_" in caplog.text


def test_folder_that_cannot_be_used_costs_a_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "joulebench").write_text("a file where a folder should be")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(library, "NOTICED_S", 0.0)
    assert load_anew().kernels is not None
    assert "about ten seconds, in this process alone" in caplog.text
    (line,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert line.startswith("the kernels are built anew for this process alone")
    assert "set XDG_CACHE_HOME to a folder that can" in line


def test_what_was_compiled_serves_where_it_cannot_be_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: the folder goes while the compiler works. It was compiled twice, 20 s each."""
    log = tmp_path / "log"
    kept, gone = shlex.quote(str(log)), shlex.quote(str(folder))
    script = f'echo " $* " >>{kept}; rm -rf {gone}; exec {shutil.which("c++")} "$@"'
    monkeypatch.setenv("CXX", shlex.quote(str(program(tmp_path / "compiler", script))))
    assert load_anew().kernels is not None
    assert log.read_text().count(" -shared ") == 1
    (line,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert line.startswith(f"the kernels are built anew at each start, which takes seconds: {folder} cannot be written")


@pytest.mark.parametrize("named", [None, "", "relative"])
def test_user_without_home_still_has_kernels(
    named: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.geteuid", lambda: 2**31 - 7)  # whom no list of users has
    monkeypatch.delenv("HOME", raising=False)
    if named is not None:
        monkeypatch.setenv("HOME", named)
    assert load_anew().kernels is not None
    assert "this user has no home folder; set XDG_CACHE_HOME to a folder of yours" in caplog.text


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("named", ["", "relative/folder"])
def test_folder_is_never_one_beside_or_below_the_current_one(
    variable: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative XDG_CACHE_HOME is ignored, as its specification asks; an empty HOME is none, and not /."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, named)
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_dir="/home/listed"))
    home = Path("/home/listed") if variable == "HOME" else tmp_path
    assert cache_folder(cache.KIND) == home / ".cache" / "joulebench" / "kernels"


def test_library_that_is_exchanged_after_the_check_is_not_loaded(folder: Path) -> None:
    build_only(folder)
    (kept,) = cache.find(folder)
    os.truncate(kept.library, 100)  # mapped, it would end this process
    assert library.load(kept).joulebench_instruction_set() is not None
    kept.library.unlink()
    assert library.load(kept).joulebench_instruction_set() is not None


def test_system_without_nameless_files_loads_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    build_only(folder)
    (kept,) = cache.find(folder)
    os.truncate(kept.library, 100)
    assert library.load(kept).joulebench_instruction_set() is not None


@pytest.mark.parametrize("pattern", ["*.json", "*.so"])
def test_folder_at_a_name_of_ours_gives_way(pattern: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_only(folder)
    (path,) = folder.glob(pattern)
    path.unlink()
    (path / "below").mkdir(parents=True)
    assert load_anew().kernels is not None
    assert "Is a directory" in caplog.text
    caplog.clear()
    before = stamps(folder)
    assert load_anew().kernels is not None
    assert stamps(folder) == before, "built once"
    assert not caplog.records


def test_oldest_builds_go_and_their_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT_BUILDS", 2)
    for n in range(4):
        monkeypatch.setenv(FLAGS_VARIABLE, f"-DBUILD={n} -Wl,--build-id=0x0{n}")
        assert load_anew().kernels is not None
        for path in folder.iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**13))
    kept = [json.loads(path.read_text())["command"][-4:] for path in folder.glob("*.json")]
    assert sorted(kept) == ["0x02", "0x03"]
    assert len(list(folder.glob("*.so"))) == 2


def test_build_of_a_clock_that_was_set_back_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be the oldest of all, dropped as soon as it is made, and made again at each start."""
    monkeypatch.setattr(cache, "KEPT_BUILDS", 2)
    prepared(folder)
    tomorrow = time.time() + 86400
    for name in ("one.json", "two.json"):
        (folder / name).write_text("")
        os.utime(folder / name, (tomorrow, tomorrow))
    assert load_anew().kernels is not None
    before = stamps(folder)
    assert load_anew().kernels is not None
    assert stamps(folder) == before, "built once"


def test_library_without_a_manifest_goes_once_nobody_can_be_writing_it(folder: Path) -> None:
    prepared(folder)
    for name, age_s in (("kernels-old.so", 7200), ("kernels-new.so", 60)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age_s, time.time() - age_s))
    build_only(folder)
    assert not (folder / "kernels-old.so").exists()
    assert (folder / "kernels-new.so").exists()


def test_nowhere_to_write_leaves_torch_with_the_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "joulebench").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    found = load_anew()
    assert found.kernels is None
    assert found.reason is not None
    assert "absent" in found.reason
    assert "the engine runs on torch alone" in caplog.text


def test_kernels_for_another_processor_are_not_called(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder kept from another machine, or flags beyond this one, would end the process (SIGILL)."""
    monkeypatch.setitem(library.has.__globals__["X86_FLAGS"], "SSE2", ("a-flag-of-tomorrow",))
    monkeypatch.setattr("engines.kernels.compile._cpuinfo", lambda: ["flags\t\t: sse2 avx"])
    with pytest.raises(CompileError, match="is for SSE2, which this processor lacks"):
        load_first(prepared(folder))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="flags of x86")
def test_what_the_compiler_might_use_is_asked_of_it_and_held_against_the_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in says SSE2 whatever it is compiled for: kernels for AVX2 say nothing of VNNI or BMI either."""
    monkeypatch.setattr("engines.kernels.compile._cpuinfo", lambda: ["flags\t\t: sse2 avx fma"])
    monkeypatch.setenv(FLAGS_VARIABLE, "-march=x86-64 -mbmi2 -mavx -mfma")
    with pytest.raises(
        CompileError, match=r"is for SSE2 and uses .*\bbmi2\b, which this processor lacks \(JOULEB"
    ) as told:
        load_first(prepared(folder))
    assert "fma" not in str(told.value)
    # What is asked of this processor itself is not held against a Linux that does not know all words.
    monkeypatch.setenv(FLAGS_VARIABLE, NATIVE)
    assert load_first(prepared(folder)).kernels is not None


@pytest.mark.slow
def test_two_processes_that_build_at_once_both_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, "-O0")  # they build the kernels, not the stand-in
    script = "from engines.kernels.library import library; raise SystemExit(library() is None)"
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
