"""How fast the requests of a task are answered: our engine against lm-eval's own `hf` model, one request at a time.

python -m tests.benchmarks.lm_eval_speed [bundled] [large] [--forms f32 'bf16 by bf16'] [--turns 3]

Both get the same token ids, in the same order, with the same number of threads; both share what they can: ours keeps
the context of the request before (`reuse_prefix`), `hf` computes choices of one token from one pass over their context.
Ours leaves tokens that nobody asks about out of the last layer (`last_layer`).
Building requests and scoring are outside, on both sides. Turns alternate; what a neighbour disturbed is told.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engines.base import unheard
from engines.model.checkpoints import load_checkpoint
from engines.model.tokenizer import Tokenizer
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from harness.schema import WORKLOAD
from results.records import Request
from tests.benchmarks.engine_speed import instructions_here
from tests.benchmarks.measurement import Measurement, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import BF16_FORM, FORMS
from tests.benchmarks.race_models import write_model
from tests.benchmarks.shared_context import data_root
from tests.benchmarks.timing import Turns, timed
from tests.fakes.random_models import BUNDLED, copy_tokenizer
from tests.hf_peer import texts_of_hf

NAME = "lm-eval-speed"
THREADS = 2
ONE_THREAD = "ours with one thread"
LARGE = "16 experts, top 2, width 1024"
ASKED = "last layer: asked tokens"
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "HellaSwag, 10 examples": ("hellaswag", {"num_fewshot": 10}),
    "BoolQ, 2 examples": ("boolq", {"num_fewshot": 2}),
    "RULER niah_single_2, 1024 tokens": ("ruler_niah_single_2", {"length": 1024}),
}
TARGETS = (3.0, 1.15, 3.0)
"""Times hf's rate. Of BoolQ the two share all that prefix reuse could save."""
LIMITS = {"bundled": (16, 48, 12), "large": (3, 8, 2)}
"""Items of each task."""
HF_DTYPES = {"f32": "float32", BF16_FORM: "bfloat16"}
"""What `hf` computes in beside each form of ours: without a dtype, it takes that of the checkpoint."""


def requests_of(task: str, limit: int, tokenizer: Tokenizer, max_length: int) -> list[Request]:
    name, parameters = TASKS[task]
    spec = WORKLOAD.read({"name": name, **parameters, "limit": limit})
    workload = spec.build(data_root(), allow_code=False)
    return list(workload.requests(tokenizer, max_length))


def ask_ours(engine: ReferenceEngine, requests: Sequence[Request]) -> None:
    engine.reset()
    for request in requests:
        engine.run(request, unheard)


def ask_hf(hf: Any, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
    """lm-eval's own methods for token ids and for texts."""
    if requests[0].kind == "loglikelihood":
        ids = [(("", r.request_id), list(r.prompt_ids), list(r.continuation_ids)) for r in requests]
        hf._loglikelihood_tokens(ids, disable_tqdm=True)
        return
    settings = {"until": list(requests[0].stop), "max_gen_toks": requests[0].max_new_tokens, "do_sample": False}
    texts_of_hf(hf, [tokenizer.decode(list(r.prompt_ids)) for r in requests], settings)


def race(folder: Path, what: str, form: str, limits: Sequence[int], n_turns: int) -> list[Measurement]:
    from lm_eval.models.huggingface import HFLM

    checkpoint = load_checkpoint(str(folder), torch.float32, FORMS[form].quantise)
    hf = HFLM(pretrained=str(folder), dtype=HF_DTYPES[form], device="cpu", batch_size=1)
    found = []
    for task, limit, target in zip(TASKS, limits, TARGETS, strict=True):
        engine, alone = (
            ReferenceEngine(checkpoint, DroplessParameters(), threads=threads, reuse_prefix=True, last_layer="asked")
            for threads in (THREADS, 1)
        )
        requests = requests_of(task, limit, checkpoint.tokenizer, engine.max_length)
        ways = (
            partial(ask_ours, engine, requests),
            partial(ask_hf, hf, requests, checkpoint.tokenizer),
            partial(ask_ours, alone, requests),
        )
        ask_ours(engine, requests[:1])
        ask_hf(hf, requests[:1], checkpoint.tokenizer)
        ask_ours(alone, requests[:1])
        turns = [Turns() for _ in ways]
        for _ in range(n_turns):
            for own, work in zip(turns, ways, strict=True):
                took = timed(work)
                own.add(limit / took.seconds, took.is_quiet)
        ours, by_hf, by_one = (own.figure(n_turns) for own in turns)
        items = f"{limit} items" if data_root() else f"{limit} bundled samples"
        how = "" if form == "f32" else f" {form},"
        conditions = f"{what},{how} {items}, {THREADS} threads, batch 1, {instructions_here()}"
        found += [
            beside(task, "item/s", conditions, ours, by_hf, "lm-eval hf", target, (ASKED,)),
            beside(task, "item/s", conditions, ours, by_one, ONE_THREAD, 1.0, (ASKED,)),
        ]
    return found


REMARKS = """Items of a task answered per second, by our engine with `reuse_prefix` and by lm-eval's `hf` model on the
same checkpoint in fp32. In rows "bf16 by bf16" both compute in bf16: `hf` does so with a checkpoint in bf16 where it is
asked for nothing else, and ours with `quantise.arithmetic = "bf16"`. The four endings of a HellaSwag item share a
context that `hf` computes four times; the two answers of a BoolQ item are one token each, and `hf` takes both from one
pass, as we do: what is left there is the ratio of two prefills. In rows that say "last layer: asked tokens" ours has
`last_layer = "asked"`: one of eight layers (four in the bundled model) computes tokens alone whose logits are wanted.
Ratios within one run; the large model has random weights, and its answers run to the task's limit of 128 tokens.

RULER of the large model in fp32: decoding takes 55 to 68 % of our time, the prompt 31 to 44 %, what counts the
experts' tokens afterwards 1 to 3 % (six items on 27 November, beside other programs). So its ratio is mostly that of
two rates of decoding. Items share 50 tokens of 896 only.

`hf` takes a batch of 1, as we do, and its own choice of how experts are computed. It runs in our process, so OpenMP's
threads look for work as briefly there as ours let them ([why](../decisions/0028-threads-that-sleep.md)). Rows beside
one thread say what the second one brings: below 1 it would cost more than it gives."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", choices=[[], *LIMITS], default=[])
    parser.add_argument("--forms", nargs="*", choices=HF_DTYPES, default=["f32"])
    parser.add_argument("--turns", type=int, default=3)
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    torch.set_num_threads(THREADS)
    found: list[Measurement] = []
    for name in parsed.models or list(LIMITS):
        with tempfile.TemporaryDirectory() as folder:
            if name == "large":
                write_model(LARGE, Path(folder))
                copy_tokenizer(Path(folder))
            path, what = (BUNDLED, "bundled model") if name == "bundled" else (Path(folder), LARGE)
            for form in parsed.forms:
                found += race(path, what, form, LIMITS[name], parsed.turns)
    write_page(NAME, "Tasks answered, beside lm-eval's hf model", merged(read_json(NAME), found), REMARKS)


if __name__ == "__main__":
    main()
