"""SHA-256 of files, kept between runs: 60 GB of weights are read for it once, and then only looked up.

A digest is looked up by the file's path, size, inode and times of change (content and inode), to the nanosecond. A file
that was changed within the last seconds is read again: a second change in the same tick of the file system's clock
would not show. The digest of a weight file is the one that the Hugging Face hub shows beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from results.file_state import file_state, sha256_of_file
from results.report.files import replace_text

KEPT_IN = "digests.json"
MOST_KEPT = 20_000
SETTLED_S = 2.0
TOLD_FROM_BYTES = 2_000_000_000
"""Of files that have to be read: some seconds on most disks."""
MOST_THREADS = 4

log = logging.getLogger(__name__)


def file_digests(paths: Iterable[Path], folder: Path, told: Callable[[str], None]) -> dict[Path, str]:
    """The SHA-256 of each file, in hexadecimal. Raises `OSError`.

    folder: where digests are kept; where it cannot be written, files are read again next time. told: hears of a wait.
    """
    kept = _kept(folder / KEPT_IN)
    keys = {path: _key(path) for path in dict.fromkeys(paths)}
    to_read = [path for path, key in keys.items() if key not in kept]
    n_bytes = sum(path.stat().st_size for path in to_read)
    if n_bytes > TOLD_FROM_BYTES:
        told(f"reading {n_bytes / 1e9:.0f} GB in {len(to_read)} files for their SHA-256; this is done once a file")
    if to_read:
        # Hashing and reading let go of the interpreter: files are read side by side.
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1, len(to_read))) as threads:
            found = dict(zip(to_read, threads.map(sha256_of_file, to_read), strict=True))
        settled = {keys[p]: digest for p, digest in found.items() if _is_settled(p) and _key(p) == keys[p]}
        if settled:
            _keep(kept | settled, folder / KEPT_IN)
    else:
        found = {}
    return {path: found[path] if path in found else kept[key] for path, key in keys.items()}


def _key(path: Path) -> str:
    return f"{path.resolve()} {' '.join(map(str, file_state(path)))}"


def _is_settled(path: Path) -> bool:
    state = path.stat()
    return time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_S


def _kept(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.info("%s cannot be read (%s): files are read again", path, error)
        return {}
    known = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in known if isinstance(v, str) and len(v) == 2 * hashlib.sha256().digest_size}


def _keep(digests: dict[str, str], path: Path) -> None:
    try:
        replace_text(path, json.dumps(dict(list(digests.items())[-MOST_KEPT:]), indent=0))
    except OSError as error:
        log.info("%s cannot be written (%s): files are read again next time", path, error)
