"""What each form of weights costs in accuracy: logits and perplexity beside fp32, on a model that has learnt something.

python -m tests.benchmarks.quantisation [--text FILE] [--steps 300]

Without --text the books of the data folder are read (JOULEBENCH_DATA, or shared/data beside the repository): one
collection to train on, another to ask about. A text of your own is cut: the first 95 % train, the rest is asked about.

Legend: S sequences, T tokens of a sequence, L vocabulary rows, N asked tokens.
"""

from __future__ import annotations

import argparse
import lzma
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.model.attention import AttentionWeights
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import GatedWeights
from engines.model.quantised import AS_THE_MODEL, FORMS, ROUNDED_FORMS, Arithmetic, Form, Quantisation
from engines.model.tokenizer import Tokenizer
from engines.model.transformer import KeyValueCache, Transformer
from engines.model.weights import ModelWeights
from engines.techniques.presets import dropless
from results.units import format_number
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_json
from tests.benchmarks.race_forms import BF16_ATTENTION, INT8_ATTENTION
from tests.fakes.random_models import BUNDLED, copy_tokenizer

NAME = "quantisation"
VOCABULARY = 2048
# Widths of 256 fill the groups of every form.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
    "architectures": ["Qwen3MoeForCausalLM"],
}
N_SEQUENCES, SEQUENCE = 8, 128
PEAK_RATE, WARMUP_STEPS = 3e-3, 20
N_TRAINING_CHARACTERS = 4_000_000
N_ASKED = 96
"""Sequences whose every token but the first is asked about."""
OWN_TEXT_SHARE = 0.95

COMPONENTS: dict[str, tuple[str, ...]] = {
    "experts": ("experts",),
    "dense": ("dense",),
    "attention": ("attention",),
    "head": ("head",),
    "all": ("experts", "dense", "attention", "head"),
}
BASE: Form = "fp32"
ARMS: dict[str, tuple[Form, dict[str, Arithmetic]]] = {
    **{form: (form, {}) for form in FORMS if form != BASE},
    **{f"{form} by {by}": (form, {"arithmetic": by}) for by, forms in ROUNDED_FORMS.items() for form in forms},
    BF16_ATTENTION: ("int8", {"arithmetic": "int8", "attention_arithmetic": "bf16"}),
    INT8_ATTENTION: ("int8", {"arithmetic": "int8", "attention_arithmetic": "int8"}),
}
"""A form, by fp32 and, of those whose inputs may be rounded, by int8 or bf16; prompts' attention in bf16 or int8."""


# --- texts and the model ----------------------------------------------------------------------------------------------


def texts(own: Path | None) -> tuple[str, str, str]:
    """(to train on, to ask about, what they are)."""
    if own is not None:
        text = own.read_text(encoding="utf-8")
        cut = int(OWN_TEXT_SHARE * len(text))
        return text[:cut][:N_TRAINING_CHARACTERS], text[cut:], f"{own.name}, trained on its first 95 %, asked the rest"
    data = Path(os.environ.get("JOULEBENCH_DATA") or Path(__file__).parents[3] / "shared" / "data") / "corpus"
    if not data.is_dir():
        sys.exit(f"no texts at {data}; set JOULEBENCH_DATA or give --text FILE")
    train, asked = (_unpacked(data / f"gutenberg_{part}.txt.xz") for part in ("train", "valid"))
    return train, asked, "books of Project Gutenberg, other ones to train on than to ask about"


def _unpacked(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read(N_TRAINING_CHARACTERS)


def train(ids: Tensor, folder: Path, n_steps: int) -> float:
    """Writes a small Qwen3-MoE, trained by transformers on random stretches of the text. Returns the seconds taken."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES))
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    started_s = time.perf_counter()
    for step in range(n_steps):
        for group in optimiser.param_groups:
            group["lr"] = PEAK_RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / n_steps)
        starts = torch.randint(0, len(ids) - SEQUENCE, (N_SEQUENCES,), generator=draw)
        tokens_ST = torch.stack([ids[start : start + SEQUENCE] for start in starts.tolist()])
        loss = model(tokens_ST, labels=tokens_ST).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss.detach()):.2f}, {time.perf_counter() - started_s:.0f} s", flush=True)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return time.perf_counter() - started_s


def unigram_perplexity(train_ids: Tensor, asked_ST: Tensor) -> float:
    """Of a model that knows how often each token occurs, and nothing else (one more occurrence each than seen)."""
    share_L = (torch.bincount(train_ids, minlength=VOCABULARY) + 1).double()
    return math.exp(-float((share_L / share_L.sum()).log()[asked_ST[:, 1:]].mean()))


# --- one form beside fp32 ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def logits_STL(folder: Path, asked_ST: Tensor, quantise: Quantisation) -> tuple[Tensor, ModelWeights]:
    checkpoint = load_checkpoint(str(folder), torch.float32, quantise)
    model, cache = Transformer(checkpoint), KeyValueCache(checkpoint.config)
    found = []
    for tokens_T in asked_ST:
        cache.start(len(tokens_T))
        found.append(model.logits(model.forward(tokens_T, cache, dropless(), "prefill")[0]))
    return torch.stack(found), checkpoint.weights


@dataclass(frozen=True)
class Deviation:
    """Of logits from fp32's. KL in nat, of fp32's distribution against the other. nll: of the asked tokens, in nat."""

    largest: float
    relative_rms: float
    same_first_share: float
    kl: float
    perplexity: float
    nll_change: float
    nll_change_error: float
    """Standard error of the mean over tokens, of differences token by token: both answer the same ones."""


def deviation(exact_STL: Tensor, found_STL: Tensor, asked_ST: Tensor) -> Deviation:
    """A sequence at a time: in double, all at once would take gigabytes."""
    largest, squares, own_squares, same, kl = 0.0, 0.0, 0.0, 0.0, 0.0
    nlls: tuple[list[Tensor], list[Tensor]] = ([], [])
    for exact_TL, found_TL, tokens_T in zip(exact_STL, found_STL, asked_ST, strict=True):
        exact_TL, found_TL = exact_TL.double(), found_TL.double()
        error_TL = found_TL - exact_TL
        largest = max(largest, float(error_TL.abs().max()))
        squares += float(error_TL.square().sum())
        own_squares += float(exact_TL.square().sum())
        same += float((exact_TL.argmax(-1) == found_TL.argmax(-1)).sum())
        log_p_TL, log_q_TL = exact_TL.log_softmax(-1), found_TL.log_softmax(-1)
        kl += float(F.kl_div(log_q_TL, log_p_TL, reduction="sum", log_target=True))
        for nll, log_TL in zip(nlls, (log_p_TL, log_q_TL), strict=True):
            nll.append(-log_TL[:-1].gather(1, tokens_T[1:, None])[:, 0])
    exact_N, found_N = (torch.cat(nll) for nll in nlls)
    change_N = found_N - exact_N
    return Deviation(
        largest=largest,
        relative_rms=math.sqrt(squares / own_squares),
        same_first_share=same / asked_ST.numel(),
        kl=kl / asked_ST.numel(),
        perplexity=math.exp(float(found_N.mean())),
        nll_change=float(change_N.mean()),
        nll_change_error=float(change_N.std()) / math.sqrt(len(change_N)),
    )


def component_bytes(weights: ModelWeights) -> dict[str, int]:
    """Bytes of what `quantise` reaches, by component."""
    found = {"experts": 0, "dense": 0, "attention": 0, "head": weights.head_LH.nbytes}
    for layer in weights.layers:
        attention = cast(AttentionWeights, layer.attention)
        matrices = (attention.q_QH, attention.k_MH, attention.v_MH, attention.out_HQ)
        found["attention"] += sum(matrix.nbytes for matrix in matrices)
        if isinstance(layer.mlp, GatedWeights):
            found["dense"] += layer.mlp.n_bytes
        else:
            found["experts"] += sum(expert.n_bytes for expert in layer.mlp.experts.experts)
    return found


def rows(component: str, arm: str, n_bytes: int, wide_bytes: int, found: Deviation, exact: float) -> list[Measurement]:
    """exact: fp32's perplexity."""
    where = conditions(component, arm)
    return [
        measured("weights", n_bytes / 1e6, "MB", where, wide_bytes / 1e6, BASE),
        measured("bits per weight", 32 * n_bytes / wide_bytes, "bit", where),
        measured("largest logit error", found.largest, "", where),
        measured("logit error, RMS / RMS of logits", 100 * found.relative_rms, "%", where),
        measured("same first token", 100 * found.same_first_share, "%", where),
        measured("KL divergence", 1e3 * found.kl, "mnat", where),
        measured("loss of log-likelihood", 1e3 * found.nll_change, "mnat/token", where),
        measured("standard error of the loss", 1e3 * found.nll_change_error, "mnat/token", where),
        measured("perplexity", found.perplexity, "", where, exact, BASE),
    ]


def conditions(component: str, arm: str) -> str:
    return f"{component} {arm}"


def measurements(folder: Path, asked_ST: Tensor) -> Iterator[Measurement]:
    exact_STL, wide = logits_STL(folder, asked_ST, AS_THE_MODEL)
    exact = deviation(exact_STL, exact_STL, asked_ST).perplexity
    wide_bytes = component_bytes(wide)
    for component, parts in COMPONENTS.items():
        for arm, (form, rounding) in ARMS.items():
            quantise = Quantisation(**dict.fromkeys(parts, form)).model_copy(update=rounding)
            found_STL, weights = logits_STL(folder, asked_ST, quantise)
            own_bytes = component_bytes(weights)
            found = deviation(exact_STL, found_STL, asked_ST)
            print(f"{conditions(component, arm)}: {found}", flush=True)
            n_bytes, n_wide = (sum(one[part] for part in parts) for one in (own_bytes, wide_bytes))
            yield from rows(component, arm, n_bytes, n_wide, found, exact)


# --- the page ---------------------------------------------------------------------------------------------------------

COLUMNS = {
    "bits per weight": "bits / weight",
    "weights": "MB",
    "largest logit error": "largest logit error",
    "logit error, RMS / RMS of logits": "RMS error %",
    "same first token": "same first token %",
    "KL divergence": "KL mnat",
    "loss of log-likelihood": "loss mnat/token",
    "perplexity": "perplexity",
}
DECIMALS = {"same first token": 2, "perplexity": 2}
"""Of metrics whose news is in the digits behind those that all rows share."""


def table(found: Sequence[Measurement]) -> list[str]:
    """A row for each component and arm, a column for each metric, made of nothing but the measurements."""
    by_place: Mapping[tuple[str, str], Measurement] = {(m.conditions, m.metric): m for m in found}
    lines = ["| component | form | " + " | ".join(COLUMNS.values()) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for component in COMPONENTS:
        for arm in ARMS:
            figures = {metric: by_place[conditions(component, arm), metric].ours for metric in COLUMNS}
            error = by_place[conditions(component, arm), "standard error of the loss"].ours
            cells = {
                metric: f"{value:.{DECIMALS[metric]}f}" if metric in DECIMALS else format_number(value)
                for metric, value in figures.items()
            }
            cells["loss of log-likelihood"] = format_number(figures["loss of log-likelihood"], error)
            lines.append(f"| {component} | {arm} | " + " | ".join(cells.values()) + " |")
    return lines


REMARKS = """Each component in each form, beside the same model with all weights in fp32; arithmetic is fp32. In rows
"by int8" what goes into a product is rounded to 8 bits, with a scale for each 32 inputs, in rows "by bf16" to bf16
(`quantise.arithmetic`). Where attention is "by bf16", and in rows "with bf16 attention", what attention multiplies is
rounded too (`quantise.attention_arithmetic`). In rows "with int8 attention" queries and keys are rounded to 8 bits, and
the rest of attention to bf16; since 30 November it is whole numbers, [which round
less](../decisions/0029-int8-arithmetic.md).
`all` is experts, dense blocks, attention and head together. The embedding, routers and norms stay fp32.

- largest logit error: over all logits. One far above the RMS error is a token that went to other experts, for its
  router was near a tie. RMS error: root mean square of the errors over that of fp32's logits.
- same first token: how often the likeliest next token is the one of fp32.
- KL: mean divergence of the next-token distribution from fp32's.
- loss: mean loss of log-likelihood of the text's own tokens, ± its standard error over tokens: what another text of the
  kind may show. A gain is chance of the rounding, which moves likelihoods either way; KL cannot gain.
- perplexity: e to the mean negative log-likelihood of all asked tokens.

int8 and fp8 have one scale for each output, int4-gN one for each N inputs, mxfp4 a power of two for each 32. No form
uses data to choose its values. The bundled model is not in the table: what narrow weights do to its answers is in
[tiny-arms](tiny-arms.md). What follows is measured on a model that had a few minutes to learn, of 5 million weights;
large models, whose weights hold rarer and larger outliers, lose other amounts. It tells whether forms are computed
right and how they rank, and not what int4 does to a model of yours: measure that with `quantise` in a plan."""


def page(found: Sequence[Measurement], model: str) -> str:
    first = found[0]
    lines = ["# What narrow weights cost", "", REMARKS, "", model, "", *table(found), ""]
    return "\n".join([*lines, f"{first.date}, {first.machine}. Made by `{first.command}`.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="train on and ask about a text of your own")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train_text, asked_text, origin = texts(arguments.text)
    tokenizer = Tokenizer(BUNDLED, "bundled", (0,), VOCABULARY)
    train_ids, asked_ids = (torch.tensor(tokenizer.encode(text)) for text in (train_text, asked_text))
    asked_ST = asked_ids[: N_ASKED * SEQUENCE].view(-1, SEQUENCE)
    with tempfile.TemporaryDirectory() as scratch:
        seconds = train(train_ids, Path(scratch), arguments.steps)
        found = list(measurements(Path(scratch), asked_ST))
    exact = next(m.peer for m in found if m.metric == "perplexity")
    unigrams = unigram_perplexity(train_ids, asked_ST)
    found.insert(0, measured("perplexity", cast(float, exact), "", BASE, unigrams, "frequencies of tokens alone"))
    n_seen = arguments.steps * N_SEQUENCES * SEQUENCE
    model = (
        f"The model: a Qwen3-MoE of one dense and two sparse layers, hidden {SIZES['hidden_size']}, "
        f"{SIZES['num_experts']} experts top-{SIZES['num_experts_per_tok']}, trained for {seconds:.0f} s on {n_seen} "
        f"tokens ({origin}). Perplexity in fp32 over {asked_ST[:, 1:].numel()} asked tokens: {exact:.2f}; of a model "
        f"that knows how often each token occurs and nothing else: {unigrams:.0f}."
    )
    write_json(NAME, found)
    (FOLDER / f"{NAME}.md").write_text(page(found, model), encoding="utf-8")


if __name__ == "__main__":
    main()
