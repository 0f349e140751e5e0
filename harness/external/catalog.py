"""The engines that `runs` may name in a plan, and the union of all engines of a plan. The one place to add one."""

from __future__ import annotations

from harness.external.base import ExternalSpec
from harness.external.coreml import CoremlSpec
from harness.external.llama_cpp import LlamaCppSpec
from harness.external.openai import OpenAISpec
from harness.external.programs import PROGRAMS

_KINDS: tuple[type[ExternalSpec], ...] = (LlamaCppSpec, OpenAISpec, CoremlSpec, *PROGRAMS)
EXTERNAL: dict[str, type[ExternalSpec]] = {spec.tag: spec for spec in _KINDS}


def keys_of_others() -> dict[str, str]:
    """Keys that only engines of others have, and why joulebench's own refuses them."""
    found: dict[str, list[str]] = {}
    for name, spec in EXTERNAL.items():
        for key in spec.model_fields:
            found.setdefault(key, []).append(name)
    return {
        key: f'is of engines that are not ours ({", ".join(names)}): give runs = "{names[0]}", or remove the line'
        for key, names in found.items()
    }
