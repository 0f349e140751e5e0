"""Builders of small plans, as the TOML parser would give them, and a writer of TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.plan import PlanError, build_plan

MODEL = "bundled:tiny-qwen3-moe"
Raw = dict[str, Any]

DROPLESS: Raw = {"name": "dropless", "technique": {"name": "dropless"}}
TIERS: Raw = {"name": "tiers", "technique": {"name": "npumoe-t", "multiples": [4, 2, 1]}}
HERE: Raw = {"devices": ["host"]}
"""Beside an arm, in plans that have a modelled device too."""
NPUMOE: Raw = {"name": "npumoe", "technique": {"name": "npumoe-t"}, "devices": ["model:m2-ultra"]}
"""For plans with a modelled device."""
BOOLQ: Raw = {"name": "boolq", "limit": 2, "num_fewshot": 0}
SHAREGPT: Raw = {"name": "sharegpt", "limit": 1, "max_turns": 1, "max_new_tokens": 8}
HOST: Raw = {"name": "host", "meters": ["modelled"]}
M2_ULTRA: Raw = {"name": "model:m2-ultra"}
IPHONE: Raw = {"name": "ios:00008110-000E"}
PHONE: Raw = {"name": "adb:R58M42ABCDE"}
FAST: Raw = {"warmup": 0, "repeats": 1, "idle_s": 0, "sample_interval_s": 0.01, "max_foreign_cpu_share": 1}
"""Also on a busy machine: what other processes take is no reason to repeat a trial of a test."""


def raw_plan(**changes: Any) -> Raw:
    """One arm, one workload, the host; each section may be replaced. Modelled devices alone have nothing to sample."""
    devices = changes.get("device", [HOST])
    is_modelled = isinstance(devices, list) and all("model:" in str(device) for device in devices)
    plan: Raw = {
        "schema": 1,
        "name": "small",
        "model": {"source": MODEL},
        "engine": [DROPLESS],
        "workload": [BOOLQ],
        "device": [HOST],
        "protocol": {key: value for key, value in FAST.items() if not (is_modelled and key == "sample_interval_s")},
    }
    return json.loads(json.dumps(plan | changes))  # type: ignore[no-any-return]


def two_device_plan() -> Raw:
    """Dropless and tiers on the host, tiers placed on the modelled device; idle baselines; two repeats."""
    return raw_plan(
        name="two devices",
        engine=[DROPLESS | HERE, TIERS | HERE, NPUMOE],
        workload=[BOOLQ, SHAREGPT],
        device=[HOST, M2_ULTRA],
        protocol=FAST | {"warmup": 1, "repeats": 2, "idle_s": 0.05},
    )


def toml_text(raw: Raw) -> str:
    """A plan as TOML, every section inline."""
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in raw.items())


def write_plan(path: Path, raw: Raw) -> Path:
    path.write_text(toml_text(raw), encoding="utf-8")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # A JSON string, number or boolean is one of TOML too.
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def problems(raw: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        build_plan(raw)
    return list(caught.value.problems)


def write_failing_plan(folder: Path) -> tuple[Path, Path]:
    """A plan with a llama-bench that is no program, so that every trial fails: the plan's file, and the program's."""
    program, model = folder / "llama-bench", folder / "model.gguf"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    model.write_bytes(b"GGUF")
    arm = {"name": "bench", "runs": "llama-bench", "program": str(program), "model_file": str(model), "threads": 1}
    lengths = {"name": "fixed_lengths", "prompt_tokens": 8, "new_tokens": 2, "limit": 1}
    return write_plan(folder / "plan.toml", raw_plan(engine=[arm], workload=[lengths])), program
