"""The two models that lm-eval meets: one that writes down what it is asked, one that reads out what was answered.

Imports lm-eval at the top (a second and more), so this module is itself imported inside functions.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from lm_eval.api.model import LM, TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from results.records import TOP_K_OF_TRANSFORMERS, Completion, Request, Sampling
from workloads.base import Tokenizer, WorkloadError

SampleIds = Mapping[str, Sequence[str]]
"""By task: what its asked documents are called, in their order."""


def _sample_id(sample_ids: SampleIds, instance: Any) -> str:
    return str(sample_ids[instance.task_name][instance.doc_id])


def request_id(sample_id: str, number: int) -> str:
    """A sample's choices, windows and repeated generations are requests of their own."""
    return f"{sample_id}#{number}"


def _generation_id(instance: Any, sample_id: str, number: int) -> str:
    """A text that is generated once has its sample's id."""
    return sample_id if instance.repeats == 1 else request_id(sample_id, number)


class RecordingLM(TemplateLM):  # type: ignore[misc]
    """Turns each of lm-eval's instances into a `Request`, with dummy answers.

    Token ids are those of lm-eval's own models. A context and its continuation are encoded together and cut at the
    length of the encoded context (`TemplateLM`); an empty context is the begin token, or the end token of a model that
    has none; a text whose every token is asked is cut into windows of the model's length.
    """

    def __init__(self, tokenizer: Tokenizer, sample_ids: SampleIds, max_length: int | None) -> None:
        """max_length: the model's; None for tasks that ask for no windows."""
        super().__init__()
        self._tokenizer = tokenizer
        self._sample_ids = sample_ids
        self._max_length = max_length
        # The choices of an item share their context, which comes after each whole: two entries, and it is encoded once.
        self._encode = lru_cache(maxsize=2)(tokenizer.encode_prompt)
        self._instances: Sequence[Any] = ()
        self.recorded: dict[str, Request] = {}
        """By request id, in the order in which they were asked."""

    @property
    def eot_token_id(self) -> int:
        if not self._tokenizer.eos_token_ids:
            raise WorkloadError(
                f"tokenizer {self._tokenizer.name} has neither a begin nor an end token, and a text without context "
                "stands on one; name eos_token in its tokenizer_config.json"
            )
        return self._tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        begin = self._tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._tokenizer.encode(string) if add_special_tokens is False else self._encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._instances = requests
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # type: ignore[no-any-return]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for instance, (_texts, prompt_ids, continuation_ids) in zip(self._instances, requests, strict=True):
            sample_id = _sample_id(self._sample_ids, instance)
            if not prompt_ids or not continuation_ids:
                raise WorkloadError(
                    f"{sample_id}: choice {instance.idx} ({instance.args[1]!r:.80}) has no token of its own after its "
                    f"context with tokenizer {self._tokenizer.name}; use another tokenizer"
                )
            self._record_loglikelihood(sample_id, instance.idx, prompt_ids, continuation_ids)
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        if self._max_length is None:
            raise WorkloadError("a task that asks for all tokens of a text is windowed; give the model's max_length")
        for instance in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            for number, window in enumerate(map(make_disjoint_window, windows)):
                self._record_loglikelihood(_sample_id(self._sample_ids, instance), number, *window)
        return [0.0] * len(requests)

    def _record_loglikelihood(
        self, sample_id: str, number: int, prompt_ids: Sequence[int], continuation_ids: Sequence[int]
    ) -> None:
        name = request_id(sample_id, number)
        self.recorded[name] = Request(
            request_id=name,
            sample_id=sample_id,
            kind="loglikelihood",
            prompt_ids=tuple(prompt_ids),
            continuation_ids=tuple(continuation_ids),
        )

    @cached_property
    def _shown_end(self) -> tuple[str, ...]:
        """lm-eval's `hf` cuts a text at the end token's, which shows where the tokenizer does not call it special."""
        own = self._tokenizer.eos_token_ids[:1]
        return tuple(filter(None, [self._tokenizer.decode(list(own))])) if own else ()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        n_asked: Counter[str] = Counter()
        for instance in requests:
            context, settings = instance.args
            sample_id = _sample_id(self._sample_ids, instance)
            name = _generation_id(instance, sample_id, n_asked[sample_id])
            asked = _generation(settings, sample_id, seed=_seed(name))
            asked["stop"] = tuple(dict.fromkeys((*asked["stop"], *self._shown_end)))
            self.recorded[name] = Request(
                request_id=name,
                sample_id=sample_id,
                kind="generate",
                prompt_ids=tuple(self.tok_encode(context)),
                **asked,
            )
            n_asked[sample_id] += 1
        return [""] * len(requests)


def _generation(settings: Mapping[str, Any], sample_id: str, seed: int) -> dict[str, Any]:
    """lm-eval's generation settings as fields of a request. 256 new tokens where a task says none, as its `hf` model.

    seed: of the draws, where the task samples.
    """
    left = dict(normalize_gen_kwargs(dict(settings)))
    # What a task that samples does not state is transformers' default.
    temperature = left.pop("temperature", 1.0) if left.pop("do_sample") else left.pop("temperature", 0.0)
    top_p, top_k = left.pop("top_p", 1.0), left.pop("top_k", TOP_K_OF_TRANSFORMERS)
    fields = {"max_new_tokens": left.pop("max_gen_toks"), "stop": tuple(left.pop("until"))}
    if left:
        raise WorkloadError(
            f"{sample_id}: its task asks to generate with {', '.join(f'{k} = {v}' for k, v in left.items())}, which "
            "engines here do not know; take another task"
        )
    if temperature:
        fields["sampling"] = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    return fields


def _seed(name: str) -> int:
    """Of each request its own: with one seed the same tokens would be favoured in all samples, whose draws must be
    independent for their mean to have the error that is told. 31 bits, which every server takes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


class AnsweringLM(LM):  # type: ignore[misc]
    """Answers lm-eval's instances from the completions of a window, looked up by request id."""

    def __init__(
        self, requests: Sequence[Request], completions: Mapping[str, Completion], sample_ids: SampleIds
    ) -> None:
        super().__init__()
        self._stop = {request.request_id: request.stop for request in requests}
        # Choices of the same tokens tie, and the first of them counts. A reused prefix or a batch would break the tie
        # by the last digits.
        first: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
        self._asked_first = {
            one.request_id: first.setdefault((one.sample_id, one.prompt_ids, one.continuation_ids), one.request_id)
            for one in requests
        }
        self._of_sample: dict[str, list[str]] = defaultdict(list)
        for request in requests:
            self._of_sample[request.sample_id].append(request.request_id)
        self._completions = completions
        self._sample_ids = sample_ids

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        names = [request_id(_sample_id(self._sample_ids, i), i.idx) for i in requests]
        return [_scored(self._completion(self._asked_first.get(name, name))) for name in names]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Sums over a text's windows; a text without tokens has none."""
        return [
            sum(_scored(self._completion(name))[0] for name in self._of_sample[_sample_id(self._sample_ids, i)])
            for i in requests
        ]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        texts = []
        n_asked: Counter[str] = Counter()
        for instance in requests:
            sample_id = _sample_id(self._sample_ids, instance)
            name = _generation_id(instance, sample_id, n_asked[sample_id])
            texts.append(_before_stop(self._completion(name).text, self._stop[name]))
            n_asked[sample_id] += 1
        return texts

    def _completion(self, wanted: str) -> Completion:
        if wanted not in self._completions:
            raise WorkloadError(f"{wanted}: not answered; score the completions of all requests")
        return self._completions[wanted]


def _scored(completion: Completion) -> tuple[float, bool]:
    """NaN is refused: the argmax over choices would take it for the best answer."""
    value, greedy = completion.loglikelihood, completion.is_greedy
    if value is None or value != value:
        raise WorkloadError(
            f"{completion.request_id}: log-likelihood {value}; the engine must return a number (NaN hints at overflow: "
            "try wider weights or arithmetic)"
        )
    return value, bool(greedy)


def _before_stop(text: str, stop: Sequence[str]) -> str:
    """Engines may leave the stop string in; lm-eval's models cut it off."""
    for string in filter(None, stop):
        text = text.split(string)[0]
    return text
