"""What is asked, in words: from the workload where it tells, else from its requests; kept with the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress
from harness.run_parts import RunParts
from harness.runner import Runner
from harness.samples import samples_of
from results.records import Request, Sample
from results.store import Store
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.plans import BOOLQ, DROPLESS, HOST, SHAREGPT, TIERS, raw_plan
from workloads.datasets import SAMPLES, read_jsonl
from workloads.ruler import NeedleInHaystackParameters, niah_single_2


class Questions:
    """A workload of two samples, of which it tells one."""

    def samples(self) -> list[Sample]:
        return [Sample(sample_id="q/1", question="Is it?", expected="yes", choices=("no", "yes"))]


def asked(tokenizer: TinyTokenizer, sample_id: str, prompt: str, *choices: str) -> list[Request]:
    kind: Any = "loglikelihood" if choices else "generate"
    return [
        Request(
            request_id=f"{sample_id}#{i}",
            sample_id=sample_id,
            kind=kind,
            prompt_ids=tuple(tokenizer.encode(prompt)),
            continuation_ids=tuple(tokenizer.encode(choice)),
        )
        for i, choice in enumerate(choices or ("",))
    ]


def test_what_a_workload_does_not_tell_is_read_back_from_its_requests() -> None:
    tokenizer = TinyTokenizer()
    requests = [
        *asked(tokenizer, "q/1", "examples ... Is it?", " no", " yes"),
        *asked(tokenizer, "q/2", "Which way?", " left", " right"),
        *asked(tokenizer, "q/3", "Tell a story."),
        *asked(tokenizer, "q/4", "It was a dark", " night"),
    ]
    workload: Any = Questions()
    assert samples_of(workload, requests, tokenizer) == (
        Sample(sample_id="q/1", question="Is it?", expected="yes", choices=("no", "yes")),
        Sample(sample_id="q/2", question="Which way?", choices=(" left", " right")),
        Sample(sample_id="q/3", question="Tell a story."),
        Sample(sample_id="q/4", question="It was a dark night"),
    )


def test_the_prompt_of_a_needle_is_read_back_beside_the_number_that_it_hides() -> None:
    tokenizer = TinyTokenizer()
    workload = niah_single_2(NeedleInHaystackParameters(length=512, limit=2), None)
    requests = workload.requests(tokenizer, 4096)
    found = samples_of(workload, requests, tokenizer)
    assert len(found) == 2
    for sample, request in zip(found, requests, strict=True):
        assert sample.question == tokenizer.decode(list(request.prompt_ids))
        assert sample.expected is not None
        assert f"is: {sample.expected}." in sample.question


def test_a_run_keeps_its_samples_once_for_all_arms(tmp_path: Path) -> None:
    plan = build_plan(raw_plan(engine=[DROPLESS, TIERS], workload=[BOOLQ, SHAREGPT], device=[HOST]))
    run_parts = RunParts(plan.protocol)
    try:
        from rich.console import Console

        with open_run(plan, tmp_path / "run", False, run_parts) as store:
            progress = PlainProgress(Console(file=(tmp_path / "log").open("w")))
            assert Runner(plan, store, run_parts, progress).run().n_failed == 0
    finally:
        run_parts.close()
    with Store.view(tmp_path / "run") as store:
        data = store.data()
    rows = [row for _, row in read_jsonl(SAMPLES / "boolq_validation.jsonl")]
    model = data.cells[0].model
    told = data.samples["boolq", model]
    assert len(told) == 2
    for sample in told:
        row = rows[int(sample.sample_id.split("/")[1])]
        assert row["question"] in sample.question
        assert sample.expected == ("yes" if row["label"] else "no")
        assert [choice.strip() for choice in sample.choices] == ["no", "yes"]
    assert [s.sample_id for s in data.samples["sharegpt", model]] == [c.sample_id for c in data.trials[-1].completions]
    assert {key[0] for key in data.samples} == {"boolq", "sharegpt"}
