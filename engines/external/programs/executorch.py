"""ExecuTorch by its `llama_main`.

    taskset f0 ./llama_main --model_path=M --tokenizer_path=T --prompt_file=P --max_new_tokens=64 --cpu_threads=4 \\
        --temperature=0 --warmup --ignore_eos

One line `PyTorchObserver {...}` holds CLOCK_REALTIME milliseconds of the phases' edges: they are placed by the device's
clock, and nothing is derived. The prompt is text: its own tokenizer must come to as many tokens as were asked, and
`prompt_tokens` says whether it did. One number of threads serves both phases.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    said_last,
    same,
    stamped,
)
from results.records import Record

NAME = "llama_main"
PROMPT_FILE = "prompt.txt"
OBSERVER = "PyTorchObserver "
UNSUPPORTED = "Missing operator|OperatorMissing|NotSupported|DelegateInvalidCompatibility"


class ExecuTorchOptions(Record):
    warm_up: bool = True
    """Answer once before the request that is timed."""


class ExecuTorch:
    name = "ExecuTorch"
    executable = NAME
    reads_text = True
    tells_threads = False
    why_silent: str | None = None

    def __init__(self, options: ExecuTorchOptions, settings: Settings, model: str, tokenizer: str) -> None:
        """model, tokenizer: files, from the program's folder. Raises `EngineError`."""
        self._options = options
        self.settings = settings
        self._setting = one_setting(settings, "ExecuTorch's llama_main")
        self._model = model
        self._tokenizer = tokenizer

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        warm_up = ("--warmup",) if self._options.warm_up else ()
        return (self._call(lengths.n_new, "--ignore_eos", *warm_up),)

    def _call(self, n_new: int, *more: str) -> ProgramCall:
        arguments = (
            f"./{NAME}", f"--model_path={self._model}", f"--tokenizer_path={self._tokenizer}",
            f"--prompt_file={PROMPT_FILE}", f"--max_new_tokens={n_new}",
            f"--cpu_threads={self._setting.n_threads}", "--temperature=0", *more,
        )  # fmt: skip
        return ProgramCall(arguments, self._setting.cores)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        check_ended(NAME, output, UNSUPPORTED)
        told = last_told(NAME, (line.strip() for line in output.text.splitlines()), OBSERVER, output)
        same(told.get("prompt_tokens"), lengths.n_prompt, f"{NAME}: prompt_tokens")
        behind_first(told.get("generated_tokens"), lengths, f"{NAME}: generated_tokens")
        keys = ("inference_start_ms", "first_token_ms", "inference_end_ms")
        start_s, first_s, end_s = (positive(told.get(key), f"{NAME}: {key}") * 1e-3 for key in keys)
        return stamped(NAME, lengths, (start_s, first_s, end_s), "its own stamps, in milliseconds")

    def question(self, asked: Question) -> ProgramCall:
        return self._call(asked.n_new)

    def answer(self, asked: Question, output: ProgramOutput) -> str:
        """The prompt is printed in front of it."""
        check_ended(NAME, output, UNSUPPORTED)
        shown = printed_answer(NAME, output)
        _, echoed, behind = shown.partition(asked.text)
        return behind if echoed else shown


def printed_answer(program: str, output: ProgramOutput) -> str:
    """Its runner prints an answer piece by piece, and then a line of its figures: without that line the answer has not
    ended. Raises `ProgramError`."""
    shown, head, _ = output.stdout.partition(f"\n{OBSERVER}")
    if not head:
        raise ProgramError(f"{program} printed no line {OBSERVER.strip()}{said_last(output)}")
    return shown
