"""llama.cpp on the requests that ours answers: the same tokens and log-likelihoods, its threads where they belong.

Ours is the oracle here, which transformers is the oracle of (`tests.test_architectures`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.answers import Limits
from engines.base import unheard
from engines.cores import PhaseSetting
from engines.errors import EngineError, NotSupportedError, OutOfMemoryError
from engines.external.base import Form
from engines.model.checkpoints import Checkpoint, inspect_checkpoint, load_checkpoint
from engines.model.rope_config import LinearScaling
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.records import Request, Sampling
from tests.fakes.families import CASES, FamilyCase, write_family

pytest.importorskip("xllamacpp", reason="llama.cpp is an extra: pip install joulebench[llama-cpp]")
pytest.importorskip("gguf")

from engines.external.gguf_file import gguf_of, why_not_written
from engines.external.llama_api import library
from engines.external.llama_cpp import CacheForm, LlamaCppEngine, find_wheel

ONE = PhaseSetting(1)
TEXT = "The river runs to the sea, and the old man said that he would never go there again because the winter was long."


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def llama(
    checkpoint: Checkpoint,
    models: Path,
    form: Form = "f32",
    cache: CacheForm = "f32",
    phases: tuple[PhaseSetting, PhaseSetting] = (ONE, ONE),
) -> LlamaCppEngine:
    file = gguf_of(checkpoint, form, models, lambda note: None)
    limits = Limits(checkpoint.config.max_length, checkpoint.config.vocabulary_size)
    return LlamaCppEngine(find_wheel(), file, checkpoint.tokenizer, limits, phases, micro_batch=32, cache=cache)


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint, models: Path) -> Iterator[LlamaCppEngine]:
    engine = llama(checkpoint, models)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ours(checkpoint: Checkpoint) -> ReferenceEngine:
    return ReferenceEngine(checkpoint, DroplessParameters(), threads=1)


def request(**changes: Any) -> Request:
    given = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": (1,), "max_new_tokens": 0}
    return Request(**given | changes)


def asked(checkpoint: Checkpoint) -> tuple[Request, Request]:
    """A generation, and a log-likelihood whose continuation spans pieces of a prompt."""
    ids = tuple(checkpoint.tokenizer.encode(TEXT) * 3)
    written = request(prompt_ids=ids, max_new_tokens=64, ignore_end_tokens=True)
    return written, request(kind="loglikelihood", prompt_ids=ids[:20], continuation_ids=ids[20:])


def test_greedy_tokens_are_ours(checkpoint: Checkpoint, ours: ReferenceEngine, theirs: LlamaCppEngine) -> None:
    written, _ = asked(checkpoint)
    own, its = ours.run(written, unheard), theirs.run(written, unheard)
    assert len(set(own.token_ids)) > 10, "an answer of one token would agree whatever was computed"
    assert (its.token_ids, its.text) == (own.token_ids, own.text)


def test_log_likelihoods_are_ours(checkpoint: Checkpoint, ours: ReferenceEngine, theirs: LlamaCppEngine) -> None:
    """Over 60 tokens and more, in fp32 with a cache of f32. With fused attention and f16 there: 7e-4 of 34 tokens."""
    _, scored = asked(checkpoint)
    own, its = ours.run(scored, unheard), theirs.run(scored, unheard)
    assert own.loglikelihood is not None
    assert its.loglikelihood == pytest.approx(own.loglikelihood, abs=1e-4 * len(scored.continuation_ids) ** 0.5)
    assert (its.is_greedy, its.n_prompt_tokens) == (own.is_greedy, own.n_prompt_tokens)


def test_each_token_has_a_stamp_and_each_edge_is_heard_with_it(checkpoint: Checkpoint, theirs: LlamaCppEngine) -> None:
    heard: list[tuple[str, float]] = []
    written, scored = asked(checkpoint)
    found = theirs.run(written, lambda event, at_s: heard.append((event, at_s)))
    assert len(found.token_times_s) == 64
    assert sorted(set(found.token_times_s)) == list(found.token_times_s)
    assert heard == [
        ("request start", found.start_s),
        ("prefill end", found.token_times_s[0]),
        ("request end", found.token_times_s[-1]),
    ]
    heard.clear()
    prefilled = theirs.run(scored, lambda event, at_s: heard.append((event, at_s)))
    assert heard[1:] == [("prefill end", prefilled.end_s), ("request end", prefilled.end_s)]


def test_no_request_finds_the_cache_of_the_one_before(checkpoint: Checkpoint, theirs: LlamaCppEngine) -> None:
    """The same prompt again costs its prefill again: its CPU time is not that of a cache that answers."""
    written, _ = asked(checkpoint)
    short = written.model_copy(update={"prompt_ids": written.prompt_ids[:1], "max_new_tokens": 1})
    long = written.model_copy(update={"prompt_ids": written.prompt_ids * 4, "max_new_tokens": 1})
    first = theirs.run(long, unheard).token_ids
    began_s = os.times().user
    again = [theirs.run(long, unheard).token_ids for _ in range(8)]
    long_s = os.times().user - began_s
    began_s = os.times().user
    for _ in range(8):
        theirs.run(short, unheard)
    assert again == [first] * 8
    assert long_s > 3 * (os.times().user - began_s)


WRITTEN = {
    "llama": FamilyCase("Llama"),
    "qwen2": FamilyCase("Qwen2"),
    "olmoe": FamilyCase("Olmoe", CASES["olmoe"].changes | {"num_key_value_heads": 4}),
    **{name: CASES[name] for name in ("qwen3", "mixtral", "qwen2-moe")},
}


@pytest.mark.parametrize("case", WRITTEN)
def test_every_family_that_is_written_computes_as_ours(case: str, tmp_path: Path) -> None:
    write_family(tmp_path / "model", WRITTEN[case])
    checkpoint = load_checkpoint(str(tmp_path / "model"), torch.float32)
    reason = why_not_written(checkpoint.config, "f32")
    assert reason is None, reason
    engine = llama(checkpoint, tmp_path)
    ids = tuple(torch.randint(0, 2048, (60,), generator=torch.Generator().manual_seed(3)).tolist())
    scored = request(kind="loglikelihood", prompt_ids=ids[:4], continuation_ids=ids[4:])
    own = ReferenceEngine(checkpoint, DroplessParameters(), threads=1).run(scored, unheard).loglikelihood
    assert own is not None
    assert engine.run(scored, unheard).loglikelihood == pytest.approx(own, abs=2e-3)
    engine.close()


@pytest.mark.parametrize("form", ["f16", "q8_0", "q4_0"])
def test_narrow_forms_are_near_and_small(
    form: Form, checkpoint: Checkpoint, ours: ReferenceEngine, theirs: LlamaCppEngine, models: Path
) -> None:
    """bits: of a weight with its share of a block's scale: 16, 8 + 16/32, 4 + 16/32."""
    engine = llama(checkpoint, models, form, "f16")
    bits = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}[form]
    wide, narrow = theirs.held_weights(), engine.held_weights()
    assert narrow.n_parameters == wide.n_parameters
    assert narrow.n_bytes / wide.n_bytes == pytest.approx(bits / 32, rel=0.02)
    _, scored = asked(checkpoint)
    own, its = (e.run(scored, unheard).loglikelihood for e in (ours, engine))
    assert own is not None
    assert its == pytest.approx(own, rel={"f16": 1e-3, "q8_0": 1e-2, "q4_0": 0.1}[form])
    engine.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_phases_compute_on_their_cores_and_the_caller_comes_back(checkpoint: Checkpoint, models: Path) -> None:
    home = os.sched_getaffinity(0)
    first, second = sorted(home)[:2]
    phases = PhaseSetting(2, frozenset({first, second})), PhaseSetting(1, frozenset({second}))
    engine = llama(checkpoint, models, phases=phases)
    written, _ = asked(checkpoint)
    engine.run(written.model_copy(update={"max_new_tokens": 4}), unheard)
    road = engine.take_road()
    assert road.prefill_threads is not None
    assert road.decoding_threads is not None
    assert (road.prefill_threads.n_threads, road.decoding_threads.n_threads) == (2, 1)
    assert road.prefill_threads.is_kept, road.prefill_threads
    assert road.decoding_threads.is_kept, road.decoding_threads
    assert road.decoding_threads.cores == str(second)
    assert os.sched_getaffinity(0) == home
    engine.close()


def test_what_it_is_not_asked_is_refused(checkpoint: Checkpoint, theirs: LlamaCppEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="set temperature = 0"):
        theirs.run(request(prompt_ids=(1, 2), max_new_tokens=1, sampling=Sampling(temperature=0.5)), unheard)
    config = checkpoint.config
    other = replace(config, rope=replace(config.rope, scaling=LinearScaling(2.0)))
    assert "LinearScaling of rope is not written" in str(why_not_written(other, "f32"))
    odd = replace(config, hidden=200)
    assert "q8_0 shares scales among 32 columns, and a matrix has 200" in str(why_not_written(odd, "q8_0"))
    unknown = replace(inspect_checkpoint("bundled:tiny-qwen3-moe"), config=replace(config, architecture="PhiMoE"))
    with pytest.raises(NotSupportedError, match=r"^not supported: PhiMoE is not written as GGUF here"):
        gguf_of(unknown, "f32", tmp_path, lambda note: None)


def test_a_damaged_file_is_told_and_so_is_one_of_another_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    limits = Limits(checkpoint.config.max_length, checkpoint.config.vocabulary_size)
    with pytest.raises(EngineError, match=r"broken\.gguf cannot be loaded \(.+\)"):
        LlamaCppEngine(find_wheel(), path, checkpoint.tokenizer, limits, (ONE, ONE))
    file = gguf_of(checkpoint, "q4_0", tmp_path, lambda note: None)
    with pytest.raises(EngineError, match="has 2048 rows of vocabulary, and the plan's model 2050"):
        LlamaCppEngine(find_wheel(), file, checkpoint.tokenizer, replace(limits, vocabulary_rows=2050), (ONE, ONE))


def test_no_room_is_a_result_of_its_own(theirs: LlamaCppEngine) -> None:
    """As the library logged it where 4 TB were asked for."""
    its = library(Path(find_wheel().where))
    its.warnings.append("llama_init_from_model: failed to initialize the context: std::bad_alloc")
    error = its.failed("no context of 1000000000 tokens")
    its.warnings.clear()
    assert isinstance(error, OutOfMemoryError)
    assert error.result == "out of memory"
    assert not isinstance(its.failed("no logits"), OutOfMemoryError)
