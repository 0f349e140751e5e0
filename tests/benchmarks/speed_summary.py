"""What the rows of the speed race say in short: ratios by form of weights, for each processor and length of prompt.

docs/engine.md has the lowest of the three models (`lowest_of_models`), the page of the race those of each model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from tests.benchmarks.measurement import Measurement
from tests.benchmarks.race_forms import FORMS, NEED_AVX512, PHASES, PROMPTS, conditions, context_of, place
from tests.benchmarks.race_models import MODELS, REAL, reads_more

Peer = Literal["transformers", "llama.cpp", "large GEMM", "streaming read"]
Pair = tuple[float | None, float | None]
"""Of prefill and of decode; None where a neighbour disturbed it, or it was not taken."""
LIMITS: tuple[Peer, Peer] = ("large GEMM", "streaming read")
RATE, LIBRARY, LARGE = "rate of the prompt", "were its products a library's", "large product"
"""On the page of a prompt's parts: a metric, and what it stands beside."""
AIMS: tuple[tuple[str, Peer, str, bool], ...] = (
    ("prefill", "llama.cpp", "a prompt as fast as llama.cpp's", False),
    ("decode", "llama.cpp", "decoding as fast as llama.cpp's", False),
    ("prefill", "large GEMM", "a prompt at 0.85 of the large product", False),
    ("decode", "streaming read", "decoding at its share of the streaming rate, keys of 16 bits counted", False),
    ("decode", "streaming read", "reading at its share of the streaming rate, keys of 32 bits counted", True),
)
"""A phase, what it stands beside, the aim in words, and whether what our keys and values read beyond 16 bits counts."""
MISSING = "—"


def processors(found: Sequence[Measurement]) -> list[str]:
    """Instruction sets and processors, as rows name them; those without AVX-512 last."""
    return sorted({place(m)[0] for m in found}, key=lambda named: ("AVX-512" not in named, "held" not in named, named))


def ratios(found: Sequence[Measurement], where: str, name: str, form: str, n_prompt: int, *peers: Peer) -> Pair:
    """peers: of both phases, or of each its own."""
    at = (where, list(MODELS).index(name), list(FORMS).index(form), n_prompt)
    of = [m for m in found if place(m) == at]

    def ratio(phase: str, peer: Peer) -> float | None:
        return next((m.ratio for m in of if m.metric == phase and str(m.peer_name).startswith(peer)), None)

    return ratio("prefill", peers[0]), ratio("decode", peers[-1])


def by_model(found: Sequence[Measurement]) -> str:
    """A table for each processor and prompt: forms, and each model's ratios to llama.cpp and to the limits."""
    tables = []
    for where in processors(found):
        for n_prompt in PROMPTS:
            rows = [(form, [_cells(found, where, name, form, n_prompt) for name in MODELS]) for form in FORMS]
            taken = [_row(form, *sum(cells, ())) for form, cells in rows if any(map(any, cells))]
            if not taken:
                continue
            heads = [head for name in MODELS for head in (f"{name}: x llama.cpp", "x limit")]
            tables.append(f"**{where}, prompt {n_prompt}:**\n\n" + "\n".join([*_header("weights", *heads), *taken]))
    return "\n\n".join(tables)


def _cells(found: Sequence[Measurement], where: str, name: str, form: str, n_prompt: int) -> tuple[str, ...]:
    """Empty where the race was not run."""
    pairs = [ratios(found, where, name, form, n_prompt, *peers) for peers in (("llama.cpp",), LIMITS)]
    return tuple(_pair(*pair) for pair in pairs) if any(pair != (None, None) for pair in pairs) else ("", "")


def not_taken(found: Sequence[Measurement]) -> str:
    """What the page still lacks, of each processor: forms of all models, or of those that are named."""
    taken = {m.conditions for m in found}
    lacking = []
    for where in processors(found):
        forms = [form for form in FORMS if form not in NEED_AVX512 or "AVX2" not in where]
        for n_prompt in PROMPTS:
            models = {f: [n for n in MODELS if conditions(n, f, n_prompt, where) not in taken] for f in forms}
            if told := "; ".join(_grouped(models)):
                lacking.append(f"{where}, prompt {n_prompt}: {told}")
    return ". ".join(lacking) or "none"


def _grouped(models_by_form: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The forms that lack the same models, and which."""
    for names in dict.fromkeys(tuple(names) for names in models_by_form.values() if names):
        forms = ", ".join(form for form, lacking in models_by_form.items() if tuple(lacking) == names)
        yield f"{forms} of {'all models' if len(names) == len(MODELS) else '; '.join(names)}"


def lowest_of_models(found: Sequence[Measurement], n_prompt: int, *peers: Peer) -> str:
    """Forms that were taken anywhere, and for each processor the lowest ratio of the models that were taken there.
    peers: as in `ratios`."""
    lines = _header("weights", *processors(found))
    for form in FORMS:
        pairs = [lowest(found, where, form, n_prompt, *peers) for where in processors(found)]
        if any(ratio is not None for pair in pairs for ratio in pair):
            lines.append(_row(form, *(_pair(*pair) for pair in pairs)))
    return "\n".join(lines)


def lowest(found: Sequence[Measurement], where: str, form: str, n_prompt: int, *peers: Peer) -> Pair:
    of_models = [ratios(found, where, name, form, n_prompt, *peers) for name in MODELS]
    prefill, decode = ([pair[i] for pair in of_models if pair[i] is not None] for i in range(len(PHASES)))
    return min(prefill, default=None), min(decode, default=None)


def aims_met(found: Sequence[Measurement]) -> str:
    """Of the rows that have an aim, how many reach it: by processor, length of prompt, phase and peer."""
    places = processors(found)
    lines = _header("aim", *places)
    for n_prompt in PROMPTS:
        for phase, peer, aim, counts_own in AIMS:
            cells = []
            for where in places:
                at = f", prompt {n_prompt}, {where}"
                of = [
                    m.ours * (own_reads(m) if counts_own else 1) >= m.target
                    for m in found
                    if m.conditions.endswith(at)
                    and m.metric == phase
                    and str(m.peer_name).startswith(peer)
                    and m.target
                ]
                cells.append(f"{sum(of)} of {len(of)}" if of else MISSING)
            lines.append(_row(f"{aim}, prompt of {n_prompt}", *cells))
    return "\n".join(lines)


def own_reads(m: Measurement) -> float:
    """Bytes that a token of ours reads, as a multiple of those that the limit of a row of the race counts."""
    _, name, form, n_prompt = place(m)
    return reads_more(list(MODELS)[name], list(FORMS.values())[form].weight_bits, context_of(n_prompt))


def beside_a_library(parts: Sequence[Measurement], where: str) -> str:
    """Of the rows of prefill-parts: a prompt's rate as a share of one with a library's products of the same shapes, and
    of the fastest large product."""
    lines = _header(f"weights, {where}", *MODELS)
    for form in FORMS:
        of_models = [[m for m in parts if m.conditions.startswith(f"{name}, {form}, ")] for name in MODELS]
        pairs = [
            tuple(
                next((m.ratio for m in of if m.metric == RATE and m.peer_name == peer and where in m.conditions), None)
                for peer in (LIBRARY, LARGE)
            )
            for of in of_models
        ]
        if any(map(any, pairs)):
            lines.append(_row(form, *(_pair(*pair) for pair in pairs)))
    return "\n".join(lines)


def of_real_shapes(found: Sequence[Measurement], where: str, n_prompt: int) -> str:
    """Of the rows of real-shapes: each form and shape beside llama.cpp."""
    lines = _header("weights", *REAL)
    for form in FORMS:
        pairs = []
        for name in REAL:
            of = [m for m in found if m.conditions == conditions(name, form, n_prompt, where)]
            beside = {m.metric: m.ratio for m in of if str(m.peer_name).startswith("llama.cpp")}
            pairs.append((beside.get("prefill"), beside.get("decode")))
        if any(map(any, pairs)):
            lines.append(_row(form, *(_pair(*pair) for pair in pairs)))
    return "\n".join(lines)


def _pair(prefill: float | None, decode: float | None) -> str:
    if prefill is None and decode is None:
        return MISSING
    return " / ".join(MISSING if one is None else f"{one:.2f}" for one in (prefill, decode))


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
