"""Requests of exact lengths, one by one, at Poisson arrivals, and at those of Azure's traces."""

from __future__ import annotations

import csv
import gzip
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from tests.data_folder import data_folder
from tests.fakes.damaged import BROKEN_GZIP, unreadable
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.azure_trace import AzureTrace, AzureTraceParameters
from workloads.base import WorkloadError
from workloads.fixed_lengths import FixedLengths, FixedLengthsParameters
from workloads.prose import exact_prompt

TOKENIZER = TinyTokenizer()


# --- exact lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_tokens", [1, 64, 256, 1024])
@pytest.mark.parametrize("new_tokens", [1, 128, 512])
def test_prompts_have_exactly_as_many_tokens_as_asked(prompt_tokens: int, new_tokens: int) -> None:
    parameters = FixedLengthsParameters(prompt_tokens=prompt_tokens, new_tokens=new_tokens, limit=3)
    requests = FixedLengths(parameters, None).requests(TOKENIZER, prompt_tokens + new_tokens)
    assert [len(r.prompt_ids) for r in requests] == [prompt_tokens] * 3
    assert [r.max_new_tokens for r in requests] == [new_tokens] * 3
    assert all(r.ignore_end_tokens and not r.stop for r in requests)


def test_every_request_has_a_text_of_its_own_by_seed() -> None:
    first, again, other = (
        FixedLengths(FixedLengthsParameters(limit=6, seed=seed), None).requests(TOKENIZER, 4096) for seed in (0, 0, 1)
    )
    assert first == again
    texts = {r.prompt_ids for r in (*first, *other)}
    assert len(texts) == 12
    assert all(prompt not in texts for prompt in FixedLengths(FixedLengthsParameters(limit=6), None)
               .calibration_prompts(TOKENIZER, 4096, 5))  # fmt: skip


class Beginning(TinyTokenizer):
    """Puts a begin token before a text, as Llama's does."""

    def encode_prompt(self, text: str) -> list[int]:
        return [1, *self.encode(text)]


class Joining(TinyTokenizer):
    """Makes one token of every eight, so that a word is less than a token."""

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)[::8]


def test_what_a_model_expects_before_a_text_counts() -> None:
    prompt = exact_prompt(Beginning(), 100, "a")
    assert prompt[0] == 1
    assert prompt[1:] == exact_prompt(TOKENIZER, 99, "a")
    assert len(exact_prompt(Joining(), 100, "a")) == 100


def test_lengths_beyond_the_context_fail_or_leave_nothing_as_the_plan_says() -> None:
    parameters = FixedLengthsParameters(prompt_tokens=4096, new_tokens=1, limit=3)
    with pytest.raises(WorkloadError, match=r"3 of 3 requests are longer than the model's 4096 tokens .*: 4097"):
        FixedLengths(parameters, None).requests(TOKENIZER, 4096)
    workload = FixedLengths(parameters.model_copy(update={"too_long": "skip"}), None)
    assert list(workload.requests(TOKENIZER, 4096)) == []
    assert workload.notes == ("3 of 3 requests skipped: longer than 4096 tokens",)


def test_poisson_arrivals_have_exponential_gaps() -> None:
    parameters = FixedLengthsParameters(prompt_tokens=1, new_tokens=1, limit=2000, arrivals_per_s=4.0)
    arrivals_s = [r.arrival_s for r in FixedLengths(parameters, None).requests(TOKENIZER, 16)]
    gaps_s = np.diff([0.0, *(a for a in arrivals_s if a is not None)])
    assert len(gaps_s) == 2000
    assert kstest(gaps_s, "expon", args=(0, 1 / 4.0)).pvalue > 0.05
    # Neighbouring gaps of a Poisson process know nothing of each other.
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 3 / math.sqrt(len(gaps_s))


# --- Azure's traces ---------------------------------------------------------------------------------------------------


def recorded(stem: str) -> list[tuple[datetime, int, int]]:
    path = data_folder() / "traces" / "workload" / f"AzureLLMInferenceTrace_{stem}_2023.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return [
        (datetime.fromisoformat(r["TIMESTAMP"][:26]), int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
    ]


@pytest.mark.parametrize(("trace", "stem", "n"), [("conversation", "conv", 19366), ("code", "code", 8819)])
def test_a_stretch_of_the_trace_is_replayed_as_recorded(trace: str, stem: str, n: int) -> None:
    rows = recorded(stem)
    assert len(rows) == n
    parameters = AzureTraceParameters.model_validate({"trace": trace, "limit": 40, "rate": 2.0, "seed": 7})
    workload = AzureTrace(parameters, data_folder())
    requests = workload.requests(TOKENIZER, 16384)
    first = int(requests[0].sample_id.rsplit("/", 1)[1])
    stretch = rows[first : first + 40]
    assert [(len(r.prompt_ids), r.max_new_tokens) for r in requests] == [(p, n) for _, p, n in stretch]
    expected_s = [(at - stretch[0][0]).total_seconds() / 2 for at, _, _ in stretch]
    assert [r.arrival_s for r in requests] == pytest.approx(expected_s, abs=1e-9)
    assert all(r.ignore_end_tokens for r in requests)
    assert len({r.prompt_ids[:64] for r in requests}) == 40
    assert workload.notes[0].startswith(f"40 requests from {stretch[0][0]}")


def test_the_seed_chooses_the_stretch_and_the_rate_only_its_speed() -> None:
    def requests(**changes: Any) -> Any:
        parameters = AzureTraceParameters(trace="code", limit=5, **changes)
        return AzureTrace(parameters, data_folder()).requests(TOKENIZER, 16384)

    assert requests() == requests()
    names = {requests(seed=seed)[0].sample_id for seed in range(3)}
    assert len(names) == 3
    slow, fast = requests(rate=0.5), requests(rate=1.0)
    assert [r.prompt_ids for r in slow] == [r.prompt_ids for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([2 * r.arrival_s for r in fast])


def trace_folder(root: Path, *lines: str) -> Path:
    folder = root / "traces" / "workload"
    folder.mkdir(parents=True)
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    (folder / "AzureLLMInferenceTrace_code.csv").write_text(text, encoding="utf-8")
    return root


CODE = AzureTraceParameters(trace="code", limit=10)
ROWS = ("2023-11-16 18:00:00.0000000,30,4", "2023-11-16 18:00:01.5000000,90,4", "2023-11-16 18:00:04.0000000,20,4")


def test_what_the_model_cannot_hold_is_left_out_and_the_others_keep_their_times(tmp_path: Path) -> None:
    root = trace_folder(tmp_path, *ROWS)
    workload = AzureTrace(CODE, root)
    assert [r.arrival_s for r in workload.requests(TOKENIZER, 94)] == [0.0, 1.5, 4.0]
    requests = workload.requests(TOKENIZER, 93)
    assert [(len(r.prompt_ids), r.arrival_s) for r in requests] == [(30, 0.0), (20, 4.0)]
    assert workload.notes == (
        "10 items asked for, the data has 3",
        "3 requests from 2023-11-16 18:00:00 on came in 4.0 s, here in 4.0 s",
        "1 of 3 requests skipped: longer than 93 tokens",
    )
    with pytest.raises(WorkloadError, match=r"azure_code/1: 94 with its answer"):
        AzureTrace(CODE.model_copy(update={"too_long": "fail"}), root).requests(TOKENIZER, 93)
    assert [len(p) for p in workload.calibration_prompts(TOKENIZER, 25, 3)] == [20] * 3


def test_a_request_of_one_token_and_one_of_answer_is_asked(tmp_path: Path) -> None:
    [request] = AzureTrace(CODE, trace_folder(tmp_path, "2023-11-16 18:00:00.0,1,1")).requests(TOKENIZER, 4096)
    assert (len(request.prompt_ids), request.max_new_tokens) == (1, 1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2023-11-16 18:00:00.5,10,2", r":4: 2023-11-16 18:00:00.500000 is before the line above"),
        ("2023-11-16 18:00:09.0,10", r":4: .* a time and two counts are expected"),
        ("yesterday,10,2", r":4: .* a time and two counts are expected"),
        ("2023-11-16 18:00:09.0,ten,2", r":4: .* a time and two counts are expected"),
        ("2023-11-16 18:00:09.0,0,2", r":4: 0 and 2 tokens; at least 1"),
        ("0001-01-01 00:00:00+14:00,10,2", r":4: .* a time and two counts are expected"),
        (f"2023-11-16 18:00:09.0,10,{'2' * 200_000}", r"unreadable after line 3 \(field larger"),
    ],
)
def test_a_line_that_is_no_request_is_told(tmp_path: Path, line: str, expected: str) -> None:
    root = trace_folder(tmp_path, *ROWS[:2], line)
    with pytest.raises(WorkloadError, match=expected):
        AzureTrace(CODE, root).requests(TOKENIZER, 4096)


def test_an_absent_or_damaged_file_is_told_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="set JOULEBENCH_DATA to a folder with traces/workload"):
        AzureTrace(CODE, None)
    root = trace_folder(tmp_path)
    with pytest.raises(WorkloadError, match="no request in it"):
        AzureTrace(CODE, root).requests(TOKENIZER, 4096)
    with pytest.raises(WorkloadError, match=r"none of AzureLLMInferenceTrace_conv_2023\.csv\.gz"):
        AzureTrace(AzureTraceParameters(), root)
    path = root / "traces" / "workload" / "AzureLLMInferenceTrace_code.csv"
    path.write_text("time,in,out\n")
    with pytest.raises(WorkloadError, match="columns time, in, out; TIMESTAMP"):
        AzureTrace(CODE, root).requests(TOKENIZER, 4096)
    packed = path.rename(path.with_name("AzureLLMInferenceTrace_code.csv.gz"))
    for content in (b"not packed", BROKEN_GZIP):
        packed.write_bytes(content)
        with pytest.raises(WorkloadError, match="unreadable after line 1"):
            AzureTrace(CODE, root).requests(TOKENIZER, 4096)
    packed.unlink()
    unreadable(path)
    with pytest.raises(WorkloadError, match=r"code\.csv: .*check that this user may read it"):
        AzureTrace(CODE, root).requests(TOKENIZER, 4096)


def test_times_with_a_zone_are_told_in_utc(tmp_path: Path) -> None:
    """As the traces of 2024 have them."""
    root = trace_folder(tmp_path, "2024-05-10 02:00:00.25+02:00,30,4", "2024-05-10 00:00:01.5+00:00,90,4")
    workload = AzureTrace(CODE, root)
    assert [r.arrival_s for r in workload.requests(TOKENIZER, 4096)] == [0.0, 1.25]
    assert "2 requests from 2024-05-10 00:00:00.250000 on came in 1.2 s, here in 1.2 s" in workload.notes
