"""What computes here: the kernels and their build, or torch; and what a window's tokens were computed by."""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from typing import TYPE_CHECKING, Literal, cast

from engines.kernels.library import loaded
from results.environments import BUILD_DIGITS, Build, PhaseThreads, Road

if TYPE_CHECKING:
    from engines.model.accelerator import Backend, DeviceType
    from engines.model.held_weights import Rounding

Decoding = Literal["fused", "layer by layer", "plan by plan"]
"""A step is one call of the kernels; each layer's experts are; or each layer waits until its plan is made."""
Prefill = Literal["grouped", "expert by expert"]


@cache
def build() -> Build:
    """Of this process. Builds the kernels where they are not there yet."""
    import torch

    found, torch_instruction_set = loaded(), torch.backends.cpu.get_cpu_capability()
    if found.manifest is None:
        return Build(road="torch", reason=found.reason, torch_instruction_set=torch_instruction_set)
    return Build(
        road="kernels",
        compiler=found.manifest.compiler,
        flags=found.manifest.flags,
        instruction_set=found.instruction_set,
        sha256=found.manifest.sha256,
        torch_instruction_set=torch_instruction_set,
    )


def road(
    backend: Backend | None,
    prefilled: Set[Prefill],
    decoded: Set[Decoding],
    n_threads: int,
    phases: tuple[PhaseThreads | None, PhaseThreads | None] = (None, None),
    rounding: Rounding | None = None,
) -> Road:
    """Of an engine. prefilled: how its steps that read prompts computed experts. decoded: how each of its steps was
    computed that gave a token. phases: the threads of prefill and of decoding, where they were chosen apart."""
    built = build()
    by_kernels = backend is None and built.road == "kernels"
    device = "cpu" if backend is None else backend.device.type
    on_cpu = built.instruction_set if by_kernels else built.torch_instruction_set
    return Road(
        arithmetic="kernels" if by_kernels else "torch",
        prefill="both" if len(prefilled) > 1 else next(iter(prefilled), None),
        decoding="both" if len(decoded) > 1 else next(iter(decoded), None),
        device=cast("DeviceType", device),
        dtype="float32" if backend is None else str(backend.dtype).removeprefix("torch."),
        rounds_inputs=rounding is not None and rounding.products is not None,
        rounded_to="bf16" if rounding is not None and rounding.products == "bf16" else "int8",
        attention_rounded_to=None if rounding is None else rounding.attention,
        cache_rounded_to=None if rounding is None or rounding.cache == "fp32" else rounding.cache,
        n_threads=n_threads,
        prefill_threads=phases[0],
        decoding_threads=phases[1],
        instruction_set=on_cpu if device == "cpu" else None,
        build=built.sha256[:BUILD_DIGITS] if by_kernels and built.sha256 else None,
    )
