"""Trains a small model from nothing: transformers computes, this keeps the schedule, the state and the log.

Warm-up, a constant rate, then a linear fall to zero over the last part. The loss is a weighted mean of cross-entropies
(answers by their weight, other tokens OTHER_WEIGHT) plus the balancing loss of Switch Transformers. Of the other tokens
a random part is taken, at a higher weight: the same expectation, and the head (a third of the arithmetic of so small a
model) is computed for few.

Every batch is a function of its step, and the state is written every few minutes, whole or not at all: after a kill,
training goes on from there and ends with the same weights as if nothing had happened, on the same number of threads.
"""

# N sequences, L tokens of a sequence, P chosen positions, H width, V vocabulary.

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from engines.errors import EngineError
from engines.model.tensor_files import write_tensors
from results.records import Record

logger = logging.getLogger(__name__)

OTHER_WEIGHT = 0.1
OTHER_SHARE = 0.25
"""Part of the tokens outside answers whose loss is computed, each at OTHER_WEIGHT / OTHER_SHARE."""
STATE_FILE, LOG_FILE = "state.safetensors", "log.csv"
LOG_COLUMNS = ("step", "tokens", "length", "learning_rate", "answer_loss", "other_loss", "balance_loss", "seconds")


class Batch(NamedTuple):
    """ids_NL int64; answer_NL: what the token weighs in the loss as part of an answer, 0 outside answers; valid_NL: the
    token is no padding."""

    ids_NL: NDArray[np.int64]
    answer_NL: NDArray[np.float32]
    valid_NL: NDArray[np.bool_]


class Stage(Record):
    """Steps with sequences of one length."""

    n_steps: int = Field(ge=1)
    n_rows: int = Field(ge=1)
    """Sequences of a step."""
    length: int = Field(ge=2)
    """Tokens of a sequence."""
    lessons: str = ""
    """Which texts, as the source of batches calls them."""

    @property
    def n_tokens(self) -> int:
        return self.n_steps * self.n_rows * self.length


class Recipe(Record):
    """How long, on what lengths, at which rate."""

    stages: tuple[Stage, ...] = Field(min_length=1)
    peak_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(200, ge=0)
    decay_share: float = Field(0.3, gt=0, le=1)
    """Last part of all tokens, over which the rate falls to zero."""
    attention_gain: float = Field(1.5, gt=0)
    """First gains of the norms of queries and keys. At 1 no logit of a head of width d is above sqrt(d): of a few
    hundred tokens none can be singled out, and heads that copy form late."""
    weight_decay: float = Field(0.1, ge=0)
    balance_weight: float = Field(0.01, ge=0)
    seed: int = 20261121

    @property
    def n_steps(self) -> int:
        return sum(stage.n_steps for stage in self.stages)

    @property
    def n_tokens(self) -> int:
        return sum(stage.n_tokens for stage in self.stages)

    def stage(self, step: int) -> tuple[Stage, int]:
        """(the stage of a step, from 0; tokens before the step)."""
        done = 0
        for stage in self.stages:
            if step < stage.n_steps:
                return stage, done + step * stage.n_rows * stage.length
            step, done = step - stage.n_steps, done + stage.n_tokens
        raise ValueError(f"the recipe has {self.n_steps} steps, and no step {self.n_steps + step}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        left = 1 - self.stage(step)[1] / self.n_tokens
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.peak_rate * min(rise, left / self.decay_share, 1.0)


def train(
    config: Mapping[str, Any],
    recipe: Recipe,
    draw: Callable[[int, Stage], Batch],
    folder: Path,
    state_every_s: float = 300.0,
    device: str = "cpu",
    set_first_weights: Callable[[Any, int], None] | None = None,
) -> dict[str, Tensor]:
    """Trains, or goes on with what `folder` holds; returns the weights by their checkpoint names, in fp32.

    config: a transformers config as a dict. draw: (step, its stage) -> batch. folder: for state and log.
    set_first_weights: (new model, seed) changes the random weights before the first step.
    """
    model = _model(config, recipe)
    if set_first_weights is not None:
        set_first_weights(model, recipe.seed)
    model = model.to(device)
    optimizer = _optimizer(model, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    first = _load_state(folder / STATE_FILE, model, optimizer, recipe)
    _cut_log(folder / LOG_FILE, first)
    saved_at_s = time.monotonic()
    for step in range(first, recipe.n_steps):
        begun_s = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        batch = draw(step, recipe.stage(step)[0])
        losses = _step(model, optimizer, batch, recipe, step, device)
        row = {
            "step": step,
            "tokens": batch.ids_NL.size,
            "length": batch.ids_NL.shape[1],
            "learning_rate": f"{recipe.rate(step):.3g}",
            **{name: f"{value:.4f}" for name, value in losses.items()},
            "seconds": f"{time.monotonic() - begun_s:.3f}",
        }
        _log(folder / LOG_FILE, row)
        if step % 50 == 0:
            logger.info(" ".join(f"{key} {value}" for key, value in row.items()))
        if time.monotonic() - saved_at_s > state_every_s:
            _save_state(folder / STATE_FILE, model, optimizer, recipe, step + 1)
            saved_at_s = time.monotonic()
    _save_state(folder / STATE_FILE, model, optimizer, recipe, recipe.n_steps)
    return {name: tensor.detach().cpu() for name, tensor in _checkpoint_tensors(model).items()}


def _model(config: Mapping[str, Any], recipe: Recipe) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    torch.manual_seed(recipe.seed)
    parsed = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, recipe.attention_gain)
    return model.train()


def _optimizer(model: Any, recipe: Recipe) -> torch.optim.AdamW:
    """Norms do not decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)


def _step(
    model: Any, optimizer: torch.optim.Optimizer, batch: Batch, recipe: Recipe, step: int, device: str
) -> dict[str, float]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    ids_NL = torch.from_numpy(batch.ids_NL).to(device)
    # The token at a position is judged by the output one position before it.
    answer, valid = batch.answer_NL[:, 1:], batch.valid_NL[:, 1:]
    drawn = np.random.default_rng((recipe.seed, step)).random(answer.shape) < OTHER_SHARE
    chosen = torch.from_numpy(np.nonzero((valid & ((answer > 0) | drawn)).ravel())[0]).to(device)
    answer_P = torch.from_numpy(answer.ravel()).to(device)[chosen]
    is_answer_P = answer_P > 0
    output = model.model(input_ids=ids_NL, output_router_logits=True, use_cache=False)
    hidden_PH = output.last_hidden_state[:, :-1].reshape(-1, output.last_hidden_state.shape[-1])[chosen]
    loss_P = torch.nn.functional.cross_entropy(
        model.lm_head(hidden_PH), ids_NL[:, 1:].reshape(-1)[chosen], reduction="none"
    )
    weight_P = torch.where(is_answer_P, answer_P, OTHER_WEIGHT / OTHER_SHARE)
    balance = load_balancing_loss_func(output.router_logits, model.config.num_experts, model.config.num_experts_per_tok)
    loss = (loss_P * weight_P).sum() / weight_P.sum() + recipe.balance_weight * balance
    if not torch.isfinite(loss):
        raise EngineError(f"step {step}: the loss is {loss.item()}; lower peak_rate {recipe.peak_rate:g}")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses_P = loss_P.detach()
    return {
        "answer_loss": float(losses_P[is_answer_P].mean()) if is_answer_P.any() else float("nan"),
        "other_loss": float(losses_P[~is_answer_P].mean()),
        "balance_loss": float(balance.detach()),
    }


def _checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Weights by the names they have on disk: experts apart."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _save_state(path: Path, model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe, n_steps: int) -> None:
    tensors = {f"weight/{name}": p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            tensors[f"{key}/{name}"] = value
    partial = path.with_suffix(".partial")
    metadata = {"steps": str(n_steps), "recipe": recipe.model_dump_json()}
    write_tensors(partial, {name: t.contiguous() for name, t in tensors.items()}, metadata)
    os.replace(partial, path)


def _load_state(path: Path, model: Any, optimizer: torch.optim.Optimizer, recipe: Recipe) -> int:
    """Fills model and optimizer from a state file; steps done, 0 where there is none."""
    from safetensors import safe_open

    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as state, torch.no_grad():
        names = set(state.keys())
        begun = state.metadata().get("recipe")
        if begun != recipe.model_dump_json():
            raise EngineError(f"{path}: begun with another recipe, {begun}; name another folder")
        for name, p in model.named_parameters():
            if f"weight/{name}" not in names or state.get_slice(f"weight/{name}").get_shape() != list(p.shape):
                raise EngineError(f"{path}: the state of another model ({name} differs); name another folder")
            p.copy_(state.get_tensor(f"weight/{name}"))
            kept = {key: f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(stored in names for stored in kept.values()):
                optimizer.state[p] = {key: state.get_tensor(stored).to(p.device) for key, stored in kept.items()}
        return int(state.metadata()["steps"])


def _log(path: Path, row: Mapping[str, Any]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, LOG_COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def _cut_log(path: Path, n_steps: int) -> None:
    """Drops the rows of steps that were done after the state was written: they are done again."""
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["step"].isdigit() and int(row["step"]) < n_steps]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, LOG_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
