"""What token time stamps cost: decoding with them against the same loop without.

python -m tests.benchmarks.time_stamps

Three loops decode the same tokens, one turn each in rotation, so that a busy neighbour slows all alike: a bare one that
does nothing but compute and choose; the same with a stamp on each token; and the engine, with its listener marking a
meter at the phase edges as in a trial, its answers' bookkeeping, stop strings and the check for numbers that are none.
A turn's ratio is its time over that of the bare turn beside it. Stamps follow a value that the next step needs on the
host anyway, so there is nothing that they wait for.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from devices.clock import MonotonicClock
from devices.meters.modelled import ModelledMeter, load_watts_sheet
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.techniques.context import NOTHING
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Request
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.race_models import write_model
from tests.benchmarks.timing import MAX_FOREIGN_SHARE, Timed, between, instant

BUNDLED = "bundled:tiny-qwen3-moe"
LARGER = "16 experts, top 2, width 1024"
N_PROMPT, N_NEW = 64, 64
N_TURNS = 101
N_STAMPS = 100_000
TARGET = 1.01

Turn = Callable[[], Timed]
"""Answers the prompt once: the time from the first token to the last."""


def prompt() -> tuple[int, ...]:
    return tuple(range(8, 8 + N_PROMPT))


def bare(checkpoint: Checkpoint, stamped: bool) -> Turn:
    """stamped: each token's time is taken on the run's clock and kept."""
    model, cache, now_s = Transformer(checkpoint), KeyValueCache(checkpoint.config), MonotonicClock().now_s
    technique, shown = dropless(), Shown(NOTHING, None)

    @torch.inference_mode()
    def turn() -> Timed:
        cache.start(N_PROMPT + N_NEW)
        hidden_TH, _ = model.forward(torch.tensor(prompt()), cache, technique, "prefill")
        token = int(model.logits(hidden_TH[-1:])[0].argmax())
        times_s: list[float] = []
        before = instant()  # which reads a file, so the time begins anew after it
        started_s = time.perf_counter()
        for _ in range(N_NEW - 1):
            decoded = model.decode(token, cache, technique, shown)
            assert decoded is not None  # one call of the kernels, as the engine makes it
            assert decoded.largest is not None
            _, token = decoded.largest
            if stamped:
                times_s.append(now_s())
        seconds = time.perf_counter() - started_s
        return Timed(seconds, between(before, instant()).is_quiet)

    return turn


def engine(checkpoint: Checkpoint) -> Turn:
    clock = MonotonicClock()
    meter = ModelledMeter(0.05, clock, load_watts_sheet("generic"))
    meter.open()
    reference = ReferenceEngine(checkpoint, DroplessParameters(), now_s=clock.now_s, threads=1)
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=prompt(), max_new_tokens=N_NEW)

    def turn() -> Timed:
        edges = []

        def on_phase(event: str, at_s: float) -> None:
            meter.mark()
            edges.append(instant())

        meter.start()
        completion = reference.run(request, on_phase)
        meter.stop()
        assert completion.n_generated == N_NEW, "an end token cut the answer short; take another prompt"
        _, first, last = edges
        # The stamps' own times: what follows the last one, up to its edge, is not decoding.
        return Timed(completion.token_times_s[-1] - completion.token_times_s[0], between(first, last).is_quiet)

    return turn


def ratios(name: str, checkpoint: Checkpoint) -> list[Measurement]:
    turns = [bare(checkpoint, False), bare(checkpoint, True), engine(checkpoint)]
    for turn in turns:
        turn()  # warm-up
    times: list[list[Timed]] = [[], [], []]
    for number in range(N_TURNS):
        for offset in range(len(turns)):
            index = (number + offset) % len(turns)
            times[index].append(turns[index]())
    without, stamped, whole = times
    conditions = f"{name}, {N_NEW - 1} tokens after {N_PROMPT}, one thread"
    return [
        row("time stamps alone", stamped, without, conditions, TARGET),
        row("stamps, meter marks and all else that the engine does", whole, without, conditions, None),
    ]


def one_stamp() -> Measurement:
    """A reading of the run's clock, kept in a list: too short to be seen in a ratio of whole turns."""
    now_s = MonotonicClock().now_s
    times_s: list[float] = []
    started_s = time.perf_counter()
    for _ in range(N_STAMPS):
        times_s.append(now_s())
    each_s = (time.perf_counter() - started_s) / N_STAMPS
    return measured("one stamp by itself", each_s * 1e6, "µs", f"mean of {N_STAMPS}")


def row(
    metric: str, some: Sequence[Timed], without: Sequence[Timed], conditions: str, target: float | None
) -> Measurement:
    """The median over turns of the ratio to the bare turn of the same rotation, quiet ones where there are any."""
    pairs = list(zip(some, without, strict=True))
    quiet = [(a, b) for a, b in pairs if a.is_quiet and b.is_quiet]
    counted = quiet if len(quiet) > 1 else pairs
    of_pairs = sorted(a.seconds / b.seconds for a, b in counted)
    low, median, high = statistics.quantiles(of_pairs, n=4)
    note = f"quartiles {low:.4f} to {high:.4f}; {len(quiet)} of {len(pairs)} turns were quiet"
    each_us = 1e6 * statistics.median(b.seconds for _, b in counted) / (N_NEW - 1)
    return measured(
        metric, median, "x", conditions, target=target, note=f"{note}; {each_us:.0f} µs a token without stamps"
    )


REMARKS = f"""How many times as long decoding takes as in a loop that computes and chooses the same tokens and does
nothing else: the median over {N_TURNS} rotations. The target is for the stamps. The other row is what the engine adds
in all; it is a fixed time per token, so it weighs most on the smallest model. A turn is quiet when other processes take
no more than {MAX_FOREIGN_SHARE:.0%} of the machine meanwhile; where some are, only they count."""


def larger(folder: Path) -> Checkpoint:
    write_model(LARGER, folder)
    return load_checkpoint(str(folder), torch.bfloat16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [one_stamp(), *ratios(f"{BUNDLED}, fp32", load_checkpoint(BUNDLED, torch.float32))]
    with tempfile.TemporaryDirectory() as scratch:
        found += ratios(f"{LARGER}, bf16", larger(Path(scratch)))
    write_page("time-stamps", "What time stamps cost", found, REMARKS)
