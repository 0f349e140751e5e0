"""Engines that are programs: started for each request, here or on an Android phone over adb; or on this host the wheel
of the same project, by the Python that has it."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from engines.base import Engine
from engines.errors import EngineError, NotSupportedError, ProblemsError
from engines.external.base import Abilities, Found, PerPhase, Surroundings
from engines.external.programs.executorch import ExecuTorch, ExecuTorchOptions
from engines.external.programs.litert_lm import LiteRtLm, LiteRtOptions
from engines.external.programs.llama_bench import LlamaBench, LlamaBenchOptions
from engines.external.programs.mllm import ONLY_MODEL, Mllm, MllmOptions
from engines.external.programs.mnn_bench import MnnBench, MnnOptions
from engines.external.programs.program import PhaseSetting, Program, Settings
from engines.external.programs.wheel import (
    EXECUTORCH,
    LITERT_LM,
    MNN,
    SCRIPTS,
    Wheel,
    WheelKind,
    WheelProgram,
    wheel_in,
)
from harness.external.base import ExternalSpec
from results.core_lists import parse_cores

MOST_MODEL_FILES = 200
MOST_LIBRARIES = 200
MODEL_FOLDER = "model"


def _abilities(per_phase: PerPhase, token_ids: bool = False) -> Abilities:
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
        return [_beside(self.model_file)] if self.model_file is not None else []

    def _placed(self) -> list[tuple[str, Path]]:
        libraries = [_beside(named) for named in self.libraries]
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


def _beside(named: str) -> tuple[str, Path]:
    path = Path(named).expanduser()
    return path.name, path


def _at(named: str | None) -> str:
    """As the program is told it: in its folder, and never taken for a flag."""
    return f"./{Path(named or '').name}"


class LlamaBenchSpec(ProgramSpec):
    """llama.cpp by its own benchmark: the peer for speed, and the one way onto a phone."""

    tag: ClassVar[str] = "llama-bench"
    what: ClassVar[str] = "llama.cpp by llama-bench, here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = _abilities("each phase")
    executable: ClassVar[str] = LlamaBench.executable
    model_begins: ClassVar[bytes] = b"GGUF"

    runs: Literal["llama-bench"]
    flash_attention: bool = False
    poll: int | None = Field(None, ge=0, le=100)
    """How long threads that wait keep their cores busy; its own default where it is not given."""

    def asked(self) -> Program:
        options = LlamaBenchOptions(flash_attention=self.flash_attention, poll=self.poll)
        return LlamaBench(options, self.settings, _at(self.model_file))


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


class MnnSpec(ProgramOrWheelSpec):
    """MNN by its llm_bench, or its wheel."""

    tag: ClassVar[str] = "mnn"
    what: ClassVar[str] = "MNN by its wheel here, or llm_bench here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = _abilities("both phases")
    executable: ClassVar[str] = MnnBench.executable
    wheel: ClassVar[WheelKind] = MNN

    runs: Literal["mnn"]
    precision: Literal["normal", "high", "low"] | None = None

    def _model_files(self) -> list[tuple[str, Path]]:
        """`model_file` is the config.json of a folder, all of which it reads."""
        if self.model_file is None:
            return []
        folder = Path(self.model_file).expanduser().absolute().parent
        files = (path for path in folder.rglob("*") if path.is_file())
        found = sorted(itertools.islice(files, MOST_MODEL_FILES + 1))
        if len(found) > MOST_MODEL_FILES:
            raise EngineError(
                f"model_file {self.model_file}: its folder holds more than {MOST_MODEL_FILES} files; give it a"
                " folder of its own"
            )
        return [(f"{MODEL_FOLDER}/{path.relative_to(folder)}", path) for path in found]

    def asked(self) -> Program:
        config = f"{MODEL_FOLDER}/{Path(self.model_file or '').name}"
        if self.environment is not None:
            return self.by_wheel(config, precision=self.precision)
        return MnnBench(MnnOptions(precision=self.precision), self.settings, config)


class ExecuTorchSpec(ProgramOrWheelSpec):
    """ExecuTorch by its llama_main, or its wheel."""

    tag: ClassVar[str] = "executorch"
    what: ClassVar[str] = "ExecuTorch by its wheel here, or llama_main here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = _abilities("both phases")
    executable: ClassVar[str] = ExecuTorch.executable
    wheel: ClassVar[WheelKind] = EXECUTORCH

    runs: Literal["executorch"]
    tokenizer_file: str = Field(min_length=1)
    """Its tokenizer, that of the plan's model: each prompt must come to as many tokens as in ours."""
    warm_up: bool = True
    """Answer once before the request that is timed."""

    def _model_files(self) -> list[tuple[str, Path]]:
        return [*super()._model_files(), _beside(self.tokenizer_file)]

    def asked(self) -> Program:
        if self.environment is not None:
            tokenizer = _at(self.tokenizer_file)
            return self.by_wheel(_at(self.model_file), tokenizer=tokenizer, warm_up=self.warm_up)
        options = ExecuTorchOptions(warm_up=self.warm_up)
        return ExecuTorch(options, self.settings, _at(self.model_file), _at(self.tokenizer_file))


class LiteRtSpec(ProgramOrWheelSpec):
    """LiteRT-LM by its litert_lm_advanced_main, or its wheel."""

    tag: ClassVar[str] = "litert-lm"
    what: ClassVar[str] = "LiteRT-LM by its wheel here, or its program here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = _abilities("both phases")
    executable: ClassVar[str] = LiteRtLm.executable
    wheel: ClassVar[WheelKind] = LITERT_LM

    runs: Literal["litert-lm"]

    def asked(self) -> Program:
        if self.environment is not None:
            return self.by_wheel(_at(self.model_file))
        return LiteRtLm(LiteRtOptions(), self.settings, _at(self.model_file))


class MllmSpec(ProgramSpec):
    """mllm by its mllm-llm-benchmark."""

    tag: ClassVar[str] = "mllm"
    what: ClassVar[str] = "mllm by mllm-llm-benchmark, on Arm: one model, lengths only"
    abilities: ClassVar[Abilities] = _abilities("both phases")
    executable: ClassVar[str] = Mllm.executable

    runs: Literal["mllm"]
    config_file: str = Field(min_length=1)
    """Its config.json of the model."""
    model_name: str = Field(ONLY_MODEL, min_length=1, max_length=100)
    """As its -n."""
    cache_length: int = Field(2048, ge=1, le=1 << 20)
    """Tokens that its cache holds."""

    def _model_files(self) -> list[tuple[str, Path]]:
        return [*super()._model_files(), _beside(self.config_file)]

    def asked(self) -> Program:
        options = MllmOptions(model_name=self.model_name, cache_length=self.cache_length)
        return Mllm(options, self.settings, _at(self.model_file), _at(self.config_file))


class MnnAppSpec(ExternalSpec):
    """MNN by its app on an iPhone, started with --bench-cmd."""

    tag: ClassVar[str] = "mnn-app"
    what: ClassVar[str] = "MNN by its app on an iPhone: lengths only"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=False,
        loglikelihoods=False,
        stamps="phase",
        only_fixed_lengths=True,
        stop_texts=False,
        threads="both phases",
        devices=("ios",),
    )

    runs: Literal["mnn-app"]
    app: str = Field(min_length=1, max_length=200)
    """Its bundle identifier. The app carries the model."""
    timeout_s: float = Field(1800.0, gt=0, le=86_400)
    """After which one start of it is ended, and the trial taken again."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.model_file is not None:
            yield "model_file: the app carries its model; remove the line"
        if self.threads is None or self.threads.prefill is None or self.threads.decode is None:
            yield "threads: the app is told a number of threads; give one"

    def find(self) -> Found:
        """Whether it is installed is seen when it is started."""
        return Found(f"{self.app} on the phone", None)

    def build(self, around: Surroundings) -> Engine:
        from devices.ios.device import IosDevice
        from engines.external.programs.engine import ProgramEngine
        from engines.external.programs.iphone_target import IphoneTarget, MnnApp

        assert isinstance(around.device, IosDevice)  # it goes onto no other
        assert self.threads is not None  # `problems`
        facts, target = around.facts, IphoneTarget(around.device, self.app)
        program = MnnApp(self.threads.prefill or 1)
        longest = facts.config.max_length
        name = around.device.name
        return ProgramEngine(program, target, {}, name, facts.tokenizer, longest, around.now_s, self.timeout_s)


PROGRAMS: tuple[type[ExternalSpec], ...] = (LlamaBenchSpec, MnnSpec, ExecuTorchSpec, LiteRtSpec, MllmSpec, MnnAppSpec)
