"""What programs of other engines are asked, and what follows from what they print: golden outputs, and broken ones.

The golden files are written after the formats in the engines' own sources; their figures are round, so that every time
has a closed form: 512 tokens in 2 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import engines.tiny
from engines.errors import EngineError, ResultError
from engines.external.programs.engine import ProgramEngine
from engines.external.programs.executorch import ExecuTorch, ExecuTorchOptions
from engines.external.programs.litert_lm import LiteRtLm, LiteRtOptions, duration_s
from engines.external.programs.llama_bench import LlamaBench, LlamaBenchOptions
from engines.external.programs.mllm import Mllm, MllmOptions
from engines.external.programs.mnn_bench import JSON_FILE, MnnBench, MnnOptions, app_arguments, app_figures
from engines.external.programs.program import (
    Lengths,
    PhaseSetting,
    Program,
    ProgramCall,
    ProgramError,
    ProgramOutput,
    Question,
    Settings,
    Stretch,
    positive,
)
from engines.external.programs.target import ProgramRun
from engines.model.tokenizer import Tokenizer
from results.records import Request
from results.roads import road_words

BUNDLED = Path(engines.tiny.__file__).parent / "bundled" / "tiny-qwen3-moe"
GOLDEN = Path(__file__).parent / "golden" / "engines"
ASKED = Lengths(512, 64)
BIG = PhaseSetting(4, frozenset({4, 5, 6, 7}))
ALIKE = Settings(BIG, BIG)
LLAMA = LlamaBench(LlamaBenchOptions(), Settings(BIG, PhaseSetting(2, frozenset({6, 7}))), "model.gguf")
MNN = MnnBench(MnnOptions(), ALIKE, "config.json")
EXECUTORCH = ExecuTorch(ExecuTorchOptions(), ALIKE, "model.pte", "tokenizer.bin")
LITERT = LiteRtLm(LiteRtOptions(), ALIKE, "model.litertlm")
MLLM = Mllm(MllmOptions(), ALIKE, "model.mllm", "config.json")


def golden(name: str) -> str:
    return (GOLDEN / name).read_text()


def printed(stdout: str = "", stderr: str = "", code: int = 0, **files: str) -> ProgramOutput:
    return ProgramOutput(stdout, stderr, code, {name.replace("_json", ".json"): text for name, text in files.items()})


OUTPUTS: dict[str, tuple[Program, list[ProgramOutput]]] = {
    "llama-bench": (
        LLAMA,
        [printed(golden(f"llama_bench_{phase}.json.txt"), "warning: a\n") for phase in ("prefill", "decode")],
    ),
    "MNN": (MNN, [printed(golden("mnn_bench.stdout.txt"), bench_json=golden("mnn_bench.json"))]),
    "ExecuTorch": (EXECUTORCH, [printed(golden("executorch.stdout.txt"))]),
    "LiteRT-LM": (LITERT, [printed(stderr=golden("litert_lm.stderr.txt"))]),
    "mllm": (MLLM, [printed(golden("mllm.stdout.txt"))]),
}


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_llama_bench_has_a_call_with_threads_and_cores_for_each_phase() -> None:
    prefill, decode = (" ".join(call.arguments) for call in LLAMA.calls(ASKED))
    assert prefill == ("./llama-bench -m model.gguf -o json -r 1 -p 512 -n 0 -t 4 -C 0xf0 --cpu-strict 1 -ngl 0 -fa 0")
    # The first of 64 tokens comes with the prompt's end: 63 steps, on a cache of 512.
    assert "-p 0 -n 63 -d 512 -t 2 -C 0xc0" in decode
    assert len(LLAMA.calls(Lengths(512, 1))) == 1


def test_mnn_is_asked_to_decode_behind_the_prompt_and_is_bound_from_outside() -> None:
    [call] = MNN.calls(ASKED)
    words = " ".join(call.arguments)
    assert "-p 0 -n 0 -pg 512,64 -rep 1" in words
    assert call.cores == {4, 5, 6, 7}
    assert call.reads == (JSON_FILE,)
    assert app_arguments(ASKED, 4) == ("--bench-cmd", "bench cpu 512 64 1 4")


class Printing:
    """A target on which each call prints what was recorded, and ends 100 s after it began."""

    def __init__(self, outputs: Sequence[ProgramOutput]) -> None:
        self._left = list(outputs)
        self._at_s = 0.0

    def prepare(self, files: Mapping[str, Path]) -> None: ...
    def close(self) -> None: ...

    def run(self, call: ProgramCall, texts: Mapping[str, str], timeout_s: float) -> ProgramRun:
        self._at_s += 100.0
        return ProgramRun(self._left.pop(0), self._at_s - 100.0, self._at_s, lambda wall_s: None, "no clock")

    def now_s(self) -> float:
        return self._at_s


@pytest.mark.parametrize("echoed", ["The capital of France is", ""])
def test_an_answer_of_executorch_is_what_its_runner_printed_behind_the_prompt(echoed: str) -> None:
    """As the wheel 1.5.1 printed it: it has the runner of `llama_main`, without the prompt in front."""
    asked = Question("The capital of France is", (1, 2, 3), 12)
    line = 'PyTorchObserver {"prefill_token_per_sec":9000,"prompt_tokens":9,"generated_tokens":11}'
    said = EXECUTORCH.answer(asked, printed(f"{echoed} Along Along Along\n{line}\n"))
    assert said == " Along Along Along"
    with pytest.raises(ProgramError, match="printed no line PyTorchObserver"):
        EXECUTORCH.answer(asked, printed(f"{echoed} Along Along"))
    with pytest.raises(ResultError, match="killed"):
        EXECUTORCH.answer(asked, printed(f"{echoed} Along", code=137))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-bench", "llama-bench, prefill with 4 threads, decoding with 2 threads, answers not seen"),
        ("MNN", "MNN, 4 threads, answers not seen"),
        ("LiteRT-LM", "LiteRT-LM, 4 threads asked for and not told, answers not seen"),
        ("mllm", "mllm, 4 threads asked for and not told, answers not seen"),
    ],
)
def test_a_trial_tells_threads_that_were_only_asked_from_those_that_the_program_names(name: str, words: str) -> None:
    program, outputs = OUTPUTS[name]
    target = Printing(outputs)
    engine = ProgramEngine(program, target, {}, "host", Tokenizer(BUNDLED, "tiny", (), 2048), 2048, target.now_s)
    assert engine.take_road() is None
    request = Request(
        request_id="r", sample_id="r", kind="generate", prompt_ids=(1,) * 512, max_new_tokens=64,
        ignore_end_tokens=True,
    )  # fmt: skip
    engine.run(request, lambda event, at_s: None)
    road = engine.take_road()
    assert road is not None
    assert road_words(road) == words
    assert any("threads is what was asked" in remark for remark in engine.take_remarks()) is road.threads_are_asked


def test_litert_may_not_raise_the_clocks() -> None:
    assert "--boost_performance=disabled" in LITERT.calls(ASKED)[0].arguments


def test_every_program_writes_numbers_with_a_point() -> None:
    for program, _ in OUTPUTS.values():
        assert all(call.environment["LC_ALL"] == "C" for call in program.calls(ASKED))


@pytest.mark.parametrize("build", [MnnBench, LiteRtLm])
def test_one_setting_for_both_phases_is_said(build: Callable[..., Program]) -> None:
    options = MnnOptions() if build is MnnBench else LiteRtOptions()
    with pytest.raises(EngineError, match="one number of threads and one set of cores for both phases"):
        build(options, Settings(BIG, PhaseSetting(2)), "model")


def test_mllm_runs_its_one_model_only() -> None:
    other = Mllm(MllmOptions(model_name="llama-3.2"), ALIKE, "model.mllm", "config.json")
    with pytest.raises(ResultError, match=r"^not supported: mllm's benchmark knows qwen3-w4a32-kai alone"):
        other.calls(ASKED)


# --- what is said ----------------------------------------------------------------------------------------------------

STAMPS_S = (1791379689.0, 1791379690.5, 1791379693.65)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "first_token"),
    [
        ("llama-bench", Stretch(0, 2.0), Stretch(1, 3.15), "derived"),
        ("MNN", Stretch(0, 2.0, 2.0, is_derived=True), Stretch(0, 2.0, is_derived=True), "derived"),
        ("ExecuTorch", Stretch(0, 1.5, 0.0, STAMPS_S[:2]), Stretch(0, 3.15, 0.0, STAMPS_S[1:]), "measured"),
        # Decoding took 3.2 s for 64 steps: the first of them gives the first token.
        ("LiteRT-LM", Stretch(0, 2.05, 3.15, is_derived=True), Stretch(0, 3.15, is_derived=True), "derived"),
        # The third of its runs, and not their average.
        ("mllm", Stretch(0, 2.0, 3.2), Stretch(0, 3.2, is_derived=True), "measured"),
    ],
)
def test_golden_outputs(name: str, prefill: Stretch, decode: Stretch, first_token: str) -> None:
    program, outputs = OUTPUTS[name]
    figures = program.figures(ASKED, outputs)
    assert figures.first_token == first_token
    for found, expected in ((figures.prefill, prefill), (figures.decode, decode)):
        assert found is not None
        assert (found.call, found.wall_s, found.is_derived) == (expected.call, expected.wall_s, expected.is_derived)
        assert found.seconds == pytest.approx(expected.seconds, abs=1e-6)
        assert found.before_end_s == pytest.approx(expected.before_end_s, abs=1e-6)


def test_llama_bench_tells_its_build() -> None:
    program, outputs = OUTPUTS["llama-bench"]
    assert program.figures(ASKED, outputs).version == "4dca015b (CPU)"


def test_the_app_of_an_iphone() -> None:
    console = golden("mnn_app.console.txt")
    figures = app_figures(ASKED, 4, console)
    assert figures.prefill == Stretch(0, 2.0, 2.0, is_derived=True)
    assert figures.decode == Stretch(0, 2.0, is_derived=True)
    # It ends at an end token, and tells how many tokens it really made.
    for said, other in (("decode=64", "decode=3"), ("prompt=512", "prompt=17"), ("threads=4", "threads=1")):
        with pytest.raises(ProgramError, match=other.replace("=", r": \d+ asked, ") + " done"):
            app_figures(ASKED, 4, console.replace(said, other))
    with pytest.raises(ProgramError, match="cut short, or it crashed"):
        app_figures(ASKED, 4, console.replace("[MNN_BENCH_DONE]", ""))
    with pytest.raises(ProgramError, match="MNN's app: createLLM failed"):
        app_figures(ASKED, 4, "x [MNN_BENCH_ERROR] createLLM failed\n")
    with pytest.raises(ResultError, match=r"^out of memory"):
        app_figures(ASKED, 4, "x [MNN_BENCH_ERROR] alloc failed\n")


# --- what may not become a number ------------------------------------------------------------------------------------

BROKEN = [
    # (program, what stands in its last output, what stands there instead, what is said)
    ("llama-bench", "3150000000", "0", "measured nothing"),
    ("llama-bench", "3150000000", "NaN", "is no number"),
    ("llama-bench", "[ 3150000000 ]", "[]", "one time asked"),
    ("llama-bench", '"n_depth": 512', '"n_depth": 0', "n_depth: 512 asked, 0 done"),
    ("llama-bench", '"n_threads": 2', '"n_threads": 8', "n_threads: 2 asked, 8 done"),
    ("llama-bench", "\n]", "\n", "printed no whole result"),
    ("llama-bench", "[\n", "{\n", "printed no JSON"),
    ("MNN", '"decode_tps": 32.0', '"decode_tps": "32,0"', "is no number"),
    ("MNN", '"prefill_tps": 256.0', '"prefill_tps": -256.0', "cannot be"),
    ("MNN", ', "prefill_tps": 256.0', "", "None' is no number"),
    ("MNN", "prefill_and_decode", "decode", "0 results of prefill and decode together"),
    ("MNN", "  ]\n}", "", "wrote no whole bench.json"),
    ("ExecuTorch", '"prompt_tokens":512', '"prompt_tokens":480', "prompt_tokens: 512 asked, 480 done"),
    ("ExecuTorch", '"generated_tokens":63', '"generated_tokens":12', "63 asked, 12 done"),
    ("ExecuTorch", '"inference_end_ms":1791379693650', '"inference_end_ms":1791379690000', "do not rise"),
    ("ExecuTorch", '"SCALING_FACTOR_UNITS_PER_SECOND":1000}', "", "cut short"),
    ("ExecuTorch", "PyTorchObserver", "Observer", "printed no line PyTorchObserver"),
    ("LiteRT-LM", "Processed 64 tokens", "Processed 3 tokens", "decode tokens: 64 asked, 3 done"),
    ("LiteRT-LM", "3.2s duration", "3,2s duration", "is no duration"),
    ("LiteRT-LM", "3.2s duration", "0s duration", "measured nothing"),
    ("LiteRT-LM", "    Decode Turn 1", "    Decode", "one decode turn asked, 0 told"),
    ("mllm", "Decode Speed : 20.0", "Decode Speed : inf", "is no number"),
    ("mllm", "Decode Speed :", "Speed :", "told no Decode Speed"),
    ("mllm", "(PP)    : 512", "(PP)    : 64", "512 asked, 64 told"),
    ("mllm", "2000.0 ms", "2.0 s", "TTFT in 's'"),
]


@pytest.mark.parametrize(("name", "wrong", "instead", "said"), BROKEN)
def test_output_that_is_cut_or_of_something_else_is_no_figure(name: str, wrong: str, instead: str, said: str) -> None:
    program, outputs = OUTPUTS[name]
    last = outputs[-1]
    texts = [last.stdout, last.stderr, *last.files.values()]
    assert any(wrong in text for text in texts)
    stdout, stderr, *files = (text.replace(wrong, instead) for text in texts)
    broken = ProgramOutput(stdout, stderr, 0, dict(zip(last.files, files, strict=True)))
    with pytest.raises(ProgramError, match=said):
        program.figures(ASKED, [*outputs[:-1], broken])


@pytest.mark.parametrize("name", list(OUTPUTS))
def test_how_a_program_ended_is_told_apart(name: str) -> None:
    program, outputs = OUTPUTS[name]

    def ended(code: int, stderr: str = "") -> str:
        with pytest.raises(EngineError) as raised:
            program.figures(ASKED, [printed("", stderr, code)] * len(outputs))
        return str(raised.value)

    assert ended(137, "Killed\n").startswith("out of memory: ")
    assert ended(134, "terminate called after throwing an instance of 'std::bad_alloc'").startswith("out of memory: ")
    assert "crashed (exit code 139)" in ended(139)
    assert "built for another CPU" in ended(132)
    assert "shared library" in ended(127, "CANNOT LINK EXECUTABLE: library libomp.so not found")
    assert "it is not executable (chmod +x)" in ended(126, "taskset: failed to execute ./x: Permission denied\n")
    assert "no program for this machine" in ended(126, "./x: cannot execute binary file: Exec format error\n")
    # What a program prints is made fit for a terminal.
    assert "\x1b" not in ended(1, "\x1b[2J\x1b]0;title\x07 bad\n")


def test_a_model_that_a_program_does_not_know_is_not_supported() -> None:
    said = "error loading model: unknown model architecture: 'deepseek9'\n"
    with pytest.raises(ResultError, match=r"^not supported: .*unknown model architecture: 'deepseek9'"):
        LLAMA.figures(ASKED, [printed("", said, 1)])


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (LITERT, "UNIMPLEMENTED: gemma4 on this backend"),
        (EXECUTORCH, "Missing operator: [3] aten::topk.values"),
        (MLLM, "[ERROR] unsupported model: llama-3.2"),
    ],
)
def test_the_line_that_says_what_is_not_supported_is_told(program: Program, said: str) -> None:
    with pytest.raises(ResultError, match=f"^not supported: [^:]*: {re.escape(said)}$"):
        program.figures(ASKED, [printed("loading\n", f"W1 slow\n{said}\nbye\n", 1)])


LONG = 400_000


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["a" * LONG, "\n" * LONG, " " * LONG], ids=["one line", "blank lines", "blanks"])
@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_program_that_prints_a_lot_is_read_in_a_moment(name: str, code: int, text: str) -> None:
    """One answer in a line, or a line for each step: time that grows with the square took half an hour."""
    program, outputs = OUTPUTS[name]
    with pytest.raises((EngineError, ResultError)):
        program.figures(ASKED, [printed(text, text, code, bench_json="{}") for _ in outputs])


@pytest.mark.parametrize(
    ("program", "output"),
    [
        (LLAMA, printed("[\n" + "[" * 99_999 + "\n]\n")),
        (MNN, printed(bench_json="[" * 99_999)),
        (EXECUTORCH, printed("PyTorchObserver " + "[" * 99_999)),
    ],
)
def test_brackets_without_end_are_no_result(program: Program, output: ProgramOutput) -> None:
    with pytest.raises(ProgramError, match=r"no whole|cut short"):
        program.figures(ASKED, [output] * len(program.calls(ASKED)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("872.643962ms", 0.872643962), ("1.5s", 1.5), ("1m2.25s", 62.25), ("1h0m3s", 3603.0), ("12us", 12e-6)],
)
def test_durations_as_abseil_writes_them(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "1,5", "nan", "-1", 0, None, True, "1e400", "0x10"])
def test_what_is_no_positive_number_is_refused(value: object) -> None:
    with pytest.raises(ProgramError):
        positive(value, "x")
