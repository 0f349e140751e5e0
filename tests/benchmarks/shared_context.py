"""What it saves to compute a shared context once: requests with against without `reuse_prefix`.

python -m tests.benchmarks.shared_context

Both engines answer the same items in turns, so that a busy neighbour slows both alike. An item's ratio is the time of
its requests without reuse over that with it; the median over items is told. Beside it stands what would be saved if
time followed the number of computed tokens alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from engines.base import unheard
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from engines.techniques.presets import DroplessParameters
from results.records import Completion, Request
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.techniques import NpumoeT
from workloads.base import Workload
from workloads.boolq import BoolQ, BoolQParameters
from workloads.hellaswag import HellaSwag, HellaSwagParameters
from workloads.sharegpt import ShareGPT, ShareGPTParameters

MODEL = "bundled:tiny-qwen3-moe"
CHUNK = 512
OTHER_CHUNK = 384
N_ITEMS = 16
N_CONVERSATIONS = 8
TARGET = 3.0


@dataclass(frozen=True)
class Item:
    """The answers to the requests of one item (a question's choices, a conversation's turns)."""

    without: Sequence[Completion]
    reusing: Sequence[Completion]


def data_root() -> Path | None:
    """JOULEBENCH_DATA, or shared/data beside the repository; None: the bundled samples."""
    folder = Path(os.environ.get("JOULEBENCH_DATA") or Path(__file__).parents[3] / "shared" / "data")
    return folder if folder.is_dir() else None


def answered(
    checkpoint: Checkpoint, technique: TechniqueParameters, workload: Workload, item_of: Callable[[Request], str]
) -> list[Item]:
    """Every item by both engines, in turns; which goes first alternates."""
    engines = [ReferenceEngine(checkpoint, technique, CHUNK, threads=1, reuse_prefix=reuse) for reuse in (False, True)]
    for engine in engines:
        if engine.needs_calibration:
            wanted = technique.wanted_prompts
            engine.calibrate(workload.calibration_prompts(checkpoint.tokenizer, engine.max_length, wanted))
    requests = workload.requests(checkpoint.tokenizer, engines[0].max_length)
    for engine in engines:
        engine.run(requests[0], unheard)
        engine.reset()
    items = []
    for number, (_, group) in enumerate(groupby(requests, key=item_of)):
        asked = list(group)
        answers: dict[int, list[Completion]] = {}
        for turn in (number % 2, 1 - number % 2):
            answers[turn] = [engines[turn].run(request, unheard) for request in asked]
        items.append(Item(answers[0], answers[1]))
    return items


def prefill_s(completions: Sequence[Completion]) -> float:
    return sum(c.prefill_end_s - c.start_s for c in completions)


def n_computed(completions: Sequence[Completion]) -> int:
    return sum(c.n_computed_tokens for c in completions)


def ratio(metric: str, items: Sequence[Item], conditions: str, target: float | None = None) -> Measurement:
    return measured(
        metric,
        statistics.median(prefill_s(i.without) / prefill_s(i.reusing) for i in items),
        "x",
        f"{conditions}; median of {len(items)}",
        peer=statistics.median(n_computed(i.without) / n_computed(i.reusing) for i in items),
        peer_name="fewer tokens computed",
        target=target,
    )


def largest_difference(
    metric: str, items: Sequence[Item], otherwise_cut: Sequence[Completion] | None = None
) -> Measurement:
    """Of log-likelihoods, with and without reuse; beside it that of the same prompts cut into other chunks."""
    without = [c for item in items for c in item.without]
    reusing = [c for item in items for c in item.reusing]
    return measured(
        metric,
        _apart(without, reusing),
        "nat",
        f"largest of {len(without)} requests",
        peer=_apart(without, otherwise_cut) if otherwise_cut else None,
        peer_name=f"chunks of {OTHER_CHUNK}" if otherwise_cut else None,
        target=1e-5,
    )


def _apart(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    pairs = zip(some, others, strict=True)
    return max(abs(_nat(a) - _nat(b)) for a, b in pairs)


def _nat(completion: Completion) -> float:
    assert completion.loglikelihood is not None  # only log-likelihoods are compared
    return completion.loglikelihood


def otherwise_cut(checkpoint: Checkpoint, workload: Workload) -> list[Completion]:
    engine = ReferenceEngine(checkpoint, DroplessParameters(), OTHER_CHUNK, threads=1)
    return [engine.run(r, unheard) for r in workload.requests(checkpoint.tokenizer, engine.max_length)]


def by_sample(request: Request) -> str:
    return request.sample_id


def by_conversation(request: Request) -> str:
    return request.sample_id.rsplit("/", 1)[0]


def measurements(checkpoint: Checkpoint, data: Path | None) -> list[Measurement]:
    dropless, tiers = DroplessParameters(), NpumoeT()
    hellaswag = HellaSwag(HellaSwagParameters(limit=N_ITEMS), data)
    boolq = BoolQ(BoolQParameters(limit=N_ITEMS), data)
    sharegpt = ShareGPT(ShareGPTParameters(limit=N_CONVERSATIONS, max_new_tokens=4), data)
    endings = answered(checkpoint, dropless, hellaswag, by_sample)
    of_tiers = answered(checkpoint, tiers, hellaswag, by_sample)
    yes_no = answered(checkpoint, dropless, boolq, by_sample)
    turns = [i for i in answered(checkpoint, dropless, sharegpt, by_conversation) if len(i.without) > 1]
    source = "(bundled sample)" if data is None else "(validation split)"
    found = [
        ratio("HellaSwag 10-shot, dropless", endings, f"four endings {source}", TARGET),
        ratio("HellaSwag 10-shot, npumoe-t", of_tiers, f"four endings, whole chunks of {CHUNK} {source}", TARGET),
        ratio("BoolQ 2-shot, dropless", yes_no, f"two answers {source}", TARGET),
        largest_difference("HellaSwag log-likelihoods, dropless", endings, otherwise_cut(checkpoint, hellaswag)),
        largest_difference("HellaSwag log-likelihoods, npumoe-t", of_tiers),
        largest_difference("BoolQ log-likelihoods, dropless", yes_no, otherwise_cut(checkpoint, boolq)),
    ]
    if turns:
        found.append(ratio("ShareGPT, all TTFTs of a conversation, dropless", turns, "two turns or more"))
    return found


REMARKS = f"""How many times faster the requests of an item are answered with `reuse_prefix` than without, on {MODEL},
one thread, prefill chunks of {CHUNK} tokens. The peer column is the ratio of computed tokens: what could be had if
every token cost the same. What is left to compute are short chunks, whose fixed costs weigh more on so small a model.

BoolQ asks two answers of one token, so sharing within an item halves the work at best, whatever the model: 3 is out of
reach. Its examples are drawn anew for each item, so items share next to nothing. Tiers keep whole chunks only, for a
capacity makes tokens depend on their neighbours: what they save depends on where in a chunk the context ends.

Answers of tiers are the same to the last bit, for they compute the same chunks. Those of dropless are the same but for
fp32 rounding in chunks of other lengths; the largest difference stands below, and beside it what prefill chunks of
{OTHER_CHUNK} instead of {CHUNK} tokens change without any reuse."""

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = measurements(load_checkpoint(MODEL, torch.float32), data_root())
    write_page("shared-context", "Shared contexts computed once", found, REMARKS)
