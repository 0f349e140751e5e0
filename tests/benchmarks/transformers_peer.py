"""transformers as a peer, in a process of its own: there OpenMP's threads wait as its users have them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from engines import environment_for_others
from tests.benchmarks.race_models import VOCABULARY
from tests.benchmarks.timing import Timed, timed

EXPERT_KINDS = ("grouped_mm", "eager")
"""`batched_mm` copies the weights of each token's experts; on a CPU it is not tried."""


class TransformersPeer:
    """A model that is loaded once. A turn reads a prompt and writes tokens."""

    def __init__(self, folder: Path, is_sparse: bool) -> None:
        self.is_sparse = is_sparse
        # torch first: `engines` leaves threads alone that are there already
        start = f"import torch; from {__name__} import serve; serve({str(folder)!r}, {torch.get_num_threads()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start],
            env=environment_for_others(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def turn(self, *asked: int | str | None) -> tuple[Timed, Timed]:
        """asked: tokens of the prompt, new tokens, how experts are computed in prefill and in decode, and how many such
        prompts together, if not one. The time to the first token, and the time of the others."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        prefill, decode = json.loads(self._process.stdout.readline())
        return Timed(*prefill), Timed(*decode)

    def close(self) -> None:
        self._process.communicate()


def serve(folder: str, n_threads: int) -> None:
    import transformers

    torch.set_num_threads(n_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        prefill, decode = answered(model, *json.loads(line))
        print(json.dumps([[phase.seconds, phase.is_quiet] for phase in (prefill, decode)]), flush=True)


@torch.inference_mode()
def answered(
    model: Any,
    n_prompt: int,
    n_new: int,
    prefill_experts: str | None,
    decode_experts: str | None,
    n_sequences: int = 1,
) -> tuple[Timed, Timed]:
    last: Any = None
    cache: Any = None

    def step(ids: torch.Tensor) -> None:
        nonlocal last, cache
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        last, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        last.tolist()

    def decode() -> None:
        for _ in range(n_new - 1):
            step(last)

    if prefill_experts is not None:
        model.set_experts_implementation(prefill_experts)
    prefill = timed(lambda: step(torch.randint(1, VOCABULARY, (n_sequences, n_prompt))))
    if decode_experts is not None:
        model.set_experts_implementation(decode_experts)
    return prefill, timed(decode)
