"""RULER's aggregation: which words of a long list are the most frequent.

Common words (cwe): a numbered list of English words; ten occur more often than the others. Frequent words (fwe):
made-up words of six letters whose frequencies follow Zipf's law with exponent 2; the three most frequent after dots.

For the same words in the same order the prompts are lm-eval's, character by character. Where the draws differ:

- cwe: lm-eval counts a solved example into the length and then leaves it out of the prompt; here nothing is counted
  that is not there, so a sample of a length has more words. It has no example there either;
- fwe: lm-eval leaves the answer's 50 tokens out of the count, here they are in it;
- the number of words moves in steps of one, there of 10 or of length/32; fwe has at least as many as make the third
  answer more frequent than what follows;
- the order is drawn for every sample; lm-eval's fwe puts the ranks into one order for all.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from workloads.base import WorkloadError
from workloads.ruler_samples import Prompt, RulerParameters, RulerTask, english_words_of, lm_eval_text

N_COMMON = 10
ZIPF_EXPONENT = 2.0
N_FREQUENT = 3
_FIRST_SHARE = 6 / math.pi**2
"""Share of the most frequent word, 1 / zeta(2)."""
N_CODED_LEAST = math.ceil(1 / _FIRST_SHARE / ((N_FREQUENT + 1) ** -ZIPF_EXPONENT - (N_FREQUENT + 2) ** -ZIPF_EXPONENT))
"""Text length in words from which the third answer occurs at least once more than the word after it."""


class RulerCommonWords(RulerTask):
    """The ten most common words of a list."""

    def __init__(self, parameters: RulerParameters, data_root: Path | None) -> None:
        super().__init__("cwe", "ruler_cwe", parameters, "generated")

    def _sample(self, sample_id: str, number: int) -> CommonWordsSample:
        return CommonWordsSample(sample_id, self.length)


class CommonWordsSample:
    """An order of all words, common ones first; its size is how many of them are in the list."""

    def __init__(self, sample_id: str, length: int) -> None:
        self._sample_id = sample_id
        words = english_words()
        self._words = random.Random(sample_id).sample(words, min(length, len(words)))
        self.outputs = self._words[:N_COMMON]
        # How often each occurs: lm-eval has these two pairs and nothing between.
        self.n_common, self.n_uncommon = (30, 3) if length >= 4096 else (6, 1)

    @property
    def sizes(self) -> range:
        return range(N_COMMON + 1, len(self._words) + 1)

    def prompt(self, size: int) -> Prompt:
        words = self.outputs * self.n_common + self._words[N_COMMON:size] * self.n_uncommon
        random.Random(f"{self._sample_id}/{size} words").shuffle(words)
        return common_words_prompt(words)


def common_words_prompt(words: Sequence[str]) -> Prompt:
    texts = lm_eval_text("cwe_utils.py", "CONFIG")
    numbered = " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))
    return Prompt(texts["template"].format(context=numbered), texts["answer_prefix"].strip())


@cache
def english_words() -> list[str]:
    """Nouns, adjectives and verbs of wonderwords, sorted."""
    return sorted(set().union(*map(english_words_of, ("noun", "adjective", "verb"))))


class RulerFrequentWords(RulerTask):
    """The three most frequent words of a made-up text."""

    def __init__(self, parameters: RulerParameters, data_root: Path | None) -> None:
        super().__init__("fwe", "ruler_fwe", parameters, "generated")
        # lm-eval's vocabulary: a word for every 50 tokens. The dots, the answers and one more are needed.
        if (n_words := self.length // 50) < N_FREQUENT + 2:
            raise WorkloadError(f"{self.name}: length {self.length} gives {n_words} words; raise length to 250 or more")

    def _sample(self, sample_id: str, number: int) -> FrequentWordsSample:
        return FrequentWordsSample(sample_id, self.length)


class FrequentWordsSample:
    """Made-up words by rank, dots first; its size is the number of words that Zipf's law divides among them."""

    def __init__(self, sample_id: str, length: int) -> None:
        rng = random.Random(sample_id)
        drawn: dict[str, None] = {}
        while len(drawn) < length // 50 - 1:
            drawn["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        self.by_rank = ["...", *drawn]
        self.outputs = self.by_rank[1 : N_FREQUENT + 1]
        self._sample_id = sample_id
        self._length = length

    @property
    def sizes(self) -> range:
        return range(N_CODED_LEAST, self._length)

    def prompt(self, size: int) -> Prompt:
        words = [
            word
            for rank, word in enumerate(self.by_rank, start=1)
            for _ in range(int(size * _FIRST_SHARE * rank**-ZIPF_EXPONENT))
        ]
        random.Random(f"{self._sample_id}/{size} words").shuffle(words)
        return frequent_words_prompt(words)


def frequent_words_prompt(words: Sequence[str]) -> Prompt:
    texts = lm_eval_text("fwe_utils.py", "CONFIG")
    return Prompt(texts["template"].format(context=" ".join(words)), texts["answer_prefix"].strip())
