"""Perplexity, KL divergence and the likeliest token: closed forms, transformers' own distributions, and whole plans."""

from __future__ import annotations

import gzip
import lzma
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.errors import EngineError
from engines.fidelity import divergence, keep_log_probabilities, kl_divergence
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import AS_THE_MODEL, Form, Quantisation
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from harness.plan import Plan, build_plan
from harness.run_parts import RunParts
from results.records import Completion, Divergence, Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.damaged import BROKEN_GZIP, unreadable
from tests.fakes.random_models import BUNDLED, write_random_model
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.plans import DROPLESS, HERE, HOST, M2_ULTRA, NPUMOE, TIERS, raw_plan
from tests.techniques import NpumoeT
from workloads.base import WorkloadError
from workloads.fidelity import Fidelity, FidelityParameters

pytestmark = pytest.mark.numbers

FIDELITY = {"name": "fidelity", "length": 64, "limit": 2}


def log_p(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def aggregates(scores: Sequence[Score]) -> dict[str, Score]:
    return {s.metric: s for s in scores if s.sample_id is None}


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_kl_of_known_distributions() -> None:
    """KL(1/2, 1/2 || 1/4, 3/4) = ln 2 - ln 3 / 2; of a certain token from a uniform guess of four: ln 4."""
    assert float(kl_divergence(log_p(0.5, 0.5), log_p(0.25, 0.75))) == pytest.approx(math.log(2) - math.log(3) / 2)
    assert float(kl_divergence(log_p(1.0, 0.0, 0.0, 0.0), log_p(*[0.25] * 4))) == pytest.approx(math.log(4))


def test_kl_of_a_distribution_from_itself_is_zero_also_where_tokens_are_excluded() -> None:
    p = torch.log_softmax(torch.randn(5, 100, generator=torch.Generator().manual_seed(0)) * 8, dim=-1)
    p[0, 3] = -math.inf
    assert kl_divergence(p, p).tolist() == [0.0] * 5


@pytest.mark.parametrize("vocabulary", [2, 2000])
def test_a_uniform_model_has_the_perplexity_of_its_vocabulary(vocabulary: int) -> None:
    workload = Fidelity(FidelityParameters(length=32, limit=3), None)
    requests = workload.requests(TinyTokenizer(), 512)
    completions = answer(requests, lambda r: -len(r.continuation_ids) * math.log(vocabulary))
    found = aggregates(workload.score(requests, completions))
    assert found["perplexity"].value == pytest.approx(vocabulary)
    assert found["nll_nats"].value == pytest.approx(math.log(vocabulary))
    assert found["nll_nats"].stderr == pytest.approx(0.0)


def test_perplexity_is_that_of_all_tokens_and_its_error_that_of_the_samples() -> None:
    """Two samples of 16 asked tokens, 1 and 3 nats a token: e^2; sd / sqrt(2) of (1, 3) is 1."""
    workload = Fidelity(FidelityParameters(length=32, limit=2), None)
    requests = workload.requests(TinyTokenizer(), 512)
    per_token = {requests[0].sample_id: 1.0, requests[1].sample_id: 3.0}
    found = workload.score(requests, answer(requests, lambda r: -16 * per_token[r.sample_id]))
    whole = aggregates(found)["perplexity"]
    assert (whole.value, whole.stderr, whole.n) == (pytest.approx(math.e**2), pytest.approx(math.e**2), 2)
    assert not any(s.higher_is_better for s in found)
    assert {s.sample_id: s.value for s in found if s.sample_id} == pytest.approx(per_token)


def test_divergences_are_scores_of_samples_and_their_mean() -> None:
    workload = Fidelity(FidelityParameters(), None)
    found = workload.score_divergences(
        [
            Divergence(sample_id="a", n_positions=8, kl_nats=0.1, same_top1=1.0),
            Divergence(sample_id="b", n_positions=8, kl_nats=0.3, same_top1=0.5),
        ]
    )
    kl, same = aggregates(found)["kl_nats"], aggregates(found)["same_top1"]
    assert (kl.value, kl.stderr, kl.higher_is_better) == (pytest.approx(0.2), pytest.approx(0.1), False)
    assert (same.value, same.stderr, same.higher_is_better) == (pytest.approx(0.75), pytest.approx(0.25), True)


def test_a_perplexity_beyond_any_number_is_refused() -> None:
    workload = Fidelity(FidelityParameters(length=8, limit=1), None)
    requests = workload.requests(TinyTokenizer(), 512)
    with pytest.raises(WorkloadError, match="1000 nats a token have a perplexity beyond any number"):
        workload.score(requests, answer(requests, lambda r: -1000.0 * len(r.continuation_ids)))


def test_a_likelihood_that_is_no_number_is_refused() -> None:
    workload = Fidelity(FidelityParameters(length=8, limit=1), None)
    requests = workload.requests(TinyTokenizer(), 512)
    with pytest.raises(WorkloadError, match="log-likelihood -inf; the engine must return a finite number"):
        workload.score(requests, answer(requests, lambda _: -math.inf))


# --- texts -----------------------------------------------------------------------------------------------------------


def test_samples_have_the_asked_length_and_their_second_half_is_asked() -> None:
    requests = Fidelity(FidelityParameters(length=33, limit=4), None).requests(TinyTokenizer(), 512)
    assert {(len(r.prompt_ids), len(r.continuation_ids)) for r in requests} == {(16, 17)}
    assert len({r.prompt_ids for r in requests}) == 4


@pytest.mark.parametrize(("suffix", "opener"), [(".txt", open), (".txt.gz", gzip.open), (".txt.xz", lzma.open)])
def test_samples_of_a_file_are_its_words_and_calibration_reads_another_part(
    tmp_path: Path, suffix: str, opener: Callable[..., Any]
) -> None:
    path, text = tmp_path / f"text{suffix}", " ".join(f"word{i}" for i in range(2000))
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    tokenizer = TinyTokenizer()
    workload = Fidelity(FidelityParameters(text=str(path), length=40, limit=5), None)
    asked = [tokenizer.decode([*r.prompt_ids, *r.continuation_ids]) for r in workload.requests(tokenizer, 512)]
    assert all(f" {one}" in f" {text}" for one in asked), "stretches from the start of a word on"
    assert [text.index(one) for one in asked] == sorted(text.index(one) for one in asked)
    shown = [tokenizer.decode(list(ids)) for ids in workload.calibration_prompts(tokenizer, 512, 3)]
    assert min(text.index(one) for one in shown) > max(text.index(one) + len(one) for one in asked)


class Phrases(TinyTokenizer):
    """A token for every ten words."""

    def encode(self, text: str) -> list[int]:
        return [1] * (len(text.split()) // 10)


def test_a_sample_takes_as_much_text_as_its_tokens_need(tmp_path: Path) -> None:
    """50 tokens are 4500 characters, and 400 are encoded at first; what is asked of the text has 5040 of its 6300."""
    (tmp_path / "text.txt").write_text(" ".join(f"word{i:04d}" for i in range(700)))
    workload = Fidelity(FidelityParameters(text=str(tmp_path / "text.txt"), length=50, limit=4), None)
    requests = workload.requests(Phrases(), 512)
    # Most samples begin too near the end, and are taken from further ahead.
    assert [len(r.prompt_ids) + len(r.continuation_ids) for r in requests] == [50] * 4


def test_a_text_that_is_absent_short_or_binary_says_what_to_do(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.txt")
    with pytest.raises(WorkloadError, match=re.escape(f"text: no file {absent}; name one that is there")):
        Fidelity(FidelityParameters(text=absent), None)
    with pytest.raises(WorkloadError, match="no data folder was given; set JOULEBENCH_DATA"):
        Fidelity(FidelityParameters(text="books"), None)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="UTF-8 text is expected"):
        Fidelity(FidelityParameters(text=str(tmp_path / "binary.txt")), None)
    (tmp_path / "broken.txt.gz").write_bytes(BROKEN_GZIP)
    with pytest.raises(WorkloadError, match="UTF-8 text is expected"):
        Fidelity(FidelityParameters(text=str(tmp_path / "broken.txt.gz")), None)
    with pytest.raises(WorkloadError, match=r"locked\.txt: .*name a text file"):
        Fidelity(FidelityParameters(text=str(unreadable(tmp_path / "locked.txt"))), None)
    (tmp_path / "short.txt").write_text("too short a text")
    with pytest.raises(WorkloadError, match="a sample needs 256; lower length, or name a longer text"):
        Fidelity(FidelityParameters(text=str(tmp_path / "short.txt")), None).requests(TinyTokenizer(), 512)
    with pytest.raises(WorkloadError, match=r"length 600 is more than the 513 tokens .*; lower length"):
        Fidelity(FidelityParameters(length=600), None).requests(TinyTokenizer(), 512)


def test_a_text_may_lie_where_joulebench_is_called_or_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("here.txt", "data/there.txt"):
        (tmp_path / place).write_text("A word and another. " * 50)
        workload = Fidelity(FidelityParameters(text=Path(place).name, length=8, limit=1), tmp_path / "data")
        assert (tmp_path / workload.data_source) == tmp_path / place


def test_a_length_beyond_the_model_is_left_out_where_the_plan_says_so() -> None:
    workload = Fidelity(FidelityParameters(length=34, limit=2, too_long="skip"), None)
    assert list(workload.requests(TinyTokenizer(), 32)) == []
    assert workload.notes == ("length 34 skipped: a sample may have 33 tokens with this model",)
    assert len(workload.requests(TinyTokenizer(), 33)) == 2
    assert workload.notes == ()


@pytest.mark.parametrize("name", ["books", "wikipedia", "shakespeare"])
def test_the_texts_of_the_data_folder_are_read(name: str) -> None:
    workload = Fidelity(FidelityParameters(text=name, length=64, limit=3), data_folder())
    assert len(workload.requests(TinyTokenizer(), 512)) == 3


# --- engines ---------------------------------------------------------------------------------------------------------


def engine_of(folder: Path | str, quantise: Quantisation = AS_THE_MODEL, technique: Any = None) -> ReferenceEngine:
    checkpoint = load_checkpoint(str(folder), torch.float32, quantise)
    return ReferenceEngine(checkpoint, technique or DroplessParameters(), prefill_chunk=16)


def request_of(n: int = 48, seed: int = 3, n_asked: int = 30) -> Request:
    ids = torch.randint(1, 2000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(
        request_id="r",
        sample_id="s",
        kind="loglikelihood",
        prompt_ids=tuple(ids[: n - n_asked]),
        continuation_ids=tuple(ids[n - n_asked :]),
    )


def test_shown_distributions_are_those_of_transformers(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, "qwen3-moe")
    request, shown = request_of(), []
    engine_of(tmp_path).show_log_probabilities(request, shown.append)
    ids = torch.tensor([[*request.prompt_ids, *request.continuation_ids]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0, len(request.prompt_ids) - 1 : -1], dim=-1)
    torch.testing.assert_close(torch.cat(shown), expected, atol=2e-4, rtol=1e-4)


def test_kl_and_same_token_are_those_of_transformers_distributions(tmp_path: Path) -> None:
    """Two checkpoints; the reference values from transformers' logits alone."""
    request = request_of()
    ids = torch.tensor([[*request.prompt_ids, *request.continuation_ids]])
    expected = []
    for name, kind in (("p", "qwen3-moe"), ("q", "qwen3-moe-unnormalised")):
        model = write_random_model(tmp_path / name, kind)
        with torch.no_grad():
            expected.append(torch.softmax(model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double(), dim=-1))
    p, q = expected
    keep_log_probabilities(engine_of(tmp_path / "p"), request, tmp_path / "kept")
    found = divergence(engine_of(tmp_path / "q"), request, tmp_path / "kept")
    assert found.kl_nats == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)
    assert found.same_top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.n_positions == 30


def test_a_model_is_as_near_to_itself_as_can_be(tmp_path: Path) -> None:
    request = request_of()
    keep_log_probabilities(engine_of(BUNDLED), request, tmp_path / "kept")
    found = divergence(engine_of(BUNDLED), request, tmp_path / "kept")
    assert (found.kl_nats, found.same_top1) == (0.0, 1.0)


def test_a_model_whose_head_knows_nothing_has_the_perplexity_of_its_vocabulary(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"].zero_()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    engine, workload = engine_of(tmp_path), Fidelity(FidelityParameters(length=24, limit=2), None)
    requests = workload.requests(engine.tokenizer, engine.max_length)
    completions: list[Completion] = [engine.run(r, lambda *_: None) for r in requests]
    assert aggregates(workload.score(requests, completions))["perplexity"].value == pytest.approx(2048)


def test_narrower_weights_are_further_away(tmp_path: Path) -> None:
    request = request_of()
    keep_log_probabilities(engine_of(BUNDLED), request, tmp_path / "kept")
    forms: tuple[Form, ...] = ("bf16", "int8", "int4-g32")  # bf16 is what its weights are stored in
    kl = [
        divergence(engine_of(BUNDLED, Quantisation(attention=f, head=f)), request, tmp_path / "kept").kl_nats
        for f in forms
    ]
    assert 0 == kl[0] < kl[1] < kl[2]


def test_showing_distributions_counts_nothing_and_leaves_no_trace_in_answers(tmp_path: Path) -> None:
    engine = engine_of(BUNDLED, technique=NpumoeT(multiples=(1.0,), align=1))
    engine.calibrate([request_of(seed=9).prompt_ids])
    request = request_of()
    before = engine.run(request, lambda *_: None).loglikelihood
    counted = engine.take_counters()
    assert counted.dropped_pairs > 0
    keep_log_probabilities(engine, request, tmp_path / "kept")
    assert engine.take_counters().routed_pairs == 0
    assert engine.run(request, lambda *_: None).loglikelihood == before
    assert engine.take_counters() == counted


def test_models_of_other_vocabularies_and_other_requests_are_refused(tmp_path: Path) -> None:
    request = request_of()
    (tmp_path / "kept").write_bytes(bytes(4 * 30 * 7))
    with pytest.raises(EngineError, match="vocabulary rows, the reference has 7; compare arms of one model"):
        divergence(engine_of(BUNDLED), request, tmp_path / "kept")
    generate = request.model_copy(update={"kind": "generate", "continuation_ids": (), "max_new_tokens": 4})
    with pytest.raises(EngineError, match="a generate shows none; ask for a loglikelihood"):
        engine_of(BUNDLED).show_log_probabilities(generate, lambda _: None)


# --- whole plans -----------------------------------------------------------------------------------------------------


def planned(*engines: dict[str, Any], **changes: Any) -> Plan:
    return build_plan(raw_plan(engine=list(engines), workload=[FIDELITY], **changes))


def unmeasured(plan: Plan) -> dict[str, dict[str, float]]:
    """Aggregates of each arm, by its label, and the folder of the reference is gone afterwards."""
    run_parts = RunParts(plan.protocol)
    try:
        found = {}
        for cell_plan in plan.cells:
            scores, notes = run_parts.arm(cell_plan).unmeasured
            assert notes == ("distributions are compared with those of dropless, float32",)
            found[cell_plan.cell.label] = {m: s.value for m, s in aggregates(scores).items()}
        return found
    finally:
        run_parts.close()


def test_each_arm_of_a_plan_is_compared_with_the_reference_arm() -> None:
    int8 = DROPLESS | {"name": "int8", "quantise": {"attention": "int8", "head": "int8"}}
    plan = planned(DROPLESS | HERE, TIERS | HERE, int8, NPUMOE, device=[HOST, M2_ULTRA])
    found = unmeasured(plan)
    assert found["dropless · fidelity · host"] == {"kl_nats": 0.0, "same_top1": 1.0}
    assert 0 < found["int8 · fidelity · host"]["kl_nats"] < 0.1
    assert found["npumoe · fidelity · model:m2-ultra"].keys() == {"kl_nats", "same_top1"}


def test_without_a_lossless_arm_the_model_as_it_stands_is_the_reference() -> None:
    int4 = DROPLESS | {"name": "int4", "quantise": {"attention": "int4-g32"}}
    (found,) = unmeasured(planned(int4, device=[HOST])).values()
    assert found["kl_nats"] > 0
