"""Core ML naive of NPUMoE (000), Table 2: graphs as large as the busiest expert needs, in decoding the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.dispatch import DispatchPlan, Routing
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.residency import Counts
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import preset_parameters
from tests.run_builders import generation
from tests.test_npumoe import PHI, routing_of


def test_a_shape_of_the_busiest_is_frozen_for_a_naive_launch_alone() -> None:
    chosen = {"layout": {"kind": "capacity", "rows": "max", "overflow": "none"}}
    on_cpu = CustomParameters.model_validate(chosen)
    one = Routing(torch.tensor([[0, 9]]), torch.ones(1, 2), 16)
    for phase, routing in (("prefill", routing_of([2] * 16)), ("decode", one)):
        seen = LayerInput(0, phase, routing, counts=Counts(1, 16))  # type: ignore[arg-type]
        naive = preset_parameters("coreml-naive")().build(BuildContext(32, PHI)).plan(seen)
        assert {(call.unit, call.static) for call in naive.calls} == {("npu", True)}
        plain = on_cpu.build(BuildContext(32, PHI)).plan(seen)
        assert {(call.unit, call.static) for call in plain.calls} == {("cpu", False)}


def test_naive_decodes_with_the_graphs_of_its_prefill() -> None:
    """Table 2: "the same graphs". Of each layer the largest that the request's prefill launched; or of one row."""

    class Launched:
        """Rows of the calls of each layer, by phase."""

        def __init__(self) -> None:
            self.rows: dict[str, list[set[int]]] = {}

        def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
            seen = self.rows.setdefault(phase, [set() for _ in plans])
            for rows, plan in zip(seen, plans, strict=True):
                rows |= set() if plan is None else set(plan.calls.rows_S.tolist())

    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    ids = torch.randint(16, 2000, (2, 90), generator=torch.Generator().manual_seed(3)).tolist()
    found: dict[str, list[list[set[int]]]] = {"same": [], "single": []}
    for graphs, steps in found.items():
        parameters = preset_parameters("coreml-naive").model_validate({"decode_graphs": graphs})
        engine = ReferenceEngine(checkpoint, parameters, prefill_chunk=32)
        for i, prompt in enumerate((ids[0], ids[1][:20])):
            engine.observer = launched = Launched()
            engine.run(generation(f"r{i}", prompt, 4), lambda event, at_s: None)
            largest = [{max(rows)} for rows in launched.rows["prefill"]]
            assert launched.rows["decode"] == (largest if graphs == "same" else [{1}] * len(largest))
            steps.append(launched.rows["prefill"])
    assert found["same"] == found["single"], "prefill is the same"
    first, second = found["same"]
    assert all(max(b) < max(a) for a, b in zip(first, second, strict=True)), (
        "what a request before launched is forgotten"
    )
