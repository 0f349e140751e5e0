"""Where the time to the first token goes: kernels that time their own parts, and what Python adds.

python -m tests.benchmarks.prefill_parts [MODEL ...] [--forms f32 int8 ...] [--prompt 512] [--turns 5]

The kernels are built with the parts' clocks for this alone, and one thread computes: its CPU time counts, which other
processes disturb little. RACE_MODELS names a folder where models are kept, as for tests.benchmarks.engine_speed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.kernels.compile import FLAGS_VARIABLE, NATIVE
from engines.kernels.library import library, loaded
from engines.model import transformer
from engines.model.checkpoints import load_checkpoint
from engines.profiling import ChoiceCounts
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from tests.benchmarks.decode_parts import PARTS
from tests.benchmarks.engine_speed import folder_of, instructions_here, unheld, written
from tests.benchmarks.limits import Product, large_products, products_of_shapes
from tests.benchmarks.measurement import Measurement, measured, merged, read_json, write_page
from tests.benchmarks.race_forms import FORMS
from tests.benchmarks.race_models import BASE, MODELS, add_models, is_sparse, random_request
from tests.benchmarks.speed_summary import LARGE, LIBRARY, RATE

PAGE = "prefill-parts"
OUTSIDE = "plans, rows of torch and Python"
WHOLE = "whole prompt"
PRODUCTS = (PARTS[0], PARTS[3], PARTS[5], PARTS[6])
SHARE = 0.85
"""Of the fastest large product of the same arithmetic, that a prompt is to reach."""
OWN_SHAPES = "the same shapes"
WAITING = "waiting for the other threads"


def clocked(owner: Any, name: str, part: str, seconds: dict[str, float]) -> None:
    """What Python calls by this name is a part of its own, with the kernels that it calls."""
    called: Callable[..., object] = getattr(owner, name)

    def timed(*arguments: Any) -> object:
        begin = time.process_time()
        result = called(*arguments)
        seconds[part] += time.process_time() - begin
        return result

    setattr(owner, name, timed)


def turn(engine: ReferenceEngine, n_prompt: int, python_s: dict[str, float]) -> Mapping[str, float]:
    """Seconds of each part of a prompt, and of all of it."""
    kernels = library()
    assert kernels is not None
    parts = (ctypes.c_double * len(PARTS))()
    edges: list[float] = []
    found: dict[str, float] = {}

    def heard(event: object, at_s: float) -> None:
        edges.append(time.process_time())
        kernels.joulebench_parts(parts)
        if len(edges) == 1:
            python_s.clear()
        if len(edges) == 2:
            found.update((name, s) for name, s in zip(PARTS, parts, strict=True) if name != WAITING)
            found.update(python_s)

    engine.run(random_request(n_prompt, n_new=2), heard)
    whole_s = edges[1] - edges[0]
    return found | {OUTSIDE: whole_s - sum(found.values()), WHOLE: whole_s}


def flop(name: str, n_prompt: int) -> Mapping[str, int]:
    """Of the parts that multiply matrices."""
    hidden, dim, layers = (BASE[key] for key in ("hidden_size", "head_dim", "num_hidden_layers"))
    queries, keys = (dim * BASE[key] for key in ("num_attention_heads", "num_key_value_heads"))
    model, n_rows = MODELS[name], n_prompt
    width = model["intermediate_size"] if not is_sparse(name) else model["moe_intermediate_size"]
    if is_sparse(name):
        n_rows *= model["num_experts_per_tok"]
    found = {
        PARTS[0]: 2 * n_prompt * hidden * (queries + 2 * keys),
        PARTS[2]: 4 * queries * (n_prompt * (n_prompt + 1) // 2),
        PARTS[3]: 2 * n_prompt * hidden * queries,
        PARTS[5]: 2 * n_rows * hidden * 2 * width,
        PARTS[6]: 2 * n_rows * hidden * width,
    }
    found[WHOLE] = sum(found.values())
    return {part: int(layers * of_layer) for part, of_layer in found.items()}


def rows_of_experts(engine: ReferenceEngine, name: str, n_prompt: int) -> Sequence[int]:
    """How many tokens of a random prompt each expert of the first layer gets; all of them in a dense model."""
    if not is_sparse(name):
        return [n_prompt]
    counts = engine.layer_observer = ChoiceCounts()
    engine.run(random_request(n_prompt, n_new=1), lambda event, at_s: None)
    engine.layer_observer = None
    return counts.profile(MODELS[name]["num_experts_per_tok"], 1).tokens_per_expert[0]


def shapes(name: str, n_prompt: int, rows: Sequence[int]) -> Mapping[str, tuple[Sequence[int], int, int]]:
    """Of one layer's products with weights: rows of each matrix, the columns shared, and outputs."""
    hidden, dim = BASE["hidden_size"], BASE["head_dim"]
    queries, keys = (dim * BASE[key] for key in ("num_attention_heads", "num_key_value_heads"))
    width = MODELS[name]["moe_intermediate_size" if is_sparse(name) else "intermediate_size"]
    found = (
        ([n_prompt], hidden, queries + 2 * keys),
        ([n_prompt], queries, hidden),
        (rows, hidden, 2 * width),
        (rows, width, hidden),
    )
    return dict(zip(PRODUCTS, found, strict=True))


class FastestProducts:
    """The fastest of several ways in this thread, by its CPU time: the best of all that were taken."""

    def __init__(self, products: Mapping[str, tuple[int, Product]]) -> None:
        """products: by way, with the FLOP of each."""
        self._products = products
        self._flop_per_s: dict[str, float] = {}

    def take(self) -> None:
        for way, (flop, work) in self._products.items():
            begin = time.process_time()
            work()
            rate = flop / (time.process_time() - begin)
            self._flop_per_s[way] = max(rate, self._flop_per_s.get(way, 0.0))

    @property
    def fastest(self) -> tuple[float, str]:
        """FLOP/s, and which it was."""
        return max((rate, way) for way, rate in self._flop_per_s.items())


def rows(
    name: str, folder: Path, form: str, n_prompt: int, n_turns: int, python_s: dict[str, float]
) -> Iterator[Measurement]:
    """python_s: what parts outside of the kernels take, as they end."""
    checkpoint = load_checkpoint(str(folder), FORMS[form].dtype, FORMS[form].quantise)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=1024)
    arithmetic = FORMS[form].arithmetic
    large, turns = FastestProducts(large_products(arithmetic)), []
    alike = {
        part: FastestProducts(products_of_shapes(arithmetic, *shape))
        for part, shape in shapes(name, n_prompt, rows_of_experts(engine, name, n_prompt)).items()
    }
    for _ in range(n_turns + 1):
        for products in (large, *alike.values()):
            products.take()
        turns.append(turn(engine, n_prompt, python_s))
    turns = turns[1:]  # the first warms up
    fastest = min(turns, key=lambda found: found[WHOLE])
    slowest = max(found[WHOLE] for found in turns)
    here = f"{name}, {form}, prompt {n_prompt}, one thread, {instructions_here()}"
    work = flop(name, n_prompt)
    how = f"fastest of {n_turns} turns; the slowest took {slowest / fastest[WHOLE]:.2f} times as long"
    for part, seconds in fastest.items():
        peer, peer_name = (None, None) if part == WHOLE else (fastest[WHOLE] * 1e3, WHOLE)
        notes = [how]
        if part in work:
            notes.insert(0, f"{work[part] / seconds / 1e9:.0f} GFLOP/s")
        yield measured(part, seconds * 1e3, "ms", here, peer, peer_name, note="; ".join(notes))
    library_s = {part: work[part] / products.fastest[0] for part, products in alike.items()}
    for part, seconds in library_s.items():
        peer, peer_name = work[part] / seconds / 1e9, f"{alike[part].fastest[1]}, {OWN_SHAPES}"
        yield measured(f"{part}: rate", work[part] / fastest[part] / 1e9, "GFLOP/s", here, peer, peer_name, note=how)
    peer = work[WHOLE] / with_products_in(library_s, fastest) / 1e9
    note = f"the peer is derived from the rows above; {how}"
    yield measured(RATE, work[WHOLE] / fastest[WHOLE] / 1e9, "GFLOP/s", here, peer, LIBRARY, note=note)
    rate, way = large.fastest
    large_s = {part: work[part] / rate for part in PRODUCTS}
    for metric, seconds, target in (
        (RATE, fastest[WHOLE], SHARE),
        ("the same, were its products as fast as the large one", with_products_in(large_s, fastest), None),
    ):
        note = f"{way}; {how}" if target else f"derived from the rows above; {way}"
        yield measured(
            metric,
            work[WHOLE] / seconds / 1e9,
            "GFLOP/s",
            here,
            rate / 1e9,
            LARGE,
            target and target * rate / 1e9,
            note,
        )


def with_products_in(products_s: Mapping[str, float], seconds: Mapping[str, float]) -> float:
    """Seconds of a prompt whose products with weights take these, and all else what it takes."""
    return seconds[WHOLE] + sum(products_s[part] - seconds[part] for part in PRODUCTS)


REMARKS = """From the prompt to its first token, batch 1: CPU time of one thread, which does all. "Input laid out" is
what puts tokens into panels and rounds them there. "Norms and sums" has the sums between blocks, and the embedding.
What is left is Python: plans of experts, and rows that torch makes. A ratio is the part's share of the whole. Two
threads read the same caches and memory, so that each has less of them: a prompt takes them more than half of this
time.

A large product is no peer of an expert's: that has few rows, and its weights come from memory. So each product stands
beside the fastest that a library (torch, oneDNN) makes of the very same shapes: as many rows for each expert as a
random prompt gives it in the first layer, one call for each, weights laid out before. The library's input is laid out
and rounded already, and nothing is gathered, gated or summed. "Rate of the prompt" beside "were its products a
library's" is above 1 where no library's products would make the prompt faster.

The last two rows of a form say how much of the fastest large product of the same arithmetic a prompt reaches, and how
much it would if its four products with weights ran at that rate and all else took what it takes: attention, which is
fp32 but in the forms bf16 by bf16 and "with bf16 attention", norms, layout and Python. A target above the last row
cannot be reached by products of that rate alone. A last row below the one before says that the prompt's products are
faster already."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["f32", "int8 by int8"], help="how weights are held"
    )
    parser.add_argument("--prompt", type=int, default=512, help="its length, in tokens")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    flags = os.environ.get(FLAGS_VARIABLE, NATIVE)
    os.environ[FLAGS_VARIABLE] = f"{flags} -DJOULEBENCH_PARTS -DJOULEBENCH_PARTS_OF_CPU"
    if lacking := unheld():
        parser.error(f"the kernels are held to {loaded().instruction_set}; set {' '.join(lacking)} too")
    python_s: dict[str, float] = defaultdict(float)
    clocked(transformer.Transformer, "logits", "head", python_s)
    for name in arguments.models:
        with folder_of(name) as folder:
            written(name, folder, ())
            for form in arguments.forms:
                found = list(rows(name, folder, form, arguments.prompt, arguments.turns, python_s))
                print(form, *(f"{m.metric} {m.ours:.1f};" for m in found), flush=True)
                page = merged(read_json(PAGE), found)
                write_page(PAGE, "Where does the time of a prompt go?", page, REMARKS)


if __name__ == "__main__":
    main()
