"""Copies to a device that runs behind the host: every read after its copy, every copy after the last read of its place.

There is no GPU here: the order is that of `StreamCopier`, and its two queues are noted (`tests.fakes.noted_streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.model.accelerator import Backend
from engines.model.checkpoints import load_checkpoint
from engines.model.copier import CopyQueue, Mark, Part
from engines.model.quantised import Quantisation
from engines.model.stream_copier import StreamCopier, StreamJob
from engines.profile_files import profile_folder, read_profile
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from tests.cases import marked
from tests.fakes.noted_streams import NotedStreams
from tests.fakes.random_models import BUNDLED
from tests.test_expert_slots import EXPERT, request

BF16 = 2
ROOM = {"all": 2 * 16 * EXPERT * BF16, "few": 2 * 3 * EXPERT * BF16, "token": 2 * 2 * EXPERT * BF16}
"""Bytes: two buffers for a layer's 16 experts, for 3, and for the 2 of a token."""


@dataclass(frozen=True)
class Noted(ExpertMemory):
    """An expert memory that is copied to by the queues of a device that is not there."""

    streams: NotedStreams = field(default_factory=NotedStreams)
    queue: Callable[[NotedStreams, torch.dtype], CopyQueue] = StreamCopier

    def _queue(self, backend: Backend | None, now_s: Callable[[], float]) -> CopyQueue:
        assert backend is not None
        return self.queue(self.streams, backend.dtype)


def engine(name: str, memory: ExpertMemory | None, **parameters: object) -> ReferenceEngine:
    """It computes in bf16 as an accelerator does, so that torch sees every call."""
    technique = preset_parameters(name).model_validate(parameters)
    stay = memory is not None
    checkpoint = load_checkpoint(str(BUNDLED), torch.bfloat16, experts_as_filed=stay)
    made = ReferenceEngine(
        checkpoint, technique, 32, torch_device="cpu", compute_dtype=torch.bfloat16,
        expert_memory=memory or ExpertMemory(),
    )  # fmt: skip
    if made.needs_calibration:
        made.use_profile(read_profile(profile_folder("bundled:tiny-qwen3-moe")))
    return made


def answers(made: ReferenceEngine, streams: NotedStreams | None = None) -> list[tuple[int, ...]]:
    """Of two requests, of which the second finds what the first left."""
    found = []
    for asked in (request(40, 6), request(9, 5)):
        if streams is None:
            found.append(made.run(asked, unheard).token_ids)
        else:
            with streams.watching():
                found.append(made.run(asked, unheard).token_ids)
    return found


@cache
def in_memory(name: str) -> list[tuple[int, ...]]:
    """The answers with all experts in memory, one by one as copied ones are: grouped products round otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.model.accelerator.multiplies_groups", lambda *_: False)
        return answers(engine(name, None))


ARMS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, room, {}) for name in ("on-demand", "prefetch-hint", "router-pf") for room in ROOM),
    *((name, "few", {}) for name in ("est-pf", "hybrid-pf")),
    *((name, "all", {"slots": 3}) for name in ("lru", "lfu", "static", "moe-ondemand")),
]
USUAL = [arm for arm in ARMS if arm[1] == "few" or arm[0] == "lru"]
"""Each arm with buffers that a layer overflows, and the cache that most have."""


@pytest.mark.parametrize(("name", "room", "parameters"), marked(ARMS, pytest.mark.slow, but=USUAL), ids=str)
@pytest.mark.parametrize("late", [True, False])
def test_every_call_waits_for_its_copies_and_every_copy_for_the_calls_before(
    name: str, room: str, parameters: dict[str, Any], late: bool
) -> None:
    """Copies made as late and as early as may be give what all experts in memory give."""
    streams = NotedStreams(late)
    n_bytes = None if parameters else ROOM[room]
    made = engine(name, Noted(n_bytes, "bf16", streams=streams), **parameters)
    found = answers(made, streams)
    assert streams.n_copies > 0
    executes_predictions = name in ("router-pf", "est-pf", "hybrid-pf")
    assert found == in_memory(name if executes_predictions else "dropless")
    counters = made.take_counters()
    assert (counters.bytes_copied or 0) % (EXPERT * BF16) == 0
    assert counters.bytes_copied == streams.n_copies // 3 * EXPERT * BF16


class ForgetsReads(StreamCopier):
    def start(self, parts: Sequence[Part], after: Mark | None = None) -> StreamJob:
        return super().start(parts)


class ForgetsToWait(StreamCopier):
    def start(self, parts: Sequence[Part], after: Mark | None = None) -> StreamJob:
        job = super().start(parts, after)
        job.wait = lambda: None  # type: ignore[method-assign]
        return job


@pytest.mark.parametrize(
    ("queue", "told"), [(ForgetsReads, "a copy may begin while"), (ForgetsToWait, "that nobody waited for")]
)
@pytest.mark.parametrize(("name", "given"), [("prefetch-hint", {}), ("lru", {"slots": 3})])
def test_the_notes_find_an_order_that_lacks_something(
    queue: type[StreamCopier], told: str, name: str, given: dict[str, Any]
) -> None:
    streams = NotedStreams()
    memory = Noted(None if given else ROOM["few"], "bf16", streams=streams, queue=queue)
    made = engine(name, memory, **given)
    with pytest.raises(AssertionError, match=told):
        answers(made, streams)


def test_the_host_waits_for_no_copy_while_a_request_is_answered() -> None:
    """Its counters are what it asks the device for, when the request has ended."""
    streams = NotedStreams()
    made = engine("prefetch-hint", Noted(ROOM["all"], "bf16", streams=streams))
    waited: list[int] = []
    made.reset()
    before = streams.n_host_waits
    with streams.watching():
        made.run(request(40, 6), lambda event, at_s: waited.append(streams.n_host_waits - before))
    assert waited == [0] * len(waited)
    assert len(waited) >= 3


def test_times_of_copies_and_waits_are_the_devices() -> None:
    """A microsecond a thing that a queue is given: spans follow each other, and lie in their step."""
    streams = NotedStreams()
    made = engine("prefetch-hint", Noted(ROOM["all"], "bf16", streams=streams))
    with streams.watching():
        made.run(request(40, 6), unheard)
    counters = made.take_counters()
    assert (counters.copying_s or 0) > 0
    steps = made.take_decode_steps()
    assert len(steps) == 5
    for step in steps:
        ends = [layer.end_s for layer in step.layers]
        assert ends == sorted(ends)
        assert [layer.layer for layer in step.layers] == [0, 1, 2, 3]
        assert 0 < ends[0] < ends[-1] < step.duration_s
        assert all(0 < copy.begin_s < copy.end_s for copy in step.copies)
        assert {copy.is_ahead for copy in step.copies} == {True, False}


def test_memory_that_cannot_be_pinned_is_one_line() -> None:
    """Of four layers of sixteen experts two fit."""
    streams = NotedStreams(pinned_bytes=2 * 16 * EXPERT * BF16)
    told = r"the experts take 9\.44 MB, and so much .*cannot be pinned for cpu \(out of memory: pin_memory\); free some"
    with pytest.raises(EngineError, match=told):
        engine("on-demand", Noted(ROOM["all"], "bf16", streams=streams))


def test_experts_in_a_narrow_form_are_not_copied_to_a_device() -> None:
    checkpoint = load_checkpoint(str(BUNDLED), torch.bfloat16, Quantisation(experts="int8"), experts_as_filed=True)
    with pytest.raises(EngineError, match="experts in a narrow form are not copied to cpu; leave quantise out"):
        ReferenceEngine(
            checkpoint, preset_parameters("on-demand")(), 32, torch_device="cpu", compute_dtype=torch.bfloat16,
            expert_memory=Noted(ROOM["all"], "int8"),
        )  # fmt: skip


def test_a_technique_that_learns_needs_a_profile_where_its_experts_are_copied_to_a_device() -> None:
    checkpoint = load_checkpoint(str(BUNDLED), torch.bfloat16, experts_as_filed=True)
    made = ReferenceEngine(
        checkpoint, preset_parameters("router-pf")(), 32, torch_device="cpu", compute_dtype=torch.bfloat16,
        expert_memory=Noted(ROOM["all"], "bf16"),
    )  # fmt: skip
    with pytest.raises(EngineError, match="router-pf copies experts to cpu, where it is not calibrated; give it"):
        made.calibrate([list(range(10, 40))])
