"""How engines fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from results.messages import readable
from results.trials import CellText


class EngineError(Exception):
    """A request or a model that the engine cannot take: what, the value found, the remedy."""

    is_lost: ClassVar[bool] = False
    """As of a `DeviceError`: what computes was gone, and may be there another day."""

    def __str__(self) -> str:
        return readable(super().__str__())


class ProblemsError(EngineError):
    """All that is in the way at once. problems: a line each. where: what each of them begins with."""

    def __init__(self, problems: Sequence[str], where: str = "") -> None:
        super().__init__(where + "; ".join(problems))
        self.problems = tuple(readable(where + problem) for problem in problems)


def lines_of(error: EngineError) -> tuple[str, ...]:
    """What it says, a line for each problem."""
    return error.problems if isinstance(error, ProblemsError) else (str(error),)


class NoServerError(EngineError):
    """Nobody answers where a server was."""

    is_lost = True


class FewSlotsError(EngineError):
    """A memory that holds fewer experts than a technique needs, or none that is given. what: without the remedy.
    n_needed: experts. instead: another remedy than more memory. is_given: whether there is some."""

    def __init__(self, what: str, n_needed: int, instead: str | None = None, is_given: bool = True) -> None:
        remedies = [*(("give it more",) if is_given else ()), *((instead,) if instead else ())]
        super().__init__(f"{what}; {', or '.join(remedies)}")
        self.what, self.n_needed, self.instead = what, n_needed, instead


class ResultError(EngineError):
    """What came to a result without figures: no fault of a run. result: the text of its cells in tables."""

    def __init__(self, result: CellText, why: str) -> None:
        super().__init__(f"{result}: {why}")
        self.result: CellText = result


class NoRoomError(ResultError):
    """Experts that fit nowhere on a machine, by the memories that its sheet states: "N.S." or "oom", as in sources."""


class NotSupportedError(ResultError):
    """An engine that cannot do what it is asked: a model that it does not know, tokens that it does not take."""

    def __init__(self, why: str) -> None:
        super().__init__("not supported", why)


class OutOfMemoryError(ResultError):
    """An engine that ran out of the machine's memory."""

    def __init__(self, why: str) -> None:
        super().__init__("out of memory", why)
