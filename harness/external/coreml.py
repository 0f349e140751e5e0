"""Core ML graphs, converted from the plan's model, with joulebench's own router and dispatch plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from engines.base import Engine
from engines.errors import EngineError, ProblemsError
from engines.external.base import Abilities, Found, Surroundings
from harness.external.base import OF_OURS, SHARED, ExternalSpec, not_of
from harness.technique_specs import TechniqueSpec, technique_changes

if TYPE_CHECKING:
    from engines.coreml.manifest import Manifest
    from engines.coreml.predictor import Predictor
    from engines.profile import Profile

DIGITS = 16


class CoremlSpec(ExternalSpec):
    """A technique's plans, whose calls on the npu are predictions of Core ML. With predictor = "interpreter" they are
    computed in numpy, on any machine: the same numbers, and times that say nothing of a Mac."""

    tag: ClassVar[str] = "coreml"
    what: ClassVar[str] = "Core ML graphs of a technique's plans, on a Mac's Neural Engine (coremltools)"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=True,
        loglikelihoods=True,
        stamps="token",
        only_fixed_lengths=False,
        samples=True,
        threads="both phases",
        cores="no",
    )
    misplaced: ClassVar[Mapping[str, str]] = not_of(
        "ranks", "reuse_prefix", "last_layer", "long_rope", "max_batch", "expert_memory", "copy_bytes_per_s",
        "decoding", "quantise", why=OF_OURS,
    )  # fmt: skip

    runs: Literal["coreml"]
    technique: TechniqueSpec
    """Whose plans are computed: npumoe and its ablations, coreml-naive, anemll, or choices spelled out."""
    profile: str | None = Field(None, min_length=1)
    """Folder that `joulebench calibrate` wrote, or "bundled:NAME": what the graphs' shapes are frozen by. Needed where
    the technique learns."""
    prefill_chunk: int = Field(512, ge=1, le=1 << 16)
    context: int = Field(2048, ge=32, le=1 << 16)
    """Positions that attention's graphs hold: the most of a prompt and its answer."""
    packages: str | None = Field(None, min_length=1)
    """Folder of `joulebench coreml convert`, with the same technique, profile, chunk, context and weights. Where it is
    not given the graphs are converted before the first window, and kept."""
    predictor: Literal["macos", "interpreter"] = "macos"
    """interpreter: numpy, in the place of Core ML. Its trials are marked, and in no mean of times or joules."""
    arithmetic: Literal["float16", "float32"] = "float16"
    """Of the interpreter: float32 rounds no result, as no Mac does."""
    attention: Literal["stateless", "stateful"] = "stateless"
    """Whether keys and values lie in a state of Core ML or go in and out of each prediction. Stateful decoding is
    reported not to compile on some machines."""
    weights: Literal["float16", "int8"] = "float16"
    """As packages hold them; int8: a scale for each output."""
    compute_units: Literal["cpu_and_ne", "all"] = "cpu_and_ne"
    """all: Core ML decides, the GPU included."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.model_file is not None:
            yield "model_file: graphs are made of the plan's model; remove the line"
        if self.arithmetic != "float16" and self.predictor == "macos":
            yield 'arithmetic: graphs are fp16 on a Mac; remove the line, or set predictor = "interpreter"'
        if self.compute_units != "cpu_and_ne" and self.predictor == "interpreter":
            yield "compute_units: the interpreter has none; remove the line"
        if self.technique.wanted_prompts and self.profile is None:
            yield (
                f"profile: {self.technique.technique} freezes the graphs' shapes by one; add the line, with a folder of"
                " `joulebench calibrate`"
            )
        if self.profile is not None and not self.technique.wanted_prompts:
            yield f"profile: technique {self.technique.technique} learns nothing offline; remove profile"
        from engines.coreml.conversion import technique_in_the_way

        yield from (f"technique: {problem}" for problem in technique_in_the_way(self.technique))

    @property
    def is_lossless(self) -> bool:
        return self.technique.lossless

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        return cls._found("macos", {})

    @property
    def options(self) -> dict[str, Any]:
        return self._told(self.model_dump(mode="json", exclude={*SHARED, "technique"}))

    @property
    def changed_options(self) -> dict[str, Any]:
        return self._told(self.model_dump(mode="json", exclude={*SHARED, "technique"}, exclude_defaults=True))

    def _told(self, own: dict[str, Any]) -> dict[str, Any]:
        return {"plans": self.technique.technique, **technique_changes(self.technique), **own}

    def find(self) -> Found:
        if self.packages is None:
            return self._found(self.predictor, {})
        from engines.coreml.manifest import MANIFEST

        folder = Path(self.packages).expanduser()
        return self._found(self.predictor, {"packages": folder / MANIFEST}, self._problems_of_packages(folder))

    def _problems_of_packages(self, folder: Path) -> Iterator[str]:
        """What can be known of them before the model is read, without reading their weights."""
        from engines.coreml.conversion import is_there
        from engines.coreml.manifest import read_manifest

        try:
            found = read_manifest(folder)
        except EngineError as error:
            yield str(error)
            return
        technique = self.technique.model_dump(mode="json", exclude={"name"})
        wanted = (self.technique.technique, technique, self.prefill_chunk, self.context, self.weights)
        there = (found.technique, found.technique_parameters, found.chunk, found.context, found.weights)
        names = ("technique", "technique's parameters", "prefill_chunk", "context", "weights")
        if differing := [n for n, a, b in zip(names, wanted, there, strict=True) if a != b]:
            yield self._otherwise(differing)
        if lost := [package.path for package in found.packages if not is_there(folder, package)]:
            yield self._lost(lost, "are missing or cut off")

    def _otherwise(self, differing: Sequence[str]) -> str:
        return (
            f"packages {self.packages}: converted otherwise than this arm asks ({', '.join(differing)} differ); convert"
            " with the same technique, profile, chunk, context and weights, or leave packages out"
        )

    def _lost(self, paths: Sequence[str], how: str) -> str:
        return (
            f"packages {self.packages}: {len(paths)} {how}, first {paths[0]}; give the same `joulebench coreml convert`"
            " again, which writes them anew"
        )

    @classmethod
    def _found(cls, predictor: str, files: dict[str, Path], problems: Iterable[str] = ()) -> Found:
        """Without loading coremltools, which takes seconds. problems: others. Raises `ProblemsError` with all."""
        from engines.coreml.macos import why_no_core_ml
        from engines.coreml.toolkit import installed_version

        told, version = [], ""
        try:
            version = installed_version()
        except EngineError as error:
            told.append(str(error))
        if predictor == "macos" and (reason := why_no_core_ml()) is not None:
            told.append(f"Core ML is not here: {reason}")
        if told := [*told, *problems]:
            raise ProblemsError(told)
        where = "Core ML" if predictor == "macos" else "the interpreter"
        return Found(where, f"coremltools {version}, {where}", files)

    def build(self, around: Surroundings) -> Engine:
        import torch

        from engines.coreml.engine import CoremlEngine
        from engines.model.checkpoints import load_checkpoint

        profile = self._profile(around)
        # fp16 as the packages hold it, so that what the host computes has the same weights.
        checkpoint = load_checkpoint(around.source, torch.float16)
        folder, manifest = self._packages(around, profile)
        return CoremlEngine(
            checkpoint,
            self.technique,
            profile,
            manifest,
            self._predictor(folder),
            self.attention,
            around.now_s,
            self.compute_units,
            None if self.threads is None else self.threads.prefill,
        )

    def _predictor(self, folder: Path) -> Predictor:
        if self.predictor == "interpreter":
            from engines.coreml.interpreter import Interpreter

            return Interpreter(folder, self.arithmetic)
        from engines.coreml.macos import MacPredictor

        return MacPredictor(folder)

    def _profile(self, around: Surroundings) -> Profile | None:
        if self.profile is None or not self.technique.wanted_prompts:
            return None
        from engines.profile_files import profile_folder, read_profile
        from harness.profiles import mismatch_with

        profile = read_profile(profile_folder(self.profile))
        if reason := mismatch_with(profile, around.facts, around.on_note):
            raise EngineError(f"profile {self.profile}: {reason}; calibrate this model: `joulebench calibrate`")
        return profile

    def _packages(self, around: Surroundings, profile: Profile | None) -> tuple[Path, Manifest]:
        """Those that are given, held against what this arm needs; or made, under a name that says of what."""
        import hashlib

        from engines.coreml.conversion import Asked, Conversion, differences
        from engines.coreml.manifest import read_manifest
        from engines.coreml.sums import damage, read_now
        from harness.coreml_convert import convert_all
        from harness.file_digests import file_digests
        from harness.profiles import model_digests
        from harness.state import state_folder

        digest = model_digests(around.facts, around.on_note).model
        assert digest is not None  # its weights were read
        asked = Asked(self.technique, self.prefill_chunk, self.context, self.weights, self.attention)
        conversion = Conversion(around.source, asked, profile, digest)

        def digests(paths: Sequence[Path]) -> Mapping[Path, str | None]:
            # Large packages are read once, and then only where something touched them.
            try:
                return dict(file_digests(paths, state_folder(), around.on_note))
            except OSError:
                return read_now(paths)

        if self.packages is not None:
            folder = Path(self.packages).expanduser()
            found = read_manifest(folder)
            if differing := differences(found, conversion.manifest):
                raise EngineError(self._otherwise(differing))
            damaged = damage((folder / package.path for package in found.packages), digests)
            if damaged:
                raise EngineError(self._lost([str(path.relative_to(folder)) for path in damaged], "are not as written"))
            return folder, found
        name = hashlib.sha256(conversion.manifest.model_dump_json().encode()).hexdigest()[:DIGITS]
        folder = around.models / f"coreml-{name}"
        around.on_note(f"converts {len(conversion.packages)} packages for Core ML into {folder}")
        try:
            convert_all(conversion, folder, digests=digests)
        except OSError as error:
            raise EngineError(f"{folder}: cannot be written ({error.strerror}); free some room") from error
        return folder, conversion.manifest
