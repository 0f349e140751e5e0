"""An iPhone as a place for programs: an app that is installed, started with arguments, its console read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from devices.ios.device import IosDevice
from engines.external.programs.edges import Edge, last_edge
from engines.external.programs.mnn_bench import APP_ERROR, DONE, app_arguments, app_figures
from engines.external.programs.program import (
    MAKES_UP,
    Figures,
    Lengths,
    PhaseSetting,
    ProgramCall,
    ProgramOutput,
    Settings,
)
from engines.external.programs.target import ProgramRun

ARRIVAL = "the app's end is known by the arrival of its last line here, to half of the link's trip there and back"


class MnnApp:
    """MNN's app, which carries its model."""

    name = "MNN's app"
    executable = ""
    reads_text = False
    tells_threads = True
    why_silent: str | None = MAKES_UP

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self.settings = Settings(PhaseSetting(n_threads), PhaseSetting(n_threads))

    def calls(self, lengths: Lengths) -> tuple[ProgramCall, ...]:
        return (ProgramCall(app_arguments(lengths, self._n_threads)),)

    def figures(self, lengths: Lengths, outputs: Sequence[ProgramOutput]) -> Figures:
        [output] = outputs
        return app_figures(lengths, self._n_threads, output.stdout)


class IphoneTarget:
    """app: its bundle identifier."""

    def __init__(self, device: IosDevice, app: str) -> None:
        self._device = device
        self._app = app

    def prepare(self, files: Mapping[str, Path]) -> None:
        """The app is installed beforehand."""

    def run(self, call: ProgramCall, texts: Mapping[str, str], timeout_s: float) -> ProgramRun:
        ran = self._device.run_app(self._app, call.arguments, (DONE, APP_ERROR), timeout_s)
        output = ProgramOutput(ran.console, "", 0)
        arrived = Edge(ran.ended_s, 0.0)  # nothing of the app is seen later
        done = last_edge(arrived, ran.ended_s, ran.trip_s)
        return ProgramRun(output, ran.begun_s, ran.ended_s, lambda wall_s: None, ARRIVAL, done)

    def close(self) -> None:
        """The app is ended after each run."""
