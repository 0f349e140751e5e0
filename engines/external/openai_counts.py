"""Which tokens an answer has, and when each came: proven by the plan's own tokenizer, or refused.

A server that counts otherwise than the tokenizer of the plan runs another model, adds tokens of its own, or hides some:
its tokens a second would be of other tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from engines.errors import EngineError
from engines.external.openai_chunks import Streamed
from engines.external.openai_flavours import FLAVOURS
from engines.model.tokenizer import Tokenizer
from results.printable import printable
from results.records import Request

UNSEEN = "\N{REPLACEMENT CHARACTER}"


class Tokens(NamedTuple):
    """times_s: of each, that of the chunk which brought it. n_shared: tokens that came together with others. is_told:
    the server told the ids; else the text was encoded again, and the server's count agrees."""

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    n_shared: int
    is_told: bool


def check_prompt_count(request: Request, n_told: int | None, n_sent: int, as_text: bool) -> None:
    """Raises `EngineError` where the server reads another prompt than the one that was asked."""
    if n_told is None and as_text:
        raise EngineError("it does not count its prompt tokens, so that nothing shows that it read what was asked")
    if n_told is not None and n_told != n_sent:
        raise EngineError(
            f"it counts {n_told} prompt tokens, and the plan's tokenizer {n_sent} (request {request.request_id}); it"
            " adds tokens of its own (a template, a begin token), or runs another model"
        )


def check_models(told: Iterable[str], asked: str) -> None:
    """Raises `EngineError` where another model answers: a gateway may fall back on one, whose tokens are alike."""
    others = sorted(set(told) - {asked})
    if others:
        raise EngineError(
            f"it answers as model {printable(', '.join(others), 200)!r}, and {asked!r} was asked; if that is the same,"
            " name it so with model"
        )


class Room:
    """Ends a stream that goes on behind the tokens that were asked: it may have no end."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._n_pieces = request.max_new_tokens + 1
        """From so many on the text is counted, where the server tells no ids and no numbers: it costs time."""

    def check(self, streamed: Streamed) -> None:
        """Raises `EngineError`."""
        n, most = max(streamed.n_told_ids, streamed.usage.n_new or 0), self._request.max_new_tokens
        if not n and len(streamed.pieces) >= self._n_pieces:
            n = len(self._tokenizer.encode(streamed.text))
            self._n_pieces *= 2
        if n > most:
            raise EngineError(f"request {self._request.request_id}: {n} new tokens came and no end, asked for {most}")


def tokens_of(streamed: Streamed, request: Request, tokenizer: Tokenizer) -> Tokens:
    """Raises `EngineError` where counts disagree."""
    n = streamed.usage.n_new
    told_ids = streamed.token_ids
    if told_ids and (ids := _ended(told_ids, n, streamed, tokenizer)) is not None:
        _check_text(ids, streamed.text, request, tokenizer)
        times = [piece.at_s for piece in streamed.pieces for _ in piece.token_ids]
        times += [_end_s(streamed)] * (len(ids) - len(times))
        return Tokens(ids, tuple(times), _n_shared(times), True)
    if n is None:
        raise EngineError("it tells neither the ids of its tokens nor their number, so that no speed can be told")
    if n == 0 and not streamed.text:
        return Tokens((), (), 0, False)
    lengths: list[int] = []
    for candidate in _encodings(streamed.text, request, tokenizer):
        lengths.append(len(candidate))
        if (ids := _ended(candidate, n, streamed, tokenizer)) is not None:
            times = _times(ids, streamed, tokenizer)
            return Tokens(ids, tuple(times), _n_shared(times), False)
    also = f", told the ids of {len(told_ids)}" if told_ids else ""
    raise EngineError(
        f"it counts {n} new tokens{also}, and the plan's tokenizer makes {lengths[0]} of its text; another model,"
        " hidden tokens, or a text that has several spellings: a flavour that tells token ids settles it:"
        f" {', '.join(name for name, flavour in FLAVOURS.items() if flavour.ids)}"
    )


def _ended(ids: Sequence[int], n: int | None, streamed: Streamed, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids where the server's count agrees; with the end token that it counted and did not show. None: it does not
    agree."""
    if n is None or n == len(ids):
        return tuple(ids)
    if n == len(ids) + 1 and streamed.finish_reason == "stop" and tokenizer.eos_token_ids:
        return (*ids, tokenizer.eos_token_ids[0])
    return None


def _check_text(ids: Sequence[int], text: str, request: Request, tokenizer: Tokenizer) -> None:
    """That ids mean to us what they mean to the server."""
    ours, theirs = _bare(tokenizer.decode(ids)), _bare(text)
    if ours != theirs and not (request.stop and ours.startswith(theirs)):
        raise EngineError(
            "its text is not what its token ids mean to the plan's tokenizer: it runs another model, or shows special"
            f" tokens (request {request.request_id}: {theirs[:40]!r}, and by the ids {ours[:40]!r})"
        )


def _bare(text: str) -> str:
    """Servers differ in half characters at the end and in blanks around an answer."""
    return text.strip().strip(UNSEEN).strip()


def _encodings(text: str, request: Request, tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """What the tokens may have been: of the text alone, behind its prompt, and with the stop string that was cut."""
    prompt_ids = list(request.prompt_ids)
    prompt = tokenizer.decode(prompt_ids)
    for stop in ("", *request.stop):
        yield tokenizer.encode(text + stop)
        whole = tokenizer.encode(prompt + text + stop)
        if whole[: len(prompt_ids)] == prompt_ids:
            yield whole[len(prompt_ids) :]


def _times(ids: Sequence[int], streamed: Streamed, tokenizer: Tokenizer) -> list[float]:
    """Of ids that the server did not tell: by its own running count, by chunks where there is one for each, else by the
    chunk whose text first held the token's. One that no chunk showed, as an end token or a stop string's, came with the
    stream's end."""
    pieces = streamed.pieces
    counts = [piece.n_so_far for piece in pieces if piece.n_so_far is not None]
    if len(counts) == len(pieces):
        _check_running_counts(counts, ids, streamed, tokenizer)
        upto = counts
    elif len(pieces) == len(ids):
        upto = list(range(1, len(ids) + 1))
    else:
        upto = []
        shown = list(itertools.accumulate(len(piece.text) for piece in pieces))
        n, n_shown = 0, len(ids)
        while n_shown and not tokenizer.decode(ids[n_shown - 1 :]):
            n_shown -= 1
        for length in shown:
            while n < n_shown and len(tokenizer.decode(ids[: n + 1])) <= length:
                n += 1
            upto.append(n)
    times: list[float] = []
    for piece, n in zip(pieces, upto, strict=True):
        times += [piece.at_s] * (min(n, len(ids)) - len(times))
    return times + [_end_s(streamed)] * (len(ids) - len(times))


def _end_s(streamed: Streamed) -> float:
    assert streamed.end_s is not None  # a stream without an end is refused
    return streamed.end_s


def _check_running_counts(counts: Sequence[int], ids: Sequence[int], streamed: Streamed, tokenizer: Tokenizer) -> None:
    """Raises `EngineError` where they fall, pass the whole, or run ahead of the text that had come: stamps by them
    would make an answer faster than it was."""
    n_before = n_characters = 0
    for count, piece in zip(counts, streamed.pieces, strict=True):
        n_characters += len(piece.text)
        # Half a character is counted before it can be shown.
        ahead = count - n_before > 1 and len(tokenizer.decode(ids[:count]).rstrip(UNSEEN)) > n_characters
        if count < n_before or count > len(ids) or ahead:
            raise EngineError(
                f"it counted {count} new tokens behind {n_before}, of {len(ids)} in all, when {n_characters} characters"
                " had come: its running counts are not those of its text"
            )
        n_before = count


def _n_shared(times: Sequence[float]) -> int:
    return sum(n for _, group in itertools.groupby(times) if (n := len(list(group))) > 1)
