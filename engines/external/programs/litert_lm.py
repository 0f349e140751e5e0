"""LiteRT-LM by its `litert_lm_advanced_main`.

    taskset f0 ./litert_lm_advanced_main --backend=cpu --model_path=M --benchmark --benchmark_prefill_tokens=512 \\
        --benchmark_decode_tokens=64 --num_cpu_threads=4 --num_iterations=1 --async=false --boost_performance=disabled

Its default raises the clocks of the CPU, and may choose cores: that is switched off. It makes up tokens. Each decode
step gives one of the new tokens, also the first, so its time to the first token is derived: prefill and one mean step.
One number of threads serves both phases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from engines.external.programs.program import (
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
    same,
)
from results.records import Record

NAME = "litert_lm_advanced_main"
UNSUPPORTED = "UNIMPLEMENTED|is not supported|unsupported model"
_TURN = r"{phase} Turn \d+: Processed (\S+) tokens in (\S+) duration"
_SECONDS_OF = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|us|ns|h|m|s)")


class LiteRtOptions(Record):
    backend: Literal["cpu", "gpu"] = "cpu"


class LiteRtLm:
    name = "LiteRT-LM"
    executable = NAME
    reads_text = False
    tells_threads = False
    why_silent: str | None = (
        "it draws its answers as its model's file says, and cannot be told to take the likeliest token"
    )

    def __init__(self, options: LiteRtOptions, settings: Settings, model: str) -> None:
        """model: the .litertlm file, from the program's folder. Raises `EngineError`."""
        self._options = options
        self.settings = settings
        self._setting = one_setting(settings, "LiteRT-LM")
        self._model = model

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        arguments = (
            f"./{NAME}", f"--backend={self._options.backend}", f"--model_path={self._model}", "--benchmark",
            f"--benchmark_prefill_tokens={lengths.n_prompt}", f"--benchmark_decode_tokens={lengths.n_new}",
            f"--num_cpu_threads={self._setting.n_threads}", "--num_iterations=1", "--async=false",
            "--boost_performance=disabled",
        )  # fmt: skip
        return (ProgramCall(arguments, self._setting.cores, last_words="Decode Turn 1:"),)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        check_ended(NAME, output, UNSUPPORTED)
        prefill_s = _turn(output, "Prefill", lengths.n_prompt)
        decoding_s = _turn(output, "Decode", lengths.n_new)
        return with_a_mean_step(lengths, prefill_s, decoding_s)


def with_a_mean_step(
    lengths: Lengths, prefill_s: float, decoding_s: float, end_s: float | None = None, version: str | None = None
) -> Figures:
    """decoding_s: of all new tokens, also the first, whose step counts as prefill. end_s: of the last by the wall
    clock; None: it is the program's."""
    step_s = decoding_s / lengths.n_new
    rest_s = decoding_s - step_s
    prefill = Stretch(0, prefill_s + step_s, rest_s, is_derived=True)
    decode = Stretch(0, rest_s, is_derived=True) if lengths.n_new > 1 else None
    if end_s is not None:
        first_s = end_s - rest_s
        prefill = prefill._replace(before_end_s=0.0, wall_s=(first_s - prefill.seconds, first_s))
        decode = decode and decode._replace(wall_s=(first_s, end_s))
    remark = "the first token is derived: prefill and one mean decode step, which counts as prefill"
    return Figures(prefill, decode, "derived", version, (f"LiteRT-LM: {remark}",))


def _turn(output: ProgramOutput, phase: str, n_asked: int) -> float:
    """Seconds of the one turn. Raises `ProgramError`."""
    turns = re.findall(_TURN.format(phase=phase), output.text)
    if len(turns) != 1:
        raise ProgramError(f"{NAME}: one {phase.lower()} turn asked, {len(turns)} told{said_last(output)}")
    n_tokens, duration = turns[0]
    same(int(n_tokens) if n_tokens.isdigit() else n_tokens, n_asked, f"{NAME}: {phase.lower()} tokens")
    return positive(duration_s(duration), f"{NAME}: {phase.lower()} duration {duration}")


def duration_s(text: str) -> float:
    """As Abseil writes durations: `872.643962ms`, `1.5s`, `1m2.25s`. Raises `ProgramError`."""
    pieces = _PIECE.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise ProgramError(f"{NAME}: {text[:40]!r} is no duration")
    return sum(float(number) * _SECONDS_OF[unit] for number, unit in pieces)
