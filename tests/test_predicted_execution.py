"""Experts that are executed as predicted: against a model written apart; and what a prediction may know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines.model.checkpoints import BUNDLED_FOLDER, load_checkpoint
from engines.model.transformer import Transformer
from engines.oracle import Oracle
from engines.profile import Profile
from engines.techniques.context import ModelSizes
from tests.speculating import BUNDLED, STEPS, Ran, Recorded, built, loaded, tokens


@pytest.fixture(scope="module")
def bundled() -> tuple[Transformer, ModelSizes, Profile]:
    return loaded(BUNDLED)


# --- lossy, against a model written apart ----------------------------------------------------------------------------


class WrittenApart:
    """transformers' model with its experts in plain loops over the file's tensors, executed as predicted in decoding.

    Keeps what each layer predicts for the next one, and counts how many of the routers' own experts were predicted.
    """

    def __init__(self, profile: Profile, predict: str) -> None:
        from transformers import AutoModelForCausalLM

        folder = BUNDLED_FOLDER / "tiny-qwen3-moe"
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._file = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self._profile, self._predict = profile, predict
        self._told: dict[int, tuple[list[int], list[float]]] = {}
        self._residual: Tensor = torch.empty(0)
        self._decodes = False
        self.n_predicted = self.n_recalled = 0
        for number, layer in enumerate(self._model.model.layers):
            layer.post_attention_layernorm.register_forward_pre_hook(self._keep_residual)
            layer.mlp.forward = lambda x, number=number: self._experts(number, x)

    def logits(self) -> Tensor:
        found, cache = [], None
        with torch.no_grad():
            for chunk, (_, phase) in zip(tokens().split([n for n, _ in STEPS]), STEPS, strict=True):
                self._decodes = phase == "decode"
                out = self._model(input_ids=chunk[None], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits[0])
        return torch.cat(found)

    def _keep_residual(self, module: object, inputs: tuple[Tensor]) -> None:
        self._residual = inputs[0][0]

    def _experts(self, number: int, x_1TH: Tensor) -> Tensor:
        rows = []
        for x_H, r_H in zip(x_1TH[0], self._residual, strict=True):
            ids, weights = self._choice(number, x_H)
            if self._decodes and number > 0:
                self.n_predicted += len(ids)
                self.n_recalled += len({*ids} & {*self._told[number][0]})
                ids, weights = self._told[number]
            if self._decodes and number < 3:
                self._told[number + 1] = self._prediction(number, x_H, r_H, ids, weights)
            row = torch.zeros_like(x_H)
            for expert, weight in zip(ids, weights, strict=True):
                gate, up, down = (
                    self._file[f"model.layers.{number}.mlp.experts.{expert}.{n}_proj.weight"]
                    for n in ("gate", "up", "down")
                )
                inner = gate @ x_H
                row = row + weight * (down @ (inner / (1 + torch.exp(-inner)) * (up @ x_H)))
            rows.append(row)
        return torch.stack(rows)[None]

    def _choice(self, number: int, x_H: Tensor) -> tuple[list[int], list[float]]:
        return self._best(self._file[f"model.layers.{number}.mlp.gate.weight"] @ x_H)

    def _best(self, logits_E: Tensor) -> tuple[list[int], list[float]]:
        """The two best and their softmax, normalised."""
        score = torch.exp(logits_E - logits_E.max())
        ids = sorted(range(16), key=lambda e: -float(score[e]))[:2]
        total = float(sum(score[e] for e in ids))
        return ids, [float(score[e]) / total for e in ids]

    def _prediction(
        self, number: int, x_H: Tensor, r_H: Tensor, ids: list[int], weights: list[float]
    ) -> tuple[list[int], list[float]]:
        if self._predict == "s":
            return self._choice(number + 1, x_H)
        vectors = self._profile.default_vectors_EH
        assert vectors is not None
        q_H = r_H.clone()
        for expert, weight in zip(ids, weights, strict=True):
            q_H = q_H + weight * vectors[number][expert]
        q_H = q_H / torch.sqrt((q_H**2).mean() + 1e-6)
        q_H = q_H * self._file[f"model.layers.{number + 1}.post_attention_layernorm.weight"]
        if self._predict == "q" or (self._predict == "hybrid" and number != 0):
            return self._choice(number + 1, q_H)
        own = self._profile.estimator
        assert own is not None
        z = own.reduce_WH @ q_H + own.position_PW[number]
        inner = own.widen_VW @ z
        z = z + own.narrow_WV @ (inner / (1 + torch.exp(-inner)))
        z = (z - z.mean()) / torch.sqrt(z.var(unbiased=False) + 1e-5) * own.norm_W + own.norm_bias_W
        return self._best(own.head_EW @ z)


@pytest.mark.parametrize(
    ("predict", "name", "changes"),
    [
        ("q", "router-pf", {}),
        ("s", "router-pf", {"source": "s"}),
        ("estimator", "est-pf", {}),
        ("hybrid", "hybrid-pf", {}),
    ],
)
def test_predictions_are_executed_as_a_model_written_apart_executes_them(
    predict: str, name: str, changes: dict[str, object], bundled: tuple[Transformer, ModelSizes, Profile]
) -> None:
    """Logits, and how many of the routers' experts had been told; and it is not what the routers would have given."""
    model, sizes, profile = bundled
    apart = WrittenApart(profile, predict)
    expected = apart.logits()
    found = Ran(model, built(name, model, sizes, profile, **changes), sizes)
    assert found.fused_steps == 6
    torch.testing.assert_close(found.logits, expected, atol=2e-3, rtol=1e-3)
    n_predicted = sum(plan.routed_pairs for plan in found.of("decode") if plan.recalled is not None)
    assert (n_predicted, sum(plan.recalled or 0 for plan in found.of("decode"))) == (
        apart.n_predicted,
        apart.n_recalled,
    )
    assert apart.n_recalled < apart.n_predicted
    assert found.off(Ran(model, Oracle(), sizes)) > 1e-3
    assert torch.equal(found.logits[:13].argmax(-1), Ran(model, Oracle(), sizes).logits[:13].argmax(-1))


# --- what a prediction may know --------------------------------------------------------------------------------------


def changed(folder: Path, to: Path, wanted: Callable[[str], bool]) -> str:
    """The bundled model, with other weights under the names that are wanted."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(to / "model.safetensors")
    names = [name for name in tensors if wanted(name)]
    assert names
    for name in names:
        tensors[name] = torch.flip(tensors[name], (0,)).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


@pytest.mark.parametrize("name", ["prefetch-hint", "router-pf", "est-pf", "hybrid-pf"])
@pytest.mark.parametrize("watches", [True, False])
def test_a_prefetch_does_not_hang_on_what_comes_later(
    watches: bool, name: str, tmp_path: Path, bundled: tuple[Transformer, ModelSizes, Profile]
) -> None:
    """Inside of one call of the kernels, and where somebody watches each layer. Layer 1's experts, and layers 2 and 3
    but for the norm and the router that a guess asks, give other values: what they read and choose is another, and what
    layers 0 and 1 fetched for layers 1 and 2 is the same."""
    model, sizes, profile = bundled

    def later(tensor: str) -> bool:
        known = tensor.endswith(("layers.2.mlp.gate.weight", "layers.2.post_attention_layernorm.weight"))
        return "layers.1.mlp.experts" in tensor or (
            tensor.startswith(("model.layers.2.", "model.layers.3.")) and not known
        )

    other = Transformer(
        load_checkpoint(changed(BUNDLED_FOLDER / "tiny-qwen3-moe", tmp_path / "m", later), torch.float32)
    )
    a, b = (
        Ran(one, built(name, one, sizes, profile), sizes, Recorded() if watches else None) for one in (model, other)
    )
    assert a.fused_steps == b.fused_steps == (0 if watches else 6)
    chose = [ran.plans[2][1][2].compared for ran in (a, b)]
    assert chose[0] is not None
    assert chose[1] is not None
    assert not torch.equal(chose[0][0].weights_TK, chose[1][0].weights_TK)
    for layer in (0, 1):
        for step in range(2, len(STEPS)):
            first, second = (ran.plans[step][1][layer] for ran in (a, b))
            assert first.prediction is not None
            assert second.prediction is not None
            ahead = [[t.expert for t in plan.transfers if t.layer == layer + 1] for plan in (first, second)]
            assert ahead[0] == ahead[1] != []
            assert torch.equal(first.prediction.routing.weights_TK, second.prediction.routing.weights_TK)
