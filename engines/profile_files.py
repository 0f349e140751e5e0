"""A profile as a folder: `profile.json` says of what and over what it was counted, `profile.safetensors` holds it.

    tokens_per_expert     int64 [L, E]
    saliency_per_expert   float64 [L, E]
    default_vectors       float32 [L, E, H], where they were computed
    estimator.*           float32, where one was trained: the tensors of `engines.estimator`

The folder appears whole under its name or not at all, and what is there is never replaced. Legend: L sparse layers,
E experts, H hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from engines.errors import EngineError
from engines.estimator import Estimator, estimator_shapes
from engines.model.architecture import ModelConfig
from engines.model.checkpoints import BUNDLED_PREFIX
from engines.model.tensor_files import TensorFile, is_finite
from engines.profile import Profile, ProfiledPredictions, ProfileOrigin, Sha256
from results.file_state import sha256_of_file
from results.records import Record

DESCRIPTION, TENSORS = "profile.json", "profile.safetensors"
BUNDLED_PROFILES = Path(__file__).parent / "tiny" / "profiles"
MOST_DESCRIPTION_BYTES = 1 << 20
COUNTS, SALIENCY, VECTORS = "tokens_per_expert", "saliency_per_expert", "default_vectors"
ESTIMATOR = "estimator."
DTYPES = {COUNTS: torch.int64, SALIENCY: torch.float64, VECTORS: torch.float32}
DIGITS = 12
PROFILE_FORMAT: Final = 2
UNSEALED = "0" * 64


class _Description(Record):
    profile_format: Literal[2]
    origin: ProfileOrigin
    layers: tuple[int, ...] = Field(min_length=1)
    n_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    hidden: int | None = Field(ge=1)
    """None: without default vectors."""
    n_prompts: int = Field(ge=1)
    n_tokens: int = Field(ge=1)
    imbalance: tuple[float, ...]
    """Of each layer, for people; it follows from the counts."""
    predictions: ProfiledPredictions | None = None
    tensors_sha256: Sha256
    sha256: Sha256
    """Of all the rest of this record: `seal_of`."""


def profile_folder(name: str) -> Path:
    """What a plan names: a folder, or the profile that is installed with a bundled model. Raises `EngineError`."""
    if not name.startswith(BUNDLED_PREFIX):
        return Path(name)
    model = name.removeprefix(BUNDLED_PREFIX)
    bundled = sorted(path.name for path in BUNDLED_PROFILES.iterdir() if path.is_dir())
    if model not in bundled:
        raise EngineError(f"{name}: no such bundled profile; there is {', '.join(bundled)}")
    return BUNDLED_PROFILES / model


def profile_files(folder: Path) -> tuple[Path, Path]:
    return folder / DESCRIPTION, folder / TENSORS


def write_profile(profile: Profile, folder: Path) -> None:
    """Raises `FileExistsError` where something is there already, other `OSError`s as they come."""
    from safetensors.torch import save

    if profile.origin is None or profile.saliency_per_expert is None:
        raise ValueError("a profile without its origin or its saliency is not written")
    layers = list(profile.tokens_per_expert)
    vectors = profile.default_vectors_EH
    tensors = {
        COUNTS: torch.tensor([profile.tokens_per_expert[layer] for layer in layers], dtype=torch.int64),
        SALIENCY: torch.tensor([profile.saliency_per_expert[layer] for layer in layers], dtype=torch.float64),
    }
    if vectors is not None:
        tensors[VECTORS] = torch.stack([vectors[layer] for layer in layers])
    if profile.estimator is not None:
        tensors |= {f"{ESTIMATOR}{name}": tensor for name, tensor in profile.estimator.tensors().items()}
    packed = save(tensors)
    description = _Description(
        profile_format=PROFILE_FORMAT,
        origin=profile.origin,
        layers=tuple(layers),
        n_experts=tensors[COUNTS].shape[1],
        top_k=profile.top_k,
        hidden=None if vectors is None else tensors[VECTORS].shape[2],
        n_prompts=profile.n_prompts,
        n_tokens=profile.n_tokens,
        imbalance=tuple(profile.imbalance(layer) for layer in layers),
        predictions=profile.predictions,
        tensors_sha256=hashlib.sha256(packed).hexdigest(),
        sha256=UNSEALED,
    )
    description = description.model_copy(update={"sha256": seal_of(description.model_dump(mode="json"))})
    check_is_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for path, content in zip(
            profile_files(temporary), (f"{description.model_dump_json(indent=2)}\n".encode(), packed), strict=True
        ):
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        check_is_free(folder)
        temporary.rename(folder)  # onto an empty folder too, and onto nothing else
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_is_free(folder: Path) -> None:
    """Raises `FileExistsError` where a profile cannot appear; an empty folder is taken."""
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise FileExistsError(f"{folder}: exists already and is left as it is; give another name")


def read_profile(folder: Path) -> Profile:
    """Raises `EngineError`: it is no profile, or any of it is not as it was written."""
    description = _read_description(folder)
    tensors = _read_tensors(folder, description)
    for problem in _contradictions(description, tensors):
        raise _damaged(folder, problem)
    seal = seal_of(description.model_dump(mode="json"))
    if seal != description.sha256:
        raise _damaged(folder, f"{DESCRIPTION} was sealed as {description.sha256[:DIGITS]} and is {seal[:DIGITS]} now")
    rows = list(enumerate(description.layers))
    own = {name.removeprefix(ESTIMATOR): tensor for name, tensor in tensors.items() if name.startswith(ESTIMATOR)}
    return Profile(
        {layer: tuple(tensors[COUNTS][row].tolist()) for row, layer in rows},
        description.top_k,
        description.n_prompts,
        {layer: tuple(tensors[SALIENCY][row].tolist()) for row, layer in rows},
        {layer: tensors[VECTORS][row] for row, layer in rows} if VECTORS in tensors else None,
        description.origin,
        description.predictions,
        Estimator(description.layers[:-1], **own) if own else None,
    )


def seal_of(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description, as JSON has it, without its own seal."""
    rest = {key: value for key, value in description.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def digest_of_profile(folder: Path) -> str:
    """SHA-256 of the description, which names that of the tensors. Raises `EngineError`."""
    return hashlib.sha256(_description_bytes(folder)).hexdigest()


def mismatch(profile: Profile, model_sha256: str | None, tokenizer_sha256: str, config: ModelConfig) -> str | None:
    """Why a profile does not serve a model; None where it does. model_sha256 None: its weights are not here yet."""
    origin, moe = profile.origin, config.moe
    assert origin is not None  # a profile that was read has one
    if moe is None:
        return f"it is of {origin.model}, which has experts, and this model is dense"
    for what, theirs, ours in (
        ("model", origin.model_sha256, model_sha256),
        ("tokenizer", origin.tokenizer_sha256, tokenizer_sha256),
    ):
        if ours is not None and theirs != ours:
            return (
                f"it was counted with another {what} ({origin.model}, sha256 {theirs[:DIGITS]}; this one's is"
                f" {ours[:DIGITS]})"
            )
    layers = tuple(profile.tokens_per_expert)
    n_experts = len(profile.tokens_per_expert[layers[0]])
    if (n_experts, profile.top_k) != (moe.n_experts, moe.top_k):
        return (
            f"it counts {n_experts} experts of which a token chooses {profile.top_k}, and the model has"
            f" {moe.n_experts} and chooses {moe.top_k}"
        )
    if layers != tuple(sorted(moe.sparse_layers)):
        return f"it counts {len(layers)} layers of experts, and the model has {len(moe.sparse_layers)}, or others"
    return None


def _description_bytes(folder: Path) -> bytes:
    path, _ = profile_files(folder)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_DESCRIPTION_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise EngineError(
            f"profile {str(folder)[:80]}: no {DESCRIPTION} there ({why}); `joulebench calibrate` writes one"
        ) from error
    if len(content) > MOST_DESCRIPTION_BYTES:
        raise _damaged(folder, f"{DESCRIPTION} of more than {MOST_DESCRIPTION_BYTES:,} bytes")
    return content


def _read_description(folder: Path) -> _Description:
    try:
        return _Description.model_validate_json(_description_bytes(folder), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        written = next((e["input"] for e in error.errors() if e["loc"] == ("profile_format",)), None)
        if type(written) is int and written > 0:
            by, remedy = "an older", "make it again with `joulebench calibrate`"
            if written > PROFILE_FORMAT:
                by, remedy = "a newer", "update joulebench, or make it again with `joulebench calibrate`"
            raise EngineError(
                f"profile {folder}: made by {by} joulebench (format {written}; this one reads format"
                f" {PROFILE_FORMAT}); {remedy}"
            ) from error
        where = ".".join(map(str, first["loc"])) or DESCRIPTION
        raise _damaged(folder, f"{where[:80]}: {first['msg'][:160]}") from error


def _read_tensors(folder: Path, description: _Description) -> dict[str, Tensor]:
    _, path = profile_files(folder)
    try:
        digest = sha256_of_file(path)
    except OSError as error:
        raise _damaged(folder, f"{TENSORS}: {error.strerror}") from error
    if digest != description.tensors_sha256:
        raise _damaged(
            folder,
            f"{TENSORS} has sha256 {digest[:DIGITS]}, {DESCRIPTION} says {description.tensors_sha256[:DIGITS]}",
        )
    file_of_tensors = TensorFile(path)
    n_layers, n_experts, hidden = len(description.layers), description.n_experts, description.hidden
    wanted: dict[str, tuple[int, ...]] = {COUNTS: (n_layers, n_experts), SALIENCY: (n_layers, n_experts)}
    if hidden is not None:
        wanted[VECTORS] = (n_layers, n_experts, hidden)
    predictions = description.predictions
    if predictions is not None and predictions.estimator is not None and hidden is not None:
        origin = predictions.estimator
        shapes = estimator_shapes(n_layers - 1, hidden, n_experts, origin.width, origin.recipe.expansion)
        wanted |= {f"{ESTIMATOR}{name}": shape for name, shape in shapes.items()}
    found = {name: (place.shape, place.dtype) for name, place in file_of_tensors.places.items()}
    if found != {name: (shape, DTYPES.get(name, torch.float32)) for name, shape in wanted.items()}:
        told = ", ".join(f"{name[:40]} {shape} {dtype}" for name, (shape, dtype) in list(found.items())[:4])
        raise _damaged(folder, f"{TENSORS} holds {told or 'nothing'}")
    return {name: file_of_tensors.read(name).clone() for name in wanted}


def _contradictions(description: _Description, tensors: dict[str, Tensor]) -> Iterator[str]:
    """What no count of any prompts gives."""
    layers, counts_LE, saliency_LE = description.layers, tensors[COUNTS], tensors[SALIENCY]
    if layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
        yield "layers are not in order"
    if description.top_k > description.n_experts:
        yield f"a token chooses {description.top_k} of {description.n_experts} experts"
    fewest, most = int(counts_LE.min()), int(counts_LE.max())
    if fewest < 0 or most > description.n_tokens:
        yield f"experts were chosen by {fewest} to {most} of {description.n_tokens} tokens"
    if set(counts_LE.sum(dim=1).tolist()) != {description.n_tokens * description.top_k}:
        yield f"choices of a layer are not {description.n_tokens} tokens times {description.top_k}"
    if not is_finite(saliency_LE) or float(saliency_LE.min()) < 0 or bool((saliency_LE[counts_LE == 0] != 0).any()):
        yield "a saliency is no sum of norms"
    if VECTORS in tensors and (not is_finite(tensors[VECTORS]) or bool(tensors[VECTORS][counts_LE == 0].any())):
        yield "a default vector holds NaN or infinity, or is not zero although its expert was never chosen"
    if any(name.startswith(ESTIMATOR) and not is_finite(tensor) for name, tensor in tensors.items()):
        yield "an estimator holds NaN or infinity"
    if description.predictions is not None:
        yield from _contradictory_predictions(description, description.predictions)
    mean = description.n_tokens * description.top_k / description.n_experts
    expected = tuple(int(count) / mean for count in counts_LE.amax(dim=1))
    if len(expected) != len(description.imbalance) or any(
        not abs(a - b) <= 1e-9 * a for a, b in zip(expected, description.imbalance, strict=True)
    ):
        yield "imbalance does not follow from the counts"


def _contradictory_predictions(description: _Description, predictions: ProfiledPredictions) -> Iterator[str]:
    if description.hidden is None or len(description.layers) < 2:
        yield "predictions without default vectors, or of one layer"
    if not {row.layer for row in predictions.accuracies} <= {*description.layers[1:]}:
        yield "predictions of other layers"
    if any(len(row.rank_alignment) != description.top_k for row in predictions.accuracies):
        yield f"predictions of other ranks than {description.top_k}"
    is_trained = predictions.estimator is not None
    if not {*predictions.estimated_layers} <= ({*description.layers[:-1]} if is_trained else set()):
        yield "an estimator is asked after layers that it was not trained on"


def _damaged(folder: Path, found: str) -> EngineError:
    return EngineError(f"profile {folder}: damaged ({found}); calibrate again")
