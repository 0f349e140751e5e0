"""Fixed prompt and decode lengths (Fig. 8, 9 and 10 of source 002), of which the text gives ranges alone.

A run over p prompt tokens and d decoded ones spends p e_prefill + d e_decode. Decode energy and speed are those of
`other_models` (from one row of each engine and phone). Prefill draws the same power and is three times as fast
(§2.2, of MNN on one phone; taken for every engine and phone here). MNN-AECS prefills as MNN does. Keys and values
that a long prompt adds to what decoding reads are left out: they are the same for every engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from harness.reproduce.findings import Finding
from harness.reproduce.ledger import ledger
from harness.reproduce.mnn_aecs.other_models import predicted
from harness.reproduce.mnn_aecs.places import ANCHOR_MODEL, MODELS, PHONES, Cell, cells
from harness.reproduce.printed import Span

PROMPTS = (64, 256, 1024)
DECODES = (128, 256, 512)
COMPARED = ("executorch", "llama.cpp", "mllm")
"""Figure 8's."""
PREFILL_ROW = "002-033"
OURS = "MNN-AECS"


def prefill_speedup() -> float:
    """Prefill speed over decode speed."""
    return ledger().calibration(PREFILL_ROW)


def energy_per_decoded_token(phone: str, engine: str, model: str, prompt: int, decode: int) -> float | None:
    """Of the whole run, in the unit of the tables; None where the engine runs nothing there."""
    decoding = predicted(phone, engine, model, "energy")
    speed = predicted(phone, engine, model, "speed")
    own = "MNN" if engine == OURS else engine
    prefill_energy, prefill_speed = (predicted(phone, own, model, q) for q in ("energy", "speed"))
    if decoding is None or speed is None or prefill_energy is None or prefill_speed is None:
        return None
    power = prefill_energy * prefill_speed
    return decoding + prompt / decode * power / (prefill_speed * prefill_speedup())


def _pairs(engine: str) -> list[tuple[str, str]]:
    """Phones and models that the source ran on both."""
    return [
        (phone, model)
        for phone in PHONES
        for model in MODELS
        if all(Cell(phone, one, model, "energy") in cells() for one in (engine, OURS))
    ]


def energy_reduction(
    engine: str, prompts: Iterable[int], decodes: Iterable[int], phones: Iterable[str] = PHONES
) -> float:
    """1 - geometric mean over lengths, phones and models of MNN-AECS over `engine`."""
    lengths, kept = [(p, d) for p in prompts for d in decodes], set(phones)
    ratios = [
        _ratio(energy_per_decoded_token(phone, OURS, model, p, d), energy_per_decoded_token(phone, engine, model, p, d))
        for phone, model in _pairs(engine)
        if phone in kept
        for p, d in lengths
    ]
    return 1.0 - statistics.geometric_mean(ratios)


def speedup(engine: str, phones: Iterable[str] = PHONES) -> float:
    """Geometric mean over phones and models of MNN-AECS's decode speed over `engine`'s, less 1; at any length."""
    kept = set(phones)
    ratios = [
        _ratio(predicted(phone, OURS, model, "speed"), predicted(phone, engine, model, "speed"))
        for phone, model in _pairs(engine)
        if phone in kept
    ]
    return statistics.geometric_mean(ratios) - 1.0


def _ratio(ours: float | None, other: float | None) -> float:
    assert ours is not None
    assert other is not None
    return ours / other


def _range(values: Iterable[float]) -> Span:
    """In percent."""
    found = [100.0 * value for value in values]
    return Span(min(found), max(found))


def findings() -> Iterable[Finding]:
    lengths = [((p,), DECODES) for p in PROMPTS] + [(PROMPTS, (d,)) for d in DECODES]
    for n, (prompts, decodes) in enumerate(lengths):
        reductions = [energy_reduction(engine, prompts, decodes) for engine in COMPARED]
        yield Finding(
            f"002-{125 + n}",
            _range(reductions),
            "shape",
            note="least and most of three engines; prefill at 3 x decode speed",
        )
    for n in range(len(lengths)):
        yield Finding(
            f"002-{131 + n}",
            _range(speedup(engine) for engine in COMPARED),
            "shape",
            note="least and most of three engines; the same at every length, for keys and values are left out",
        )
    six = [phone for phone in PHONES if phone != "Meizu 21"]
    yield Finding(
        "002-137",
        _range(energy_reduction("MNN", PROMPTS, DECODES, [phone]) for phone in six),
        "shape",
        note="least and most of six phones",
    )
    yield Finding("002-138", 100.0 * energy_reduction("MNN", PROMPTS, DECODES, ["Meizu 21"]), "shape")
    yield Finding("002-139", -100.0 * speedup("MNN", ["Honor V30 Pro"]), "shape", note=_AT_ANY)
    others = _range(speedup("MNN", [phone]) for phone in PHONES if phone != "Honor V30 Pro")
    yield Finding(
        "002-140",
        others,
        "shape",
        note=_AT_ANY,
        explanation=(
            f"with {ANCHOR_MODEL}, from which ours starts, Table 9 itself has MNN-AECS 2 % slower than MNN on the"
            " Mate 40 Pro and the Galaxy A56; the figure of fixed lengths has no phone but one slower"
        ),
    )


_AT_ANY = "at any length: the ratio of the two anchors"
