"""The sources, and where what we find of each comes from."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from harness.reproduce.findings import Finding
from harness.reproduce.redrawn import SourceTable


class Package(Protocol):
    """What a source's package gives; imported when it is asked, as it may need torch."""

    def findings(self) -> Iterable[Finding]: ...

    def tables(self) -> Iterable[SourceTable]: ...


class Source(NamedTuple):
    id: str
    name: str
    package: str

    def load(self) -> Package:
        return cast(Package, import_module(f"harness.reproduce.{self.package}"))


SOURCES = (
    Source("000", "NPUMoE", "npumoe"),
    Source("001", "GPU-NDP", "gpu_ndp"),
    Source("002", "MNN-AECS", "mnn_aecs"),
    Source("003", "Speculating experts", "speculating"),
    Source("004", "Neuron MoE guide", "neuron"),
)
