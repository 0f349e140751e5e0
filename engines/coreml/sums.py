"""Sums of what was written: by them bytes that changed in place are found.

Beside `layer-003/attention.mlpackage` lies `layer-003/attention.sha256`, as `sha256sum` writes it and checks it, with a
line for each file of the package. It is written before the package has its name: what has its name has its sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from results.file_state import sha256_of_file

SUFFIX = ".sha256"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
Digests = Callable[[Sequence[Path]], Mapping[Path, str | None]]
"""SHA-256 of files; None of one that cannot be read."""


def sums_file(package: Path) -> Path:
    return package.with_suffix(SUFFIX)


def write_sums(written: Path, package: Path) -> None:
    """Of a package that lies elsewhere, under the name that it will have. Raises `OSError`."""
    files = sorted(path for path in written.rglob("*") if path.is_file())
    lines = [f"{sha256_of_file(path)}  {package.name}/{path.relative_to(written).as_posix()}" for path in files]
    sums_file(package).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_now(paths: Sequence[Path]) -> dict[Path, str | None]:
    found: dict[Path, str | None] = {}
    for path in paths:
        try:
            found[path] = sha256_of_file(path)
        except OSError:
            found[path] = None
    return found


def damage(packages: Iterable[Path], digests: Digests = read_now) -> dict[Path, str]:
    """What is wrong, by the package; those that are as they were written are not here. Files beside the listed ones do
    no harm: a Mac's Finder writes its own."""
    found: dict[Path, str] = {}
    listed: dict[Path, dict[Path, str]] = {}
    for package in packages:
        sums = _read_sums(package)
        if not package.is_dir():
            found[package] = "is missing"
        elif not sums:
            found[package] = f"has no {sums_file(package).name} beside it, which says what was written"
        elif missing := [path for path in sums if not path.is_file()]:
            found[package] = f"{missing[0].relative_to(package)} is missing"
        else:
            listed[package] = sums
    now = digests([path for sums in listed.values() for path in sums])
    for package, sums in listed.items():
        for path, digest in sums.items():
            if now[path] != digest:
                how = "cannot be read" if now[path] is None else "is not as it was written"
                found[package] = f"{path.relative_to(package)} {how}"
                break
    return found


def _read_sums(package: Path) -> dict[Path, str]:
    """Empty where they cannot be read, or are of something else."""
    try:
        lines = sums_file(package).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    matches = [_LINE.fullmatch(line) for line in lines]
    read = {package.parent / match[2]: match[1] for match in matches if match is not None}
    inside = all(path.is_relative_to(package) and ".." not in path.relative_to(package).parts for path in read)
    return read if len(read) == len(lines) and inside else {}
