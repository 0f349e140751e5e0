"""The two models that lm-eval meets: one that writes down what it is asked, one that reads out what was answered.

Imports lm-eval at the top (a second and more), so this module is itself imported inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lm_eval.api.model import LM, TemplateLM

from results.records import Completion, Request
from workloads.base import Tokenizer, WorkloadError


def request_id(sample_id: str, kind: str, choice: int) -> str:
    """A choice is a request of its own; a generated answer has its sample's id."""
    return f"{sample_id}#{choice}" if kind == "loglikelihood" else sample_id


class RecordingLM(TemplateLM):  # type: ignore[misc]
    """Turns each of lm-eval's instances into a `Request`, with dummy answers.

    The split of a text into context and continuation tokens is that of `TemplateLM`, as for lm-eval's own models: the
    whole is encoded, then cut at the length of the encoded context. `sample_ids[i]` names the task's document i.
    """

    def __init__(self, tokenizer: Tokenizer, sample_ids: Sequence[str]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._sample_ids = sample_ids
        # The choices of an item share their context, which comes after each whole: two entries, and it is encoded once.
        self._encode = lru_cache(maxsize=2)(tokenizer.encode_prompt)
        self._instances: Sequence[Any] = ()
        self.recorded: list[Request] = []

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_token_ids[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._instances = requests
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for instance, (_texts, prompt_ids, continuation_ids) in zip(self._instances, requests, strict=True):
            sample_id = self._sample_ids[instance.doc_id]
            if not continuation_ids:
                raise WorkloadError(
                    f"{sample_id}: choice {instance.idx} ({instance.args[1]!r}) has no token of its own after its "
                    f"context with tokenizer {self._tokenizer.name}; use another tokenizer"
                )
            self.recorded.append(
                Request(
                    request_id=request_id(sample_id, "loglikelihood", instance.idx),
                    sample_id=sample_id,
                    kind="loglikelihood",
                    prompt_ids=tuple(prompt_ids),
                    continuation_ids=tuple(continuation_ids),
                )
            )
        return [(0.0, False)] * len(requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        for instance in requests:
            context, generation = instance.args
            until = generation.get("until") or ()
            sample_id = self._sample_ids[instance.doc_id]
            self.recorded.append(
                Request(
                    request_id=sample_id,
                    sample_id=sample_id,
                    kind="generate",
                    prompt_ids=tuple(self.tok_encode(context)),
                    max_new_tokens=generation["max_gen_toks"],
                    stop=(until,) if isinstance(until, str) else tuple(until),
                )
            )
        return [""] * len(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        raise NotImplementedError("no task of this project asks for rolling log-likelihoods")


class AnsweringLM(LM):  # type: ignore[misc]
    """Answers lm-eval's instances from the completions of a window, looked up by request id."""

    def __init__(self, requests: Sequence[Request], completions: Mapping[str, Completion], sample_ids: Sequence[str]):
        super().__init__()
        self._stop = {request.request_id: request.stop for request in requests}
        self._completions = completions
        self._sample_ids = sample_ids

    def _completion(self, instance: Any, kind: str) -> Completion:
        wanted = request_id(self._sample_ids[instance.doc_id], kind, instance.idx)
        if wanted not in self._completions:
            raise WorkloadError(f"{wanted}: not answered; score the completions of all requests")
        return self._completions[wanted]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        return [_scored(self._completion(instance, "loglikelihood")) for instance in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        completions = [self._completion(instance, "generate_until") for instance in requests]
        return [_before_stop(c.text, self._stop[c.request_id]) for c in completions]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        raise NotImplementedError("no task of this project asks for rolling log-likelihoods")


def _scored(completion: Completion) -> tuple[float, bool]:
    """NaN is refused: the argmax over choices would take it for the best answer."""
    value, greedy = completion.loglikelihood, completion.is_greedy
    if value is None or value != value:
        raise WorkloadError(
            f"{completion.request_id}: log-likelihood {value}; the engine must return a number (NaN hints at overflow: "
            "try dtype float32)"
        )
    return value, bool(greedy)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """Engines may leave the stop string in; lm-eval's models cut it off."""
    for string in filter(None, stop):
        text = text.split(string)[0]
    return text
