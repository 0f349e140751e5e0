"""An engine whose requests are runs of a program: so many tokens in, so many out, none of them ours.

A request's edges are the program's own stamps where it has them, placed by the machine's clock; else they follow
backwards, by the times that it tells, from its last words or its end, whichever was seen first: derived, and late by
what it still does after its last token. Starting, loading the model and warming up are set aside: no latency and no
joules hold them. Tokens between the first and the last have no stamps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from devices.base import DeviceError, TransientDeviceError
from engines.base import EngineError, PhaseListener
from engines.external.base import Answer
from engines.external.programs.program import Answers, Figures, Lengths, Program, ProgramError, Question, Stretch
from engines.external.programs.target import ProgramRun, Target
from engines.model.tokenizer import Tokenizer
from engines.profile import Profile
from results.counters import EngineCounters
from results.environments import PhaseThreads, Road
from results.records import Completion, DerivedTime, Request

NO_TOKEN = 0
"""In the place of tokens that nobody tells."""
PROMPT_FILE = "prompt.txt"
TOLERANCE_S = 0.05
"""Of a machine's clock: a program that says it computed longer than it ran, by more, said something wrong."""
TIMEOUT_S = 1800.0


class ProgramEngine:
    """device: the name of the plan's device. files: what the program needs, by its name in its folder."""

    time_method: Literal["measured", "modelled"] = "measured"
    needs_calibration = False
    starts_programs: Literal[True] = True

    def __init__(
        self,
        program: Program,
        target: Target,
        files: Mapping[str, Path],
        device: str,
        tokenizer: Tokenizer,
        max_length: int,
        now_s: Callable[[], float],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.device = device
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._program = program
        self._target = target
        self._files = files
        self._now_s = now_s
        self._timeout_s = timeout_s
        self._is_prepared = False
        self._remarks: dict[str, None] = {}
        self._road: Road | None = None

    def prepare(self) -> None:
        """Puts the program where it runs: once, before any window. Raises `DeviceError`, `EngineError`."""
        if not self._is_prepared:
            self._target.prepare(self._files)
            self._is_prepared = True

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Raises `EngineError`, `DeviceError`. The listener hears of the edges when they are over."""
        lengths = self._lengths(request)
        self.prepare()
        texts = {PROMPT_FILE: self.tokenizer.decode(request.prompt_ids)} if self._program.reads_text else {}
        asked_s = self._now_s()
        runs = [self._target.run(call, texts, self._timeout_s) for call in self._program.calls(lengths)]
        answered_s = self._now_s()
        figures = self._program.figures(lengths, [run.output for run in runs])
        told_stretches = [one for one in (figures.prefill, figures.decode) if one is not None]
        stretches = [_placed(one, runs, self._program.name) for one in told_stretches]
        prefill_s, known_s = stretches[0], [_uncertainty_s(one, runs) for one in told_stretches]
        _check_order([(asked_s, asked_s), *stretches], self._program.name)
        stamped = all(one.wall_s and not one.is_derived for one in told_stretches)
        edges = (
            "the program's own stamps"
            if stamped
            else "derived from the program's end, which may be late, and the times that it tells"
            if None in known_s
            else "derived from the program's last words or its end, and the times that it tells"
        )
        version = "" if figures.version is None else f" {figures.version}"
        told = (f"{self._program.name}{version}: edges of phases are {edges}; {runs[0].remark}", *figures.remarks)
        self._remarks |= dict.fromkeys(told)
        self._road = _road(self._program)
        if not self._program.tells_threads:
            self._remarks[f"{self._program.name}: the number of threads is what was asked; it tells of none"] = None
        if figures.first_token == "derived":
            self._remarks["time to the first token is derived: the program does not tell it"] = None
        start_s, first_s = prefill_s
        begin_s, end_s = stretches[-1] if figures.decode is not None else (first_s, first_s)
        steps = lengths.n_new - 1
        times_s = (first_s, *(begin_s + (end_s - begin_s) * (k + 1) / steps for k in range(steps)))
        for event, at_s in (("request start", start_s), ("prefill end", first_s), ("request end", end_s)):
            on_phase(event, at_s)  # type: ignore[arg-type]
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=lengths.n_prompt,
            start_s=start_s,
            prefill_end_s=first_s,
            end_s=end_s,
            token_ids=(NO_TOKEN,) * lengths.n_new,
            token_times_s=times_s,
            set_aside_s=tuple(_between((asked_s, answered_s), stretches)),
            derived=_derived(figures),
            is_spread=True,
            edges_uncertainty_s=None if None in known_s else max(filter(None, known_s), default=0.0),
        )

    @property
    def why_silent(self) -> str | None:
        """See `engines.external.base.AnswersAside`."""
        return self._program.why_silent

    def answer_aside(self, request: Request) -> Answer:
        assert isinstance(self._program, Answers)  # else it is silent
        self.prepare()
        asked = Question(self.tokenizer.decode(request.prompt_ids), request.prompt_ids, request.max_new_tokens)
        texts = {PROMPT_FILE: asked.text} if self._program.reads_text else {}
        return self._program.answer(
            asked, self._target.run(self._program.question(asked), texts, self._timeout_s).output
        )

    def _lengths(self, request: Request) -> Lengths:
        """Raises `EngineError` for a request that is more than lengths."""
        name = self._program.name
        if request.kind != "generate" or not request.ignore_end_tokens or request.stop:
            raise EngineError(
                f"{name} makes up its tokens, so that it cannot answer {request.request_id}; give it the workload"
                " fixed_lengths"
            )
        if request.arrival_s is not None:
            raise EngineError(
                f"{name} is started for each request, so none can arrive on its own; remove arrivals_per_s"
            )
        return Lengths(len(request.prompt_ids), request.max_new_tokens)

    def reset(self) -> None:
        """Nothing is kept between requests."""

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is learnt."""

    def use_profile(self, profile: Profile) -> None:
        raise EngineError(f"{self._program.name} learns from no profile; remove the line")

    def take_counters(self) -> EngineCounters | None:
        """None: what it does with experts is not told."""
        return None

    def take_remarks(self) -> tuple[str, ...]:
        remarks, self._remarks = tuple(self._remarks), {}
        return remarks

    def take_road(self) -> Road | None:
        """None: it has computed nothing since."""
        road, self._road = self._road, None
        return road

    def close(self) -> None:
        self._target.close()
        self._is_prepared = False


def _road(program: Program) -> Road:
    """Cores are the program's or taskset's to keep, and are not read back: a phone that gives fewer is an error."""
    numbers = [setting.n_threads for setting in program.settings]
    prefill, decode = (PhaseThreads(n_threads=n) if len(set(numbers)) > 1 else None for n in numbers)
    return Road(
        arithmetic=program.name,
        dtype=None,
        n_threads=max(numbers),
        prefill_threads=prefill,
        decoding_threads=decode,
        threads_are_asked=not program.tells_threads,
        answers_are_seen=program.why_silent is None,
    )


def _derived(figures: Figures) -> tuple[DerivedTime, ...]:
    """Of its times, those that the program does not tell as such."""
    decode = figures.decode is not None and figures.decode.is_derived
    is_so: dict[DerivedTime, bool] = {
        "first token": figures.first_token == "derived",
        "prefill": figures.prefill.is_derived,
        "decode": decode,
    }
    return tuple(name for name, so in is_so.items() if so)


def _placed(stretch: Stretch, runs: Sequence[ProgramRun], program: str) -> tuple[float, float]:
    """On the run's clock. Raises `ProgramError` for a time that is longer than its program ran."""
    run = runs[stretch.call]
    begin_s = end_s = None
    if stretch.wall_s is not None:
        begin_s, end_s = map(run.of_wall_s, stretch.wall_s)
        if begin_s is None or end_s is None:
            raise TransientDeviceError(
                f"{program}: the wall clock of the machine was set while it ran, so its stamps mean nothing; turn"
                " automatic time off, or try again"
            )
    else:
        end_s = (run.ended_s if run.done is None else run.done.at_s) - stretch.before_end_s
        begin_s = end_s - stretch.seconds
    if begin_s < run.begun_s - TOLERANCE_S or end_s > run.ended_s + TOLERANCE_S:
        raise ProgramError(
            f"{program} says that it computed for {stretch.seconds + stretch.before_end_s:.3g} s, and it ran"
            f" {run.ended_s - run.begun_s:.3g} s: one of them is wrong, and no figure is taken from it"
        )
    return begin_s, end_s


def _uncertainty_s(stretch: Stretch, runs: Sequence[ProgramRun]) -> float | None:
    """Standard. None: by the program's end alone, before which it may have done more."""
    run = runs[stretch.call]
    if stretch.wall_s is not None:
        return run.stamp_uncertainty_s
    return None if run.done is None else run.done.uncertainty_s


def _check_order(stretches: Sequence[tuple[float, float]], program: str) -> None:
    """Raises `DeviceError`: edges from two clocks may cross where one was read badly."""
    for (_, before_s), (after_s, _) in itertools.pairwise(stretches):
        if after_s < before_s - TOLERANCE_S:
            raise DeviceError(
                f"{program}: a phase begins {before_s - after_s:.3g} s before the one in front of it ended"
            )


def _between(whole: tuple[float, float], stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What of the whole lies in none of the stretches, which rise."""
    found, at_s = [], whole[0]
    for begin_s, end_s in stretches:
        if begin_s > at_s:
            found.append((at_s, begin_s))
        at_s = max(at_s, end_s)
    return [*found, (at_s, whole[1])] if whole[1] > at_s else found
