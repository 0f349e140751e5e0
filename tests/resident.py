"""By how much a process grows that answers with an engine. `python -m tests.resident` imports what that takes, and
measures each engine that it is asked for in a fork of itself, which has loaded nothing before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from engines.base import unheard
from engines.expert_memory import ExpertMemory
from engines.kernels.library import library
from engines.model.quantised import Form, Quantisation
from tests.test_expert_slots import engine, request


def resident(folder: str) -> tuple[int, int]:
    """Bytes of this process that are private, and those of files in the folder, or of files without a name."""
    status = Path("/proc/self/status").read_text()
    private = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024
    in_files, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_own = folder in line or "(deleted)" in line
        elif is_own and line.startswith("Rss:"):
            in_files += int(line.split()[1]) * 1024
    return private, in_files


def grown(folder: str, name: str, budget: int, form: Form, dtype: str) -> tuple[int, int, int]:
    """Bytes, private and of files, and experts that were copied into slots."""
    before = resident(folder)
    others: dict[str, object] = {} if name == "dropless" else {"expert_memory": ExpertMemory(budget, form)}
    if form not in ("fp32", "bf16"):
        others["quantise"] = Quantisation(experts=form)
    if name == "static":
        others["parameters"] = {"calibration_prompts": 1}
    made = engine(folder, name, getattr(torch, dtype), **others)
    made.run(request(96, 24), unheard)
    counted = made.take_counters()
    private, in_files = (after - one for after, one in zip(resident(folder), before, strict=True))
    return private, in_files, getattr(counted, "misses", None) or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    library()
    for asked in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.write(sys.stdout.fileno(), f"{json.dumps(grown(*json.loads(asked)))}\n".encode())
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"{asked}: its process failed")
