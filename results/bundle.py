"""A run in one file that shows when something in it was changed.

    manifest.json       version, run, and of each other file its path, bytes and SHA-256
    plan.json           the plan as it was run
    environment.json    machines, software, digests of inputs, self-tests
    run/...             the run's folder: run.sqlite, traces, tables, report

It is a zip without compression. Whoever changes a file and the manifest makes another bundle that is whole in itself.
So a bundle shows tampering only against a hash that is kept elsewhere: the root hash, the SHA-256 of manifest.json.

Checking needs this module alone: nothing of the run is parsed, so that another version of joulebench can do it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
import shutil
import sqlite3
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from pydantic import ValidationError

from results.database import DATABASE, StoreError, opened_for_reading
from results.records import Record
from results.report.files import flush
from results.scratch import ScratchFolder
from results.store import Store
from results.trace_files import temporary_of

FORMAT = 1
MANIFEST, PLAN, ENVIRONMENT = "manifest.json", "plan.json", "environment.json"
RUN = "run/"
TRACES = "traces"
MOST_MANIFEST_BYTES = 1 << 28
SAME_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file: the same run gives the same bytes."""
CHUNK_BYTES = 1 << 20
DAMAGED = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error,
    NotImplementedError, EOFError, RuntimeError, ValueError,
)  # fmt: skip
"""What reading a zip raises where bytes of it are others."""


class BundleError(Exception):
    """No bundle, or one of a newer version."""


class BundledFile(Record):
    n_bytes: int
    sha256: str


class Manifest(Record):
    format: int
    joulebench: str
    run_id: str
    n_trials: int
    files: dict[str, BundledFile]


class Verified(NamedTuple):
    """root: SHA-256 of the manifest. problems: one line each; empty where everything is as the manifest says."""

    root: str
    manifest: Manifest
    problems: tuple[str, ...]


def write_bundle(directory: Path, out: Path, joulebench: str) -> Verified:
    """Appears whole. Raises `StoreError` where the run is damaged: a bundle would vouch for it; `OSError`."""
    with Store.view(directory) as store, ScratchFolder("bundle", beside=out) as folder:
        info, n_trials = store.info(), store.n_trials
        store.trials()  # each row is what was written
        traces = store.trace_digests()
        _check_traces(directory, traces)
        database = folder / DATABASE
        _copy_database(directory / DATABASE, database)
        said = info.model_dump(mode="json")
        plan = _canonical(said.pop("plan"))
        files: dict[str, Path | bytes] = {PLAN: plan, ENVIRONMENT: _canonical(said), f"{RUN}{DATABASE}": database}
        files |= {f"{RUN}{name}": path for name, path in _own_files(directory, folder, traces)}
        manifest = Manifest(
            format=FORMAT,
            joulebench=joulebench,
            run_id=info.run_id,
            n_trials=n_trials,
            files={name: _digest(content) for name, content in sorted(files.items())},
        )
        text = _canonical(manifest.model_dump(mode="json"))
        temporary = folder / "bundle"
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as bundle:
            for name, content in [(MANIFEST, text), *sorted(files.items())]:
                _put(bundle, name, content)
        os.chmod(temporary, 0o600)  # it holds prompts and answers
        flush(temporary)
        temporary.replace(out)
        flush(out.parent)
    return Verified(hashlib.sha256(text).hexdigest(), manifest, ())


def verify(path: Path) -> Verified:
    """Of a bundle, or of the folder that it was unpacked into. Raises `BundleError`, `OSError`."""
    if path.is_dir():
        found = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file() or p.is_symlink()}
        if MANIFEST not in found:
            raise BundleError(f"{path} holds no {MANIFEST}; give a bundle, or the folder that it was unpacked into")
        text = found[MANIFEST].read_bytes()
        manifest = _manifest(text, path)
        links = {name for name, p in found.items() if p.is_symlink()}
        digests = ((name, _digest(p)) for name, p in found.items() if name != MANIFEST and name not in links)
        problems = [*_problems(manifest, digests), *_links(sorted(links))]
        return Verified(hashlib.sha256(text).hexdigest(), manifest, tuple(problems))
    try:
        with zipfile.ZipFile(path) as bundle:
            return _verified(bundle, path)
    except (*DAMAGED, OSError) as error:
        # A place in the file that cannot be: its directory names it.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise BundleError(f"{path} is no bundle, or its directory is damaged ({error})") from error


def _verified(bundle: zipfile.ZipFile, path: Path) -> Verified:
    names = [one.filename for one in bundle.infolist()]
    if MANIFEST not in names:
        raise BundleError(f"{path} holds no {MANIFEST}; `joulebench bundle RUN --out FILE` makes one")
    if bundle.getinfo(MANIFEST).file_size > MOST_MANIFEST_BYTES:
        raise BundleError(f"{path}: its {MANIFEST} has more than {MOST_MANIFEST_BYTES:,} bytes")
    try:
        text = bundle.read(MANIFEST)
    except DAMAGED as error:
        raise BundleError(f"{path}: its {MANIFEST} is damaged ({error})") from error
    manifest = _manifest(text, path)
    problems = [f"{name}: is there twice" for name, n in sorted(Counter(names).items()) if n > 1]
    to_read = [one for one in bundle.infolist() if _is_as_large(one, manifest)]
    n_bytes, most = sum(one.file_size for one in to_read), path.stat().st_size
    if n_bytes > most:
        raise BundleError(
            f"{path}: its files have {n_bytes:,} bytes unpacked, and it has {most:,}; no bundle is compressed. Where"
            " there is room for them and you trust its sender, unpack it and give the folder"
        )
    lost: list[str] = []
    problems += _problems(manifest, _digests(bundle, manifest, lost), lost)
    problems += _links(sorted(one.filename for one in bundle.infolist() if stat.S_ISLNK(one.external_attr >> 16)))
    return Verified(hashlib.sha256(text).hexdigest(), manifest, tuple(problems))


def _is_as_large(one: zipfile.ZipInfo, manifest: Manifest) -> bool:
    kept = manifest.files.get(one.filename)
    return kept is not None and kept.n_bytes == one.file_size


def _digests(bundle: zipfile.ZipFile, manifest: Manifest, lost: list[str]) -> Iterator[tuple[str, BundledFile]]:
    """Of each file; those that cannot be read are put into `lost`. One of another size than is kept is not read."""
    for one in bundle.infolist():
        if one.filename == MANIFEST:
            continue
        if not _is_as_large(one, manifest):
            yield one.filename, BundledFile(n_bytes=one.file_size, sha256="")
            continue
        try:
            with bundle.open(one) as file:
                yield one.filename, _digest_of(file)
        except (*DAMAGED, OSError):
            lost.append(one.filename)


def _problems(
    manifest: Manifest, digests: Iterator[tuple[str, BundledFile]], lost: list[str] | None = None
) -> Iterator[str]:
    seen = set()
    for name in manifest.files:
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\\" in name:
            yield f"{name}: leads out of the folder that it is unpacked into; unpack it nowhere"
    for name, found in digests:
        seen.add(name)
        kept = manifest.files.get(name)
        if kept is None:
            yield f"{name}: was added"
        elif kept != found:
            size = f" ({kept.n_bytes} -> {found.n_bytes} bytes)" if kept.n_bytes != found.n_bytes else ""
            yield f"{name}: was changed{size}"
    seen |= set(lost or ())
    yield from (f"{name}: was changed, and cannot be read" for name in lost or ())
    yield from (f"{name}: was removed" for name in manifest.files if name not in seen)


def _links(names: Sequence[str]) -> list[str]:
    return [f"{name}: is a link, and no file" for name in names]


def _manifest(text: bytes, path: Path) -> Manifest:
    """Raises `BundleError`."""
    try:
        said = json.loads(text)
        version = said.get("format") if isinstance(said, dict) else None
        if type(version) is int and version > FORMAT:
            raise BundleError(f"{path}: a bundle of format {version}, this joulebench checks {FORMAT}; update it")
        return Manifest.model_validate(said)
    except (ValueError, ValidationError, RecursionError) as error:
        raise BundleError(f"{path}: its {MANIFEST} is damaged ({str(error).splitlines()[0]})") from error


def _check_traces(directory: Path, kept: Mapping[str, str | None]) -> None:
    """Raises `StoreError`."""
    for trial_id, sha256 in kept.items():
        path = directory / TRACES / f"{trial_id}.parquet"
        if sha256 is None and (path.is_symlink() or path.parent.is_symlink()):
            raise StoreError(
                f"trace file {path} is a link, and no digest of it was kept: a bundle would hold whatever it leads to;"
                " put the file itself there"
            )
        if not path.is_file():
            raise StoreError(f"trace file {path} is missing; a bundle would vouch for a run without it")
        if sha256 is not None and _digest(path).sha256 != sha256:
            raise StoreError(f"trace file {path} is not what was kept; a bundle would vouch for it. Put back a copy")


def _own_files(directory: Path, folder: Path, traces: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(name, where it is) of traces, tables and pages; the database is copied apart, and what only a running process
    needs is left out. Links are followed for `traces` alone, whose digests were checked: another may lead anywhere. A
    finished trace stays as it is: all others are copied into the folder, because a process that goes on may write them
    anew between their digest and their bytes."""
    checked = [f"{TRACES}/{trial_id}.parquet" for trial_id in traces]
    yield from ((name, directory / name) for name in checked)
    left_out = {DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal", "run.lock", *checked}
    copied = 0
    for path in sorted(directory.rglob("*")):
        inside = PurePosixPath(path.relative_to(directory).as_posix())
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if not path.is_file() or path.is_symlink() or str(inside) in left_out or is_hidden:
            continue
        if inside.parts[0] == TRACES:
            if path != temporary_of(path):
                yield str(inside), path
        else:
            copied += 1
            yield str(inside), Path(shutil.copyfile(path, folder / f"{copied}.copy"))


def _copy_database(path: Path, copy: Path) -> None:
    """Whole, also while a run goes on. Raises `OSError`."""
    with closing(opened_for_reading(path)) as db:
        try:
            db.execute("VACUUM INTO ?", (str(copy),))
        except sqlite3.OperationalError as error:
            number = errno.ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(number, str(error)) from error


def _canonical(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def _digest(content: Path | bytes) -> BundledFile:
    if isinstance(content, bytes):
        return BundledFile(n_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    with content.open("rb") as file:
        return _digest_of(file)


def _digest_of(file: IO[bytes]) -> BundledFile:
    whole, n_bytes = hashlib.sha256(), 0
    while chunk := file.read(CHUNK_BYTES):
        whole.update(chunk)
        n_bytes += len(chunk)
    return BundledFile(n_bytes=n_bytes, sha256=whole.hexdigest())


def _put(bundle: zipfile.ZipFile, name: str, content: Path | bytes) -> None:
    info = zipfile.ZipInfo(name, SAME_DATE)
    info.external_attr = 0o600 << 16
    info.file_size = len(content) if isinstance(content, bytes) else content.stat().st_size
    with bundle.open(info, "w") as target:
        if isinstance(content, bytes):
            target.write(content)
            return
        with content.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
