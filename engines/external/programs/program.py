"""What a program of another project is asked, and what it says of it: the pure halves, without a machine.

A program reads so many prompt tokens of its own making and decodes so many, and prints how long each took. How it is
called and what it prints are one small module a program; what all of them share is here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from engines.errors import EngineError, NotSupportedError, OutOfMemoryError
from engines.external.base import Answer
from results.printable import printable

C_LOCALE = {"LC_ALL": "C"}
"""A program in another locale would write 1,5 for 1.5."""
SAID_CHARACTERS = 300
_KILLED, _SEGMENTATION, _ILLEGAL, _ABORTED, _NOT_FOUND, _NOT_EXECUTABLE = 137, 139, 132, 134, 127, 126
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|out of memory|cannot allocate memory|(failed|unable) to allocate|insufficient memory"
    r"|MemoryAllocationFailed|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class ProgramError(EngineError):
    """A program that crashed, that is not there, or whose output does not say what was asked."""


class Lengths(NamedTuple):
    """Of one request, in tokens. The first of the new tokens comes with the prompt's end."""

    n_prompt: int
    n_new: int


class Question(NamedTuple):
    """Asked for its answer, not for its times. token_ids: of the text, by the plan's tokenizer."""

    text: str
    token_ids: tuple[int, ...]
    n_new: int


class PhaseSetting(NamedTuple):
    """n_threads: that compute. cores: the program may use; None: all."""

    n_threads: int
    cores: frozenset[int] | None = None


class Settings(NamedTuple):
    """Of the two phases."""

    prefill: PhaseSetting
    decode: PhaseSetting


@dataclass(frozen=True)
class ProgramCall:
    """arguments: the program's file first, as `./NAME`. reads: files that it writes, wanted afterwards."""

    arguments: tuple[str, ...]
    cores: frozenset[int] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: C_LOCALE)
    reads: tuple[str, ...] = ()
    last_words: str | None = None
    """It writes them when its last phase is over; the last time counts. None: nobody knows such words."""


@dataclass(frozen=True)
class ProgramOutput:
    stdout: str
    stderr: str
    exit_code: int
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Programs differ in where they write; logs mostly go to the errors."""
        return f"{self.stdout}\n{self.stderr}"


class Stretch(NamedTuple):
    """When one phase ran. call: which of the program's calls. seconds: how long, by the program itself.

    before_end_s: between its end and that of the program, as far as the program says. wall_s: its begin and its end by
    the machine's wall clock, where the program stamps them: then nothing has to be derived. is_derived: its seconds
    follow from a speed, or from a mean.
    """

    call: int
    seconds: float
    before_end_s: float = 0.0
    wall_s: tuple[float, float] | None = None
    is_derived: bool = False


@dataclass(frozen=True)
class Figures:
    """What a program said of one request. prefill: until the first token is out. decode: all tokens after it."""

    prefill: Stretch
    decode: Stretch | None
    first_token: Literal["measured", "derived"]
    version: str | None = None
    remarks: tuple[str, ...] = ()


class Program(Protocol):
    """One program with its options."""

    name: str
    executable: str
    """File name of the program."""
    reads_text: bool
    """Whether the prompt is text that it encodes itself; else it makes up tokens."""
    settings: Settings
    tells_threads: bool
    """Whether its output names the number of threads, which `figures` then holds against what was asked."""
    why_silent: str | None
    """Why nobody sees what it answers; None of programs that are `Answers` too."""

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        """Raises `EngineError` for what it cannot be asked, `NotSupportedError` for what it cannot do."""
        ...

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        """Raises `ProgramError`, `ResultError`."""
        ...


MAKES_UP = "it makes up its prompts, and shows no answer"


@runtime_checkable
class Answers(Protocol):
    """A program that can also be asked a question, and shows what it answers."""

    def question(self, asked: Question) -> ProgramCall: ...

    def answer(self, asked: Question, output: ProgramOutput) -> Answer:
        """Raises `ProgramError`, `ResultError`."""
        ...


def one_setting(settings: Settings, program: str) -> PhaseSetting:
    """Of a program that computes both phases alike. Raises `EngineError` where they differ."""
    if settings.prefill != settings.decode:
        raise EngineError(
            f"{program} has one number of threads and one set of cores for both phases; give threads and cores one"
            " value each"
        )
    return settings.prefill


def check_ended(program: str, output: ProgramOutput, unsupported: str | None = None) -> None:
    """Raises what an exit code other than 0 means. unsupported: a pattern of the program's words for what it lacks."""
    code, said = output.exit_code, said_last(output)
    if code == 0:
        return
    if unsupported is not None and (found := re.search(unsupported, output.text)):
        raise NotSupportedError(f"{program}: {printable(_line_at(output.text, found.start()), SAID_CHARACTERS)}")
    if found := _OUT_OF_MEMORY.search(output.text):
        raise OutOfMemoryError(f"{program}: {printable(_line_at(output.text, found.start()), SAID_CHARACTERS)}")
    if code == _KILLED:
        raise OutOfMemoryError(f"{program} was killed (exit code 137), as systems do that run out of memory")
    if code == _ILLEGAL:
        raise ProgramError(
            f"{program} ended by an illegal instruction: it was built for another CPU; build it for this one"
        )
    if code in (_SEGMENTATION, _ABORTED):
        raise ProgramError(f"{program} crashed (exit code {code}){said}")
    if code == _NOT_FOUND:
        raise ProgramError(f"{program} could not be started (exit code 127); is a shared library of it missing?{said}")
    if code == _NOT_EXECUTABLE:
        is_forbidden = "Permission denied" in output.text
        why = "it is not executable (chmod +x)" if is_forbidden else "no program for this machine"
        raise ProgramError(f"{program} could not be started (exit code 126): {why}{said}")
    raise ProgramError(f"{program} ended with exit code {code}{said}")


def said_last(output: ProgramOutput) -> str:
    """The last lines that it wrote, for a message; empty where it wrote none."""
    for text in (output.stderr, output.stdout):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            return f": {printable(' | '.join(lines[-3:]), SAID_CHARACTERS)}"
    return ""


def positive(value: object, what: str) -> float:
    """A number above 0, as a number or as text. Raises `ProgramError` for NaN, infinities, 0, and 1,5."""
    text = str(value).strip()
    if isinstance(value, bool) or not _NUMBER.fullmatch(text):
        raise ProgramError(f"{what}: {printable(text, SAID_CHARACTERS)!r} is no number; was the output cut short?")
    number = float(text)
    if not 0 < number < math.inf:
        raise ProgramError(f"{what}: {text}, which cannot be; the program measured nothing")
    return number


def check_rising(stamps_s: tuple[float, float, float], lengths: Lengths, program: str) -> None:
    """Of begin, first token and end. Raises `ProgramError`."""
    start_s, first_s, end_s = stamps_s
    told = f"({start_s}, {first_s}, {end_s} s)"
    if not start_s <= first_s <= end_s:
        raise ProgramError(f"{program}: its stamps do not rise {told}: its clock was set")
    if start_s == first_s or (lengths.n_new > 1 and first_s == end_s):
        raise ProgramError(
            f"{program}: a phase was over before its clock went on {told}; ask more tokens, or a larger model"
        )


def same(found: object, asked: int, what: str) -> None:
    """Raises `ProgramError` where a program did something else than was asked: another length, other threads."""
    if found != asked or isinstance(found, bool):
        raise ProgramError(f"{what}: {asked} asked, {printable(repr(found), SAID_CHARACTERS)} done")


def stamped(
    program: str, lengths: Lengths, stamps_s: tuple[float, float, float], remark: str, version: str | None = None
) -> Figures:
    """Of begin, first token and end by its own wall clock: nothing is derived. Raises `ProgramError`."""
    check_rising(stamps_s, lengths, program)
    start_s, first_s, end_s = stamps_s
    prefill = Stretch(0, first_s - start_s, wall_s=(start_s, first_s))
    decode = Stretch(0, end_s - first_s, wall_s=(first_s, end_s)) if lengths.n_new > 1 else None
    return Figures(prefill, decode, "measured", version, (remark,))


def behind_first(found: object, lengths: Lengths, what: str) -> None:
    """The first new token comes with the prompt's end: some releases count it, some do not. Raises `ProgramError`."""
    if found != lengths.n_new:
        same(found, lengths.n_new - 1, f"{what} behind the first")


def last_told(program: str, lines: Iterable[str], head: str, output: ProgramOutput) -> Mapping[str, Any]:
    """Of the last line with this head, the JSON behind it: a warm-up may print one before. Raises `ProgramError`."""
    found = [line.partition(head)[2] for line in lines if head in line]
    try:
        told = json.loads(found[-1]) if found else None
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{program}: its line {head.strip()} was cut short ({error})") from error
    if not isinstance(told, Mapping):
        raise ProgramError(f"{program} printed no line {head.strip()}{said_last(output)}")
    return told


def _line_at(text: str, at: int) -> str:
    return text[text.rfind("\n", 0, at) + 1 :].partition("\n")[0].strip()
