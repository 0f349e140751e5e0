"""How weights are held in the speed race, and what its rows are named by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.model.quantised import AS_THE_MODEL, Arithmetic, Quantisation
from tests.benchmarks import llama_cpp
from tests.benchmarks.measurement import Measurement
from tests.benchmarks.race_models import MODELS

PROMPTS = (512, 4096)
PHASES = ("prefill", "decode")
N_NEW = 64


def context_of(n_prompt: int) -> int:
    """Tokens before the decoded one, in the middle of an answer."""
    return n_prompt + N_NEW // 2


@dataclass(frozen=True)
class Form:
    """How weights are held. weight_bits: of one weight in a layer, with its share of the scales.

    dtype: of what `quantise` leaves alone.
    """

    dtype: torch.dtype
    weight_bits: float
    peer: llama_cpp.Form
    quantise: Quantisation = AS_THE_MODEL

    @property
    def arithmetic(self) -> Arithmetic:
        return self.quantise.arithmetic


INT8 = Quantisation(experts="int8", dense="int8", attention="int8", head="int8")
INT4 = Quantisation(experts="int4-g32", dense="int4-g32", attention="int4-g32", head="int8")
BF16 = Quantisation(experts="bf16", dense="bf16", attention="bf16", head="bf16", arithmetic="bf16")
BY_INT8: dict[str, Arithmetic] = {"arithmetic": "int8"}
BF16_FORM = "bf16 by bf16"
BF16_ATTENTION = "int8 by int8 with bf16 attention"
INT8_ATTENTION = "int8 by int8 with int8 attention"
"""Attention of prompts; a token is decoded as in "int8 by int8"."""

FORMS = {
    "f32": Form(torch.float32, 32, "f32"),
    "bf16": Form(torch.bfloat16, 16, "f16"),
    "f16": Form(torch.float16, 16, "f16"),
    BF16_FORM: Form(torch.float32, 16, "bf16", BF16),
    "int8": Form(torch.float32, 8, "q8_0", INT8),
    "int8 by int8": Form(torch.float32, 8, "q8_0", INT8.model_copy(update=BY_INT8)),
    BF16_ATTENTION: Form(torch.float32, 8, "q8_0", INT8.model_copy(update={**BY_INT8, "attention_arithmetic": "bf16"})),
    INT8_ATTENTION: Form(torch.float32, 8, "q8_0", INT8.model_copy(update={**BY_INT8, "attention_arithmetic": "int8"})),
    "int4": Form(torch.float32, 4.5, "q4_0", INT4),
    "int4 by int8": Form(torch.float32, 4.5, "q4_0", INT4.model_copy(update=BY_INT8)),
}
"""Forms of one peer stand next to each other: they race together."""
MULTIPLY_BF16 = (BF16_FORM, BF16_ATTENTION)
"""What only processors that multiply two bf16 take part with."""
NEED_AVX512 = (*MULTIPLY_BF16, INT8_ATTENTION)


def conditions(name: str, form: str, n_prompt: int, instructions: str) -> str:
    """instructions: what our kernels were built for, and llama.cpp with them. Rows of each processor stay."""
    return f"{name}, {form}, prompt {n_prompt}, {instructions}"


def place(m: Measurement) -> tuple[str, int, int, int]:
    """Where a row stands on the page: by instruction set, model, form and prompt."""
    name, form, prompt, instructions = m.conditions.rsplit(", ", 3)
    return instructions, list(MODELS).index(name), list(FORMS).index(form), int(prompt.removeprefix("prompt "))
