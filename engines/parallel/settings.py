"""What every rank is told, so that all of them build the same technique and each its own part of the model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from engines.errors import EngineError
from engines.model.accelerator import Backend as Computes
from engines.model.checkpoints import load_checkpoint
from engines.model.model_config import ModelConfig
from engines.model.quantised import Quantisation
from engines.model.rope_config import LongRope
from engines.model.transformer import with_long_rope
from engines.parallel.links import Backend
from engines.profile import Profile
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext
from engines.techniques.over_ranks import OverRanks
from engines.techniques.parameters import Composed, CustomParameters
from engines.techniques.presets import preset_parameters
from results.records import Record


class RankSettings(Record):
    """The same for all ranks."""

    source: str
    """A folder or a bundled model: the first rank has resolved it."""
    dtype: Literal["float32", "bfloat16", "float16"]
    quantise: Quantisation
    long_rope: LongRope
    technique: str
    parameters: dict[str, Any]
    prefill_chunk: int
    n_ranks: int
    threads: int
    """Of each."""
    backend: Backend
    store_file: str
    profile: dict[int, tuple[int, ...]] | None = None
    """Choices of each expert by layer, where the technique learns from them."""
    top_k: int = 1
    n_prompts: int = 1

    def technique_of(self, config: ModelConfig) -> OverRanks:
        """Raises `EngineError`."""
        profile = None if self.profile is None else Profile(self.profile, self.top_k, self.n_prompts)
        context = BuildContext(self.prefill_chunk, own_sizes(config), profile, ranks=self.n_ranks)
        built = parameters_of(self.technique, self.parameters).build(context)
        assert isinstance(built, OverRanks)  # the engine takes no other
        return built


class RankPart:
    """What a rank holds and has read."""

    def __init__(self, settings: RankSettings, technique: OverRanks, rank: int) -> None:
        """Reads this rank's shard. Raises `EngineError`."""
        self._settings = settings
        self.rank = rank
        self.read_bytes: dict[str, int] = {}
        """By tensor. What is read twice (a tied head) is in it twice."""
        self.backend = backend_of(settings.backend, rank)
        checkpoint = load_checkpoint(
            settings.source,
            getattr(torch, settings.dtype),
            settings.quantise,
            lambda layer: technique.held(layer, rank),
            self._note,
        )
        self.checkpoint = with_long_rope(checkpoint, settings.long_rope)

    def _note(self, name: str, n_bytes: int) -> None:
        self.read_bytes[name] = self.read_bytes.get(name, 0) + n_bytes


def backend_of(links: Backend, rank: int) -> Computes | None:
    """Where a rank computes; None: on the CPU, by the kernels. Over nccl on the GPU of its number, in fp32, which is
    what ranks send each other. Raises `EngineError` where there is none."""
    if links == "gloo":
        return None
    n = torch.cuda.device_count()
    if rank >= n:
        raise EngineError(
            f"rank {rank} computes on GPU {rank}, and torch {torch.__version__} sees {n}; give fewer ranks"
        )
    torch.cuda.set_device(rank)
    return Computes(torch.device("cuda", rank), torch.float32)


def parameters_of(technique: str, values: dict[str, Any]) -> Composed:
    kind = CustomParameters if technique == CustomParameters.technique else preset_parameters(technique)
    return kind.model_validate(values)
