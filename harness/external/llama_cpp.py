"""llama.cpp in this process, through the wheel xllamacpp."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from engines.base import Engine
from engines.external.base import Abilities, Found, Surroundings
from harness.external.base import ExternalSpec


class LlamaCppSpec(ExternalSpec):
    """llama.cpp by its C API, in this process: the same token ids, a stamp for each token."""

    tag: ClassVar[str] = "llama.cpp"
    what: ClassVar[str] = "llama.cpp on this host's CPU, by its C API (the wheel xllamacpp)"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=True,
        loglikelihoods=True,
        stamps="token",
        only_fixed_lengths=False,
        threads="each phase",
        cores="each phase",
    )

    runs: Literal["llama.cpp"]
    weights: Literal["f32", "f16", "q8_0", "q4_0"] = "f32"
    """The form in which the plan's model is written for it; routers and vectors stay f32."""
    micro_batch: int = Field(512, ge=1, le=1 << 16)
    """Prompt tokens that go through the layers at once."""

    def find(self) -> Found:
        from engines.external.llama_cpp import find_wheel

        return find_wheel()

    def build(self, around: Surroundings) -> Engine:
        raise NotImplementedError
