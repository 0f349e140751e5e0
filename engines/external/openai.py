"""A server that speaks OpenAI's protocol as an engine: vLLM, SGLang, llama-server, Ollama, `joulebench serve`.

Answers are streamed, and a token's stamp is that of its chunk when it is here, one for all that come together:
latencies are a client's, the way to the server included. Prefill ends with the first chunk that brings a token; a chunk
that only names a role brings none.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from engines.answers import StopStrings
from engines.base import PhaseListener, unheard
from engines.errors import EngineError, NoServerError, NotSupportedError
from engines.external.base import Answer
from engines.external.openai_chunks import Streamed, Usage, model_in, scored_in, usage_in
from engines.external.openai_counts import Room, check_models, check_prompt_count, tokens_of
from engines.external.openai_flavours import FLAVOURS, FlavourName
from engines.external.openai_host import whereabouts
from engines.external.openai_link import ServerLink
from engines.model.tokenizer import Tokenizer
from engines.profile import Profile
from results.cells import CACHE_NOT_KNOWN, SERVER_BUSY
from results.counters import EngineCounters
from results.latencies import n_behind_first
from results.printable import printable
from results.records import Completion, Request

NO_VERSION = "a server that tells no version"
MOST_VERSION = 400
"""Characters of what a server says of its build."""
ONE_CLIENT = (
    "the server is asked one request at a time, and those that arrive meanwhile wait on this side: waiting, TTFT under"
    " load and utilisation are of such a client; a server that takes several at once would keep them waiting for less"
)
OWN_ENDS = ("stop", "eos", "eos_token", "stop_sequence")
"""Ends of a stream that are the answer's own, as servers call them. By any other it was cut off: by a limit ("length"),
a filter, a client that went away ("abort"), or what failed ("error", "insufficient_system_resource")."""
TOLERANCE = 1e-3
"""A log-probability above 0 by less than this was rounded."""


@dataclass(frozen=True)
class ServerOptions:
    """url: up to and with /v1. model: by the server's name; None: the only one that it has. cache_is_off: the plan's
    word that nothing of earlier prompts is used, for servers that cannot be told so."""

    url: str
    model: str | None = None
    flavour: FlavourName = "openai"
    key_variable: str | None = None
    timeout_s: float = 600.0
    cache_is_off: bool = False


class OpenAIEngine:
    """An `engines.base.Engine`. One request at a time, over one connection."""

    time_method: Literal["measured", "modelled"] = "measured"
    needs_calibration = False
    why_silent: str | None = None

    def __init__(
        self,
        options: ServerOptions,
        tokenizer: Tokenizer,
        max_length: int,
        now_s: Callable[[], float],
        device: str = "host",
    ) -> None:
        """tokenizer, max_length: of the plan's model, which the server is said to run. Raises `EngineError`."""
        self.device, self.tokenizer, self.max_length = device, tokenizer, max_length
        self._options, self._flavour, self._now_s = options, FLAVOURS[options.flavour], now_s
        self._link = ServerLink(options.url, options.key_variable, options.timeout_s, now_s)
        self._model = options.model or only_model(self._link)
        self._build: str | None = None
        """What it said of itself before the first window."""
        self._where = whereabouts(self._link.host, self._link.port)
        self._n_tokens = self._n_shared = self._n_at_first = self._n_encoded = self._n_cached = 0
        self._n_untold = self._n_uncounted = 0
        self._cache_known = True
        self._have_arrived = False

    # --- what is asked of every engine --------------------------------------------------------------------------------

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        self._learns_nothing()

    def use_profile(self, profile: Profile) -> None:
        self._learns_nothing()

    def _learns_nothing(self) -> NoReturn:
        raise EngineError(f"{self._link.url}: a server learns nothing from prompts; leave the profile out")

    def reset(self) -> None:
        """Before a window: the server must be that of the first one. That nothing of earlier prompts is used, every
        request asks for itself. Raises `EngineError`."""
        build = told_version(self._link, self._options.flavour) or NO_VERSION
        self._build = self._build or build
        if build != self._build:
            raise EngineError(
                f"{self._link.url}: was {self._build} at the first trial, and is {build}; trials of two servers are in"
                " no mean: begin a new run"
            )
        # Ollama, and a llama-server with several models, start what computes with the first request.
        self._where = whereabouts(self._link.host, self._link.port)

    def take_counters(self) -> EngineCounters | None:
        """None: what it does with experts is not told."""
        return None

    def process_ids(self) -> Sequence[int]:
        """This process, and those of a server on this machine."""
        return (os.getpid(), *self._where.process_ids)

    def close(self) -> None:
        """The connection. The server is not ours to end."""
        self._link.close()

    def why_unseen(self, by_cpu_time: bool) -> str | None:
        """See `engines.base.AsksServer`."""
        return self._where.elsewhere or (self._where.note if by_cpu_time else None)

    def take_marks(self) -> tuple[str, ...]:
        known, self._cache_known = self._cache_known, True
        n_busy, self._link.n_busy = self._link.n_busy, 0
        return (*(() if known else (CACHE_NOT_KNOWN,)), *((SERVER_BUSY,) if n_busy else ()))

    def take_remarks(self) -> tuple[str, ...]:
        """How counts and stamps came about."""
        notes = [note for note in (self._where.elsewhere, self._where.note) if note]
        if self._n_shared:
            notes.append(
                f"{self._n_shared} of {self._n_tokens} tokens came together with others, in a chunk or in several that"
                " arrived as one: time per output token is by tokens, and between those there is none"
            )
        if self._n_at_first:
            notes.append(
                f"{self._n_at_first} of {self._n_tokens} tokens came together with the first of their answer: time"
                " to the first token and prefill hold what they took, and decoding is told without them"
            )
        if self._n_encoded:
            notes.append(
                f"the server told no ids of {self._n_encoded} of {self._n_tokens} tokens: its text was encoded again,"
                " and its counts agree; the window's CPU time and joules hold that"
            )
        if self._n_cached:
            notes.append(f"the server held {self._n_cached} prompt tokens from before; they count as not computed")
        if self._link.n_again:
            notes.append(f"requests sent again, before anything of their answer had come: {self._link.n_again}")
        if self._n_uncounted:
            notes.append(
                f"the server did not count the prompt tokens of {self._n_uncounted} requests: nothing shows that it"
                " read all of them"
            )
        if self._n_untold:
            notes.append(
                f"{self._n_untold} requests asked the server to use nothing of earlier prompts; it does not say whether"
                " it did"
            )
        if not self._cache_known:
            notes.append(
                "the server cannot be told to forget earlier prompts, and does not say how much of them it used: its"
                " prefill may be none; with its prefix cache off, say cache_is_off = true"
            )
        if self._have_arrived:
            notes.append(ONE_CLIENT)
        self._n_tokens = self._n_shared = self._n_at_first = self._n_encoded = self._n_cached = 0
        self._n_untold = self._n_uncounted = self._link.n_again = 0
        self._have_arrived = False
        return tuple(notes)

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Raises `EngineError`, with the server's own words where it has some."""
        self._have_arrived = self._have_arrived or request.arrival_s is not None
        with self._named():
            if request.kind == "loglikelihood":
                return self._score(request, on_phase)
            return self._generate(request, on_phase)

    def answer_aside(self, request: Request) -> Answer:
        """See `engines.external.base.AnswersAside`. Counts of tokens are not proven: no figure comes from it, and a
        text may have several spellings."""
        with self._named():
            streamed, _ = self._streamed(request, unheard)
            self._check_asked(request, streamed)
            return tuple(streamed.token_ids) or streamed.text

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors begin with the server's address."""
        try:
            yield
        except NotSupportedError:
            raise
        except EngineError as error:
            if str(error).startswith(self._link.url):
                raise
            raise EngineError(f"{self._link.url}: {error}") from error

    # --- generations --------------------------------------------------------------------------------------------------

    def _generate(self, request: Request, on_phase: PhaseListener) -> Completion:
        streamed, start_s = self._streamed(request, on_phase)
        assert streamed.end_s is not None  # a stream without an end is refused
        return self._completion(request, streamed, start_s, streamed.end_s)

    def _streamed(self, request: Request, on_phase: PhaseListener) -> tuple[Streamed, float]:
        """A whole answer, and when it was asked."""
        body = self._asked(request.prompt_ids) | self._sampling(request)
        body |= {"max_tokens": request.max_new_tokens, "stream": True, **self._flavour.ids}
        body["stream_options"] = {"include_usage": True}
        if self._flavour.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
        if request.stop:
            body["stop"] = list(request.stop)
        if request.ignore_end_tokens:
            body |= self._flavour.exact
            if self._flavour.least is not None:
                body[self._flavour.least] = request.max_new_tokens
        streamed = Streamed()
        self._link.ready()
        start_s = self._now_s()
        on_phase("request start", start_s)
        room, heard_s = Room(request, self.tokenizer), start_s
        for chunk in self._link.stream("/completions", body):
            if streamed.add(chunk.at_s, chunk.told):
                heard_s = chunk.at_s
                if len(streamed.pieces) == 1:
                    on_phase("prefill end", heard_s)
                room.check(streamed)
            elif chunk.at_s - heard_s > self._options.timeout_s:
                raise EngineError(f"nothing of the answer came in {self._options.timeout_s:g} s; raise timeout_s")
        end_s = streamed.end_s
        if end_s is None or streamed.finish_reason is None:
            raise EngineError("the stream did not say why it ended; what came is no whole answer")
        if not streamed.pieces:
            on_phase("prefill end", end_s)
        on_phase("request end", end_s)
        return streamed, start_s

    def _completion(self, request: Request, streamed: Streamed, start_s: float, end_s: float) -> Completion:
        n_prompt = len(request.prompt_ids)
        self._check_asked(request, streamed)
        tokens = tokens_of(streamed, request, self.tokenizer)
        n, most = len(tokens.token_ids), request.max_new_tokens
        if n > most or (request.ignore_end_tokens and not request.stop and n != most):
            how = "" if self._flavour.exact else f"; flavour {self._options.flavour} cannot be asked for exact lengths"
            raise EngineError(
                f"request {request.request_id}: {n} new tokens came, asked for {'exactly ' if n < most else ''}{most}"
                f" (it ended by {printable(streamed.finish_reason or '', 40)!r}){how}"
            )
        if n < most and streamed.finish_reason not in OWN_ENDS:
            raise EngineError(
                f"request {request.request_id}: {n} new tokens came, and the answer was cut off"
                f" ({printable(streamed.finish_reason or '', 40)!r}), though it may have {most}; raise the server's own"
                " limit or context, or look at its log"
            )
        self._n_tokens += n
        self._n_shared += tokens.n_shared
        self._n_at_first += max(0, n - 1) - n_behind_first(tokens.times_s)
        self._n_encoded += 0 if tokens.is_told else n
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=n_prompt,
            n_cached_tokens=self._cached(streamed.usage, n_prompt),
            start_s=start_s,
            prefill_end_s=streamed.pieces[0].at_s if streamed.pieces else end_s,
            end_s=end_s,
            token_ids=tokens.token_ids,
            token_times_s=tokens.times_s,
            text=StopStrings(request.stop, self.tokenizer.spell).cut(streamed.text),
        )

    def _check_asked(self, request: Request, streamed: Streamed) -> None:
        """That this model read this prompt. Raises `EngineError`."""
        check_models(streamed.models, self._model)
        self._check_prompt(request, streamed.usage.n_prompt, len(request.prompt_ids))

    def _check_prompt(self, request: Request, n_told: int | None, n_sent: int) -> None:
        check_prompt_count(request, n_told, n_sent, as_text=not self._flavour.takes_ids)
        self._n_uncounted += n_told is None

    def _sampling(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        asked: dict[str, Any] = {"temperature": sampling.temperature, "seed": sampling.seed % 2**31}
        asked |= self._flavour.plain
        if sampling.temperature:
            asked |= {"top_p": sampling.top_p, **self._flavour.draws}
        if sampling.temperature and sampling.top_k:
            if not self._flavour.top_k:
                self._not_supported("draws with top_k: the protocol has no word for it")
            asked["top_k"] = sampling.top_k
        return asked

    def _asked(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What every request says."""
        prompt: Any = list(token_ids)
        if not self._flavour.takes_ids:
            prompt = self.tokenizer.decode(token_ids)
            if list(token_ids) not in (self.tokenizer.encode_prompt(prompt), self.tokenizer.encode(prompt)):
                self._not_supported("takes texts only, and this prompt's tokens are not those of its text")
        asked = {"model": self._model, "prompt": prompt, **self._flavour.fresh}
        if self._flavour.salt is not None:
            asked[self._flavour.salt] = f"joulebench-{uuid.uuid4().hex}"
        return asked

    def _cached(self, usage: Usage, n_sent: int) -> int:
        """Prompt tokens that were not computed; the last one always is. Raises `EngineError`."""
        asked_fresh = bool(self._flavour.fresh) or self._flavour.salt is not None
        if usage.n_cached is None:
            self._n_untold += asked_fresh and not self._options.cache_is_off
            self._cache_known = self._cache_known and (asked_fresh or self._options.cache_is_off)
            return 0
        if usage.n_cached >= n_sent:
            raise EngineError(f"it says that it held {usage.n_cached} of {n_sent} prompt tokens; the last is computed")
        self._n_cached += usage.n_cached
        return usage.n_cached

    # --- log-likelihoods ----------------------------------------------------------------------------------------------

    def _score(self, request: Request, on_phase: PhaseListener) -> Completion:
        """The whole text is sent as a prompt, and one token asked on top, which some servers need: it is no part of the
        answer, and its step is in the time."""
        if not self._flavour.scores_prompts:
            self._not_supported("tells no log-likelihoods of a prompt, by which this workload is scored")
        asked_ids = [*request.prompt_ids, *request.continuation_ids]
        body = self._asked(asked_ids) | {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        if self._flavour.names_ids:
            body["return_tokens_as_token_ids"] = True
        self._link.ready()
        start_s = self._now_s()
        on_phase("request start", start_s)
        end_s, told = self._link.post("/completions", body)
        on_phase("prefill end", end_s)
        on_phase("request end", end_s)
        scored = scored_in(told)
        n, first = len(asked_ids), len(request.prompt_ids)
        if len(scored.tokens) not in (n, n + 1):
            raise EngineError(f"request {request.request_id}: scores {len(scored.tokens)} tokens, and {n} were sent")
        if self._flavour.names_ids and list(scored.tokens[:n]) != [f"token_id:{token}" for token in asked_ids]:
            raise EngineError(f"request {request.request_id}: scores other tokens than those that were sent")
        usage = usage_in(told)
        check_models(filter(None, [model_in(told)]), self._model)
        self._check_prompt(request, usage.n_prompt, n)
        values = scored.log_probabilities[first:n]
        wrong = next((v for v in values if type(v) not in (int, float) or not v <= TOLERANCE), None)
        if None in values or wrong is not None:
            raise EngineError(f"request {request.request_id}: log-probability {wrong!r:.40} is no number up to 0")
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=n - 1,
            n_cached_tokens=self._cached(usage, n),
            start_s=start_s,
            prefill_end_s=end_s,
            end_s=end_s,
            loglikelihood=math.fsum(values),
            is_greedy=all(map(_is_likeliest, values, scored.likeliest[first:n])),
        )

    def _not_supported(self, why: str) -> NoReturn:
        raise NotSupportedError(f"{self._link.url} (flavour {self._options.flavour}) {why}")


def _is_likeliest(value: float, others: Any) -> bool:
    if not isinstance(others, dict) or not all(type(other) in (int, float) for other in others.values()):
        raise EngineError("top_logprobs: must tell the likeliest token at each place; ask a server that does")
    return all(value >= other for other in others.values())


def only_model(link: ServerLink) -> str:
    """Raises `EngineError` where a server has several, and none is named."""
    names = model_names(link)
    if len(names) != 1:
        told = printable(", ".join(names), 300) or "none"
        raise EngineError(f"{link.url}: has these models: {told}; name one with model")
    return names[0]


def model_names(link: ServerLink) -> list[str]:
    """Raises `EngineError`."""
    told = link.get("/models")
    rows = told.get("data") if isinstance(told, dict) else None
    if not isinstance(rows, list):
        raise EngineError(f"{link.url}: /models tells no list; is this OpenAI's protocol, and does the url end in /v1?")
    return [str(row["id"])[:200] for row in rows if isinstance(row, dict) and "id" in row]


def told_version(link: ServerLink, flavour: FlavourName) -> str | None:
    """Its build, where it tells it. Raises `NoServerError`: one that is away is no other server."""
    road, keys = FLAVOURS[flavour].version_road, FLAVOURS[flavour].version_keys
    if road is None:
        return None
    try:
        told = link.get(road, beside_v1=True)
    except NoServerError:
        raise
    except EngineError:
        return None
    found = [str(told[key]) for key in keys if isinstance(told, dict) and told.get(key)]
    return printable(" ".join(found), MOST_VERSION) or None
