"""NPUMoE's arms priced on sheets of its machines: chunk x prompt x arm x capacity x group size x model.

Arms are presets: four baselines and four ablations. Nothing of the source but the sheet's constants enters a price.
"""

from __future__ import annotations

from functools import cache

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, PhaseCost, PricedCell, parameters, price_cell
from engines.pricing.published_shapes import NAMED_SHAPES
from harness.reproduce.npumoe import arithmetic
from harness.reproduce.npumoe.routing import STATED_IMBALANCE, QuartileRouting
from results.records import COMM

IMBALANCES = (1.0, 1.5, 2.0, 2.4, 3.0)
"""Times that a quarter of the experts is as busy as the mean: the source states 2 as an example, and publishes none."""
STATED = ((1024, 256), (1024, 512), (4096, 512), (4096, 1024))
"""(prompt, chunk) of §5.3."""
PROMPTS, CHUNKS = (1024, 4096), (256, 512, 1024)
DECODED = 8
"""Tokens of an answer on average (§5.1)."""
BASELINES = ("coreml-cpu", "coreml-naive", "anemll")
ABLATIONS = ("npumoe-base", "npumoe-t", "npumoe-tg", "npumoe")
OURS = "npumoe"
WORDS = {
    "coreml-cpu": "Core ML CPU",
    "coreml-naive": "Core ML naive",
    "anemll": "ANEMLL",
    "gpu": "GPU",
    "npumoe-base": "base",
    "npumoe-t": "T",
    "npumoe-tg": "TG",
    "npumoe": "NPUMoE",
}
"""What the source calls them."""
PHI, TINY = "phi-3.5-moe", "phi-tiny-moe"
ULTRA, MAX = "m2-ultra", "m2-max"
ROUTING = QuartileRouting()
Given = tuple[tuple[str, object], ...]
"""Parameters of a technique beside its preset's."""


@cache
def priced(
    arm: str,
    prompt: int,
    chunk: int,
    model: str = PHI,
    sheet: str = ULTRA,
    given: Given = (),
    decode_steps: int = DECODED,
    imbalance: float = STATED_IMBALANCE,
) -> PricedCell:
    return price_cell(
        Cell(
            load_sheet(sheet),
            NAMED_SHAPES[model],
            parameters(arm, **dict(given)),
            QuartileRouting(imbalance),
            prompt,
            decode_steps,
            chunk,
        )
    )


def prefill(arm: str, prompt: int, chunk: int, model: str = PHI, sheet: str = ULTRA, given: Given = ()) -> PhaseCost:
    found = priced(arm, prompt, chunk, model, sheet, given).prefill
    assert found is not None, "all models fit in the memory of an M2 Ultra"
    return found


def prefill_only(
    arm: str, prompt: int, chunk: int, model: str = PHI, given: Given = (), sheet: str = ULTRA
) -> PhaseCost:
    found = priced(arm, prompt, chunk, model, sheet, given, decode_steps=0).prefill
    assert found is not None
    return found


def naive_rows(chunk: int) -> Given:
    """Of Core ML naive: graphs of as many rows as Table 4's padding says at chunk 256, and in proportion elsewhere."""
    return (("rows", round(arithmetic.naive_rows() * chunk / 256)), ("overflow", "order"))


def in_groups(prompt: int, chunk: int, model: str, group: int, capacity: int) -> PhaseCost:
    """TG in graphs of `group` experts, whose tiers have twice, once and half of `capacity` rows."""
    shape = NAMED_SHAPES[model]
    once = capacity / (chunk * shape.top_k / shape.n_experts)
    given = (("group_size", group), ("multiples", (2 * once, once, once / 2)))
    return prefill_only("npumoe-tg", prompt, chunk, model, given)


def ttft_gain(arm: str, prompt: int, chunk: int, ours: str = OURS, given: Given = ()) -> float:
    """TTFT of an arm over ours. given: of the arm."""
    return prefill(arm, prompt, chunk, given=given).seconds / prefill(ours, prompt, chunk).seconds


def of_imbalance(arm: str, prompt: int, chunk: int, imbalance: float) -> PhaseCost:
    """A prefill on another routing."""
    found = priced(arm, prompt, chunk, decode_steps=0, imbalance=imbalance).prefill
    assert found is not None
    return found


@cache
def gains_by_imbalance(arm: str, prompt: int, chunk: int) -> tuple[float, ...]:
    """TTFT of an arm over ours, for each of `IMBALANCES`."""
    return tuple(
        of_imbalance(arm, prompt, chunk, one).seconds / of_imbalance(OURS, prompt, chunk, one).seconds
        for one in IMBALANCES
    )


def ttft_s(arm: str, prompt: int, chunk: int) -> float:
    return prefill(arm, prompt, chunk).seconds


def dropped_percent(phase: PhaseCost) -> float:
    return 100 * phase.counters.dropped_pairs / phase.counters.routed_pairs


def padded_percent(phase: PhaseCost) -> float:
    return 100 * phase.counters.padded_rows / phase.counters.computed_rows


def seconds_whole(phase: PhaseCost) -> float:
    return phase.seconds


def joules_of(phase: PhaseCost) -> float:
    total = phase.total_j
    assert total is not None, "the sheet has the watts of all its units"
    return total


def mj_per_token(arm: str, prompt: int, chunk: int) -> float:
    """Of the prefill."""
    return joules_of(prefill(arm, prompt, chunk)) / prompt * 1e3


def energy_gain(arm: str, prompt: int, chunk: int, ours: str = OURS) -> float:
    """Joules of an arm's prefill over ours."""
    return joules_of(prefill(arm, prompt, chunk)) / joules_of(prefill(ours, prompt, chunk))


def end_to_end_gain(arm: str, prompt: int, chunk: int, given: Given = ()) -> float:
    """Time of prefill and answer over ours. given: of ours."""
    theirs, ours = priced(arm, prompt, chunk).e2e_s, priced(OURS, prompt, chunk, given=given).e2e_s
    assert theirs is not None
    assert ours is not None
    return theirs / ours


def end_to_end_energy_gain(arm: str, prompt: int, chunk: int) -> float:
    theirs, ours = priced(arm, prompt, chunk).total_j, priced(OURS, prompt, chunk).total_j
    assert theirs is not None
    assert ours is not None
    return theirs / ours


def prefill_share(arm: str, prompt: int, chunk: int) -> float:
    """Percent of the time of prefill and answer."""
    whole_s = priced(arm, prompt, chunk).e2e_s
    assert whole_s is not None
    return 100 * prefill(arm, prompt, chunk).seconds / whole_s


def seconds_of(phase: PhaseCost, operation: str) -> float:
    return sum(seconds for (name, _), seconds in phase.spent.items() if name == operation)


def expert_share(arm: str, prompt: int, chunk: int) -> float:
    """Percent of the TTFT that experts take."""
    phase = prefill(arm, prompt, chunk)
    return 100 * seconds_of(phase, "expert FFN") / phase.seconds


BLOCK = ("router", "gather", "padding", "expert FFN", "scatter", "residual")
"""Operations of an MoE block."""


def dispatch_share(prompt: int, chunk: int) -> float:
    """Percent of the naive arm's MoE blocks that Core ML's own dispatch takes."""
    naive_launch_s = load_sheet(ULTRA).units["npu"].s_per_naive_launch
    assert naive_launch_s is not None
    phase = prefill("coreml-naive", prompt, chunk)
    n_launches = phase.counters.expert_calls
    block_s = sum(seconds_of(phase, name) for name in BLOCK)
    return 100 * n_launches * naive_launch_s.value / block_s


def cpu_busy_s(arm: str, prompt: int, chunk: int) -> float:
    return sum(seconds for (_, unit), seconds in prefill(arm, prompt, chunk).spent.items() if unit == "cpu")


def comm_j(arm: str, prompt: int, chunk: int) -> float:
    joules = prefill(arm, prompt, chunk).joules[COMM]
    assert joules is not None
    return joules


def padding_percent(arm: str, prompt: int, chunk: int) -> float:
    """How much longer a prefill takes for the multiplications of its padded rows."""
    phase = prefill(arm, prompt, chunk)
    price = load_sheet(ULTRA).units["npu"].kernels["expert_ffn"].s_per_flop
    assert price is not None
    padded_s = phase.counters.padded_rows * 2.0 * NAMED_SHAPES[PHI].expert_weights * price.value
    return 100 * padded_s / (phase.seconds - padded_s)
