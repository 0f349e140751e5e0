"""Weights from a Hugging Face folder, a hub id, or the bundled model: safetensors only, every tensor accounted for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.load_weights import HoldsExperts, load_weights
from engines.model.model_config import ModelConfig, read_json, read_model_config
from engines.model.mxfp4 import NAN_SCALE
from engines.model.quantised import AS_THE_MODEL, PLAIN_DTYPES, Quantisation
from engines.model.single_tensors import SCALES_OF_BLOCKS, Part, Shape
from engines.model.tensor_files import TensorFile, is_finite
from engines.model.tokenizer import MORE_TEMPLATES, Tokenizer
from engines.model.wanted_tensors import tensor_shapes as tensor_shapes
from engines.model.weights import ModelWeights
from engines.model.wrong_sources import check_folder, refused_file, refused_weights

logger = logging.getLogger(__name__)

BUNDLED_PREFIX = "bundled:"
BUNDLED_FOLDER = Path(__file__).parents[1] / "tiny" / "bundled"
MXFP4_SUFFIXES = ("_blocks", "_scales")
TOKENIZER_FILES = ["*.json", "*.jinja"]
SECOND_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
"""Of a hub model in another form, which nothing here reads: GPT-OSS and Mistral bring theirs so."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What can be known without reading weights."""

    source: str
    folder: Path
    revision: str | None
    """Commit of a hub snapshot; None for a folder."""
    config: ModelConfig
    tokenizer: Tokenizer

    @property
    def note(self) -> str | None:
        """For the tables, such as "random weights"."""
        return self.config.note


@dataclass(frozen=True)
class Checkpoint(CheckpointFacts):
    weights: ModelWeights


def inspect_checkpoint(source: str) -> CheckpointFacts:
    """Config, tokenizer, and the names and shapes of all tensors; no weights are read. Raises `EngineError`.

    For a hub id whose weights are not in the local cache, only the JSON files are fetched, and the tensors are left to
    `load_checkpoint`: checking a plan must not download gigabytes.
    """
    facts = _read_facts(source, weights=False)
    local_weights = any(facts.folder.glob("*.safetensors"))
    if local_weights or facts.revision is None:
        _check_tensors(facts.config, _locate_tensors(facts.folder))
    return facts


def load_checkpoint(
    source: str,
    dtype: torch.dtype,
    quantise: Quantisation = AS_THE_MODEL,
    held: HoldsExperts | None = None,
    on_read: Callable[[str, int], object] = lambda name, n_bytes: None,
    experts_as_filed: bool = False,
) -> Checkpoint:
    """Raises `EngineError` naming the tensor that is missing, misshapen, left over or not finite.

    Every tensor is read once, to see that it is sound. Those whose form in the file is the one asked for stay views of
    the mapped file; others are converted one by one.

    dtype: how matrices are stored in memory that `quantise` says nothing of. Vectors (norms, biases) and routers are
    always fp32; arithmetic is fp32. A file's MXFP4 experts keep their bits where MXFP4 is asked for; a file's FP8
    blocks are widened first, whatever is asked for.

    held: of a layer the experts that are wanted, and their columns; nothing else of the experts is read. on_read: told
    the tensor and the bytes of each reading. experts_as_filed: see `load_weights`.
    """
    facts = _read_facts(source, weights=True)
    located = _locate_tensors(facts.folder)
    _check_tensors(facts.config, located)
    read = _tensor_reader(located, facts.config, on_read)
    if _stored_tied_head(facts.config) in located:
        _check_tied_head(facts.config, read)
    weights = load_weights(
        facts.config, lambda name, _, part=(): read(name, part), dtype, quantise, held, experts_as_filed
    )
    return Checkpoint(facts.source, facts.folder, facts.revision, facts.config, facts.tokenizer, weights)


# --- where the files are ---------------------------------------------------------------------------------------------


def _read_facts(source: str, weights: bool) -> CheckpointFacts:
    folder, revision = _find_folder(source, weights)
    config = read_model_config(folder)
    name = source if revision is not None or source.startswith(BUNDLED_PREFIX) else folder.resolve().name
    tokenizer = Tokenizer(folder, name.removeprefix(BUNDLED_PREFIX), config.eos_token_ids, config.vocabulary_size)
    return CheckpointFacts(source, folder, revision, config, tokenizer)


def _find_folder(source: str, weights: bool) -> tuple[Path, str | None]:
    """The folder of a source, and the commit if it came from the hub ("owner/name" or "owner/name@revision")."""
    if source.startswith(BUNDLED_PREFIX):
        name = source.removeprefix(BUNDLED_PREFIX)
        bundled = sorted(path.name for path in BUNDLED_FOLDER.iterdir() if path.is_dir())
        if name not in bundled:
            raise EngineError(f"{source}: no such bundled model; there is {', '.join(bundled)}")
        return BUNDLED_FOLDER / name, None
    try:
        folder = Path(source).expanduser()
        is_there, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder above that is closed, no such user
        raise EngineError(f"{source[:80]}: is no path of a folder ({getattr(error, 'strerror', error)})") from error
    if is_file:
        raise refused_file(folder)
    found = (folder, None) if is_there else _fetch_from_hub(source, folder, weights)
    check_folder(found[0])
    return found


def _fetch_from_hub(source: str, folder: Path, weights: bool) -> tuple[Path, str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = source.partition("@")
    patterns = [*TOKENIZER_FILES, "*.safetensors"] if weights else TOKENIZER_FILES
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns, ignore_patterns=SECOND_COPIES
            )
        )
    except HFValidationError as error:
        raise EngineError(f"{source}: no folder {folder.absolute()}, and not a hub id like owner/name") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(
            f"{source}: no folder {folder.absolute()}, and the Hugging Face hub did not give {repository!r} "
            f"({type(error).__name__}: {reason}); check the path, or download the model while online"
        ) from error
    logger.info("%s: hub snapshot %s", repository, snapshot.name)
    return snapshot, snapshot.name


# --- the tensors in them ---------------------------------------------------------------------------------------------


def _locate_tensors(folder: Path) -> dict[str, TensorFile]:
    """The file of each tensor, from the headers alone."""
    files = [TensorFile(path) for path in _weight_files(folder)]
    return {name: file for file in files for name in file.places}


def _weight_files(folder: Path) -> list[Path]:
    index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise EngineError(f"{index_path}: weight_map is no map of tensors to files; fetch the file again")
        names = sorted(set(weight_map.values()))
        if odd := [name for name in names if not _is_plain(name)]:
            raise EngineError(f"{index_path}: weight_map names {odd[0]!r:.80}, no file of this folder; fetch it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise EngineError(f"{index_path}: files {missing or 'none'} of the index are not in the folder; fetch them")
        if single.is_file() and single.name not in names:
            raise EngineError(
                f"{folder}: {single.name} is there, and {index_path.name} names other files: two models, of which"
                f" transformers takes the first; remove {single.name} or the index"
            )
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    raise refused_weights(folder)


def _is_plain(name: str) -> bool:
    """Whether it can name a file of the folder itself: an index is as much a stranger's text as the weights are."""
    try:
        n_bytes = len(os.fsencode(name))
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return 0 < n_bytes < 256 and "/" not in name and "\0" not in name


def decisive_files(source: str) -> list[Path]:
    """The files that decide what a model answers: config, tokenizer, chat template, weights. Raises `EngineError`.

    Fetches what is not there yet of a hub model.
    """
    folder, _ = _find_folder(source, weights=True)
    return decisive_files_of(folder)


def decisive_files_of(folder: Path, weights: bool = True) -> list[Path]:
    """The same of a folder, as far as it is there. Raises `EngineError`."""
    own = {path for pattern in (*TOKENIZER_FILES, f"{MORE_TEMPLATES}/default.jinja") for path in folder.glob(pattern)}
    return [*sorted(own), *(_weight_files(folder) if weights else ())]


def _check_tensors(config: ModelConfig, located: dict[str, TensorFile]) -> None:
    wanted = _without_scales_of_wide(tensor_shapes(config), located)
    missing = sorted(wanted.keys() - located.keys())
    left_over = sorted(name for name in located.keys() - wanted.keys() if not _is_unused(name, config))
    if missing:
        instead = f", {left_over[0]!r:.200} left over ({len(left_over)} in all)" if left_over else ""
        raise EngineError(
            f"tensor {missing[0]!r} missing ({len(missing)} in all){instead}; config.json and weights do not belong"
            " together"
        )
    if left_over:
        raise EngineError(
            f"tensor {left_over[0]!r} left over ({len(left_over)} in all): {config.architecture} does not use it; "
            "config.json and weights do not belong together"
        )
    for name, shape in wanted.items():
        found = located[name].places[name].shape
        if found != shape:
            raise EngineError(f"tensor {name!r} has shape {found}, config.json asks for {shape}")
    for name in sorted(located.keys() & {*wanted, _stored_tied_head(config)}):
        _check_form(located[name].path, name, located[name].places[name].dtype, config)


def _without_scales_of_wide(wanted: Mapping[str, Shape], located: Mapping[str, TensorFile]) -> dict[str, Shape]:
    """Those of a file in FP8 blocks, less scales of what it holds wider: by the file, as in transformers. The list of
    its config (`modules_to_not_convert`) also names what is never in FP8, by names of modules."""

    def is_wide(name: str) -> bool:
        file = located.get(name)
        return file is not None and file.places[name].dtype in PLAIN_DTYPES.values()

    return {
        name: shape
        for name, shape in wanted.items()
        if not (name.endswith(SCALES_OF_BLOCKS) and is_wide(name.removesuffix(SCALES_OF_BLOCKS)))
    }


def _check_form(path: Path, name: str, dtype: torch.dtype, config: ModelConfig) -> None:
    if _is_mxfp4(name, config):
        if dtype is not torch.uint8:
            raise EngineError(f"{path}: tensor {name!r} holds {dtype}; MXFP4 is bytes, fetch the file again")
        return
    is_fp8 = config.fp8_block is not None and dtype is torch.float8_e4m3fn
    if not is_fp8 and (not dtype.is_floating_point or dtype.itemsize == 1):
        raise EngineError(f"{path}: tensor {name!r} holds {dtype}; quantised weights are not supported")


def _is_mxfp4(name: str, config: ModelConfig) -> bool:
    return config.moe is not None and config.moe.mxfp4 and name.endswith(MXFP4_SUFFIXES)


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Tensors that published checkpoints hold and that computing does not need. Everything else must have a use.

    Llama exports of old hold the rotary frequencies, which follow from the config.
    """
    names = config.names
    beyond = tuple(f"{names.root}model.layers.{layer}." for layer in config.ignored_layers)
    return (
        name == _stored_tied_head(config)
        or name.endswith(".rotary_emb.inv_freq")
        or name.startswith((*beyond, *names.ignored_prefixes))
    )


def _tensor_reader(
    located: dict[str, TensorFile], config: ModelConfig, on_read: Callable[[str, int], object]
) -> Callable[[str, Part], Tensor]:
    """Tensors by name, or parts of them, each looked through before it is handed out."""
    last: list[str] = []

    def read(name: str, part: Part = ()) -> Tensor:
        # What was read before is converted by now, or stays a view that fetches its pages when it is used: the pages of
        # one tensor at a time are enough.
        for before in last:
            if before != name:
                located[before].release(before)
        last[:] = [name]
        tensor = located[name].read(name)[part]
        on_read(name, tensor.nbytes)
        _check_values(located[name].path, name, tensor, config)
        return tensor

    return read


def _check_values(path: Path, name: str, tensor: Tensor, config: ModelConfig) -> None:
    if _is_mxfp4(name, config):
        is_sound = name.endswith("_blocks") or int(tensor.max()) != NAN_SCALE
    else:
        is_sound = is_finite(tensor)
    if not is_sound:
        raise EngineError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged or badly converted")


def _stored_tied_head(config: ModelConfig) -> str | None:
    """The name under which some exports store the head beside the embedding that it is tied to."""
    return config.names.root + "lm_head.weight" if config.tie_embeddings else None


def _check_tied_head(config: ModelConfig, read: Callable[[str, Part], Tensor]) -> None:
    """Where both are stored there must be no choice to make."""
    root = config.names.root
    if not torch.equal(read(root + "lm_head.weight", ()), read(root + "model.embed_tokens.weight", ())):
        raise EngineError(
            f"tensor '{root}lm_head.weight' differs from the embedding although config.json says tie_word_embeddings; "
            "transformers takes the tensor then: write false there to do so too"
        )
