"""Where items come from, and what is said about files that are not what they should be."""

from __future__ import annotations

import gzip
import json
import os
import socketserver
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.damaged import unreadable
from workloads.base import WorkloadError
from workloads.boolq import DATASET as BOOLQ
from workloads.datasets import SAMPLES, choose, data_source, find_file, read_jsonl, read_rows
from workloads.hellaswag import DATASET as HELLASWAG
from workloads.sharegpt import DATASET as SHAREGPT

ITEM = {
    "activity_label": "Rowing",
    "ctx_a": "A man rows.",
    "ctx_b": "he",
    "endings": ["sings.", "flies."],
    "label": "1",
}


def write(root: Path, text: str, name: str = "hellaswag/validation.jsonl") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def complaint(root: Path) -> str:
    with pytest.raises(WorkloadError) as caught:
        data_source("folder", root).rows(HELLASWAG, "validation")
    return str(caught.value)


@pytest.mark.parametrize("name", ["hellaswag/validation.jsonl", "hellaswag/validation.jsonl.gz"])
def test_plain_and_packed_lines_read_the_same_and_other_columns_are_dropped(tmp_path: Path, name: str) -> None:
    write(tmp_path, json.dumps(ITEM | {"ind": 7}) + "\n\n" + json.dumps(ITEM) + "\n", name)
    assert data_source(None, tmp_path).rows(HELLASWAG, "validation") == [ITEM, ITEM]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    write(tmp_path, "\ufeff" + json.dumps(ITEM) + "\n")
    assert data_source(None, tmp_path).rows(HELLASWAG, "validation") == [ITEM]


@pytest.mark.parametrize("text", ["\ud83d", "cut \udc00 off"])
def test_half_a_character_is_told_with_its_line(tmp_path: Path, text: str) -> None:
    """Encoders refuse it with a traceback; a whole one is two escapes, and read."""
    fox = ITEM | {"ctx_a": "\U0001f98a"}
    path = write(tmp_path, "\n".join(map(json.dumps, (fox, ITEM, ITEM | {"endings": ["sings.", text]}))))
    assert "\\ud83e\\udd8a" in path.read_text()
    half = ascii(next(sign for sign in text if "\ud800" <= sign <= "\udfff"))
    told = f"{path}:3: a text holds half a character ({half}, a lone surrogate); write it whole, or leave the row out"
    assert complaint(tmp_path) == told


@pytest.mark.parametrize(
    "content", [gzip.compress(b"{}", mtime=0), '{"ä": 1}'.encode("latin-1"), "{}".encode("utf-16")]
)
def test_what_is_no_utf_8_says_how_to_mend_it(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, "")
    path.write_bytes(content)
    told = complaint(tmp_path)
    assert told.startswith(f"{path}: no text in UTF-8 after line 0 (")
    assert told.endswith("; save it as UTF-8, or end its name with .gz if it is packed")


def test_absent_split_names_the_folder_what_is_there_and_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, "", "hellaswag/train.jsonl")
    message = complaint(tmp_path)
    assert str(tmp_path / "hellaswag") in message
    assert "found: train.jsonl" in message
    assert 'data = "sample"' in message


def test_absent_dataset_folder_is_said(tmp_path: Path) -> None:
    assert "no such folder" in complaint(tmp_path)


def test_absent_data_folder_is_an_error_and_not_the_sample(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="does not exist"):
        data_source(None, tmp_path / "nowhere")
    with pytest.raises(WorkloadError, match="no data folder was given"):
        data_source("folder", None)


def test_a_data_folder_that_is_a_file_is_told_so(tmp_path: Path) -> None:
    """It was said not to exist."""
    (tmp_path / "file").touch()
    with pytest.raises(WorkloadError, match="is no folder; name one"):
        data_source(None, tmp_path / "file")


def test_missing_column_names_file_line_and_the_columns_found(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(ITEM) + "\n" + json.dumps({"query": "?", "label": "1"}) + "\n")
    message = complaint(tmp_path)
    assert f"{path}:2: no column activity_label, ctx_a, ctx_b, endings" in message
    assert "found: query, label" in message


def test_malformed_line_is_named_by_number(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(ITEM) + "\n{half a line\n")
    assert f"{path}:2: not JSON" in complaint(tmp_path)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_line_beyond_what_json_readers_take_is_named_by_number(tmp_path: Path, line: str) -> None:
    write(tmp_path, "{}\n" + line, "boolq/validation.jsonl")
    with pytest.raises(WorkloadError, match=r"validation\.jsonl:2: not JSON"):
        list(read_jsonl(tmp_path / "boolq" / "validation.jsonl"))


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "[1, 2]\n")
    assert "list found" in complaint(tmp_path)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_split_is_an_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert "empty" in complaint(tmp_path)


def test_truncated_archive_is_an_error_and_not_a_shorter_data_set(tmp_path: Path) -> None:
    path = write(tmp_path, (json.dumps(ITEM) + "\n") * 1000, "hellaswag/validation.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-20])
    assert "unreadable" in complaint(tmp_path)
    path.write_bytes(b"not packed at all")
    assert "unreadable" in complaint(tmp_path)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        *(({"label": label}, "label must be the position of one of 2 endings") for label in ("", "2", -1)),
        *(
            ({"label": 0, "endings": endings}, "endings must be a list of at least two texts, none of them empty")
            for endings in (["one"], [], "text", ["one", " "], ["one", 2])
        ),
        ({"ctx_a": 3}, "ctx_a"),
    ],
)
def test_hellaswag_values_that_could_not_be_scored_are_refused(
    tmp_path: Path, bad: dict[str, object], words: str
) -> None:
    """One ending alone would always be right."""
    write(tmp_path, json.dumps(ITEM | bad))
    assert words in complaint(tmp_path)


def test_the_other_boolq_schema_is_told_apart(tmp_path: Path) -> None:
    row = {"question": "is it", "passage": "It is.", "answer": True}
    write(tmp_path, json.dumps(row), "boolq/validation.jsonl")
    with pytest.raises(WorkloadError, match=r"no column label .found: question, passage, answer.; .*aps/super_glue"):
        data_source("folder", tmp_path).rows(BOOLQ, "validation")
    write(tmp_path, json.dumps(row | {"label": True}), "boolq/validation.jsonl")
    with pytest.raises(WorkloadError, match="label must be 0"):
        data_source("folder", tmp_path).rows(BOOLQ, "validation")


@pytest.mark.parametrize(
    "conversations",
    [
        [],
        "text",
        [{"from": "human"}],
        [{"from": "stranger", "value": "hello"}],
        [{"from": ["human"], "value": "hello"}],
        [{"value": "hello"}],
    ],
)
def test_conversations_of_another_shape_are_refused(tmp_path: Path, conversations: object) -> None:
    write(tmp_path, json.dumps({"id": "a", "conversations": conversations}), "sharegpt/test.jsonl")
    with pytest.raises(WorkloadError, match=r"test\.jsonl:1: "):
        data_source("folder", tmp_path).rows(SHAREGPT, "test")


@pytest.mark.parametrize("own_id", [[1], {"a": 1}, True, 1.5])
def test_an_id_that_is_no_name_is_refused(tmp_path: Path, own_id: object) -> None:
    rows = {"id": own_id, "conversations": [{"from": "human", "value": "hello"}]}
    write(tmp_path, json.dumps(rows), "sharegpt/test.jsonl")
    with pytest.raises(WorkloadError, match=r"test\.jsonl:1: id must be a text or a whole number, found "):
        data_source("folder", tmp_path).rows(SHAREGPT, "test")


def test_the_hub_out_of_reach_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    message = hub_complaint(os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}, tmp_path)
    assert "aps/super_glue (validation) could not be read from the hub" in message
    assert "name a local data folder" in message


def hub_complaint(environment: dict[str, str], cache: Path) -> str:
    """What a process of its own, with an empty cache, says that asks for a data set of the hub."""
    code = (
        "from workloads.base import WorkloadError\n"
        "from workloads.datasets import data_source\nfrom workloads.boolq import DATASET\n"
        "try: data_source('hub', None).rows(DATASET, 'validation')\n"
        "except WorkloadError as error: raise SystemExit(str(error))"
    )
    environment = environment | {"HF_HOME": str(cache)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return run.stderr


def test_generated_rows_are_checked_like_any_other(tmp_path: Path) -> None:
    made = replace(HELLASWAG, generate=lambda split: [ITEM | {"ctx_a": split}, ITEM])
    source = data_source("generated", tmp_path)
    assert source.rows(made, "train") == [ITEM | {"ctx_a": "train"}, ITEM]
    assert source.label(made) == "generated"
    spoilt = replace(HELLASWAG, generate=lambda split: [ITEM, ITEM | {"label": "7"}])
    with pytest.raises(WorkloadError, match=r"generated hellaswag \(train\):2: label must be the position"):
        source.rows(spoilt, "train")
    with pytest.raises(WorkloadError, match='has no generator; set data = "folder"'):
        source.rows(replace(HELLASWAG, generate=None), "train")


@pytest.mark.parametrize("name", ["hellaswag/validation.jsonl", "hellaswag/validation.jsonl.gz"])
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path, name: str) -> None:
    path = unreadable(tmp_path / name)
    assert complaint(tmp_path).startswith(f"{path}: ")
    assert "check that this user may read it" in complaint(tmp_path)


def test_a_parquet_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"away\.parquet.*check that this user may read it"):
        list(read_rows(tmp_path / "away.parquet"))


def test_files_of_the_hub_that_make_up_no_data_set_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"query": "?"}\n{half a line\n')
    dataset = replace(
        HELLASWAG, hub_id=str(tmp_path), hub_config=None, hub_options={"cache_dir": str(tmp_path / "cache")}
    )
    with pytest.raises(WorkloadError, match=r"\(train\) could not be read from the hub or its cache \(DatasetGen"):
        data_source("hub", None).rows(dataset, "train")


def test_a_proxy_that_refuses_is_told(tmp_path: Path) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Refusal) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and "OFFLINE" not in k}
        message = hub_complaint(env | {"HTTPS_PROXY": url, "HF_HUB_DISABLE_TELEMETRY": "1"}, tmp_path)
        proxy.shutdown()
    assert "aps/super_glue (validation) could not be read from the hub or its cache (ProxyError: 403" in message


class Refusal(socketserver.StreamRequestHandler):
    """A proxy that lets nobody through."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("where", ["called", "data"])
def test_a_file_that_a_plan_names_is_looked_for_where_joulebench_is_called_and_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    for folder in ("called", "data"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "called")
    (tmp_path / where / "own.txt").write_text("One. Two.")
    assert find_file("text", "own.txt", tmp_path / "data").resolve() == tmp_path / where / "own.txt"
    with pytest.raises(WorkloadError, match=r"^text: no file away\.txt or \S+/data/away\.txt; "):
        find_file("text", "away.txt", tmp_path / "data")
    with pytest.raises(WorkloadError, match=r"^text: no file /away\.txt; "):
        find_file("text", "/away.txt", tmp_path / "data")


def test_a_file_that_is_no_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"not packed at all")
    with pytest.raises(WorkloadError, match=r"test\.parquet: not Parquet"):
        list(read_rows(tmp_path / "test.parquet"))


def test_tables_name_the_source(tmp_path: Path) -> None:
    assert data_source(None, None).label(HELLASWAG) == "sample"
    assert data_source(None, tmp_path).label(HELLASWAG) == str(tmp_path)
    assert data_source("sample", tmp_path).label(HELLASWAG) == "sample"
    assert data_source("hub", tmp_path).label(HELLASWAG) == "hub:Rowan/hellaswag"


@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 250), st.integers(0, 2**32))
def test_a_smaller_limit_asks_a_subset_of_a_larger_one(n_rows: int, limit_a: int, limit_b: int, seed: int) -> None:
    few, many = (choose(n_rows, limit, seed) for limit in sorted((limit_a, limit_b)))
    assert set(few) <= set(many) <= set(range(n_rows))
    assert len(few) == len(set(few)) == min(n_rows, limit_a, limit_b)
    assert few == sorted(few)


def test_another_seed_asks_others() -> None:
    assert choose(1000, 20, seed=0) == choose(1000, 20, seed=0) != choose(1000, 20, seed=1)


@pytest.mark.parametrize("dataset", ["hellaswag", "boolq"])
def test_the_sample_asks_nothing_that_its_train_split_shows(dataset: str) -> None:
    texts = [
        {json.dumps(row) for _, row in read_jsonl(SAMPLES / f"{dataset}_{split}.jsonl")}
        for split in ("train", "validation")
    ]
    assert not texts[0] & texts[1]


def test_the_sample_rewards_no_fixed_answer() -> None:
    for name, n_choices in (("hellaswag", 4), ("boolq", 2)):
        labels = [int(row["label"]) for _, row in read_jsonl(SAMPLES / f"{name}_validation.jsonl")]
        assert max(labels.count(i) for i in range(n_choices)) <= len(labels) / n_choices + 1
