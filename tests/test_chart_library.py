"""The script of charts is put together once for a user, taken only where it is whole and ours, and costs no page."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import vl_convert

from results.report import chart_library as charts

SCRIPT = "const a = '</script><!--';" * 100
ON_A_PAGE = "const a = '<\\/script><\\!--';" * 100


def library_anew() -> str:
    """As a process that begins would have it."""
    return charts.chart_library.__wrapped__()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "joulebench" / "charts"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vl-convert was asked for; in its place a script that is put together in no time."""
    asked: list[str] = []

    def put_together(snippet: str) -> str:
        asked.append(snippet)
        return SCRIPT

    monkeypatch.setattr(vl_convert, "javascript_bundle", put_together)
    return asked


def kept(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_what_is_kept_is_what_vl_convert_puts_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = vl_convert.javascript_bundle(charts.SNIPPET).replace("</script", "<\\/script").replace("<!--", "<\\!--")
    assert library_anew() == expected
    monkeypatch.delattr(vl_convert, "javascript_bundle")
    assert library_anew() == expected, "of the file"


def test_it_is_put_together_once_and_kept_for_the_user_alone(folder: Path, made: list[str]) -> None:
    assert [library_anew() for _ in range(3)] == [ON_A_PAGE] * 3
    assert made == [charts.SNIPPET]
    assert [path.stat().st_mode & 0o777 for path in (folder, kept(folder))] == [0o700, 0o600]


def cut_short(path: Path) -> None:
    os.truncate(path, 1000)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def changed_in_one_byte(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)


def replaced_by_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[2] / "elsewhere"))


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)


def writable_by_others(path: Path) -> None:
    path.chmod(0o666)


def given_to_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "damage",
    [cut_short, emptied, changed_in_one_byte, replaced_by_a_link, replaced_by_a_folder, writable_by_others,
     given_to_another_user],
)  # fmt: skip
def test_a_file_that_is_not_what_we_wrote_is_not_taken_and_made_anew(
    damage: Callable[[Path], None], folder: Path, made: list[str]
) -> None:
    library_anew()
    damage(kept(folder))
    assert library_anew() == ON_A_PAGE
    assert len(made) == 2
    assert library_anew() == ON_A_PAGE
    assert len(made) == 2, "the damage was mended"


@pytest.mark.parametrize("name", ["version", "snippet"])
def test_a_script_of_another_version_is_not_taken_for_this_one(
    name: str, folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library_anew()
    if name == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda _: "0.0.1")
    else:
        monkeypatch.setattr(charts, "SNIPPET", "window.other = vegaEmbed;")
    library_anew()
    assert len(made) == 2


def test_old_scripts_go(folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(7):
        monkeypatch.setattr("importlib.metadata.version", lambda _, n=n: f"1.{n}")
        library_anew()
        for path in folder.iterdir():
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**13))
    assert len(list(folder.iterdir())) == charts.KEPT_SCRIPTS
    for n in range(3, 7):
        monkeypatch.setattr("importlib.metadata.version", lambda _, n=n: f"1.{n}")
        library_anew()
    assert len(made) == 7, "the newest four stayed"


def no_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "joulebench").write_text("a file where a folder should be")


def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.geteuid", lambda: 2**31 - 7)  # whom no list of users has
    monkeypatch.delenv("HOME", raising=False)


def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write there all the same, so another file system says no: one that nobody can make a folder in."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")


@pytest.mark.parametrize("damage", [no_folder, no_home, read_only])
def test_a_cache_that_cannot_be_used_costs_no_page(
    damage: Callable[[Path, pytest.MonkeyPatch], None], folder: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(folder.parents[1], monkeypatch)
    assert library_anew() == ON_A_PAGE


@contextmanager
def no_file_longer_than(n_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_no_page_and_leaves_nothing(folder: Path, made: list[str]) -> None:
    with no_file_longer_than(100):
        assert library_anew() == ON_A_PAGE
    assert list(folder.iterdir()) == []
    assert library_anew() == ON_A_PAGE
    assert kept(folder).stat().st_size == charts.N_HEX + len(SCRIPT)
