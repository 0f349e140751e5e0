"""Engines that are programs: started for each request, here or on an Android phone over adb; or on this host the wheel
of the same project, by the Python that has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from engines.base import Engine
from engines.errors import EngineError
from engines.external.base import Abilities, Found, Surroundings
from engines.external.programs.executorch import ExecuTorch, ExecuTorchOptions
from engines.external.programs.litert_lm import LiteRtLm, LiteRtOptions
from engines.external.programs.llama_bench import LlamaBench, LlamaBenchOptions
from engines.external.programs.mllm import ONLY_MODEL, Mllm, MllmOptions
from engines.external.programs.mnn_bench import MnnBench, MnnOptions
from engines.external.programs.program import Program
from engines.external.programs.wheel import EXECUTORCH, LITERT_LM, MNN, WheelKind
from harness.external.base import ExternalSpec
from harness.external.program_spec import (
    MODEL_FOLDER,
    ProgramOrWheelSpec,
    ProgramSpec,
    name_there,
    program_abilities,
    put_beside,
)

MOST_MODEL_FILES = 200


class LlamaBenchSpec(ProgramSpec):
    """llama.cpp by its own benchmark: the peer for speed, and the one way onto a phone."""

    tag: ClassVar[str] = "llama-bench"
    what: ClassVar[str] = "llama.cpp by llama-bench, here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = program_abilities("each phase")
    executable: ClassVar[str] = LlamaBench.executable
    model_begins: ClassVar[bytes] = b"GGUF"

    runs: Literal["llama-bench"]
    flash_attention: bool = False
    poll: int | None = Field(None, ge=0, le=100)
    """How long threads that wait keep their cores busy; its own default where it is not given."""

    def asked(self) -> Program:
        options = LlamaBenchOptions(flash_attention=self.flash_attention, poll=self.poll)
        return LlamaBench(options, self.settings, name_there(self.model_file))


class MnnSpec(ProgramOrWheelSpec):
    """MNN by its llm_bench, or its wheel."""

    tag: ClassVar[str] = "mnn"
    what: ClassVar[str] = "MNN by its wheel here, or llm_bench here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = program_abilities("both phases")
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
    abilities: ClassVar[Abilities] = program_abilities("both phases")
    executable: ClassVar[str] = ExecuTorch.executable
    wheel: ClassVar[WheelKind] = EXECUTORCH

    runs: Literal["executorch"]
    tokenizer_file: str = Field(min_length=1)
    """Its tokenizer, that of the plan's model: each prompt must come to as many tokens as in ours."""
    warm_up: bool = True
    """Answer once before the request that is timed."""

    def _model_files(self) -> list[tuple[str, Path]]:
        return [*super()._model_files(), put_beside(self.tokenizer_file)]

    def asked(self) -> Program:
        if self.environment is not None:
            tokenizer = name_there(self.tokenizer_file)
            return self.by_wheel(name_there(self.model_file), tokenizer=tokenizer, warm_up=self.warm_up)
        options = ExecuTorchOptions(warm_up=self.warm_up)
        return ExecuTorch(options, self.settings, name_there(self.model_file), name_there(self.tokenizer_file))


class LiteRtSpec(ProgramOrWheelSpec):
    """LiteRT-LM by its litert_lm_advanced_main, or its wheel."""

    tag: ClassVar[str] = "litert-lm"
    what: ClassVar[str] = "LiteRT-LM by its wheel here, or its program here or on an Android phone: lengths only"
    abilities: ClassVar[Abilities] = program_abilities("both phases")
    executable: ClassVar[str] = LiteRtLm.executable
    wheel: ClassVar[WheelKind] = LITERT_LM

    runs: Literal["litert-lm"]

    def asked(self) -> Program:
        if self.environment is not None:
            return self.by_wheel(name_there(self.model_file))
        return LiteRtLm(LiteRtOptions(), self.settings, name_there(self.model_file))


class MllmSpec(ProgramSpec):
    """mllm by its mllm-llm-benchmark."""

    tag: ClassVar[str] = "mllm"
    what: ClassVar[str] = "mllm by mllm-llm-benchmark, on Arm: one model, lengths only"
    abilities: ClassVar[Abilities] = program_abilities("both phases")
    executable: ClassVar[str] = Mllm.executable

    runs: Literal["mllm"]
    config_file: str = Field(min_length=1)
    """Its config.json of the model."""
    model_name: str = Field(ONLY_MODEL, min_length=1, max_length=100)
    """As its -n."""
    cache_length: int = Field(2048, ge=1, le=1 << 20)
    """Tokens that its cache holds."""

    def _model_files(self) -> list[tuple[str, Path]]:
        return [*super()._model_files(), put_beside(self.config_file)]

    def asked(self) -> Program:
        options = MllmOptions(model_name=self.model_name, cache_length=self.cache_length)
        return Mllm(options, self.settings, name_there(self.model_file), name_there(self.config_file))


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
