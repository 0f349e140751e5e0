"""Which compiler builds the kernels, with which flags, and what is said of those that do not."""

from __future__ import annotations

import logging
import os
import platform
import re
import select
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from engines.kernels import library
from engines.kernels.compile import FLAGS, FLAGS_VARIABLE, SOURCES, CompileError, Compiler, compilers, source_key
from results.environments import TORCH_ALONE
from tests.benchmarks.first_start import NAME, factors
from tests.benchmarks.measurement import read_json
from tests.eventually import eventually
from tests.kernel_builds import load_anew, program, stamps, user_cache

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: there is nothing to keep")


NAMES = [n for n in ("g++", "clang++", *(f"clang++-{i}" for i in range(16, 24))) if shutil.which(n) is not None]
PROCESSORS = (
    "-march=x86-64-v4 -mavx512vnni -mavx512bf16", "-march=x86-64-v4 -mavx512vnni", "-march=x86-64-v4",
    "-march=x86-64-v3 -mavxvnni", "-march=x86-64-v3", "-march=x86-64-v2",
)  # fmt: skip
"""Each has parts of the kernels that no other one has."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return user_cache(tmp_path, monkeypatch)


def test_kept_build_serves_once_the_compiler_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_anew().manifest
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_anew().manifest == built


def test_machine_without_compiler_is_told_what_to_install_and_what_it_loses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = load_anew()
    assert found.kernels is None
    assert found.reason == "no C++ compiler found; install g++ (Debian: apt install g++)"
    (said,) = (record.message for record in caplog.records)
    assert said == f"the engine runs on torch alone, {TORCH_ALONE}: {found.reason}"


def test_what_a_machine_without_compiler_is_told_to_lose_is_what_was_measured() -> None:
    """Within a half: other machines' rows come and go on the page."""
    told = [float(number) for number in re.findall(r"[\d.]+(?= to| times)", TORCH_ALONE)]
    assert told == pytest.approx(factors(read_json(NAME)), rel=0.5)


@pytest.mark.parametrize("stays", [True, False])
def test_long_compilation_is_told_while_it_lasts_and_a_short_one_is_not(
    stays: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is kept it told that this was once, below the line that it is at each start."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(library, "NOTICED_S", 0.01)
    with library.told_when_long(Compiler(("/usr/bin/c++",)), stays):
        assert eventually(lambda: caplog.records)
    (said,) = (record.message for record in caplog.records)
    how_often = "once for this machine and version" if stays else "in this process alone"
    assert said == f"compiling the kernels with /usr/bin/c++: about ten seconds, {how_often}"
    caplog.clear()
    monkeypatch.setattr(library, "NOTICED_S", 3600.0)
    before = set(threading.enumerate())
    with library.told_when_long(Compiler(("/usr/bin/c++",)), stays):
        (waiting,) = set(threading.enumerate()) - before
    waiting.join(60)
    assert not waiting.is_alive(), "nobody waits any more who would tell it later"
    assert not caplog.records


def test_broken_compiler_does_not_end_the_search(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = shutil.which("c++")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program(bin_folder / "c++", "echo 'kernels.cpp:1: error: too old' >&2; exit 1")
    program(bin_folder / "g++", f'exec {real} "$@"')
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    assert load_anew().kernels is not None
    first = shlex.quote(f"{bin_folder}/c++")
    assert f"{first} failed on kernels.cpp: kernels.cpp:1: error: too old; g++ 12 and" in caplog.text
    caplog.clear()
    assert load_anew().kernels is not None
    assert not caplog.records, "what the second compiler built is found before the first is tried again"


BROKEN = {
    "fails": ("echo 'error: no' >&2; exit 1", "failed on kernels.cpp: error: no"),
    "says what is no text": (r"printf 'error: \377\n' >&2; exit 1", "failed on kernels.cpp: error: \ufffd"),
    "says nothing": ("exit 3", "failed on kernels.cpp: it ended with 3 and wrote no .o file"),
    "writes nothing": ("exit 0", "failed on kernels.cpp: it ended with 0 and wrote no .o file"),
    "only preprocesses": (f'exec {shutil.which("c++")} -E "$@"', "failed on kernels.so: "),
    "says a megabyte": ("echo error: $(head -c 1000000 /dev/zero | tr '\\0' x) >&2; exit 1", "…"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_compiler_that_fails_is_named_with_its_reason(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, words = BROKEN[way]
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in ("head", "tr", "sh", "printf"):
        (bin_folder / name).symlink_to(shutil.which(name) or name)
    program(bin_folder / "c++", script)
    monkeypatch.setenv("PATH", str(bin_folder))
    found = load_anew()
    assert found.kernels is None
    assert found.reason is not None
    assert words in found.reason
    assert len(found.reason) < 600
    assert [path.name for path in folder.iterdir()] == []


def test_full_disk_under_the_compiler_is_told_with_what_helps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is GCC 12's own, of a full TMPDIR."""
    (tmp_path / "bin").mkdir()
    said = "k.cpp:1:699: fatal error: error closing /tmp/ccRRWZQO.s: No space left on device"
    program(tmp_path / "bin" / "c++", f"echo '{said}' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = load_anew()
    assert found.kernels is None
    assert f"{said}; make room in " in str(found.reason)
    assert str(found.reason).endswith(", or set TMPDIR to a folder that has some")


@pytest.mark.parametrize("variable", ["CXX", FLAGS_VARIABLE])
def test_path_or_flag_that_is_no_text_is_built_with_and_kept(
    variable: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(named)
    os.symlink(shutil.which("c++") or "c++", f"{named}/g++")
    monkeypatch.setenv(variable, f"{named}/g++" if variable == "CXX" else os.fsdecode(b"-DX=\xff"))
    first = load_anew()
    assert first.kernels is not None
    before = stamps(folder)
    assert load_anew().manifest == first.manifest
    assert stamps(folder) == before, "built once"


def test_sources_are_compiled_side_by_side(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin."""
    more = tmp_path / "more.cpp"
    more.write_text("int more() { return 0; }")
    monkeypatch.setattr("engines.kernels.compile.SOURCES", (tmp_path / "kernels.cpp", more))
    begun = tmp_path / "begun"
    begun.mkdir()
    place = shlex.quote(str(begun))
    wait = f"i=0; until [ $(ls {place} | wc -l) = 2 ]; do i=$((i + 1)); [ $i = 300 ] && exit 1; sleep 0.1; done"
    own = program(
        tmp_path / "my-c++", f'case "$*" in *.cpp*) touch {place}/$$; {wait};; esac; exec {shutil.which("c++")} "$@"'
    )
    monkeypatch.setenv("CXX", shlex.quote(str(own)))
    found = load_anew()
    assert found.kernels is not None
    assert found.manifest is not None
    assert found.manifest.command.startswith(shlex.quote(str(own)))


def test_compiler_that_takes_too_long_is_told_with_what_helps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "c++", "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("engines.kernels.compile.TIMEOUT_S", 0.1)
    found = load_anew()
    assert found.kernels is None
    called = shlex.quote(f"{tmp_path}/bin/c++")
    assert found.reason == f"{called} took more than 0.1 s on the kernels; start again when this machine is less busy"


def test_what_a_compiler_started_ends_with_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ is a driver: what compiles is a process of its own, which holds the far end of this pipe."""
    pipe = tmp_path / "pipe"
    place = shlex.quote(str(pipe))
    os.mkfifo(pipe)
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "c++", f"/bin/sh -c 'echo begun; exec /bin/sleep 600' > {place} &\nwait")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("engines.kernels.compile.TIMEOUT_S", 2.0)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as end:
        assert load_anew().kernels is None
        assert end.read(16) == b"begun\n"
        assert select.select([end], [], [], 20.0)[0], "it goes on"
        assert end.read(16) == b"", "the pipe has no other end any more"


USELESS = {
    "writes junk": ('while [ "$1" != -o ]; do shift; done; echo hi > "$2"', "file too short"),
    "writes text": ('while [ "$1" != -o ]; do shift; done; seq 100 > "$2"', "invalid ELF header"),
    "does not link": (
        'case "$*" in *-shared*) shift $(($# - 3)); exec cp "$1" "$3";; esac; exec REAL "$@"',
        "ET_DYN",
    ),
}
"""A compiler that ends well, and what the loader says of what it wrote."""


@pytest.mark.parametrize("way", USELESS)
def test_compiler_whose_build_does_not_load_does_not_end_the_search(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, words = USELESS[way]
    real = shutil.which("c++") or "c++"
    own = program(
        tmp_path / "my-c++", f'[ "$1" = --version ] && echo my own 1.0 && exit\n{script.replace("REAL", real)}'
    )
    monkeypatch.setenv("CXX", shlex.quote(str(own)))
    for _ in range(2):
        caplog.clear()
        found = load_anew()
        assert found.kernels is not None
        assert found.manifest is not None
        assert found.manifest.compiler != "my own 1.0"
        (line,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
        assert line.startswith(f"what {shlex.quote(str(own))} built is of no use here: kernels-")
        assert words in line
        assert str(folder) not in line.partition("(")[0], "the folder has no fault"
        assert line.endswith(f"; kernels of {found.manifest.compiler} are used")
        assert len(list(folder.iterdir())) == 2, "what does not load is not kept"


def test_kept_build_that_loads_serves_where_no_compiler_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_anew().manifest
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program(bin_folder / "c++", USELESS["writes junk"][0])
    monkeypatch.setenv("PATH", str(bin_folder))
    assert load_anew().manifest == built
    shutil.rmtree(folder)
    reason = load_anew().reason
    assert reason is not None
    assert f"{shlex.quote(f'{bin_folder}/c++')} built is of no use here" in reason


def test_file_that_is_no_program_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "c++").write_bytes(b"\x7fELF but not really")
    (bin_folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder))
    reason = load_anew().reason
    assert reason is not None
    assert f"{shlex.quote(f'{bin_folder}/c++')} cannot be started ([Errno 8] Exec format error" in reason


def test_compiler_that_the_user_names_is_the_one_that_builds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_anew()
    own = program(tmp_path / "my-c++", f'[ "$1" = --version ] && echo my own 1.0 || exec {shutil.which("c++")} "$@"')
    monkeypatch.setenv("CXX", shlex.quote(str(own)))
    found = load_anew().manifest
    assert found is not None
    assert found.compiler == "my own 1.0"


FAST_MATH = ["-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only"]


@pytest.mark.parametrize("flag", FAST_MATH)
@pytest.mark.parametrize("hidden", [False, True])
def test_inexact_arithmetic_is_refused_and_another_compiler_builds(
    flag: str,
    hidden: bool,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said in CXX, or by a wrapper: what the compiler defines tells. (The last -O counts: -Ofast is undone there.)"""
    if hidden and flag == "-Ofast":
        flag = "-O3 -ffast-math"
    own = program(tmp_path / "my-c++", f'exec {shutil.which("c++")} {flag} "$@"')
    monkeypatch.setenv("CXX", shlex.quote(str(own)) if hidden else f"c++ {flag}")
    found = load_anew().manifest
    assert found is not None
    assert flag not in found.command
    assert str(own) not in found.command
    assert "is refused, because " in caplog.text
    assert "; kernels of " in caplog.text


def test_inexact_arithmetic_in_our_own_variable_leaves_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, "-ffast-math")
    found = load_anew()
    assert found.kernels is None
    assert f"take it out of CXX and {FLAGS_VARIABLE}" in str(found.reason)


def test_what_the_user_put_behind_the_compiler_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -DMINE=1 '-DNAME=two words'")
    found = load_anew().manifest
    assert found is not None
    assert found.command.startswith(f"{shutil.which('c++')} -DMINE=1 '-DNAME=two words' -O3 ")
    assert found.flags.startswith("-DMINE=1 '-DNAME=two words' -O3 ")


@pytest.mark.parametrize(("named", "words"), [("/no/such/compiler", "is no program"), ("'g++", "cannot be read")])
def test_compiler_that_is_not_there_is_told_and_another_builds(
    named: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", named)
    assert load_anew().kernels is not None
    assert words in caplog.text


def test_flags_of_the_user_are_built_apart_and_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_anew()
    monkeypatch.setenv(FLAGS_VARIABLE, "-march=x86-64 -DOTHER=1" if os.uname().machine == "x86_64" else "-DOTHER=1")
    found = load_anew().manifest
    assert found is not None
    assert found.flags.endswith(" -DOTHER=1")
    assert len(list(folder.glob("*.json"))) == 2
    monkeypatch.setenv(FLAGS_VARIABLE, "'")
    reason = load_anew().reason
    assert reason is not None
    assert f'{FLAGS_VARIABLE}="\'" cannot be read' in reason


def test_flags_that_no_compiler_takes_are_told_with_their_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, "-march=no-such-processor")
    reason = str(load_anew().reason)
    assert f"{FLAGS_VARIABLE} asks for -march=no-such-processor: mend it, or leave it out" in reason
    assert "are known to take it" not in reason


def test_two_names_of_one_compiler_are_tried_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not of a program that does what its name says (ccache)."""
    bin_folder, tried = tmp_path / "bin", tmp_path / "tried"
    bin_folder.mkdir()
    for real, n in (("my-g++-12", 1), ("ccache", 2)):
        tried.write_text("")
        program(bin_folder / real, f'case "$*" in *.cpp*) echo "$0" >> {shlex.quote(str(tried))};; esac; exit 1')
        for name in ("c++", "g++"):
            (bin_folder / name).unlink(missing_ok=True)
            (bin_folder / name).symlink_to(bin_folder / real)
        monkeypatch.setenv("PATH", str(bin_folder))
        assert load_anew().kernels is None
        assert len(tried.read_text().splitlines()) == n, real


def test_compilers_are_kept_apart_by_program_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for named in ("c++", "c++ -m64", "c++ -O1"):
        monkeypatch.setenv("CXX", named)
        keys.add(next(iter(compilers())).key)
    assert len(keys) == 3
    assert len(source_key()) == 16


def test_error_of_the_flags_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, '"')
    with pytest.raises(CompileError, match="cannot be read"):
        source_key()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", NAMES)
def test_each_compiler_takes_the_kernels_for_each_processor(name: str, processor: str) -> None:
    """Whatever processor is here: nothing is made of them. clang 16 did not take those for AVX-512 VNNI."""

    def said(*arguments: str, source: str | None = None) -> str:
        command = [name, *FLAGS, *processor.split(), "-fsyntax-only", *arguments]
        return subprocess.run(command, input=source, capture_output=True, text=True, timeout=300).stderr

    if "error" in said("-x", "c++", "-", source="_Float16 half;"):
        pytest.skip(f"this {name} is older than those that are known to take them")
    for source in SOURCES:
        assert "error" not in said(str(source))
