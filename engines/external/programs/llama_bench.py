"""llama.cpp by its `llama-bench`: a call for each phase, so that each has threads and cores of its own.

    ./llama-bench -m MODEL -o json -r 1 -p 512 -n 0 -t 4 -C f0 --cpu-strict 1         prefill
    ./llama-bench -m MODEL -o json -r 1 -p 0 -n 63 -d 512 -t 4 -C f0 --cpu-strict 1   decode, on a cache of 512 tokens

It makes up tokens. Before each test it computes once without timing; the second call also reads the prompt again. The
first new token comes with the prompt's end, so one step fewer than tokens is asked for. `samples_ns` are its own times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engines.external.programs.program import (
    MAKES_UP,
    Figures,
    Lengths,
    PhaseSetting,
    ProgramCall,
    ProgramError,
    ProgramOutput,
    Settings,
    Stretch,
    check_ended,
    positive,
    said_last,
    same,
)
from results.printable import printable
from results.records import Record

NAME = "llama-bench"
UNSUPPORTED = "unknown model architecture|unsupported model"


class LlamaBenchOptions(Record):
    gpu_layers: int = 0
    """Layers on the GPU (-ngl), for builds that have one."""
    flash_attention: bool = False
    poll: int | None = None
    """How long threads that wait keep their cores busy, 0 to 100 (--poll); its own default where it is not given."""


class LlamaBench:
    name = NAME
    executable = NAME
    reads_text = False
    tells_threads = True
    why_silent: str | None = MAKES_UP

    def __init__(self, options: LlamaBenchOptions, settings: Settings, model: str) -> None:
        """model: the GGUF file, from the program's folder."""
        self._options = options
        self.settings = settings
        self._model = model

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        prefill = self._call(("-p", str(lengths.n_prompt), "-n", "0"), self.settings.prefill)
        if lengths.n_new < 2:
            return (prefill,)
        steps = ("-p", "0", "-n", str(lengths.n_new - 1), "-d", str(lengths.n_prompt))
        return prefill, self._call(steps, self.settings.decode)

    def _call(self, test: tuple[str, ...], setting: PhaseSetting) -> ProgramCall:
        o = self._options
        bound: tuple[str, ...] = ()
        if setting.cores is not None:
            mask = sum(1 << core for core in setting.cores)
            bound = ("-C", f"0x{mask:x}", "--cpu-strict", "1")
        poll = () if o.poll is None else ("--poll", str(o.poll))
        arguments = (
            f"./{NAME}", "-m", self._model, "-o", "json", "-r", "1", *test, "-t", str(setting.n_threads), *bound, *poll,
            "-ngl", str(o.gpu_layers), "-fa", str(int(o.flash_attention)),
        )  # fmt: skip
        # It writes them before it frees the model.
        return ProgramCall(arguments, setting.cores, last_words='"samples_ns"')

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        tests = [_test(output) for output in outputs]
        _check(tests[0], lengths.n_prompt, 0, 0, self.settings.prefill)
        prefill = Stretch(0, _seconds(tests[0]))
        decode = None
        if len(tests) > 1:
            _check(tests[1], 0, lengths.n_new - 1, lengths.n_prompt, self.settings.decode)
            decode = Stretch(1, _seconds(tests[1]))
        commits = {str(test.get("build_commit", "unknown")) for test in tests}
        backends = {str(test.get("backends", "unknown")) for test in tests}
        version = printable(f"{', '.join(sorted(commits))} ({', '.join(sorted(backends))})", 200)
        remark = "prefill and decode are two calls; the second reads the prompt again, untimed"
        return Figures(prefill, decode, "derived", version, (remark,) if decode else ())


def _test(output: ProgramOutput) -> Mapping[str, Any]:
    """The one test of a call: its JSON stands between a line that is `[` and one that is `]`."""
    check_ended(NAME, output, UNSUPPORTED)
    lines = output.stdout.splitlines()
    if "[" not in lines:
        raise ProgramError(f"{NAME} printed no JSON, which begins with a line [{said_last(output)}")
    try:
        first = lines.index("[")
        text = "\n".join(lines[first : lines.index("]", first) + 1])
        [test] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{NAME} printed no whole result ({error}){said_last(output)}") from error
    if not isinstance(test, Mapping):
        raise ProgramError(f"{NAME} printed no result{said_last(output)}")
    return test


def _check(test: Mapping[str, Any], n_prompt: int, n_gen: int, n_depth: int, setting: PhaseSetting) -> None:
    asked = {"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": n_depth, "n_threads": setting.n_threads}
    for key, value in asked.items():
        same(test.get(key), value, f"{NAME}: {key}")


def _seconds(test: Mapping[str, Any]) -> float:
    samples = test.get("samples_ns")
    if not isinstance(samples, list) or len(samples) != 1:
        raise ProgramError(f"{NAME}: samples_ns: one time asked, {printable(repr(samples), 200)} found")
    return positive(samples[0], f"{NAME}: samples_ns") * 1e-9
