"""Run by a Python that has the wheel MNN: reads so many tokens of its own making and decodes so many, greedily.

Prints one line `JOULEBENCH {...}` with the wall clock's seconds: when the prompt went in, when the first token was
known, when the last was.
"""

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

USUAL_TOKENS = 200
"""Tokens that any vocabulary has, behind the few with a meaning."""


def greedy(model: Any, ids: list[int]) -> int:
    """The next token's id. Reading the logits waits until they are computed."""
    import numpy

    logits = numpy.asarray(model.forward(ids).read()).reshape(-1)
    return int(logits.argmax())


def decoded(model: Any, ids: list[int], n_new: int) -> tuple[float, float, float, list[int]]:
    """(begin, first token, end, tokens), from an empty cache."""
    model.reset()
    begin_s = time.time()
    tokens = [greedy(model, ids)]
    first_s = time.time()
    while len(tokens) < n_new:
        tokens.append(greedy(model, tokens[-1:]))
    return begin_s, first_s, time.time(), tokens


def tell(told: dict[str, Any]) -> None:
    sys.stdout.write(f"JOULEBENCH {json.dumps(told)}\n")


def main() -> None:
    asked = json.loads(sys.argv[1])
    llm = importlib.import_module("MNN.llm")
    model = llm.create(asked["model"])
    chosen = {key: asked[key] for key in ("precision",) if asked[key] is not None}
    model.set_config({"thread_num": asked["threads"], "backend_type": "cpu", **chosen})
    model.load()
    if "question" in asked:
        *_, tokens = decoded(model, asked["question"]["token_ids"], asked["n_new"])
        tell({"answer": tokens})
        return
    made_up = [3 + 7 * i % USUAL_TOKENS for i in range(asked["n_prompt"])]
    decoded(model, made_up, min(asked["n_new"], 2))
    begin_s, first_s, end_s, tokens = decoded(model, made_up, asked["n_new"])
    context = model.context
    context.refresh()
    tell(
        {
            "version": importlib.metadata.version("MNN"),
            "n_cached": context.all_seq_len,
            "n_new": len(tokens),
            "stamps_s": [begin_s, first_s, end_s],
            "tokens": tokens,
        }
    )


if __name__ == "__main__":
    main()
