"""How like the states are that predictions are made from: of a window, against the states that an observer saw."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F

from engines import likeness
from engines.base import unheard
from engines.likeness import Likeness
from engines.model.checkpoints import load_checkpoint
from engines.observers import SparseLayerStep
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from results.expert_heat import LayerForetold
from tests.fakes.random_models import BUNDLED
from tests.ndp_units import generation


class Keeper:
    """Of decoded tokens, what each layer's router read."""

    def __init__(self) -> None:
        self.read: dict[int, list[torch.Tensor]] = defaultdict(list)

    def layer(self, seen: SparseLayerStep) -> None:
        if seen.phase == "decode":
            self.read[seen.layer].append(seen.router_input_TH)


@pytest.mark.numbers
def test_the_cosine_of_a_window_is_that_of_what_the_router_was_shown_with_what_it_read() -> None:
    """From s: the layer before's input. The first layer is not predicted."""
    engine = ReferenceEngine(
        load_checkpoint(str(BUNDLED), torch.float32), preset_parameters("router-pf")(source="s"), 16
    )
    engine.layer_observer = keeper = Keeper()
    for first in (10, 30):
        engine.run(generation(range(first, first + 20)), unheard)
    heat = engine.take_heat()
    assert heat is not None
    assert heat.foretold is not None
    assert heat.foretold[0] is None
    for layer, told in zip(heat.layers[1:], heat.foretold[1:], strict=True):
        shown_TH, read_TH = torch.cat(keeper.read[layer - 1]), torch.cat(keeper.read[layer])
        assert told is not None
        assert told.cosine_tokens == told.tokens == len(read_TH) > 0
        assert told.cosine == pytest.approx(float(F.cosine_similarity(shown_TH, read_TH).mean()), abs=1e-5)
    engine.run(generation(range(10, 30)), unheard)
    again = engine.take_heat()
    assert again is not None
    assert again.foretold is not None
    assert (told := again.foretold[1]) is not None
    assert told.cosine_tokens == told.tokens, "of this window alone"


def test_states_beyond_the_memory_for_them_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "MOST_BYTES", 2 * 3 * 8 * 4)
    held, along_TH = Likeness(), torch.ones(2, 8)
    for _ in range(3):
        held.hold(1, along_TH, -along_TH)
    held.hold(2, along_TH[:1], along_TH[:1])
    found = held.take()
    assert {layer: own.tokens for layer, own in found.items()} == {1: 2, 2: 1}
    assert [own.total for own in found.values()] == pytest.approx([-2.0, 1.0])
    assert held.take() == {}


def test_a_mean_of_nothing_is_missing() -> None:
    assert LayerForetold(tokens=3, recalled=1, aligned=(1, 0)).cosine is None
