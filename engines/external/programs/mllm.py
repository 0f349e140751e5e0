"""mllm by its `mllm-llm-benchmark`, which knows one model, and runs on Arm only.

    taskset f0 ./mllm-llm-benchmark -n qwen3-w4a32-kai -m model.mllm -c config.json -t 4 -pp 512 -tg 64 -cl 2048

It makes up a prompt. Some releases compute three times with pauses between: the last time is taken. Its decode speed
counts all new tokens, also the first, over the time behind the first. One number of threads serves both phases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import Field

from engines.errors import NotSupportedError
from engines.external.programs.program import (
    MAKES_UP,
    Figures,
    Lengths,
    ProgramCall,
    ProgramError,
    ProgramOutput,
    Settings,
    Stretch,
    check_ended,
    one_setting,
    positive,
    said_last,
)
from results.records import Record

NAME = "mllm-llm-benchmark"
ONLY_MODEL = "qwen3-w4a32-kai"
UNSUPPORTED = "[Uu]nsupported model|[Uu]nknown model|not supported"
_LINE = r"^[ \t]*{label}[ \t]*:[ \t]*(\S+)(?:[ \t]+(\S+))?[ \t]*$"


class MllmOptions(Record):
    model_name: str = ONLY_MODEL
    """As its -n: which of its models, and their form."""
    cache_length: int = Field(2048, ge=1)
    """Tokens that its cache holds."""


class Mllm:
    name = "mllm"
    executable = NAME
    reads_text = False
    tells_threads = False
    why_silent: str | None = MAKES_UP

    def __init__(self, options: MllmOptions, settings: Settings, model: str, config: str) -> None:
        """model, config: files, from the program's folder. Raises `EngineError`."""
        self._options = options
        self.settings = settings
        self._setting = one_setting(settings, "mllm")
        self._model = model
        self._config = config

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        o = self._options
        if o.model_name.lower() != ONLY_MODEL:
            raise NotSupportedError(f"mllm's benchmark knows {ONLY_MODEL} alone, not {o.model_name}")
        if sum(lengths) > o.cache_length:
            raise NotSupportedError(f"{sum(lengths)} tokens, and cache_length is {o.cache_length}; raise it")
        arguments = (
            f"./{NAME}", "-n", o.model_name, "-m", self._model, "-c", self._config, "-t", str(self._setting.n_threads),
            "-pp", str(lengths.n_prompt), "-tg", str(lengths.n_new), "-cl", str(o.cache_length),
        )  # fmt: skip
        return (ProgramCall(arguments, self._setting.cores, last_words="Decode Speed"),)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        check_ended(NAME, output, UNSUPPORTED)
        _check_lengths(output, lengths)
        first_token_s = _last(output, "TTFT", "ms") * 1e-3
        decode_s = lengths.n_new / _last(output, "Decode Speed", "tokens/s") if lengths.n_new > 1 else 0.0
        decode = Stretch(0, decode_s, is_derived=True) if lengths.n_new > 1 else None
        remark = "decode time follows from its speed, which counts the first token too"
        return Figures(Stretch(0, first_token_s, decode_s), decode, "measured", None, (remark,))


def _check_lengths(output: ProgramOutput, lengths: Lengths) -> None:
    for label, asked in (("Prompt Length (PP)", lengths.n_prompt), ("Generation Length (TG)", lengths.n_new)):
        found = re.findall(_LINE.format(label=re.escape(label)), output.text, re.MULTILINE)
        if [number for number, _ in found] != [str(asked)]:
            told = ", ".join(number for number, _ in found) or "none"
            raise ProgramError(f"{NAME}: {label}: {asked} asked, {told[:80]} told{said_last(output)}")


def _last(output: ProgramOutput, label: str, unit: str) -> float:
    """Of the last run. Averages have the word before the label."""
    found = re.findall(_LINE.format(label=re.escape(label)), output.text, re.MULTILINE)
    if not found:
        raise ProgramError(f"{NAME} told no {label}{said_last(output)}")
    number, found_unit = found[-1]
    if found_unit != unit:
        raise ProgramError(f"{NAME}: {label} in {found_unit[:20]!r}, {unit} expected")
    return positive(number, f"{NAME}: {label}")
