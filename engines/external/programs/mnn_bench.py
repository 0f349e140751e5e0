"""MNN by its `llm_bench`, and by its app on an iPhone.

    taskset f0 ./llm_bench -m config.json -a cpu -t 4 -p 0 -n 0 -pg 512,64 -rep 1 -load false -j bench.json

It has no flag for cores. `-n` decodes from an empty cache; only `-pg` decodes behind the prompt, so only that is asked.
The first of its rounds is a warm-up and not in its figures: with one repeat it computes twice and tells the second.
Its speeds are tokens over time; times follow from them. The prompt's end gives the first token, so that the time of
decoding holds one step fewer than its speed counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engines.errors import OutOfMemoryError
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
    same,
)
from results.printable import printable
from results.records import Record

NAME = "llm_bench"
JSON_FILE = "bench.json"
REMARK = "times follow from its speeds; a first round, not in its figures, warms up"
_LINE = re.compile(r"\[MNN_BENCH\] (run=\d+|avg) ([^\n]*)")
_ERROR = re.compile(r"\[MNN_BENCH_ERROR\]([^\n]*)")
DONE, APP_ERROR = "[MNN_BENCH_DONE]", "[MNN_BENCH_ERROR]"


class MnnOptions(Record):
    backend: Literal["cpu", "opencl"] = "cpu"
    precision: Literal["normal", "high", "low"] | None = None
    """Its own default where it is not given."""


class MnnBench:
    name = "MNN"
    executable = NAME
    reads_text = False
    tells_threads = True
    why_silent: str | None = MAKES_UP

    def __init__(self, options: MnnOptions, settings: Settings, model: str) -> None:
        """model: its config.json, from the program's folder. Raises `EngineError`."""
        self._options = options
        self.settings = settings
        self._setting = one_setting(settings, "MNN's llm_bench")
        self._model = model

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        codes = {"normal": "0", "high": "1", "low": "2"}
        precision = () if self._options.precision is None else ("-c", codes[self._options.precision])
        arguments = (
            f"./{NAME}", "-m", self._model, "-a", self._options.backend, "-t", str(self._setting.n_threads), *precision,
            "-p", "0", "-n", "0", "-pg", f"{lengths.n_prompt},{lengths.n_new}", "-rep", "1", "-load", "false",
            "-j", JSON_FILE,
        )  # fmt: skip
        row = f"pp{lengths.n_prompt}+tg{lengths.n_new}"
        return (ProgramCall(arguments, self._setting.cores, reads=(JSON_FILE,), last_words=row),)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        check_ended(NAME, output)
        told = _told(output)
        same(told.get("threads"), self._setting.n_threads, f"{NAME}: threads")
        results = told.get("results")
        found = (
            [r for r in results if isinstance(r, Mapping) and r.get("type") == "prefill_and_decode"]
            if isinstance(results, list)
            else []
        )
        if len(found) != 1 or {found[0].get("prefill_tps"), found[0].get("decode_tps")} == {None}:
            raise ProgramError(
                f"{NAME}: {len(found)} results of prefill and decode together, one with both speeds was asked; take"
                " a build that tells both speeds of -pg"
            )
        same(found[0].get("prompt_len"), lengths.n_prompt, f"{NAME}: prompt_len")
        same(found[0].get("generate_len"), lengths.n_new, f"{NAME}: generate_len")
        return speeds(lengths, found[0].get("prefill_tps"), found[0].get("decode_tps"))


def speeds(lengths: Lengths, prefill_tps: object, decode_tps: object) -> Figures:
    """Its last computation, by its two speeds in tokens a second."""
    prefill_s = lengths.n_prompt / positive(prefill_tps, "MNN: prefill_tps")
    decode_s = lengths.n_new / positive(decode_tps, "MNN: decode_tps") if lengths.n_new > 1 else 0.0
    decode = Stretch(0, decode_s, is_derived=True) if lengths.n_new > 1 else None
    return Figures(Stretch(0, prefill_s, decode_s, is_derived=True), decode, "derived", None, (REMARK,))


def _told(output: ProgramOutput) -> Mapping[str, Any]:
    try:
        told = json.loads(output.files.get(JSON_FILE, ""))
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{NAME} wrote no whole {JSON_FILE} ({error}){said_last(output)}") from error
    if not isinstance(told, Mapping):
        raise ProgramError(f"{NAME} wrote no result into {JSON_FILE}{said_last(output)}")
    return told


def app_arguments(lengths: Lengths, setting_threads: int, backend: Literal["cpu", "metal"] = "cpu") -> tuple[str, ...]:
    """Of the app on an iPhone: one repeat behind its warm-up."""
    command = f"bench {backend} {lengths.n_prompt} {lengths.n_new} 1 {setting_threads}"
    return "--bench-cmd", command


def app_figures(lengths: Lengths, setting_threads: int, console: str) -> Figures:
    """Of what the app printed until it was done. It ends at an end token: then it made fewer tokens than were asked,
    and there is no figure. Raises `ProgramError`, `OutOfMemoryError`."""
    if error := _ERROR.search(console):
        why = printable(error[1].strip(), 300)
        if re.search(r"memory|alloc", why, re.IGNORECASE):
            raise OutOfMemoryError(f"MNN's app: {why}")
        raise ProgramError(f"MNN's app: {why}")
    if DONE not in console:
        raise ProgramError("MNN's app ended without saying that it was done: its output was cut short, or it crashed")
    told = [(which, _values(rest)) for which, rest in _LINE.findall(console.partition(DONE)[0])]
    runs, averages = ([values for which, values in told if (which == "avg") == is_avg] for is_avg in (False, True))
    if not runs or not averages:
        raise ProgramError(f"MNN's app was done and told {'no average' if runs else 'no run'}")
    same(_whole(runs[-1].get("prompt")), lengths.n_prompt, "MNN's app: prompt")
    same(_whole(runs[-1].get("decode")), lengths.n_new, "MNN's app: decode")
    same(_whole(averages[-1].get("threads")), setting_threads, "MNN's app: threads")
    return speeds(lengths, runs[-1].get("prefill_tok_s"), runs[-1].get("decode_tok_s"))


def _values(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", text))


def _whole(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text
