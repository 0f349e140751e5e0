"""Compiles the kernels with a C++ compiler of this machine.

`CXX` names a compiler to try before the usual ones. `JOULEBENCH_KERNEL_FLAGS` stands in for `-march=native`: with
`-march=x86-64-v3` the kernels use AVX2 and no more, whatever the processor has. What they use is asked of the compiler
(its macros) and of the library, not read from the flags: `-march=alderlake` has AVX-VNNI too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engines.model.quantised import Quantisation

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "dots.cpp"))
"""Compiled side by side: each takes half of the time."""
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
FLAGS = ("-O3", "-std=c++17", "-pthread", "-fPIC")
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
    "AVX-512 without VNNI": ("avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "AVX2 with VNNI": ("avx2", "fma", "f16c"),
    "AVX2": ("avx2", "fma", "f16c"),
    "AVX": ("avx",),
}
"""By what the library says of itself, the words of /proc/cpuinfo."""
BF16_NEEDS = {"avx512_bf16": "AVX-512 BF16", "avx512_vnni": "AVX-512 VNNI"}
"""Of multiplying bf16 by itself. VNNI: each processor that is known to have the one has both, but a virtual machine may
hide it."""
BYTE_ATTENTION_NEEDS = {"avx512_vnni": "AVX-512 VNNI"}
"""Of attention that multiplies bytes."""
MACROS = {
    "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2", "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe", "__LZCNT__": "abm", "__BMI__": "bmi1", "__BMI2__": "bmi2", "__AVX__": "avx",
    "__AVX2__": "avx2", "__FMA__": "fma", "__F16C__": "f16c", "__FMA4__": "fma4", "__XOP__": "xop", "__TBM__": "tbm",
    "__GFNI__": "gfni", "__AVXVNNI__": "avx_vnni", "__AVX512F__": "avx512f", "__AVX512CD__": "avx512cd",
    "__AVX512VL__": "avx512vl", "__AVX512BW__": "avx512bw", "__AVX512DQ__": "avx512dq", "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16", "__AVX512VBMI__": "avx512vbmi", "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512BITALG__": "avx512_bitalg", "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq", "__AVX512IFMA__": "avx512ifma",
    "__AVX512FP16__": "avx512_fp16",
}  # fmt: skip
"""What GCC and clang define where they may use instructions of their own accord: the words of /proc/cpuinfo."""
TIMEOUT_S = 600
"""A Zen 4 takes 10 s with two cores, 18 with one; under a load of eight it took minutes."""
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
    """Those that are there, `CXX` first, each once. c++ is mostly a link to g++, and would fail as that does; a
    program that goes by the name it is called with (ccache) is not called so itself."""
    seen = set()
    for words in (_wanted(), *((name,) for name in USUAL_COMPILERS)):
        path = shutil.which(words[0]) if words else None
        if path is None:
            if words and words[0] not in USUAL_COMPILERS:
                logger.warning("CXX=%s is no program that can be started; other compilers are tried", shown(words[0]))
            continue
        behind = os.path.realpath(path)
        same = (behind if "++" in os.path.basename(behind) else path, *words[1:])
        if same not in seen:
            seen.add(same)
            yield Compiler((path, *words[1:]))


def _wanted() -> tuple[str, ...]:
    try:
        return tuple(shlex.split(os.environ.get("CXX", "")))
    except ValueError as error:
        logger.warning("CXX=%s cannot be read (%s); other compilers are tried", shown(os.environ["CXX"]), error)
        return ()


def source_key() -> str:
    """What a library follows from, whatever compiled it."""
    source = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
    # The form of the manifest is a part: what was built before it held what it needs is not asked for.
    return hashlib.sha256(source + f" {flags()} {_processor()} whole command, needs".encode()).hexdigest()[:16]


class Asked(NamedTuple):
    """command: all but the files. needs: instructions that it may use, in words of /proc/cpuinfo."""

    command: list[str]
    needs: tuple[str, ...]


def asked_of(compiler: Compiler) -> Asked:
    """Raises `CompileError` for what makes arithmetic inexact."""
    command = [*compiler.command, *flags()]
    asked, needs = next((word for word in command if word in FAST_MATH), None), tuple[str, ...]()
    if asked is None:
        (defined,) = _run(compiler, [*command, "-dM", "-E", "-x", "c++", os.devnull])
        macros = {words[1]: words[2] for line in defined.stdout.split("\n") if len(words := line.split()) == 3}
        needs = tuple(word for macro, word in MACROS.items() if macro in macros)
        found = sorted(FAST_MATH_MACROS & macros.keys())
        if macros.get("__FINITE_MATH_ONLY__", "0") != "0":
            found.append("__FINITE_MATH_ONLY__")
        asked = found[0] if found else None
    if asked is not None:
        raise CompileError(
            f"{compiler} is refused, because {asked} reorders sums and drops NaN and infinity; take it out of CXX and"
            f" {FLAGS_VARIABLE}"
        )
    return Asked(command, needs)


class Built(NamedTuple):
    """version: as the compiler calls itself. needs: see `Asked`."""

    version: str
    needs: tuple[str, ...]


def compile_kernels(compiler: Compiler, target: Path) -> Built:
    """Writes the library. Raises `CompileError`."""
    asked = asked_of(compiler)
    objects = [target.with_name(f"{source.stem}.o") for source in SOURCES]
    compiled = _run(
        compiler,
        *([*asked.command, "-c", str(source), "-o", str(made)] for source, made in zip(SOURCES, objects, strict=True)),
        scratch=target.parent,
    )
    for source, made, done in zip(SOURCES, objects, compiled, strict=True):
        _check(compiler, source.name, made, done)
    (linked,) = _run(
        compiler, [*asked.command, "-shared", *map(str, objects), "-o", str(target)], scratch=target.parent
    )
    _check(compiler, target.name, target, linked)
    (told,) = _run(compiler, [*compiler.command, "--version"])
    return Built(shown(told.stdout.strip().partition("\n")[0]) or str(compiler), asked.needs)


def _check(compiler: Compiler, name: str, made: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Raises `CompileError` where nothing was made."""
    if done.returncode == 0 and made.is_file():
        return
    said = done.stderr.strip()
    first = next((line for line in said.splitlines() if "error" in line), said)
    why = shown(first) or f"it ended with {done.returncode} and wrote no {made.suffix} file"
    raise CompileError(f"{compiler} failed on {name}: {why}; {_what_may_help(said)}")


def _what_may_help(said: str) -> str:
    if os.strerror(errno.ENOSPC) in said:
        return f"make room in {tempfile.gettempdir()}, or set TMPDIR to a folder that has some"
    own = os.environ.get(FLAGS_VARIABLE)
    if own:
        return f"{FLAGS_VARIABLE} asks for {shown(own)}: mend it, or leave it out"
    return "g++ 12 and clang 16 are known to take it"


def _run(
    compiler: Compiler, *commands: list[str], scratch: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """What each came to; they run side by side. Raises `CompileError`.

    scratch: a folder that goes, for what they leave when they are killed.
    """
    environment = os.environ if scratch is None else os.environ | {"TMPDIR": str(scratch)}
    running: list[subprocess.Popen[str]] = []
    done = []
    ends_s = time.monotonic() + TIMEOUT_S
    try:
        with contextlib.ExitStack() as stack:
            try:
                for command in commands:
                    begun = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        errors="replace", env=environment, start_new_session=True,
                    )  # fmt: skip
                    running.append(stack.enter_context(begun))
                for command, one in zip(commands, running, strict=True):
                    out, said = one.communicate(timeout=max(0.0, ends_s - time.monotonic()))
                    done.append(subprocess.CompletedProcess(command, one.returncode, out, said))
            except BaseException:
                for one in running[len(done) :]:
                    # What it started too: g++ ends alone, and what compiles for it would go on for minutes.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(one.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"{compiler} took more than {TIMEOUT_S} s on the kernels; start again when this machine is less busy"
        ) from error
    except (OSError, ValueError) as error:
        raise CompileError(f"{compiler} cannot be started ({error})") from error
    return done


def shown(text: str) -> str:
    """One printable line of somebody else's words."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


@functools.cache
def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    lines = _cpuinfo()
    if not lines:
        from devices.conditions import cpu_model

        return f"{platform.machine()} {cpu_model()}"
    described = ("model", "flags", "Features", "CPU part")
    return " ".join(sorted({line for line in lines if line.startswith(described)}))


def has(instruction_set: str) -> bool:
    """Whether this processor knows what kernels were compiled for."""
    return not lacking(X86_FLAGS.get(instruction_set, ()))


def lacks(needs: Mapping[str, str]) -> str | None:
    """Why no kernel does here what needs these instructions; None where one may."""
    return next((f"this processor lacks {needs[word]}" for word in lacking(needs)), None)


def lacks_for(quantise: Quantisation) -> tuple[tuple[str, ...], str] | None:
    """Keys that ask for arithmetic which no kernel does on this processor, and why; None where all may be done."""
    for keys, needs in ((quantise.multiplying_bf16, BF16_NEEDS), (quantise.attending_by_bytes, BYTE_ATTENTION_NEEDS)):
        if keys and (reason := lacks(needs)) is not None:
            return keys, reason
    return None


def lacking(needs: Iterable[str]) -> list[str]:
    """Of words of /proc/cpuinfo those that this processor lacks; none where it does not tell."""
    flags = next((line.partition(":")[2].split() for line in _cpuinfo() if line.startswith("flags")), None)
    return [] if flags is None else [word for word in needs if word not in flags]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
