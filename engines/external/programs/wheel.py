"""Other projects by their wheels: on this host, by a Python that has the wheel, in a process of its own.

    ENVIRONMENT/bin/python -I ./mnn_wheel.py '{"model": ..., "threads": 2, "n_prompt": 512, "n_new": 64, ...}'

What runs there is one of the scripts in `wheels/`, which prints one line `JOULEBENCH {...}`. Starting Python, loading
the model and warming up are set aside, as for any program. One number of threads serves both phases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import EngineError
from engines.external.base import Answer
from engines.external.programs.executorch import printed_answer
from engines.external.programs.litert_lm import with_a_mean_step
from engines.external.programs.program import (
    Figures,
    Lengths,
    ProgramCall,
    ProgramError,
    ProgramOutput,
    Question,
    Settings,
    behind_first,
    check_ended,
    last_told,
    one_setting,
    positive,
    same,
    stamped,
)

SAID = "JOULEBENCH "
SCRIPTS = Path(__file__).parent / "wheels"


class WheelKind(NamedTuple):
    """name: of the engine. package: as its metadata is called. figures: of what its script told. answer: of what it
    printed and told. tells_threads: how
    many computed, and not what was asked. extra: of joulebench that installs the package."""

    name: str
    package: str
    script: str
    figures: Callable[[str, Lengths, Mapping[str, Any]], Figures]
    answer: Callable[[str, ProgramOutput, Mapping[str, Any]], Answer]
    reads_text: bool = False
    tells_threads: bool = False
    extra: str | None = None

    @property
    def remedy(self) -> str:
        """Installs it beside joulebench."""
        named = self.package if self.extra is None else f"'joulebench[{self.extra}]'"
        return f"`pip install {named}`"


class Wheel(NamedTuple):
    """python: that has it. record: its list of files with the digest of each, so that its own digest is of them all."""

    python: Path
    version: str
    record: Path


def python_of(environment: Path) -> Path:
    """Whether it is there or not."""
    return environment / "bin" / "python"


def wheel_in(environment: Path, package: str) -> Wheel:
    """The wheel in a virtual environment. Raises `EngineError`."""
    python = python_of(environment)
    if not python.exists():
        raise EngineError(f"{environment} is no virtual environment (no bin/python in it)")
    stem = package.lower().replace("-", "_")
    found = [
        folder
        for folder in environment.glob("lib/python*/site-packages/*.dist-info")
        if folder.name.lower().startswith(f"{stem}-") and (folder / "RECORD").is_file()
    ]
    if len(found) != 1:
        held = "several versions of the wheel" if found else "no wheel"
        raise EngineError(f"{environment} has {held} {package}; {python} -m pip install {package}")
    version = found[0].name.removesuffix(".dist-info")[len(stem) + 1 :]
    return Wheel(python.absolute(), version, found[0] / "RECORD")


class WheelProgram:
    """A wheel by its script."""

    def __init__(
        self, kind: WheelKind, settings: Settings, python: Path, model: str, options: Mapping[str, object]
    ) -> None:
        """model: its file, from the program's folder. options: what its script takes besides."""
        self.kind = kind
        self.name = kind.name
        self.executable = kind.script
        self.reads_text = kind.reads_text
        self.tells_threads = kind.tells_threads
        self.why_silent: str | None = None
        self.settings = settings
        self.python = python
        self.model = model
        self.options = options

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        return (self._call(n_prompt=lengths.n_prompt, n_new=lengths.n_new),)

    def _call(self, **asked: object) -> ProgramCall:
        setting = one_setting(self.settings, f"the wheel {self.kind.package}")
        said = {"model": self.model, "threads": setting.n_threads, **asked, **self.options}
        words = (str(self.python), "-I", f"./{self.executable}", json.dumps(said))
        return ProgramCall(words, setting.cores)

    def _told(self, output: ProgramOutput) -> Mapping[str, Any]:
        """Raises `ProgramError`, `ResultError`."""
        check_ended(self.kind.script, output)
        lines = (line for line in output.stdout.splitlines() if line.startswith(SAID))
        return last_told(self.kind.script, lines, SAID, output)

    def question(self, asked: Question) -> ProgramCall:
        question = {"text": asked.text, "token_ids": asked.token_ids}
        return self._call(question=question, n_prompt=len(asked.token_ids), n_new=asked.n_new)

    def answer(self, asked: Question, output: ProgramOutput) -> Answer:
        told = self._told(output)
        return self.kind.answer(self.kind.script, output, told)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        told = self._told(output)
        if self.kind.tells_threads:
            same(told.get("threads"), self.settings.prefill.n_threads, f"{self.kind.script}: threads")
        return self.kind.figures(self.kind.script, lengths, told)


def mnn_figures(script: str, lengths: Lengths, told: Mapping[str, Any]) -> Figures:
    same(told.get("n_new"), lengths.n_new, f"{script}: new tokens")
    # The last token is decoded and goes into no cache.
    same(told.get("n_cached"), lengths.n_prompt + lengths.n_new - 1, f"{script}: tokens in its cache")
    return _stamped(
        script,
        lengths,
        told,
        "MNN: tokens are chosen greedily from its logits, outside of it: that copy is in its times",
    )


def executorch_figures(script: str, lengths: Lengths, told: Mapping[str, Any]) -> Figures:
    same(told.get("n_prompt"), lengths.n_prompt, f"{script}: prompt_tokens")
    behind_first(told.get("n_new"), lengths, f"{script}: generated_tokens")
    return _stamped(script, lengths, told, "ExecuTorch: its stamps are in milliseconds")


def _stamped(script: str, lengths: Lengths, told: Mapping[str, Any], remark: str) -> Figures:
    stamps = told.get("stamps_s")
    if not isinstance(stamps, list) or len(stamps) != 3:
        raise ProgramError(f"{script}: three stamps asked, {stamps!r} told")
    start_s, first_s, end_s = (positive(stamp, f"{script}: stamp") for stamp in stamps)
    return stamped(script, lengths, (start_s, first_s, end_s), remark, _version(told))


def litert_figures(script: str, lengths: Lengths, told: Mapping[str, Any]) -> Figures:
    """Its speeds count every new token in decoding, also the first."""
    same(told.get("n_prompt"), lengths.n_prompt, f"{script}: prefill tokens")
    same(told.get("n_new"), lengths.n_new, f"{script}: decode tokens")
    prefill_s = lengths.n_prompt / positive(told.get("prefill_tokens_per_s"), f"{script}: prefill speed")
    decoding_s = lengths.n_new / positive(told.get("decode_tokens_per_s"), f"{script}: decode speed")
    end_s = positive(told.get("end_s"), f"{script}: stamp")
    return with_a_mean_step(lengths, prefill_s, decoding_s, end_s, _version(told))


def _version(told: Mapping[str, Any]) -> str | None:
    version = told.get("version")
    return version if isinstance(version, str) else None


def told_answer(script: str, output: ProgramOutput, told: Mapping[str, Any]) -> Answer:
    """Token ids of a wheel that is given some, else a text."""
    answer = told.get("answer")
    if isinstance(answer, list) and all(type(token) is int for token in answer):
        return tuple(answer)
    if not isinstance(answer, str):
        raise ProgramError(f"{script}: {answer!r:.100} told as an answer")
    return answer


def executorch_answer(script: str, output: ProgramOutput, told: Mapping[str, Any]) -> str:
    """Printed by its runner: what it hands to Python fails at a piece that holds half a character."""
    return printed_answer(script, output)


MNN = WheelKind("MNN", "MNN", "mnn_wheel.py", mnn_figures, told_answer, extra="mnn")
LITERT_LM = WheelKind("LiteRT-LM", "litert-lm", "litert_lm_wheel.py", litert_figures, told_answer, extra="litert-lm")
EXECUTORCH = WheelKind(
    "ExecuTorch",
    "executorch",
    "executorch_wheel.py",
    executorch_figures,
    executorch_answer,
    reads_text=True,
    tells_threads=True,
)
