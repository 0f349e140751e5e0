"""RULER's questions over documents: SQuAD 2 (one document answers) or HotpotQA (two of ten do) among many others.

The data are the two files that lm-eval fetches, looked for in the data folder. For the same question and documents in
the same order the prompt is lm-eval's, character by character. Where the draws differ:

- the questions are drawn from the file by the seed; lm-eval takes its first 500;
- documents are added one by one, there ten at a time, and their order is drawn for every sample;
- a question whose own documents do not fit is left out and counted in the notes; there it is logged.

The score is lm-eval's `string_match_part`: the share of a question's reference answers (up to five spellings in SQuAD)
that are in the answer. RULER's own, of the same name, takes the best of them.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from results.records import Request
from workloads import files_read
from workloads.base import WorkloadError
from workloads.datasets import DAMAGED, MAKE_READABLE, parsed, shortage
from workloads.ruler_samples import Prompt, RulerParameters, RulerTask, lm_eval_text


class Asked(NamedTuple):
    """A question, its reference answers and its documents, as positions in the list of all."""

    query: str
    outputs: list[str]
    own: list[int]
    """Must be in the prompt."""
    related: list[int]
    """Of the same article: added before others."""


class Corpus(NamedTuple):
    documents: list[str]
    questions: list[Asked]


class QAFile(NamedTuple):
    """A file of the data folder and how to read it."""

    yaml_name: str
    file: str
    schema: str
    parse: Callable[[Any], Corpus]


class RulerQA(RulerTask):
    """Questions over documents, as a workload."""

    def __init__(self, file: QAFile, parameters: RulerParameters, data_root: Path | None) -> None:
        path = _path(file, data_root)
        self._corpus = _read(path, file)
        super().__init__(file.yaml_name, f"ruler_{file.yaml_name}", parameters, str(path))

    def _numbers(self) -> Sequence[int]:
        return self._order()[: self._parameters.limit]

    def _calibration_numbers(self, n: int) -> Sequence[int]:
        return self._order()[self._parameters.limit :][:n]

    def _order(self) -> list[int]:
        order = list(range(len(self._corpus.questions)))
        random.Random(self._parameters.seed).shuffle(order)
        return order

    def _notes(self, requests: Sequence[Request], n_asked: int) -> tuple[str, ...]:
        short = shortage(len(self._corpus.questions), self._parameters.limit)
        return (*short, *super()._notes(requests, n_asked))

    def _sample(self, sample_id: str, number: int) -> QASample:
        return QASample(sample_id, self._corpus, self._corpus.questions[number], self.length)


class QASample:
    """A question and an order of documents, its own first; its size is how many of them are shown."""

    def __init__(self, sample_id: str, corpus: Corpus, asked: Asked, length: int) -> None:
        self.outputs = asked.outputs
        self._sample_id = sample_id
        self._corpus = corpus
        self._asked = asked
        rng = random.Random(sample_id)
        related = rng.sample(asked.related, len(asked.related))
        n_documents = len(corpus.documents)
        # A document has four tokens at least, with its heading.
        others = rng.sample(range(n_documents), min(n_documents, length // 4))
        self._shown = list(dict.fromkeys([*asked.own, *related, *others]))

    @property
    def sizes(self) -> range:
        return range(len(self._asked.own), len(self._shown) + 1)

    def prompt(self, size: int) -> Prompt:
        shown = self._shown[:size]
        random.Random(f"{self._sample_id}/{size} documents").shuffle(shown)
        return documents_prompt([self._corpus.documents[i] for i in shown], self._asked.query)


def documents_prompt(documents: Sequence[str], query: str) -> Prompt:
    texts, heading = lm_eval_text("qa_utils.py", "CONFIG"), lm_eval_text("qa_utils.py", "DOCUMENT_PROMPT")
    context = "\n\n".join(heading.format(i=i, document=document) for i, document in enumerate(documents, start=1))
    return Prompt(texts["template"].format(context=context, query=query), texts["answer_prefix"])


def _squad(content: Any) -> Corpus:
    """Paragraphs as documents; questions without an answer are left out."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents, position = _numbered(paragraph["context"] for article in articles for paragraph in article)
    questions = []
    for article in articles:
        places = [position[paragraph["context"]] for paragraph in article]
        for paragraph, own in zip(article, places, strict=True):
            related = list(dict.fromkeys(place for place in places if place != own))
            questions += [
                Asked(asked["question"], [answer["text"] for answer in asked["answers"]], [own], related)
                for asked in paragraph["qas"]
                if not asked["is_impossible"]
            ]
    return Corpus(documents, questions)


def _hotpot(content: Any) -> Corpus:
    """Titled passages as documents, ten of them the question's own."""
    shown = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in content]
    documents, position = _numbered(document for row in shown for document in row)
    questions = [
        Asked(row["question"], [row["answer"]], list(dict.fromkeys(position[d] for d in own)), [])
        for row, own in zip(content, shown, strict=True)
    ]
    return Corpus(documents, questions)


def _numbered(texts: Any) -> tuple[list[str], dict[str, int]]:
    """Different texts in sorted order, and the position of each."""
    documents = sorted(set(texts))
    return documents, {document: i for i, document in enumerate(documents)}


SQUAD = QAFile(
    "qa_squad",
    "ruler/dev-v2.0.json",
    'SQuAD 2.0\'s {"data": [{"paragraphs": [{"context", "qas": [{"question", "is_impossible", "answers"}]}]}]}',
    _squad,
)
HOTPOT = QAFile(
    "qa_hotpot",
    "ruler/hotpot_dev_distractor_v1.json",
    'HotpotQA\'s [{"question", "answer", "context": [[title, [sentence, ...]], ...]}]',
    _hotpot,
)

qa_squad = partial(RulerQA, SQUAD)
qa_hotpot = partial(RulerQA, HOTPOT)


def _path(file: QAFile, data_root: Path | None) -> Path:
    name = f"ruler_{file.yaml_name}"
    wanted = f"{file.file} (or {file.file}.gz) with {file.schema}"
    if data_root is None:
        raise WorkloadError(f"{name} needs {wanted}, but no data folder was given; set JOULEBENCH_DATA")
    for path in (data_root / file.file, data_root / f"{file.file}.gz"):
        if path.is_file():
            return path
    raise WorkloadError(f"{name} needs {wanted}, and {data_root} does not have it; put the file there")


def _read(path: Path, file: QAFile) -> Corpus:
    files_read.note(path)
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        corpus = file.parse(parsed(text.decode("utf-8-sig")))
    except (*DAMAGED, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path}: {type(error).__name__} ({error}); {file.schema} is expected") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error}; {MAKE_READABLE}") from error
    for asked in corpus.questions:
        if not asked.outputs or not all(isinstance(text, str) and text.strip() for text in asked.outputs):
            raise WorkloadError(
                f"{path}: the answers to {asked.query!r:.80} are {asked.outputs!r:.80}, and each must be a text that is"
                f" not empty; {file.schema} is expected"
            )
    if not corpus.questions:
        raise WorkloadError(f"{path}: no question with an answer in it; {file.schema} is expected")
    return corpus
