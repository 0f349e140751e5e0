"""Requests of several clients onto one engine: one is computed at a time, and the others wait in their order."""

from __future__ import annotations

import itertools
import logging
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engines.base import unheard
from engines.errors import EngineError
from engines.reference import ReferenceEngine
from engines.serving.answer import TokenSaid, ToldGeneration
from engines.serving.asked import MOST_PROMPTS, Asked, BadRequestError
from results.records import Completion, Request, Sampling

MOST_WAITING = MOST_PROMPTS

log = logging.getLogger(__name__)


class BusyError(Exception):
    """More requests wait than are taken."""


class _GoneError(Exception):
    """The client no longer listens."""


@dataclass(frozen=True)
class Answered:
    completion: Completion
    said: Sequence[TokenSaid]
    """See `ToldGeneration`."""
    request: Request
    ended_by: Literal["stop", "length"]


@dataclass
class Job:
    """A request on its way. events: new token ids, then the answer, or the error that ended it."""

    fresh: bool
    answer: ToldGeneration | None = None
    events: queue.SimpleQueue[int | Answered | EngineError] = field(default_factory=queue.SimpleQueue)
    gone: threading.Event = field(default_factory=threading.Event)
    """Set by whoever no longer wants the answer."""

    def told(self, token_id: int) -> None:
        if self.gone.is_set():
            raise _GoneError
        self.events.put(token_id)


class Computing:
    """The engine and its queue. One thread computes (`compute_forever`); any thread may ask."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine
        self._waiting: queue.Queue[Job | None] = queue.Queue(MOST_WAITING)
        self._numbers = itertools.count(1)

    def ask(
        self,
        prompt: str | Sequence[int],
        asked: Asked,
        n_tokens: int | None,
        n_top: int | None = None,
        with_prompt: bool = False,
    ) -> Job:
        """Puts a request behind those that wait. n_tokens None: as many as there is room for.

        Raises `BadRequestError` on one that the engine cannot take, `BusyError`.
        """
        engine = self.engine
        if isinstance(prompt, str):
            self.check_length(prompt)
        try:
            prompt_ids = tuple(engine.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
            room = engine.max_length - len(prompt_ids)
            request = Request(
                request_id=f"{next(self._numbers)}",
                sample_id="",
                kind="generate",
                prompt_ids=prompt_ids,
                max_new_tokens=max(1, room if n_tokens is None else n_tokens),
                stop=asked.stops,
                sampling=Sampling(
                    temperature=asked.temperature,
                    top_k=max(0, asked.top_k),
                    top_p=asked.top_p,
                    seed=secrets.randbits(63) if asked.seed is None else asked.seed,
                ),
                ignore_end_tokens=asked.ignore_eos,
            )
            job = Job(fresh=asked.wants_fresh or with_prompt)
            job.answer = ToldGeneration(request, engine.tokenizer, engine.limits, job.told, n_top, with_prompt)
        except EngineError as error:
            raise BadRequestError(str(error)) from error
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            raise BusyError(f"{MOST_WAITING} requests wait already; ask again later") from None
        return job

    def check_length(self, prompt: str) -> None:
        """Raises `BadRequestError` on a text that is surely too long, before it is cut into tokens, which would keep
        all clients waiting."""
        least, most = self.engine.tokenizer.least_tokens(prompt), self.engine.max_length
        if least > most:
            raise BadRequestError(
                f"prompt of {len(prompt)} characters, at least {least} tokens, exceeds max_length {most}; cut it from"
                " the left"
            )

    def compute_forever(self) -> None:
        """Until `end`."""
        while (job := self._waiting.get()) is not None:
            if not job.gone.is_set():
                self._compute(job)

    def end(self) -> None:
        self._waiting.put(None)

    def _compute(self, job: Job) -> None:
        assert job.answer is not None
        try:
            if job.fresh:
                self.engine.reset()
            completion = self.engine.run_answer(job.answer, unheard)
        except _GoneError:
            log.info("a client went away; its request is ended")
        except EngineError as error:
            job.events.put(error)
        except Exception as error:
            # The next client's request is none the worse for this one.
            log.exception("request failed")
            job.events.put(EngineError(f"{type(error).__name__}: {error}"))
        else:
            job.events.put(Answered(completion, job.answer.said, job.answer.request, job.answer.ended_by))
        finally:
            # Nobody reads them here: they would only grow.
            self.engine.take_counters()
            self.engine.take_heat()
