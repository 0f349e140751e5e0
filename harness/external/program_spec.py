"""How a plan names a program of another project, where it is found, and what lies beside it; or the wheel of the same
project, by the Python that has it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from engines.base import Engine
from engines.errors import EngineError, NotSupportedError, ProblemsError
from engines.external.base import Abilities, Found, PerPhase, Surroundings
from engines.external.programs.program import PhaseSetting, Program, Settings
from engines.external.programs.wheel import SCRIPTS, Wheel, WheelKind, WheelProgram, wheel_in
from harness.external.base import ExternalSpec
from results.core_lists import parse_cores

MOST_LIBRARIES = 200
MODEL_FOLDER = "model"


def program_abilities(per_phase: PerPhase, token_ids: bool = False) -> Abilities:
    return Abilities(
        token_ids=token_ids,
        loglikelihoods=False,
        stamps="phase",
        only_fixed_lengths=True,
        stop_texts=False,
        threads=per_phase,
        cores=per_phase,
        devices=("host", "adb"),
    )


class ProgramSpec(ExternalSpec):
    """One arm that a program of another project computes. executable: what its file is called where it runs."""

    executable: ClassVar[str]

    program: str | None = Field(None, min_length=1)
    """Path of the program, built for the device: for Android arm64 where it goes onto a phone. A name is looked for in
    PATH."""
    libraries: tuple[str, ...] = Field((), max_length=64)
    """Paths of shared libraries that it needs beside it."""
    timeout_s: float = Field(1800.0, gt=0, le=86_400)
    """After which one start of it is killed, and the trial taken again."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._program_problems()
        if self.model_file is None:
            yield f"model_file: give the model in the form that {self.runs} reads"
        for phase in ("prefill", "decode"):
            if getattr(self.threads, phase, None) is None and getattr(self.cores, phase, None) is None:
                yield f"threads: {self.runs} is started with a number of threads; give threads or cores for {phase}"
        try:
            names = [name for name, _ in self._placed()]
        except EngineError:
            return  # told with the engine's other files
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"libraries: two files would be called {name} beside the program; rename one"

    def _program_problems(self) -> Iterator[str]:
        if self.program is None:
            yield f"program: give the path of {self.executable}"

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        found = shutil.which(cls.executable)
        if found is None:
            raise EngineError(f"no program {cls.executable} in PATH; a plan may name one elsewhere, as program = PATH")
        return Found(found, None)

    def find(self) -> Found:
        from engines.external.programs.target import program_path

        named = {f"library {Path(name).name}": Path(name).expanduser() for name in self.libraries}
        try:
            path = program_path(self._program())
        except EngineError as error:
            missing = [f"{name}: no file {file}" for name, file in named.items() if not file.is_file()]
            raise ProblemsError([str(error), *missing]) from error
        beside = {f"library {other.name}": other for other in _libraries_beside(path)}
        return Found(str(path), None, {"program": path, **beside, **named})

    def own_files(self) -> dict[str, Path]:
        return {f"{self.runs} {name}": path for name, path in self._model_files()}

    def _model_files(self) -> list[tuple[str, Path]]:
        """(name in the program's folder, file) of all but the program and its libraries."""
        return [put_beside(self.model_file)] if self.model_file is not None else []

    def _placed(self) -> list[tuple[str, Path]]:
        libraries = [put_beside(named) for named in self.libraries]
        return [(self.executable, Path(self._program())), *libraries, *self._model_files()]

    def _program(self) -> str:
        """As the plan names it: a `Path` of "./mnn" is "mnn", which would be looked for in PATH."""
        return self.program or self.executable

    def _started(self) -> Path:
        """The file that is started. Raises `EngineError`."""
        from engines.external.programs.target import program_path

        return program_path(self._program())

    @property
    def settings(self) -> Settings:
        """A thread for each core, where `threads` does not say otherwise."""
        return Settings(self._setting("prefill"), self._setting("decode"))

    def _setting(self, phase: str) -> PhaseSetting:
        listed, threads = getattr(self.cores, phase, None), getattr(self.threads, phase, None)
        cores = None if listed is None else parse_cores(listed)
        return PhaseSetting(threads or len(cores or ()) or 1, cores)

    def asked(self) -> Program:
        """The program with its options. Raises `EngineError`."""
        raise NotImplementedError

    def why_not_on(self, cores: frozenset[int]) -> str | None:
        from engines.cores import why_not_had

        return why_not_had(cores)

    def build(self, around: Surroundings) -> Engine:
        from devices.android.device import AndroidDevice
        from engines.external.programs.engine import ProgramEngine
        from engines.external.programs.phone_target import PhoneTarget
        from engines.external.programs.target import HostTarget

        device = around.device
        make: Callable[[], PhoneTarget | HostTarget] = partial(HostTarget, around.now_s)
        if isinstance(device, AndroidDevice):
            make = partial(PhoneTarget, device, around.now_s)
        asked = self.asked()
        files = {**dict(self._placed()), asked.executable: self._started()}
        engine = ProgramEngine(
            asked,
            make(),
            files,
            device.name,
            around.facts.tokenizer,
            around.facts.config.max_length,
            around.now_s,
            self.timeout_s,
        )
        around.on_note(f"{self.name}: its files are put onto {device.name}")
        engine.prepare()
        return engine


def _libraries_beside(program: Path) -> list[Path]:
    """Shared libraries in the program's folder, which it may load without being told of them (RPATH $ORIGIN, plug-ins
    of backends): they decide its figures as it does."""
    folder = program.resolve().parent
    found = (path for pattern in ("*.so", "*.so.*", "*.dylib") for path in folder.glob(pattern) if path.is_file())
    return sorted(found)[:MOST_LIBRARIES]


def put_beside(named: str) -> tuple[str, Path]:
    """What the file is called in the program's folder, and where it lies now."""
    path = Path(named).expanduser()
    return path.name, path


def name_there(named: str | None) -> str:
    """As the program is told it: in its folder, and never taken for a flag."""
    return f"./{Path(named or '').name}"


class ProgramOrWheelSpec(ProgramSpec):
    """`environment` in the place of `program`: the wheel of the same project, which stamps more. Only on this host."""

    wheel: ClassVar[WheelKind]

    environment: str | None = Field(None, min_length=1)
    """A virtual environment that has the wheel, in the place of a program."""

    def _program_problems(self) -> Iterator[str]:
        if (self.program is None) == (self.environment is None):
            yield (
                f"program: give the path of {self.executable}, or environment, a virtual environment that has the wheel"
                f" {self.wheel.package}: one of both"
            )
        if self.environment is not None and self.libraries:
            yield "libraries: a wheel brings its own; remove the line"

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        """An environment that was named goes before a program in PATH, and joulebench's own comes last."""
        for environment in environments:
            with suppress(EngineError):
                return _found_in(environment, cls.wheel)
        try:
            return super().look()
        except EngineError as error:
            own = Path(sys.prefix)
            with suppress(EngineError):
                return _found_in(own, cls.wheel)
            looked_in = ", ".join(map(str, (*environments, own)))
            more = "" if environments else ", the environment of joulebench (look in another: --environment)"
            told = f"nor is its wheel {cls.wheel.package} in {looked_in}{more}"
            raise EngineError(f"{error}; {told}; {cls.wheel.remedy} installs it") from error

    def find(self) -> Found:
        if self.environment is None:
            return super().find()
        wheel = self._wheel()
        return Found(str(wheel.python), f"{self.wheel.package} {wheel.version}", {"wheel's RECORD": wheel.record})

    def _wheel(self) -> Wheel:
        return wheel_in(Path(self.environment or "").expanduser(), self.wheel.package)

    def _program(self) -> str:
        return super()._program() if self.environment is None else str(SCRIPTS / self.wheel.script)

    def by_wheel(self, model: str, **options: object) -> WheelProgram:
        """Raises `EngineError`."""
        return WheelProgram(self.wheel, self.settings, self._wheel().python, model, options)

    def build(self, around: Surroundings) -> Engine:
        from devices.android.device import AndroidDevice

        if self.environment is not None and isinstance(around.device, AndroidDevice):
            raise NotSupportedError(f"{self.name}: a wheel runs on this host alone; give program, built for the phone")
        return super().build(around)


def _found_in(environment: Path, kind: WheelKind) -> Found:
    """Raises `EngineError`."""
    return Found(f'its wheel: environment = "{environment}"', wheel_in(environment, kind.package).version)
