"""llama.cpp in this process, through the wheel xllamacpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from engines.base import Engine
from engines.external.base import Abilities, Form, Found, Surroundings
from harness.external.base import ExternalSpec


class LlamaCppSpec(ExternalSpec):
    """llama.cpp by its C API, in this process: the same token ids, a stamp for each token."""

    tag: ClassVar[str] = "llama.cpp"
    what: ClassVar[str] = "llama.cpp on this host's CPU, by its C API (the wheel xllamacpp)"
    model_begins: ClassVar[bytes] = b"GGUF"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=True,
        loglikelihoods=True,
        stamps="token",
        only_fixed_lengths=False,
        threads="each phase",
        cores="each phase",
    )

    runs: Literal["llama.cpp"]
    weights: Form = "f32"
    """The form in which the plan's model is written for it; routers and vectors stay f32. Without effect beside
    `model_file`."""
    cache: Literal["f32", "f16", "q8_0"] | None = None
    """How keys and values are kept. Not given: f32 beside weights of f32, as ours are by default, else f16, its own."""
    micro_batch: int = Field(512, ge=1, le=1 << 16)
    """Prompt tokens that go through the layers at once."""

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        from engines.external.llama_cpp import find_wheel

        return find_wheel()

    def find(self) -> Found:
        return self.look()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.model_file is not None and "weights" in self.model_fields_set:
            yield f"weights: {self.model_file} has its own; remove one of them"

    def build(self, around: Surroundings) -> Engine:
        from engines.answers import Limits
        from engines.cores import phase_setting
        from engines.external.gguf_file import gguf_of
        from engines.external.llama_cpp import LlamaCppEngine

        config = around.facts.config
        if self.model_file is None:
            model = gguf_of(around.facts, self.weights, around.models, around.on_note)
        else:
            model = Path(self.model_file).expanduser()
        return LlamaCppEngine(
            found=self.find(),
            model=model,
            tokenizer=around.facts.tokenizer,
            limits=Limits(config.max_length, config.vocabulary_size),
            phases=(
                phase_setting(getattr(self.cores, "prefill", None), getattr(self.threads, "prefill", None)),
                phase_setting(getattr(self.cores, "decode", None), getattr(self.threads, "decode", None)),
            ),
            micro_batch=self.micro_batch,
            cache=self.cache or ("f32" if self.model_file is None and self.weights == "f32" else "f16"),
            now_s=around.now_s,
        )
