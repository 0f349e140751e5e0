"""Three fake phones behind one adb server, and a plan that runs two programs on each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from results.environments import Environment
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.phone import FakePhone
from tests.plans import FAST, Raw, raw_plan
from tests.run_builders import ENVIRONMENT

SERIALS = ("FAKE0001", "FAKE0002", "FAKE0003")
PROGRAM = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; -t) t=$2;; esac; shift; done
sleep 0.02
echo '['
echo '{"build_commit": "4dca015b", "backends": "CPU", "n_prompt": '$p', "n_gen": '$n', "n_depth": '${d:-0}','
echo '"n_threads": '$t', "samples_ns": [20000000]}'
echo ']'
"""
"""As llama-bench writes: 20 ms for whatever is asked."""


def phones_plan(folder: Path, repeats: int) -> Raw:
    """Two arms on each phone."""
    program, model = folder / "llama-bench", folder / "model.gguf"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    model.write_bytes(b"GGUF")
    arm = {"runs": "llama-bench", "program": str(program), "model_file": str(model), "cores": "0"}
    return raw_plan(
        name="phones",
        engine=[{"name": "one", **arm}, {"name": "two", **arm}],
        workload=[{"name": "fixed_lengths", "prompt_tokens": 8, "new_tokens": 2, "limit": 1}],
        device=[{"name": f"adb:{serial}"} for serial in SERIALS],
        protocol=FAST | {"repeats": repeats, "retries": 0},
    )


@contextmanager
def three_phones(folder: Path) -> Iterator[FakeAdbServer]:
    phones = []
    for serial in SERIALS:
        phone = FakePhone(folder / serial, serial)
        phone.file("/proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n")
        phone.file("/proc/meminfo", "MemTotal:       8000000 kB\n")
        phones.append(phone)
    with FakeAdbServer(*phones) as server:
        yield server


def phone_environment(device: str) -> Environment:
    return ENVIRONMENT.model_copy(update={"os": "Android 15", "cpu_model": device})
