"""CPU time of the engine's threads while idle and while it decodes, by how long they look for work before they sleep.

python -m tests.benchmarks.idle_threads [--turns 5]

A worker that has nothing to do looks for the next job for a millisecond, and sleeps until it is called. The other ways
are here for comparison: it sleeps at once, or it never does. All ways take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from engines.kernels.library import library
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from tests.benchmarks.decode_roads import BUNDLED, N_NEW, request
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.benchmarks.race_models import MODELS, write_model
from tests.benchmarks.timing import between, instant

NAME = "idle-threads"
IDLE_S = 1.0
N_REQUESTS = 8
NEVER = "never sleeping"
SPINS_US = {"looking for 1 ms": 1000, "sleeping at once": 0, NEVER: 60_000_000}
"""By name, how long a worker looks for a job. The first is what the pool does."""


class Spent(NamedTuple):
    """idle: CPU seconds a second while nobody asks. The next two: of a decoded token. is_quiet: nobody else ran."""

    idle: float
    token_cpu_s: float
    token_s: float
    is_quiet: bool


def decoded(engine: ReferenceEngine, seed: int) -> tuple[float, float]:
    """CPU seconds and seconds of this process, from the first token to the last."""
    stamps: list[tuple[float, float]] = []
    engine.run(request(seed), lambda _event, _at_s: stamps.append((time.process_time(), time.perf_counter())))
    (_, (first_cpu_s, first_s), (last_cpu_s, last_s)) = stamps
    return last_cpu_s - first_cpu_s, last_s - first_s


def once(engine: ReferenceEngine, kernels: ctypes.CDLL, spin_us: int) -> Spent:
    kernels.joulebench_spin(spin_us)
    decoded(engine, 0)
    begin = instant()
    found = [decoded(engine, seed) for seed in range(N_REQUESTS)]
    begin_cpu_s, begin_s = time.process_time(), time.perf_counter()
    time.sleep(IDLE_S)
    idle = (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)
    token_cpu_s, token_s = (sum(of) / (N_REQUESTS * (N_NEW - 1)) for of in zip(*found, strict=True))
    return Spent(idle, token_cpu_s, token_s, between(begin, instant()).is_quiet)


def spent(source: str, n_turns: int) -> Mapping[str, list[Spent]]:
    kernels = library()
    assert kernels is not None, "without kernels there are no threads of ours"
    engine = ReferenceEngine(load_checkpoint(source, torch.float32), DroplessParameters())
    found: dict[str, list[Spent]] = {name: [] for name in SPINS_US}
    for _ in range(n_turns):
        for name, spin_us in SPINS_US.items():
            found[name].append(once(engine, kernels, spin_us))
    kernels.joulebench_spin(next(iter(SPINS_US.values())))
    decoded(engine, 0)  # those that never sleep read the new limit behind a job
    return found


def rows(model: str, found: Mapping[str, list[Spent]]) -> list[Measurement]:
    base = found[NEVER]
    n_turns = len(base)
    n_disturbed = sum(not turn.is_quiet for turns in found.values() for turn in turns)
    note = f"{n_turns} {'turn' if n_turns == 1 else 'turns'} of each"
    if n_disturbed:
        note += f", DISTURBED by other processes: {n_disturbed} of {n_turns * len(found)}"
    made = []
    for name, turns in found.items():
        where = f"{model}, f32, {torch.get_num_threads()} threads, workers {name}"
        for field, metric, unit, factor in (
            ("idle", "CPU time while idle", "s/s", 1.0),
            ("token_cpu_s", "CPU time of a decoded token", "ms", 1e3),
            ("token_s", "time of a decoded token", "ms", 1e3),
        ):
            ours, never = (factor * statistics.median(getattr(turn, field) for turn in of) for of in (turns, base))
            peer = (None, None) if name == NEVER else (never, NEVER)
            row = measured(metric, ours, unit, where, *peer, note=note)
            # Of a disturbed token there is no ratio; who sleeps is not disturbed.
            made.append(row.model_copy(update={"ratio": None}) if n_disturbed and field != "idle" else row)
    return made


REMARKS = f"""Between two jobs a worker of the kernels looks for the next one for a millisecond, then it sleeps until it
is called. The rows compare this with a worker that sleeps at once, and with one that never does. CPU time is that of
the whole process. Idle: {IDLE_S:g} s after a request, the engine loaded. Prompts of 32 tokens, {N_NEW} new ones,
{N_REQUESTS} requests a turn, all ways in turn. One thread of two is the caller's, who waits for nobody while idle."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    n_turns = parser.parse_args().turns
    found = rows(BUNDLED, spent(BUNDLED, n_turns))
    with tempfile.TemporaryDirectory() as folder:
        name = next(iter(MODELS))
        write_model(name, Path(folder))
        found += rows(name, spent(folder, n_turns))
    title = "What do the engine's threads cost while idle, and while they wait for each other?"
    write_page(NAME, title, beside_other_machines(NAME, found), REMARKS)


if __name__ == "__main__":
    main()
