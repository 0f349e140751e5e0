"""How much of copying experts is hidden behind computing, where both take as long: on demand against prefetched.

python -m tests.benchmarks.copies [--rounds 5]

A made model whose experts lie in their file; two buffers hold 8 of its 2048. The rate of copies is set so that a
layer's experts arrive in the time in which a layer computes. Predictions are perfect: what routers chose was recorded
before. Arms take turns, token for token the same. One thread computes, one copies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.dispatch import Prediction, Routing
from engines.expert_memory import expert_layers
from engines.model.buffers import LayerBuffers
from engines.model.checkpoints import load_checkpoint
from engines.model.copier import Copier
from engines.model.key_value_cache import KeyValueCache
from engines.model.transformer import Transformer
from engines.observers import SparseLayerStep
from engines.prediction import KnownState
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import DroplessParameters
from engines.techniques.route import PredictedRoute, RoutersChoice
from results.copies import DecodeStep, StepTimes, layer_times, on_demand_s, prefetching_s, step_times
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.fakes.random_models import copy_tokenizer

PAGE = "copies"
LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 128, 4, 1024, 128
LENGTHS = (128, 512, 2048)
N_NEW, ROUNDS = 8, 6
HIDDEN_TARGET = 0.85
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
MODEL = f"made Qwen3-MoE: {LAYERS} layers, {EXPERTS} experts of {EXPERT_BYTES / 1e6:.2f} MB, top {TOP_K}, bf16"


def write_model(folder: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)


@dataclass
class Truth:
    """What routers chose in each decode step, told again a layer ahead."""

    step: int = 0
    chosen: dict[tuple[int, int], Routing] = field(default_factory=dict)

    def layer(self, seen: SparseLayerStep) -> None:
        self.chosen[self.step, seen.layer] = seen.routing

    def predict(self, known: KnownState) -> Prediction | None:
        following = self.chosen.get((self.step, known.layer + 1))
        return None if following is None else Prediction(known.layer + 1, following)

    def rule(self, layer: int) -> None: ...


@dataclass
class Arm:
    technique: Technique
    shown: Shown
    steps: list[DecodeStep] = field(default_factory=list)

    @property
    def quiet(self) -> list[DecodeStep]:
        """The quarter that took least time: what neighbours on the machine disturb takes longer."""
        return sorted(self.steps, key=lambda step: step.duration_s)[: max(1, len(self.steps) // 4)]


class Bench:
    """One prompt length."""

    def __init__(self, model: Transformer, n_prompt: int) -> None:
        self.model, self.n_prompt = model, n_prompt
        self.tokens_T = torch.randint(1, 2000, (n_prompt + N_NEW,), generator=torch.Generator().manual_seed(n_prompt))
        self.cache: KeyValueCache = model.new_cache()
        self.cache.start(n_prompt + N_NEW)
        self.truth = Truth()
        dropless = DroplessParameters().build(BuildContext(512))
        with torch.inference_mode():
            for chunk_T in torch.split(self.tokens_T[:n_prompt], 512):
                model.forward(chunk_T, self.cache, dropless, "prefill")
        for i, token_T in enumerate(self._new()):
            self.truth.step = i
            self._forward(token_T, dropless, None, self.truth)

    def arm(self, prefetches: bool, rate: float | None) -> Arm:
        sizes = own_sizes(self.model.config)
        assert sizes is not None
        n_slots = 2 * TOP_K
        context = BuildContext(
            512, sizes, None, None, self.model, expert_slots=n_slots, moved_expert_bytes=EXPERT_BYTES,
            routers_order=self.model.decodes_in_one_call,
        )  # fmt: skip
        route = PredictedRoute(self.truth, True, False) if prefetches else RoutersChoice()
        place = OneUnitParameters(unit="gpu").build(context, Exact())
        move = TwoBuffersParameters(prefetch=prefetches).build(context)
        layouts = {"prefill": Exact(), "decode": Exact()}
        technique = ComposedTechnique("arm", route, place, layouts, move, context)  # type: ignore[arg-type]
        shown = Shown(technique.asks, sizes)
        shown.slots = LayerBuffers(expert_layers(self.model.weights), n_slots, "bf16", Copier(rate))
        return Arm(technique, shown)

    def round(self, arm: Arm) -> None:
        for i, token_T in enumerate(self._new()):
            self.truth.step = i
            arm.shown.start_step(0, decodes=True)
            self._forward(token_T, arm.technique, arm.shown)
            arm.shown.end_step()
        assert arm.shown.slots is not None
        arm.shown.slots.take_copied()
        arm.steps += arm.shown.slots.stamps.take_steps()

    def _new(self) -> Sequence[Tensor]:
        self.cache.length = self.n_prompt
        return torch.split(self.tokens_T[self.n_prompt :], 1)

    def _forward(self, token_T: Tensor, technique: Technique, shown: Shown | None, observer: Any = None) -> None:
        with torch.inference_mode():
            hidden_TH, _ = self.model.forward(token_T, self.cache, technique, "decode", observer, shown=shown)
            self.model.logits(hidden_TH).argmax().item()


def alike_rate(bench: Bench) -> float:
    """Bytes a second at which a layer's experts arrive in the time in which a layer computes."""
    arm = bench.arm(prefetches=False, rate=None)
    for _ in range(2):
        bench.round(arm)
    compute_s = statistics.median(layer.compute_s for step in arm.quiet for layer in layer_times(step))
    return TOP_K * EXPERT_BYTES / compute_s


def identity(steps: Sequence[DecodeStep], ahead: bool) -> float:
    """What the source's equation makes of the steps' own times, over their duration: the median."""
    found = []
    for step in steps:
        layers, rest_s = layer_times(step), step.duration_s - step.layers[-1].end_s
        found.append(((prefetching_s if ahead else on_demand_s)(layers) + rest_s) / step.duration_s)
    return statistics.median(found)


def compared(model: Transformer, n_rounds: int) -> list[Measurement]:
    found = []
    for n_prompt in LENGTHS:
        bench = Bench(model, n_prompt)
        rate = alike_rate(bench)
        demand, ahead = bench.arm(False, rate), bench.arm(True, rate)
        for turn in range(n_rounds):
            for arm in (demand, ahead) if turn % 2 else (ahead, demand):
                bench.round(arm)
        found += rows(f"{MODEL}; prompt of {n_prompt}", rate, demand, ahead)
    return found


def times_of(step: DecodeStep) -> StepTimes:
    waits = [(wait.begin_s, wait.end_s) for wait in step.waits]
    return step_times(step.duration_s, waits, [(copy.begin_s, copy.end_s) for copy in step.copies])


def tpot_s(steps: Sequence[DecodeStep]) -> float:
    return statistics.median(step.duration_s for step in steps)


def hidden(steps: Sequence[DecodeStep]) -> float:
    times = sum(map(times_of, steps), StepTimes())
    return times.hidden_s / times.hideable_s


def shares(name: str, steps: Sequence[DecodeStep]) -> str:
    whole = sum(map(times_of, steps), StepTimes())
    computing, copying = 1 - whole.waited_s / whole.timed_s, whole.copied_s / whole.timed_s
    return f"{name}: computing {computing:.0%}, waiting {1 - computing:.0%}, copying {copying:.0%}"


def rows(where: str, rate: float, demand: Arm, ahead: Arm) -> list[Measurement]:
    n_steps = f"{len(ahead.quiet)} of {len(ahead.steps)} steps"
    note = f"{n_steps}; copies at {rate / 1e9:.2f} GB/s; {shares('on demand', demand.quiet)}"
    note += f"; {shares('prefetched', ahead.quiet)}"
    load = f"; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} threads, with all other work of this machine"
    all_steps = f"{n_steps}; of all {hidden(ahead.steps):.0%}{load}"
    on_demand, prefetched = identity(demand.quiet, ahead=False), identity(ahead.quiet, ahead=True)
    equations = "sum(compute + copy), on demand", "copy_0 + sum max(compute, copy), prefetched"
    return [
        measured("TPOT, prefetched", tpot_s(ahead.quiet), "s", where, tpot_s(demand.quiet), "on demand", None, note),
        measured("hidden of min(compute, copy)", hidden(ahead.quiet), "1", where, target=HIDDEN_TARGET, note=all_steps),
        measured(f"{equations[0]}: of the step's time", on_demand, "1", where, note=n_steps),
        measured(f"{equations[1]}: of the step's time", prefetched, "1", where, note=n_steps),
    ]


BOUND = (LAYERS - 1) / LAYERS
REMARKS = f"""What copies cost that are made while a layer computes. {LAYERS * EXPERTS} experts lie in a mapped file and
come from the page cache; two buffers hold {2 * TOP_K} of them. For each prompt length the rate of copies is set so that
the {TOP_K} experts of a layer arrive in the time in which a layer computes: there overlap saves most, at best half of
the time. Predictions are perfect and executed. Prompts are read without buffers; figures are of decoded tokens.

Figures are of the quarter of steps that took least time, for neighbours on a machine make steps longer; what they are
of all steps stands beside the share. "Hidden" is the time in which one thread copied while the other computed, over the
shorter of computing and copying, step by step. The first layer's experts can be hidden behind nothing: of {LAYERS}
layers, {LAYERS - 1} / {LAYERS} = {100 * BOUND:.1f} % is all that this model allows where both take as long. The two
equations are those of the source (003 §5.1) on the times that each step's own trace tells."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each arm")
    n_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        model = Transformer(load_checkpoint(folder, torch.bfloat16, experts_as_filed=True))
        found = beside_other_machines(PAGE, compared(model, n_rounds))
        write_page(PAGE, "How much of copying experts is hidden", found, REMARKS)


if __name__ == "__main__":
    main()
