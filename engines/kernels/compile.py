"""Compiles the kernels with a C++ compiler of this machine.

`CXX` names a compiler to try before the usual ones. `JOULEBENCH_KERNEL_FLAGS` stands in for `-march=native`: with
`-march=x86-64-v3` the kernels use AVX2 and no more, whatever the processor has.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-pthread", "-shared", "-fPIC")
FAST_MATH = frozenset(
    ("-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-ffinite-math-only", "-fassociative-math",
     "-freciprocal-math")
)  # fmt: skip
"""Refused, whoever asks for them: sums would be in another order, and lose NaN and infinity."""
FAST_MATH_MACROS = frozenset(("__FAST_MATH__", "__ASSOCIATIVE_MATH__", "__RECIPROCAL_MATH__"))
"""What GCC and clang define under them, also where a wrapper or a file of options asks for them."""
NATIVE = "-march=native"
FLAGS_VARIABLE = "JOULEBENCH_KERNEL_FLAGS"
USUAL_COMPILERS = ("c++", "g++", "clang++")
X86_FLAGS = {
    "AVX-512": ("avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "AVX2": ("avx2", "fma", "f16c"),
    "AVX": ("avx",),
    "bf16": ("avx512_bf16",),
}
"""By what the library says of itself, the words of /proc/cpuinfo."""
TIMEOUT_S = 600
"""It takes 14 s of a Zen 5 core. Two at once on two cores with a load of eight took more than two minutes."""
SHOWN_CHARACTERS = 200
"""Of what a compiler says."""


class CompileError(Exception):
    """No compiler, or one that does not take this source."""


@dataclass(frozen=True)
class Compiler:
    """command: its path and what `CXX` put behind it."""

    command: tuple[str, ...]

    @property
    def key(self) -> str:
        """Another one after an update: by the size and the time of the program."""
        at = Path(os.path.realpath(self.command[0]))
        try:
            found = at.stat()
            program = f"{at} {found.st_size} {found.st_mtime_ns}"
        except OSError:
            program = str(at)
        return hashlib.sha256(f"{program} {self.command}".encode(errors="replace")).hexdigest()[:8]

    def __str__(self) -> str:
        return shlex.join(self.command)


def flags() -> tuple[str, ...]:
    """Raises `CompileError` where the user's cannot be read."""
    own = os.environ.get(FLAGS_VARIABLE, NATIVE)
    try:
        return (*FLAGS, *shlex.split(own))
    except ValueError as error:
        raise CompileError(f"{FLAGS_VARIABLE}={own[:SHOWN_CHARACTERS]!r} cannot be read: {error}") from error


def compilers() -> Iterator[Compiler]:
    """Those that are there, `CXX` first, each once."""
    seen = set()
    for words in (_wanted(), *((name,) for name in USUAL_COMPILERS)):
        path = shutil.which(words[0]) if words else None
        if path is None:
            if words and words[0] not in USUAL_COMPILERS:
                logger.warning("CXX=%s is no program that can be started; other compilers are tried", shown(words[0]))
            continue
        compiler = Compiler((path, *words[1:]))
        if compiler.key not in seen:
            seen.add(compiler.key)
            yield compiler


def _wanted() -> tuple[str, ...]:
    try:
        return tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError as error:
        logger.warning("CXX=%s cannot be read (%s); other compilers are tried", shown(os.environ["CXX"]), error)
        return ()


def source_key() -> str:
    """What a library follows from, whatever compiled it."""
    source = b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))
    # The form of the manifest is a part: what was built before it held the whole command is not asked for.
    return hashlib.sha256(source + f" {flags()} {_processor()} whole command".encode()).hexdigest()[:16]


def command_of(compiler: Compiler) -> list[str]:
    """All but the files. Raises `CompileError` for what makes arithmetic inexact."""
    command = [*compiler.command, *flags()]
    asked = next((word for word in command if word in FAST_MATH), None)
    if asked is None:
        defined = _run(compiler, [*command, "-dM", "-E", "-x", "c++", os.devnull]).stdout.split("\n")
        macros = {words[1]: words[2] for line in defined if len(words := line.split()) == 3}
        found = sorted(FAST_MATH_MACROS & macros.keys())
        if macros.get("__FINITE_MATH_ONLY__", "0") != "0":
            found.append("__FINITE_MATH_ONLY__")
        asked = found[0] if found else None
    if asked is not None:
        raise CompileError(
            f"{compiler} is refused, because {asked} reorders sums and drops NaN and infinity; take it out of CXX and"
            f" {FLAGS_VARIABLE}"
        )
    return command


def compile_kernels(compiler: Compiler, target: Path) -> str:
    """Writes the library; returns how the compiler calls itself. Raises `CompileError`."""
    command = [*command_of(compiler), str(SOURCE), "-o", str(target)]
    done = _run(compiler, command)
    if done.returncode or not target.is_file():
        said = done.stderr.strip()
        first = next((line for line in said.splitlines() if "error" in line), said)
        why = shown(first) or f"it ended with {done.returncode} and wrote no library"
        raise CompileError(f"{compiler} failed on {SOURCE.name}: {why}; g++ 12 and clang 16 are known to take it")
    version = _run(compiler, [*compiler.command, "--version"]).stdout.strip()
    return shown(version.partition("\n")[0]) or str(compiler)


def _run(compiler: Compiler, command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"{compiler} took more than {TIMEOUT_S} s on {SOURCE.name}; start again when this machine is less busy"
        ) from error
    except (OSError, ValueError) as error:
        raise CompileError(f"{compiler} cannot be started ({error})") from error


def shown(text: str) -> str:
    """One printable line of somebody else's words."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    lines = _cpuinfo()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    described = ("model", "flags", "Features", "CPU part")
    return " ".join(sorted({line for line in lines if line.startswith(described)}))


def has(instruction_set: str) -> bool:
    """Whether this processor knows what kernels were compiled for; where it does not tell, it is believed to."""
    flags = next((line.partition(":")[2].split() for line in _cpuinfo() if line.startswith("flags")), None)
    return flags is None or set(X86_FLAGS.get(instruction_set, ())) <= set(flags)


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
