"""Libraries that were built, kept for the next process, and trusted only where nobody else can have written them.

    FOLDER/SOURCE-COMPILER.json      what was built: a `Manifest`
    FOLDER/kernels-SHA256.so         the library, named after its own contents

A library is code that we run and memory that we map: cut short it ends the process (SIGBUS), and written by somebody
else it does what they want. So folder and files must be the user's own and no one else's to write, and size and SHA-256
those of the manifest, before the library is loaded. What was checked is what is loaded: the bytes are read once, and
never again by a name under which something else may lie by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shlex
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError, field_validator

from engines.kernels.compile import NATIVE, Compiler, compile_kernels, flags, source_key
from results.own_cache import CacheError, clear, own_bytes, put
from results.records import Record
from results.scratch import ScratchFolder

logger = logging.getLogger(__name__)

KIND = "kernels"
"""Of the folders in the user's cache."""
MAX_MANIFEST_BYTES = 64 * 1024
MAX_LIBRARY_BYTES = 256 * 1024 * 1024
"""Some three hundred times what it has. A damaged manifest may tell any size, and a buffer of that size is taken."""
KEPT_BUILDS = 16
"""Of other compilers, flags, processors and versions of the source; the oldest go."""
UNFINISHED_S = 3600.0
"""A library without a manifest may be one that another process has just built."""


class Manifest(Record):
    """What a library was built from, and what it must still be."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    n_bytes: int = Field(ge=1, le=MAX_LIBRARY_BYTES)
    compiler: str
    """As it calls itself."""
    command: str
    """As it was called, but for the files: what `CXX` put behind the program too."""
    needs: tuple[str, ...] = ()
    """Instructions that the compiler might use, in words of /proc/cpuinfo."""

    @field_validator("command")
    @classmethod
    def _can_be_taken_apart(cls, command: str) -> str:
        shlex.split(command)
        return command

    @property
    def is_for_others(self) -> bool:
        """Whether it was built for a processor that somebody named. Else the compiler asked this one, of which an older
        Linux does not tell all."""
        return NATIVE not in shlex.split(self.command)

    @property
    def flags(self) -> str:
        return shlex.join(shlex.split(self.command)[1:])

    @property
    def library_name(self) -> str:
        return f"kernels-{self.sha256[:16]}.so"


class Kept(NamedTuple):
    """A library in the cache; contents: as they were checked."""

    library: Path
    contents: bytes
    manifest: Manifest
    manifest_path: Path


def find(folder: Path, compiler: Compiler | None = None) -> list[Kept]:
    """Libraries of this source for this processor that can be trusted: of one compiler, or of any, newest first.

    Others are forgotten, with a line. Raises `CacheError` where the folder cannot be listed, `CompileError` where the
    flags cannot be read.
    """
    name = f"{source_key()}-{'*' if compiler is None else compiler.key}.json"
    try:
        manifests = sorted(folder.glob(name), key=_changed_ns, reverse=True)
    except OSError as error:
        raise CacheError(f"{folder} cannot be read ({error}); set XDG_CACHE_HOME to a folder that can") from error
    found = []
    for path in manifests:
        try:
            found.append(_verified(path))
        except CacheError as error:
            logger.warning("kernels in the cache are not used, and forgotten: %s", error)
            clear(path)
    return found


def add(folder: Path, compiler: Compiler) -> Kept:
    """Compiles, and keeps what came out; where that cannot be written it serves this process, with a line. Raises
    `CompileError`, `CacheError`."""
    try:
        # Not in the folder: whoever may write above it could put another one in its place meanwhile.
        with ScratchFolder("kernels") as scratch:
            built = scratch / "kernels.so"
            made = compile_kernels(compiler, built)
            contents = built.read_bytes()
    except OSError as error:
        raise CacheError(f"nothing can be built ({error}); set TMPDIR to a folder that can be written") from error
    manifest = Manifest(
        sha256=hashlib.sha256(contents).hexdigest(),
        n_bytes=len(contents),
        compiler=made.version,
        # A path or a flag may hold bytes that are no text, which no manifest can.
        command=shlex.join((*compiler.command, *flags())).encode(errors="replace").decode(),
        needs=made.needs,
    )
    path = folder / f"{source_key()}-{compiler.key}.json"
    kept = Kept(folder / manifest.library_name, contents, manifest, path)
    try:
        # Each at once and the manifest last: another process never sees one that names half a file.
        put(kept.library, contents)
        put(path, manifest.model_dump_json().encode())
        _drop_old(folder, path)
    except OSError as error:
        words = "the kernels are built anew at each start, which takes seconds: %s cannot be written (%s); %s"
        logger.warning(words, folder, error, "set XDG_CACHE_HOME to a folder that can")
    else:
        logger.info("built %s with %s", kept.library, compiler)
    return kept


def _drop_old(folder: Path, made: Path) -> None:
    """made: stays, also where the clock was set back and others look newer. Raises `OSError`."""
    manifests = sorted(folder.glob("*.json"), key=lambda path: (path == made, _changed_ns(path)), reverse=True)
    for path in manifests[KEPT_BUILDS:]:
        clear(path)
    named = set()
    for path in manifests[:KEPT_BUILDS]:
        with contextlib.suppress(CacheError, ValidationError):
            named.add(Manifest.model_validate_json(own_bytes(path, MAX_MANIFEST_BYTES)).library_name)
    before_ns = time.time_ns() - int(UNFINISHED_S * 1e9)
    for path in folder.iterdir():
        if path.suffix != ".json" and path.name not in named and _changed_ns(path) < before_ns:
            clear(path)


def _changed_ns(path: Path) -> int:
    """0 where another process has just removed it."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def forget(kept: Kept) -> None:
    """Removes a library of no use, so that it is not tried again."""
    clear(kept.manifest_path)
    clear(kept.library)


def _verified(manifest_path: Path) -> Kept:
    """Raises `CacheError` for a library that is not what was built here by us."""
    written = own_bytes(manifest_path, MAX_MANIFEST_BYTES)
    try:
        manifest = Manifest.model_validate_json(written)
    except ValidationError as error:
        raise CacheError(f"{manifest_path} is damaged ({error.errors()[0]['msg']})") from error
    library = manifest_path.parent / manifest.library_name
    contents = own_bytes(library, manifest.n_bytes)
    if len(contents) != manifest.n_bytes:
        raise CacheError(f"{library} has {len(contents)} bytes and was built with {manifest.n_bytes}")
    if hashlib.sha256(contents).hexdigest() != manifest.sha256:
        raise CacheError(f"{library} is not what was built (its SHA-256 differs)")
    return Kept(library, contents, manifest, manifest_path)
