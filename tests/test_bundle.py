"""Bundles: what was changed, removed or added is named; the hash of the whole is another one then."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from results.bundle import MANIFEST, BundledFile, BundleError, Manifest, Verified, verify, write_bundle
from results.database import DATABASE, StoreError
from results.report.files import replace_text
from results.scratch import NEW_S
from results.store import Store
from tests.command import joulebench, run_python
from tests.conftest import FinishedRun

PLAIN_CHECK = """
import hashlib, json, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as bundle:
    manifest = json.loads(bundle.read("manifest.json"))
    for name, one in manifest["files"].items():
        content = bundle.read(name)
        assert (len(content), hashlib.sha256(content).hexdigest()) == (one["n_bytes"], one["sha256"]), name
    assert {*bundle.namelist()} == {"manifest.json", *manifest["files"]}
print(len(manifest["files"]))
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from results import bundle
bundle._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
bundle.write_bundle(Path(sys.argv[1]), Path(sys.argv[2]), "0.1.0")
"""


@pytest.fixture(scope="module")
def bundle(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "run.zip"
    write_bundle(finished_run.directory, out, "0.1.0")
    return out


def changed(bundle: Path, folder: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """The bundle, packed again after a change of what it holds."""
    with zipfile.ZipFile(bundle) as old:
        content = {name: old.read(name) for name in old.namelist()}
    change(content)
    path = folder / "changed.zip"
    with zipfile.ZipFile(path, "w") as new:
        for name, data in content.items():
            new.writestr(name, data)
    return path


def test_a_bundle_is_what_its_manifest_says_and_needs_no_joulebench(bundle: Path, finished_run: FinishedRun) -> None:
    found = verify(bundle)
    assert found.problems == ()
    with Store.view(finished_run.directory) as store:
        trials = store.trials()
        with_traces = {t.trial_id for t in trials if store.traces(t.trial_id)}
        assert found.manifest.run_id == store.info().run_id
    assert found.manifest.n_trials == len(trials)
    assert {f"run/traces/{i}.parquet" for i in with_traces} <= found.manifest.files.keys()
    assert {"plan.json", "environment.json", "run/run.sqlite", "run/report.html"} <= found.manifest.files.keys()
    # Another program's zip and SHA-256 come to the same.
    plain = subprocess.run([sys.executable, "-c", PLAIN_CHECK, str(bundle)], capture_output=True, text=True, check=True)
    assert int(plain.stdout) == len(found.manifest.files)
    with zipfile.ZipFile(bundle) as opened:
        assert hashlib.sha256(opened.read(MANIFEST)).hexdigest() == found.root
    assert bundle.stat().st_mode & 0o077 == 0


def test_the_same_run_gives_the_same_bytes(bundle: Path, finished_run: FinishedRun, tmp_path: Path) -> None:
    write_bundle(finished_run.directory, tmp_path / "again.zip", "0.1.0")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()


def test_it_is_on_the_disk_before_it_has_its_name(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.zip"
    flushed: list[tuple[int, int, bool]] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        flushed.append((found.st_ino, found.st_size, out.exists()))

    monkeypatch.setattr(os, "fsync", seen)
    write_bundle(finished_run.directory, out, "0")
    assert flushed[-2] == (out.stat().st_ino, out.stat().st_size, False)
    assert (flushed[-1][0], flushed[-1][2]) == (tmp_path.stat().st_ino, True)


def test_what_was_changed_removed_and_added_is_named(bundle: Path, tmp_path: Path) -> None:
    [trace, *_] = [name for name in verify(bundle).manifest.files if name.startswith("run/traces/")]

    def change(content: dict[str, bytes]) -> None:
        content[trace] = content[trace][:-1] + bytes([content[trace][-1] ^ 1])
        content["plan.json"] += b"\n"
        del content["environment.json"]
        content["run/notes.txt"] = b"mine"

    found = verify(changed(bundle, tmp_path, change))
    size = verify(bundle).manifest.files["plan.json"].n_bytes
    assert sorted(found.problems) == sorted(
        [
            f"{trace}: was changed",
            f"plan.json: was changed ({size} -> {size + 1} bytes)",
            "environment.json: was removed",
            "run/notes.txt: was added",
        ]
    )


def test_a_manifest_that_was_made_anew_shows_against_the_root_hash_alone(bundle: Path, tmp_path: Path) -> None:
    def change(content: dict[str, bytes]) -> None:
        content["plan.json"] = b"{}\n"
        manifest = json.loads(content[MANIFEST])
        manifest["files"]["plan.json"] = {"n_bytes": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}
        content[MANIFEST] = json.dumps(manifest).encode()

    path, root = changed(bundle, tmp_path, change), verify(bundle).root
    assert verify(path).problems == ()
    assert verify(path).root != root
    ended = joulebench("verify", str(path), "--root", root)
    assert (ended.code, "is another one" in ended.stdout) == (8, True)
    alone = joulebench("verify", str(path))
    assert alone.code == 0
    assert "whoever changed the files may have made the manifest anew" in alone.stdout
    assert joulebench("verify", str(bundle), "--root", root.upper()).code == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_byte_of_what_it_holds_can_be_changed_unseen(bundle: Path, tmp_path: Path, data: st.DataObject) -> None:
    """What zip says besides (dates, modes) is no content: there the contents are still those of before."""
    whole = bytearray(bundle.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.zip"
    path.write_bytes(whole)
    try:
        found = verify(path)
    except BundleError:
        return
    before = verify(bundle)
    assert found.problems or (found.root == before.root and _contents(path) == _contents(bundle))


def _contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as opened:
        return {one.filename: opened.read(one) for one in opened.infolist()}


def test_a_name_that_is_there_twice_is_told(bundle: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(bundle, tmp_path / "twice.zip"))
    with zipfile.ZipFile(path, "a") as opened, pytest.warns(UserWarning, match="Duplicate name"):
        opened.writestr("plan.json", b"{}")
    assert "plan.json: is there twice" in verify(path).problems


def test_a_folder_that_it_was_unpacked_into_is_checked_and_can_be_read(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(bundle) as opened:
        opened.extractall(tmp_path / "there")
    found: Verified = verify(tmp_path / "there")
    assert (found.problems, found.root) == ((), verify(bundle).root)
    with Store.view(tmp_path / "there" / "run") as store:
        assert len(store.trials()) == found.manifest.n_trials
    (tmp_path / "there" / "link").symlink_to("/etc/passwd")
    assert verify(tmp_path / "there").problems == ("link: is a link, and no file",)


def test_a_link_in_the_zip_is_told_though_its_target_has_the_digest(bundle: Path, tmp_path: Path) -> None:
    """unzip makes a link of it: what is written to run/out later goes where it leads."""
    target, path = b"/etc/passwd", tmp_path / "link.zip"

    def name_it(content: dict[str, bytes]) -> None:
        manifest = json.loads(content[MANIFEST])
        manifest["files"]["run/out"] = {"n_bytes": len(target), "sha256": hashlib.sha256(target).hexdigest()}
        content[MANIFEST] = json.dumps(manifest).encode()

    shutil.copy(changed(bundle, tmp_path, name_it), path)
    link = zipfile.ZipInfo("run/out")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr(link, target)
    assert verify(path).problems == ("run/out: is a link, and no file",)


def _moved(path: Path, to: Path) -> None:
    """A link stays behind, as where traces lie on a larger disk."""
    path.rename(to)
    path.symlink_to(to)


@pytest.mark.parametrize("what", ["traces", "one trace"])
def test_traces_behind_a_link_are_packed(finished_run: FinishedRun, tmp_path: Path, what: str) -> None:
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    _moved(run / "traces" if what == "traces" else next((run / "traces").glob("*.parquet")), tmp_path / "elsewhere")
    (run / "notes.txt").symlink_to("/etc/passwd")
    linked = write_bundle(run, tmp_path / "linked.zip", "0.1.0").manifest
    plain = write_bundle(finished_run.directory, tmp_path / "plain.zip", "0.1.0").manifest
    assert linked.files.keys() == plain.files.keys()
    assert verify(tmp_path / "linked.zip").problems == ()


def test_a_link_to_a_trace_of_no_digest_gets_no_bundle(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A run of somebody else may name any file of ours so."""
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    (run / "traces" / "more.parquet").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match=r"more\.parquet is a link, and no digest of it was kept"):
        write_bundle(run, tmp_path / "out.zip", "0.1.0")


def test_a_damaged_run_gets_no_bundle(finished_run: FinishedRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    trace = next((run / "traces").glob("*.parquet"))
    trace.write_bytes(trace.read_bytes() + b"x")
    with pytest.raises(StoreError, match=r"is not what was kept; a bundle would vouch for it"):
        write_bundle(run, tmp_path / "out.zip", "0.1.0")
    trace.unlink()
    with pytest.raises(StoreError, match=r"is missing; a bundle would vouch"):
        write_bundle(run, tmp_path / "out.zip", "0.1.0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_what_a_killed_bundle_leaves_is_no_run_and_goes_later(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A copy of the run, under a hidden name: `history` took it for the run, and the run for a copy of it."""
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    assert run_python(KILLED, str(run), str(tmp_path / "run.zip")).code == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path != run)
    assert (left / DATABASE).is_file()
    (listed,) = json.loads(joulebench("history", str(tmp_path), "--json").stdout)
    assert listed["folder"] == "run"
    long_ago_s = left.stat().st_mtime - 2 * NEW_S
    os.utime(left, (long_ago_s, long_ago_s))
    assert joulebench("bundle", str(run), "--out", str(tmp_path / "run.zip"), fresh=True).code == 0
    assert not left.exists()


def test_a_run_that_goes_on_gets_a_bundle_that_is_whole(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A fleet writes its state each 2 s, between the digest of it and its bytes too: the bundle told of a change."""
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    (run / "traces" / "unfinished.tmp").write_bytes(b"half")
    ended = threading.Event()

    def go_on() -> None:
        n = 0
        while not ended.is_set():
            n += 1
            replace_text(run / "fleet.json", f"{n:09} of the same length")

    going = threading.Thread(target=go_on)
    going.start()
    try:
        for i in range(5):
            write_bundle(run, tmp_path / f"{i}.zip", "0.1.0")
    finally:
        ended.set()
        going.join()
    for i in range(5):
        found = verify(tmp_path / f"{i}.zip")
        assert found.problems == ()
        assert "run/fleet.json" in found.manifest.files
        assert not [name for name in found.manifest.files if name.endswith((".tmp", ".copy"))]


def test_a_bundle_that_would_grow_when_it_is_read_is_not_read(tmp_path: Path) -> None:
    """Zeros of a gigabyte are a megabyte of a zip, and its manifest may say so: there is no end to that."""
    size = 1 << 26
    told = BundledFile(n_bytes=size, sha256=hashlib.sha256(bytes(size)).hexdigest())
    manifest = Manifest(format=1, joulebench="0.1.0", run_id="r", n_trials=0, files={"zeros": told})
    for compression in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / "zeros.zip", "w", compression) as new:
            new.writestr(MANIFEST, manifest.model_dump_json())
            new.writestr("zeros", bytes(size))
        if compression == zipfile.ZIP_STORED:
            assert verify(tmp_path / "zeros.zip").problems == ()
        else:
            with pytest.raises(BundleError, match=r"its files have 67,108,864 bytes unpacked, and it has \d"):
                verify(tmp_path / "zeros.zip")


def test_what_is_larger_than_the_manifest_says_is_told_and_not_read(bundle: Path, tmp_path: Path) -> None:
    """Whatever follows is no zip any more: reading it would tell that it cannot be read."""

    def change(content: dict[str, bytes]) -> None:
        content["run/zeros"] = bytes(1 << 20)
        content["plan.json"] = bytes(1 << 20)

    path = changed(bundle, tmp_path, change)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(bytes(1 << 20), b"\x01" * (1 << 20)))
    size = verify(bundle).manifest.files["plan.json"].n_bytes
    assert sorted(verify(path).problems) == [
        f"plan.json: was changed ({size} -> 1048576 bytes)", "run/zeros: was added",
    ]  # fmt: skip


def test_what_is_no_bundle_is_told(bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zip"
    other.write_text("no zip")
    with pytest.raises(BundleError, match="is no bundle, or its directory is damaged"):
        verify(other)
    with zipfile.ZipFile(other, "w") as opened:
        opened.writestr("x", b"")
    with pytest.raises(BundleError, match=r"holds no manifest\.json"):
        verify(other)

    def newer(content: dict[str, bytes]) -> None:
        content[MANIFEST] = json.dumps(json.loads(content[MANIFEST]) | {"format": 2}).encode()

    with pytest.raises(BundleError, match="a bundle of format 2, this joulebench checks 1; update it"):
        verify(changed(bundle, tmp_path, newer))
    assert joulebench("bundle", str(tmp_path), "--out", str(tmp_path / "o.zip")).code == 2
    taken = joulebench("bundle", str(tmp_path), "--out", str(other))
    assert (taken.code, "is left as it is" in taken.stderr) == (2, True)


def test_a_bundle_made_inside_the_run_holds_what_one_beside_it_holds(
    bundle: Path, finished_run: FinishedRun, tmp_path: Path
) -> None:
    """It held the copy of the database that was made for it, a second time."""
    run = Path(shutil.copytree(finished_run.directory, tmp_path / "run"))
    made = write_bundle(run, run / "run.zip", "0.1.0")
    assert made.manifest.files.keys() == verify(bundle).manifest.files.keys()


def test_a_zip_whose_own_records_are_others_is_told_as_damaged(bundle: Path, tmp_path: Path) -> None:
    """APPNOTE 4.3.7, 4.3.12, 4.3.16: a stored file that is called compressed, a directory that lies nowhere, a name
    that is no UTF-8. They ended with 1 as unforeseen, or with 2."""
    whole, other = bundle.read_bytes(), tmp_path / "other.zip"
    with zipfile.ZipFile(bundle) as opened:
        one, start = opened.getinfo("run/run.sqlite"), opened.start_dir

    def written(*changes: tuple[int, bytes]) -> Path:
        changed_bytes = bytearray(whole)
        for at, new in changes:
            changed_bytes[at : at + len(new)] = new
        other.write_bytes(changed_bytes)
        return other

    def record(name: str) -> int:
        return whole.index(name.encode(), start) - 46

    for method in (b"\x08\0", b"\x0c\0", b"\x0e\0"):  # deflate, bzip2, LZMA
        found = verify(written((one.header_offset + 8, method), (record(one.filename) + 10, method)))
        assert found.problems == ("run/run.sqlite: was changed, and cannot be read",)
        manifest = written((8, method), (record(MANIFEST) + 10, method))
        with pytest.raises(BundleError, match="damaged"):
            verify(manifest)
    with pytest.raises(BundleError, match="its directory is damaged"):
        verify(written((len(whole) - 6, b"\0\0\0\xf0")))
    with pytest.raises(BundleError, match="its directory is damaged"):
        verify(written((record(one.filename) + 8, b"\0\x08"), (record(one.filename) + 46, b"\xff\xfe")))


def test_a_name_that_leads_out_of_the_folder_is_told(bundle: Path, tmp_path: Path) -> None:
    """Also where the manifest has it."""

    def added(content: dict[str, bytes]) -> None:
        said = json.loads(content[MANIFEST])
        for name in ("../../out", "/etc/out", "run/..\\out"):
            content[name] = b"x"
            said["files"][name] = {"n_bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        content[MANIFEST] = json.dumps(said).encode()

    problems = verify(changed(bundle, tmp_path, added)).problems
    assert len(problems) == 3
    assert all("leads out of the folder" in problem for problem in problems)
