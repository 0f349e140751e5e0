"""Experts that a thread copies while another computes: bit for bit what all of them in memory give."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.cores import PhaseCores, phase_setting, why_not_bound
from engines.expert_memory import ExpertMemory, expert_layers
from engines.model.buffers import LayerBuffers
from engines.model.checkpoints import load_checkpoint
from engines.model.copier import Copier, CopyJob, Part
from engines.model.quantised import Form, Quantisation
from engines.model.slots import ExpertSlots
from engines.model.transformer import Transformer
from engines.oracle import Oracle
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.layout.exact import Exact
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.parameters import CustomParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.route import PredictedRoute
from results.counters import EngineCounters
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import BUNDLED, copy_tokenizer
from tests.speculating import STEPS, Recorded, loaded, tokens
from tests.test_expert_slots import EXPERT, all_logits, arm, counted, request
from tests.test_preflight import checked, problems

pytestmark = pytest.mark.numbers

ROOM = {"all": 2 * 16 * EXPERT * 4, "few": 2 * 3 * EXPERT * 4, "token": 2 * 2 * EXPERT * 4}
"""Bytes in fp32: two buffers for a layer's 16 experts, for 3, and for the 2 of a token."""


def engine(
    source: str | Path, name: str, n_bytes: int | None, dtype: torch.dtype = torch.float32, **others: Any
) -> ReferenceEngine:
    """n_bytes: None counts copies, and all experts lie in memory."""
    parameters = preset_parameters(name).model_validate(others.pop("parameters", {}))
    form: Form | None = others.pop("form", None)
    is_in_file = n_bytes is not None
    checkpoint = load_checkpoint(str(source), dtype, Quantisation(experts=form), experts_as_filed=is_in_file)
    rate = others.pop("rate", None)
    memory = ExpertMemory(n_bytes, form or ("fp32" if dtype is torch.float32 else "bf16"), rate)
    made = ReferenceEngine(checkpoint, parameters, 32, expert_memory=memory, **others)
    if made.needs_calibration:
        made.calibrate([list(range(10, 74))])
    return made


@cache
def in_memory(name: str, dtype: torch.dtype = torch.float32, threads: int | None = None, **given: str) -> torch.Tensor:
    """Logits of the bundled model, all of its experts in memory."""
    return all_logits(engine(BUNDLED, name, None, dtype, threads=threads, parameters=given))


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("name", ["on-demand", "prefetch-hint"])
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_answers_are_those_of_all_experts_in_memory_bit_for_bit(
    name: str, room: str, dtype: torch.dtype, threads: int
) -> None:
    """Prefill and decode, also where a step calls more experts than a buffer holds."""
    expected = in_memory("dropless", dtype, threads)
    n_bytes = ROOM[room] // (1 if dtype is torch.float32 else 2)
    assert torch.equal(all_logits(engine(BUNDLED, name, n_bytes, dtype, threads=threads)), expected)


@pytest.mark.parametrize("source", ["s", "q"])
@pytest.mark.parametrize("room", ROOM)
def test_predictions_are_executed_as_they_are_where_nothing_is_copied(room: str, source: str) -> None:
    expected = in_memory("router-pf", source=source)
    copied = all_logits(engine(BUNDLED, "router-pf", ROOM[room], parameters={"source": source}))
    assert torch.equal(copied, expected)
    assert not torch.equal(expected, in_memory("dropless"))


@pytest.mark.parametrize("form", ["int8", "int4-g64", "mxfp4"])
def test_quantised_experts_are_copied_in_their_form(form: Form) -> None:
    expected = all_logits(engine(BUNDLED, "dropless", None, form=form))
    made = engine(BUNDLED, "prefetch-hint", ROOM["few"], form=form)
    assert torch.equal(all_logits(made), expected)
    assert (made.take_counters().bytes_copied or 0) > 0


@pytest.mark.parametrize("family", ["qwen2-moe", "olmoe", "deepseek-v3", "gpt-oss", "gpt-oss-mxfp4", "llama4"])
def test_other_families_are_copied_too(family: str, tmp_path: Path) -> None:
    """Biased, packed and stacked experts, which are made on loading, from the memory that holds them."""
    write_family(tmp_path, CASES[family])
    copy_tokenizer(tmp_path)
    expected = all_logits(engine(tmp_path, "dropless", None))
    found = all_logits(engine(tmp_path, "prefetch-hint", 1 << 24))
    assert float((found - expected).norm() / expected.norm()) < 1e-6


class Adversary(Copier):
    """Writes NaN into a buffer as soon as it is told to fill it, and the weights only once somebody waits for them."""

    def start(self, parts: Sequence[Part], after: object = None) -> CopyJob:
        for part in parts:
            if part.into.dtype.is_floating_point:
                part.into.fill_(float("nan"))
        return _Late(parts)


class _Late(CopyJob):
    def join(self) -> None:
        for into, source in self.parts:
            into.copy_(source)
        self.finish(0.0, 0.0)


@pytest.mark.parametrize("n_slots", [4, 6, 32])
@pytest.mark.parametrize("prefetch", [True, False])
def test_nothing_is_computed_from_a_buffer_that_is_being_filled(n_slots: int, prefetch: bool) -> None:
    """Whenever a copy begins and however late it ends."""
    model, sizes, profile = loaded(str(BUNDLED))
    name = "prefetch-hint" if prefetch else "on-demand"
    context = BuildContext(16, sizes, profile, None, model, expert_slots=n_slots, moved_expert_bytes=1)
    technique = preset_parameters(name)().build(context)
    buffers = LayerBuffers(expert_layers(model.weights), n_slots, "fp32", Adversary())
    found = forward(model, technique, sizes, buffers)
    assert torch.equal(found, forward(model, technique, sizes, None))


@pytest.mark.parametrize("slots", [2, 5])
def test_nothing_is_computed_from_a_slot_that_is_being_filled(slots: int) -> None:
    """Of a cache that copies what is predicted for the next layer while this one computes."""
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32, experts_as_filed=True)
    model, sizes = Transformer(checkpoint), own_sizes(checkpoint.config)
    assert sizes is not None
    route = {"kind": "predicted", "source": "s", "executes": "router"}
    move = {"kind": "cache", "slots": slots, "prefetch": True}
    context = BuildContext(16, sizes, None, None, model, moved_expert_bytes=1)
    technique = CustomParameters.model_validate({"route": route, "move": move}).build(context)
    cached = ExpertSlots(expert_layers(model.weights), slots * 4, "fp32", Adversary())
    found = forward(model, technique, sizes, cached)
    assert cached.take_copied().ahead > 0
    in_memory = Transformer(load_checkpoint(str(BUNDLED), torch.float32))
    assert torch.equal(found, forward(in_memory, technique, sizes, None))


def forward(
    model: Transformer,
    technique: Technique,
    sizes: ModelSizes,
    buffers: LayerBuffers | ExpertSlots | None,
    observer: Any = None,
) -> torch.Tensor:
    """Logits of two chunks of prefill and six decoded tokens."""
    shown, cache = Shown(technique.asks, sizes), model.new_cache()
    shown.slots = buffers
    cache.start(sum(n for n, _ in STEPS))
    hidden = []
    with torch.inference_mode():
        for number, (chunk, (_, phase)) in enumerate(zip(tokens().split([n for n, _ in STEPS]), STEPS, strict=True)):
            shown.start_step(0)
            if observer is not None:
                observer.step(number)
            hidden.append(model.forward(chunk, cache, technique, phase, observer, shown=shown)[0])
        return model.logits(torch.cat(hidden))


def test_perfect_predictions_give_the_oracle_and_wait_for_nothing_but_the_first_layer() -> None:
    model, sizes, _ = loaded(str(BUNDLED))
    truth = Recorded()
    oracle = forward(model, Oracle(), sizes, None, truth)
    context = BuildContext(16, sizes, None, None, model, expert_slots=32, moved_expert_bytes=1)
    route = PredictedRoute(truth, executes_prediction=True, speculates_prefill=True)
    place, move = OneUnitParameters(unit="gpu").build(context, Exact()), TwoBuffersParameters().build(context)
    perfect = ComposedTechnique("perfect", route, place, {"prefill": Exact(), "decode": Exact()}, move, context)
    buffers = LayerBuffers(expert_layers(model.weights), 32, "fp32", Copier())
    found = forward(model, perfect, sizes, buffers, _Told(truth))
    assert float((found - oracle).norm() / oracle.norm()) < 1e-5
    copied = buffers.take_copied()
    calls = {place: set(routing.expert_ids_TK.flatten().tolist()) for place, routing in truth.routings.items()}
    assert copied.waited_for == sum(len(experts) for (_, layer), experts in calls.items() if layer == 0)
    assert copied.ahead == copied.hits == sum(len(experts) for (_, layer), experts in calls.items() if layer > 0)
    assert copied.unused == 0


class _Told:
    """Lets the recorded truth know the step, and records nothing again."""

    def __init__(self, truth: Recorded) -> None:
        self.step = truth.step

    def layer(self, seen: object) -> None:
        return


# --- what is counted -------------------------------------------------------------------------------------------------


def test_counters_tell_what_was_copied_from_what_was_only_counted() -> None:
    """On demand every call of a step's layer is one expert, copied as the file has it: two bytes a value."""
    found = counted(engine(BUNDLED, "on-demand", ROOM["all"]), request(40, 8))
    assert found.bytes_moved == found.bytes_copied == found.expert_calls * EXPERT * 2
    assert (found.hits, found.misses) == (0, found.expert_calls)
    planned = counted(engine(BUNDLED, "on-demand", None), request(40, 8))
    assert planned.bytes_moved > 0
    assert planned.bytes_copied == 0
    assert counted(engine(BUNDLED, "dropless", None), request(9, 2)).bytes_copied is None
    cached = counted(engine(BUNDLED, "lru", ROOM["all"]), request(40, 8))
    assert cached.bytes_copied == cached.bytes_moved > 0


@pytest.mark.parametrize(
    ("form", "expert_bytes"),
    [(None, EXPERT * 2), ("int8", EXPERT + 4 * (128 + 128 + 192)), ("int4-g32", EXPERT * 5 // 8),
     ("mxfp4", EXPERT * 17 // 32)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["on-demand", "monde"])
def test_copies_that_are_only_counted_are_of_experts_as_they_would_be_copied(
    name: str, form: Form | None, expert_bytes: int
) -> None:
    """int8: a scale of 4 bytes for each of 448 outputs. int4: one for 32 values. mxfp4: a byte for 32. Else two bytes a
    value, as files hold them."""
    found = counted(engine(BUNDLED, name, None, form=form), request(40, 8))
    assert found.misses
    assert (found.bytes_moved, found.bytes_copied or 0) == (found.misses * expert_bytes, 0)


@pytest.mark.parametrize("n_bytes", [ROOM["all"], None])
def test_what_was_fetched_ahead_and_not_called_is_counted(n_bytes: int | None) -> None:
    """Two experts told for each of three layers of seven decoded tokens; in the prefill all 16. Copied, or only
    counted."""
    found = counted(engine(BUNDLED, "prefetch-hint", n_bytes), request(20, 8))
    assert found.recalled is not None
    in_prefill = counted(engine(BUNDLED, "on-demand", ROOM["all"]), request(20, 1))
    called = in_prefill.expert_calls - first_layer_calls(20)
    assert found.prefetched == 3 * 16 + 7 * 3 * 2
    assert found.prefetched_unused == 3 * 16 - called + 7 * 3 * 2 - found.recalled


@pytest.mark.parametrize("n_held", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["prefetch-hint", "router-pf"])
def test_all_that_was_fetched_ahead_was_called_or_not(name: str, n_held: int) -> None:
    """Also where a prefill fills a buffer again and again: as many as it holds for each of three layers, then what was
    predicted."""
    found = counted(engine(BUNDLED, name, 2 * n_held * EXPERT * 4), request(7, 8))
    assert found.prefetched == 3 * n_held + (found.predicted or 0)
    assert (found.hits or 0) + (found.prefetched_unused or 0) == found.prefetched


def first_layer_calls(n_prompt: int) -> int:
    made = engine(BUNDLED, "dropless", None)
    seen: list[int] = []

    class Observer:
        def layer(self, step: Any) -> None:
            if step.layer == 0:
                seen.append(len(set(step.routing.expert_ids_TK.flatten().tolist())))

    made.layer_observer = Observer()
    made.run(request(n_prompt, 1), unheard)
    return sum(seen)


# --- while a request is answered --------------------------------------------------------------------------------------


USABLE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores to tell one from the other")
def test_copies_are_not_bound_to_the_cores_of_a_phase() -> None:
    if (reason := why_not_bound(frozenset(USABLE[:1]))) is not None:
        pytest.skip(reason)
    one = phase_setting(str(USABLE[0]), None)
    before = set(threading.enumerate())
    made = engine(BUNDLED, "prefetch-hint", ROOM["all"], cores=PhaseCores(one, one))
    made.run(request(9, 2), unheard)
    (own,) = [t for t in threading.enumerate() if t.name == "copier" and t not in before]
    assert own.native_id is not None
    assert os.sched_getaffinity(own.native_id) == set(USABLE)


def test_a_request_that_is_broken_off_waits_for_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert takes an hour; Ctrl-C comes when two of them are queued. The next request is paced again."""
    start, started = Copier.start, list[CopyJob]()

    def third_is_interrupted(self: Copier, parts: Sequence[Part], after: object = None) -> CopyJob:
        if len(started) == 2 and parts:
            raise KeyboardInterrupt
        started.append(start(self, parts, after))
        return started[-1]

    made = engine(BUNDLED, "on-demand", ROOM["all"], rate=80.0)
    monkeypatch.setattr(Copier, "start", third_is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run(request(9, 2), unheard)
    assert all(job.is_done for job in started)
    slots = made._shown.slots
    assert isinstance(slots, LayerBuffers)
    assert isinstance(slots._copier, Copier)
    assert not slots._copier._pace.ends.is_set()


# --- in a plan -------------------------------------------------------------------------------------------------------


def test_a_plan_gives_memory_and_rate() -> None:
    (cell,) = checked(engine=[arm("on-demand", expert_memory="6MB", copy_bytes_per_s="400MB")]).cells
    assert (cell.engine.expert_memory, cell.engine.copy_bytes_per_s) == (6_000_000, 400_000_000)


@pytest.mark.parametrize(
    ("rate", "takes"),
    [
        # 3 x 192 x 128 values of fp32 are 294,912 bytes.
        ("1kB", "at copy_bytes_per_s = 1000 an expert of 294912 bytes takes 4.9 minutes, and a token calls 8 of them"),
        ("29kB", "at copy_bytes_per_s = 29000 an expert of 294912 bytes takes 10 s, and a token calls 8 of them"),
        ("30kB", None),
    ],
)
def test_a_rate_at_which_an_expert_takes_minutes_is_told_before(rate: str, takes: str | None) -> None:
    warnings = checked(engine=[arm("on-demand", expert_memory="6MB", copy_bytes_per_s=rate)]).warnings
    assert [w for w in warnings if "copy_bytes_per_s" in w] == (
        [] if takes is None else [f"engine on-demand: {takes}; is a unit missing?"]
    )


@pytest.mark.parametrize("given", ["abc", "12 foo", "-3GB"])
def test_bytes_that_are_none_are_one_line(given: str) -> None:
    (found,) = problems(engine=[arm("on-demand", expert_memory=given)])
    assert found == (
        'engine[0].expert_memory: must be a number of bytes, with a unit if you like ("2GB", "400MB", "1GiB"),'
        f" found {given!r}"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"expert_memory": "250kB"}, "two buffers for the 2 experts of a token need 4; write expert_memory = 1179648 "),
        (
            {"copy_bytes_per_s": "1GB"},
            "on-demand copies none without expert_memory: they are counted",
        ),
    ],
)
def test_what_copies_nothing_is_one_line(given: dict[str, Any], words: str) -> None:
    (found,) = problems(engine=[arm("on-demand", **given)])
    assert words in found


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ({"name": "host", "computes": "mps"}, "est-pf loads experts for the CPU or for cuda, and host computes on mps"),
        (
            {"name": "host", "computes": "cuda"},
            "copy_bytes_per_s does not limit copies to the GPU of host; leave it out",
        ),
        (
            {"name": "host", "computes": "cuda"},
            "est-pf copies experts to the GPU of host as it computes with them; leave quantise.experts out",
        ),
        ({"name": "model:m2-ultra"}, "with expert_memory est-pf copies experts, but model:m2-ultra only prices"),
    ],
)
def test_copies_on_other_machines_are_refused_in_one_line(device: dict[str, Any], words: str) -> None:
    more: dict[str, Any] = {}
    if device.get("computes") == "cuda":
        more = {"copy_bytes_per_s": "1GB", "quantise": {"experts": "int8"}}
    given = arm("est-pf", expert_memory="6MB", profile="bundled:tiny-qwen3-moe", **more)
    found = problems(engine=[given], device=[device])
    assert len([line for line in found if words in line]) == 1


def test_what_was_never_run_on_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan check says it where torch sees one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = arm("est-pf", expert_memory="6MB", profile="bundled:tiny-qwen3-moe")
    (told,) = checked(engine=[given], device=[{"name": "host", "computes": "cuda"}]).warnings
    assert "copies of experts to a GPU were written and tested without one, and not yet run on a GPU" in told
    (found,) = problems(engine=[arm("router-pf", expert_memory="6MB")], device=[{"name": "host", "computes": "cuda"}])
    assert "cannot be calibrated there; give it a profile" in found


def test_a_bundled_model_has_a_profile_with_an_estimator() -> None:
    """It is of that model, whose arms learn from it; a name that is not there is told."""
    assert checked(engine=[arm("hybrid-pf", expert_memory="6MB", profile="bundled:tiny-qwen3-moe")]).cells
    (found,) = problems(engine=[arm("hybrid-pf", profile="bundled:nothing")])
    assert "no such bundled profile; there is tiny-qwen3-moe" in found


def test_quantised_experts_take_less_of_the_memory() -> None:
    """Four of int8, with a scale a row, are 0.3 MB; in fp32 they are 1.2 MB."""
    assert checked(engine=[arm("on-demand", expert_memory="320kB", quantise={"experts": "int8"})]).cells
    (found,) = problems(engine=[arm("on-demand", expert_memory="320kB")])
    assert "write expert_memory = 1179648 (1.18 MB) or more" in found, "4 of 3 x 192 x 128 values"
    assert checked(engine=[arm("on-demand", expert_memory=1179648)]).cells


def test_counters_of_all_engines_are_made_of_the_same_record() -> None:
    both = EngineCounters.total([EngineCounters(bytes_copied=3), EngineCounters(bytes_copied=4), EngineCounters()])
    assert both.bytes_copied == 7
