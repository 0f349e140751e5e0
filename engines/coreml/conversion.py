"""From a checkpoint and a technique to packages: what they will be, known before any work, and each of them in turn.

Weights are read layer by layer out of the mapped checkpoint, and one package holds at most the weights of a graph, so
that memory is that of one package. Each package appears whole under its name, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.coreml.contents import Converter
from engines.coreml.manifest import (
    MANIFEST,
    PLANNED,
    GraphFunction,
    Manifest,
    PackagePlan,
    Role,
    Weights,
    read_manifest,
)
from engines.coreml.planned import ALIGN, Sizes, aligned, npu_graphs
from engines.coreml.sums import sums_file, write_sums
from engines.coreml.weights import attention_bytes, content_of, expert_bytes, gated_bytes, unsupported
from engines.errors import EngineError, ProblemsError
from engines.model.checkpoints import Checkpoint, CheckpointFacts, inspect_checkpoint, load_checkpoint
from engines.model.model_config import ModelConfig
from engines.profile import Profile
from engines.sizes import own_sizes
from engines.techniques.base import TechniqueParameters
from engines.techniques.context import BuildContext
from engines.techniques.parameters import Composed
from engines.techniques.place.ranks import RanksParameters


@dataclass(frozen=True)
class Asked:
    """What graphs are made for. context: positions that attention holds. attention: which variants of it.
    decode_tokens: of the attention graph of decode steps."""

    technique: TechniqueParameters
    chunk: int = 512
    context: int = 2048
    weights: Weights = "float16"
    attention: str = "both"
    decode_tokens: int = ALIGN
    allow_int4_known_to_crash: bool = False
    """int4 weights: stateful packages with 4-bit palettes crashed after 100 to 200 predictions or were wrong
    (coremltools issues 2716, 2688), and int4 weights fell to the CPU on an M4. Others' reports, untried here."""

    def problems(self) -> list[str]:
        found = []
        if self.weights == "int4" and not self.allow_int4_known_to_crash:
            found.append(
                "weights int4: stateful packages of 4 bits are reported to crash or to be wrong (coremltools 2716,"
                " 2688); allow it by --int4-known-to-crash, or take int8"
            )
        if self.attention not in ("both", "stateful", "stateless"):
            found.append(f"attention {self.attention!r}: is both, stateful or stateless")
        for name in ("chunk", "context", "decode_tokens"):
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) <= 1 << 16:
                found.append(
                    f"{name} {getattr(self, name)!r}: must be 1 to 65536, the longest axis of the Neural Engine"
                )
        return found


def in_the_way(facts: CheckpointFacts, asked: Asked, has_profile: bool) -> list[str]:
    """Of a conversion, all that is: what was asked, and parts of the model and the technique that no graph computes."""
    problems = asked.problems()
    if asked.technique.learns and not has_profile:
        problems.append(
            f"technique {asked.technique.technique} freezes its shapes by a profile; give one: `joulebench calibrate`"
        )
    if type(asked.context) is int and asked.context > facts.config.max_length:
        problems.append(
            f"context {asked.context}: {facts.source} has {facts.config.max_length} positions; give at most these"
        )
    problems += model_in_the_way(facts, asked.technique)
    return [*problems, *(f"technique {problem}" for problem in technique_in_the_way(asked.technique))]


def model_in_the_way(facts: CheckpointFacts, technique: TechniqueParameters) -> list[str]:
    """What of it no graph of this technique computes."""
    if not isinstance(technique, Composed):
        return []
    parts = unsupported(facts.config, technique.choices.backbone == "npu")
    return [f"{facts.source}: {part}: no graph here computes that" for part in parts]


def technique_in_the_way(technique: TechniqueParameters) -> list[str]:
    """What of it no graph computes, whatever the model is. Each begins with its name."""
    if not isinstance(technique, Composed):
        return [f"{technique.technique} makes no plan that graphs could run; use npumoe"]
    parts = []
    if isinstance(technique.choices.place, RanksParameters):
        parts.append("experts on ranks")
    if technique.choices.backbone == "gpu":
        parts.append("a backbone on the gpu")
    if (move := technique.choices.move).moves_weights:
        parts.append(f"move {move.kind} (weights are constants of a graph, and do not travel)")
    return [f"{technique.technique}: {part}: no graph here computes that" for part in parts]


class Conversion:
    """A conversion that is known, and not yet done."""

    def __init__(
        self,
        source: str,
        asked: Asked,
        profile: Profile | None,
        model_sha256: str,
        converter: Converter | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """profile: of this model; None of a technique that learns nothing. model_sha256: of config and weights.
        converter: coremltools where it is not given. checkpoint: one that is loaded already.

        Raises `ProblemsError` with all that is in the way, `EngineError`.
        """
        self._facts: CheckpointFacts = checkpoint or inspect_checkpoint(source)
        self._source, self._asked, self._checkpoint = source, asked, checkpoint
        config = self._facts.config
        if problems := in_the_way(self._facts, asked, profile is not None):
            raise ProblemsError(problems)
        assert isinstance(asked.technique, Composed)  # others are in the way
        if converter is None:
            from engines.coreml.mil import MilConverter

            converter = MilConverter()
        self._converter = converter
        self.manifest = Manifest(
            model=source,
            model_sha256=model_sha256,
            technique=asked.technique.technique,
            technique_parameters=asked.technique.model_dump(mode="json", exclude={"name"}),
            profile_sha256=None if profile is None or not asked.technique.learns else counts_sha256(profile),
            chunk=asked.chunk,
            context=asked.context,
            decode_tokens=asked.decode_tokens,
            weights=asked.weights,
            converter=converter.version,
            packages=tuple(_packages(config, asked, asked.technique, profile)),
        )

    @property
    def packages(self) -> tuple[PackagePlan, ...]:
        return self.manifest.packages

    def begin(self, folder: Path) -> None:
        """Readies a folder, or goes on with one: the model's name may be another, its bytes not.

        Raises `EngineError` where it holds another conversion, `OSError`.
        """
        named = [name for name in Manifest.model_fields if name != "model"]
        for name in (MANIFEST, PLANNED):
            if not (folder / name).is_file():
                continue
            found = read_manifest(folder, name)
            if differing := [n for n in named if getattr(found, n) != getattr(self.manifest, n)]:
                raise EngineError(
                    f"{folder}: holds another conversion ({', '.join(differing)} differ); give another folder"
                )
        known = any((folder / name).is_file() for name in (MANIFEST, PLANNED))
        if not known and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise EngineError(f"{folder}: is there and holds no conversion (no {MANIFEST}); give another folder")
        if not (folder / MANIFEST).is_file():
            self.manifest.write(folder, PLANNED)

    def convert(self, package: PackagePlan, folder: Path) -> Path:
        """Writes one package. Raises `EngineError`, `OSError`."""
        path = folder / package.path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        if self._checkpoint is None:
            # As stored: matrices stay views of the mapped file, and each is read when its package is written.
            self._checkpoint = load_checkpoint(self._source, self._facts.config.weight_dtype, experts_as_filed=True)
        try:
            content = content_of(package, self._checkpoint.weights.layers[package.layer], self._facts.config)
            self._converter.write(package, content, self._asked.weights, temporary)
            write_sums(temporary, path)
            shutil.rmtree(path, ignore_errors=True)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return path

    def finish(self, folder: Path) -> None:
        """When all packages are there: raises `EngineError` where one is not, `OSError`."""
        if missing := [package.path for package in self.packages if not is_there(folder, package)]:
            raise EngineError(
                f"{folder}: {len(missing)} of {len(self.packages)} packages are missing or cut off, first {missing[0]};"
                " convert them"
            )
        self.manifest.write(folder)
        (folder / PLANNED).unlink(missing_ok=True)


def differences(found: Manifest, wanted: Manifest) -> list[str]:
    """Why packages that are there do not serve who wants others, by the field. More functions than are wanted, another
    name of the same model, and another version of a converter do no harm."""
    named = ("model_sha256", "technique", "technique_parameters", "profile_sha256", "chunk", "context", "weights")
    differing = [name for name in named if getattr(found, name) != getattr(wanted, name)]
    there = {package.path: {function.name for function in package.functions} for package in found.packages}
    lacking = [p.path for p in wanted.packages if not {f.name for f in p.functions} <= there.get(p.path, set())]
    return [*differing, *(f"functions of {path}" for path in lacking[:1])]


def is_there(folder: Path, package: PackagePlan) -> bool:
    """With its sums and all bytes of its weights; whether these are still what was written, `engines.coreml.sums`
    tells."""
    path = folder / package.path
    held = sum(path.stat().st_size for path in path.rglob("*.bin"))
    return path.is_dir() and sums_file(path).is_file() and held >= package.weight_bytes


def counts_sha256(profile: Profile) -> str:
    """Of what shapes are frozen by."""
    told = [sorted((layer, list(counts)) for layer, counts in profile.tokens_per_expert.items()), profile.top_k]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


# --- which packages ---------------------------------------------------------------------------------------------------


def _packages(config: ModelConfig, asked: Asked, technique: Composed, profile: Profile | None) -> list[PackagePlan]:
    sizes = own_sizes(config)
    assert sizes is not None  # dense models are refused
    context = BuildContext(asked.chunk, sizes, profile, None, None)
    built = technique.build(context)
    tokens = tuple(dict.fromkeys(map(aligned, (asked.chunk, asked.decode_tokens))))
    found = []
    for layer in range(config.n_layers):
        folder = f"layer-{layer:03}"
        if technique.choices.backbone == "npu":
            functions = tuple(_attention_functions(asked, tokens))
            own = attention_bytes(config, asked.weights)
            path = f"{folder}/attention.mlpackage"
            found.append(PackagePlan(path=path, layer=layer, role="attention", functions=functions, weight_bytes=own))
            found += _rows_package(config, asked, layer, folder, tokens)
        if not config.is_sparse(layer):
            continue
        per_expert = expert_bytes(config, asked.weights)
        for number, (experts, functions) in enumerate(_expert_packages(npu_graphs(built, sizes, layer, asked.chunk))):
            path, own = f"{folder}/experts-{number}.mlpackage", per_expert * len(experts)
            found.append(
                PackagePlan(
                    path=path, layer=layer, role="experts", experts=experts, functions=functions, weight_bytes=own
                )
            )
    return found


def _attention_functions(asked: Asked, tokens: Sequence[int]) -> list[GraphFunction]:
    return [
        GraphFunction(
            name=f"{variant}_{n}",
            kind="attention",
            rows=n,
            stateful=variant == "stateful",
            past=aligned(asked.context),
        )
        for variant in ("stateless", "stateful")
        if asked.attention in ("both", variant)
        for n in tokens
    ]


def _rows_package(
    config: ModelConfig, asked: Asked, layer: int, folder: str, tokens: Sequence[int]
) -> list[PackagePlan]:
    """What every token passes through besides attention: a dense layer's block, or shared experts."""
    moe = config.moe
    assert moe is not None
    role: Role
    if not config.is_sparse(layer):
        role, width = "dense", config.dense_width
    elif moe.shared is not None:
        role, width = "shared", moe.shared.width
    else:
        return []
    functions = tuple(GraphFunction(name=f"rows_{n}", kind="rows", rows=n) for n in tokens)
    own = gated_bytes(config.hidden, width, False, asked.weights)
    path = f"{folder}/{role}.mlpackage"
    return [PackagePlan(path=path, layer=layer, role=role, functions=functions, weight_bytes=own)]


def _expert_packages(graphs: Sizes) -> list[tuple[tuple[int, ...], tuple[GraphFunction, ...]]]:
    """Sets of experts that no other holds are packages; a set inside one is a function of it."""
    members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for experts in sorted(graphs, key=lambda experts: (-len(experts), experts)):
        home = next((whole for whole in members if set(experts) <= set(whole)), experts)
        members.setdefault(home, []).append(experts)
    found = []
    for whole, own in members.items():
        functions = tuple(
            GraphFunction(
                name=f"expert_{experts[0]}_{rows}" if len(experts) == 1 else f"{_group(experts, whole)}_{rows}",
                kind="experts",
                experts=experts,
                rows=rows,
            )
            for experts in own
            for rows in graphs[experts]
        )
        found.append((whole, functions))
    return found


def _group(experts: tuple[int, ...], whole: tuple[int, ...]) -> str:
    return "group" if experts == whole else "group_of_" + "_".join(map(str, experts))
