"""GFLOP/s and GB/s beside speed: closed forms of the bundled model's shape, and what is left missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engines.base import TellsActiveWeights
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Quantisation
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results import tables
from results.achieved import ACHIEVED_METRICS, NOT_TOLD, achieved_observations
from results.records import ActiveWeights
from results.report.html import page_context
from tests.run_builders import cell, completion, failed, run, trial

MODEL = "bundled:tiny-qwen3-moe"
CONFIG = json.loads((Path(__file__).parent.parent / "engines/tiny/bundled/tiny-qwen3-moe/config.json").read_text())
WEIGHTS = ActiveWeights(n_parameters=1000, n_bytes=2000, head_parameters=500, head_bytes=600)


def weights_of_a_layer(config: dict[str, int]) -> int:
    """Of Qwen3-MoE with the chosen experts alone: q, k, v, o, their norms, two norms, the router, gated units."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    attention = hidden * width * (2 * heads + 2 * kv) + 2 * width
    experts = config["num_experts_per_tok"] * 3 * hidden * config["moe_intermediate_size"]
    return attention + 2 * hidden + hidden * config["num_experts"] + experts


def test_a_token_needs_its_chosen_experts_and_no_row_of_the_embedding() -> None:
    engine = ReferenceEngine(load_checkpoint(MODEL, torch.float32), DroplessParameters())
    assert isinstance(engine, TellsActiveWeights)
    found = engine.active_weights()
    n = CONFIG["num_hidden_layers"] * weights_of_a_layer(CONFIG) + CONFIG["hidden_size"]
    assert found.n_parameters == n
    assert found.head_parameters == CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert (found.n_bytes, found.head_bytes) == (4 * n, 4 * found.head_parameters)


def test_a_token_that_the_last_layer_leaves_out_needs_its_keys_and_values() -> None:
    engine = ReferenceEngine(load_checkpoint(MODEL, torch.float32), DroplessParameters(), last_layer="asked")
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    width = CONFIG.get("head_dim", hidden // heads)
    keys_and_values = 2 * hidden * CONFIG["num_key_value_heads"] * width + width + hidden
    n = (CONFIG["num_hidden_layers"] - 1) * weights_of_a_layer(CONFIG) + keys_and_values + hidden
    assert engine.active_weights().prompt_parameters == n
    answered = [completion("a", 0.0, 8, (1.0, 1.25, 1.5))]
    weights = WEIGHTS.model_copy(update={"prompt_parameters": 800})
    one = trial(active_weights=weights, completions=answered, prefill_tokens=8, decode_tokens=2)
    found = [o.value for o in achieved_observations(one)]
    # As below, and the prompt's 8 tokens in 1 s are 2 x 800 x 8 FLOP.
    assert found == pytest.approx([2 * 800 * 8 / 1e9, 2 * 1500 * 2 / 0.5 / 1e9, 2600 * 2 / 0.5 / 1e9])


def test_narrow_experts_are_fewer_bytes_and_as_many_operations() -> None:
    plain, narrow = (
        ReferenceEngine(load_checkpoint(MODEL, torch.float32, forms), DroplessParameters()).active_weights()
        for forms in (Quantisation(), Quantisation(experts="int8"))
    )
    assert narrow.n_parameters == plain.n_parameters
    experts = CONFIG["num_hidden_layers"] * CONFIG["num_experts_per_tok"] * 3
    experts *= CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"]
    saved = plain.n_bytes - narrow.n_bytes
    assert 2.5 * experts < saved <= 3 * experts  # four bytes a weight are one, and scales


def test_rates_are_work_over_the_time_of_their_phase() -> None:
    """8 prompt tokens in 1 s, then two tokens in 0.5 s: 2 x 1000 x 8 FLOP, 2 x 1500 x 2 FLOP, 2600 x 2 bytes."""
    answered = [completion("a", 0.0, 8, (1.0, 1.25, 1.5))]
    one = trial(active_weights=WEIGHTS, completions=answered, prefill_tokens=8, decode_tokens=2)
    found = {(o.metric, o.phase): (o.value, o.unit, o.method) for o in achieved_observations(one)}
    assert found == {
        ("compute_rate", "prefill"): (pytest.approx(16e3 / 1e9), "GFLOP/s", "derived"),
        ("compute_rate", "decode"): (pytest.approx(12e3 / 1e9), "GFLOP/s", "derived"),
        ("weight_read_rate", "decode"): (pytest.approx(10400 / 1e9), "GB/s", "derived"),
    }


def test_what_is_not_known_is_missing_with_its_reason() -> None:
    for time_method, why in (("measured", "does not tell which weights"), ("modelled", "a sheet prices")):
        other = achieved_observations(trial(time_method=time_method))
        assert [(o.metric, o.phase) for o in other] == [(metric, phase) for metric, phase, _ in ACHIEVED_METRICS]
        assert all(o.value is None and o.method == "missing" and why in str(o.reason) for o in other)
    together = [completion("a", 0.0, 4, (1.0, 2.0)), completion("b", 0.0, 4, (1.5, 2.5))]
    found = {
        (o.metric, o.phase): (o.value, o.method, o.reason)
        for o in achieved_observations(trial(active_weights=WEIGHTS, completions=together))
    }
    value, method, reason = found["weight_read_rate", "decode"]
    assert (value, method) == (None, "missing")
    assert "answered together" in str(reason)
    assert found["compute_rate", "decode"][0] is not None
    asked = trial(active_weights=WEIGHTS, completions=[completion("a", 0.0, 4, ())])
    reasons = {(o.metric, o.phase): o.reason for o in achieved_observations(asked)}
    assert reasons["compute_rate", "decode"] == "no decode tokens in this trial"


def test_they_stand_beside_speed_in_csv_and_page() -> None:
    data = run([cell()], [trial(repeat=r, active_weights=WEIGHTS) for r in range(2)])
    frame = tables.tidy(data)
    own = tables.latency_rows(frame)
    assert {"compute_rate", "weight_read_rate"} <= set(own["metric"])
    assert set(own[own["metric"] == "compute_rate"]["method"]) == {"derived"}
    assert tables.accuracy_rows(frame).empty
    titles = [t.title for t in page_context(data)["figure_tables"]]
    assert titles.index("Achieved rates") == titles.index("Speed") + 1


def test_arms_whose_engine_does_not_tell_say_so_beside_those_that_do() -> None:
    cells = [cell("a", engine="ours"), cell("b", engine="theirs"), cell("c", engine="broken")]
    data = run(cells, [trial("a", active_weights=WEIGHTS), trial("b"), failed("c")])
    rows = tables.latency_rows(tables.tidy(data))
    missing = rows[rows["metric"].isin({"compute_rate", "weight_read_rate"}) & (rows["method"] == "missing")]
    assert list(missing["cell"]) == ["b"] * 3 + ["c"] * 3
    assert set(missing[missing["cell"] == "b"]["reason"]) == {NOT_TOLD}
    assert missing["mean"].isna().all()
    (table,) = [t for t in page_context(data)["figure_tables"] if t.title == "Achieved rates"]
    ours, theirs, broken = table.parts[0][1]
    assert [entry.text for entry in theirs.entries] == ["missing"] * 3
    assert NOT_TOLD in {table.notes[entry.note - 1] for entry in theirs.entries}
    assert "missing" not in {entry.text for entry in ours.entries}
    assert broken.failed_reason
