"""What a model's source is where it is no folder with a model in safetensors, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from engines.errors import EngineError
from engines.model.model_config import CONFIG_FILE, read_json

ADAPTER_CONFIG = "adapter_config.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DEEPER = ("snapshots/*", "models--*/snapshots/*", "*")
"""Where models lie in the hub's cache, and in a folder of several."""
NAME_THE_FOLDER = 'name the Hugging Face folder of its model here, and the file as model_file of a "llama.cpp" engine'


def refused_file(path: Path) -> EngineError:
    """Of a source that is a file."""
    remedy = NAME_THE_FOLDER if path.suffix == ".gguf" else f"name {path.absolute().parent}"
    return EngineError(f"{path}: is a file, and a model is a folder; {remedy}")


def check_folder(folder: Path) -> None:
    """Raises `EngineError` on an adapter, which transformers adds to the weights, and where no model's config is."""
    path = folder / ADAPTER_CONFIG
    if path.is_file():
        base = read_json(path).get("base_model_name_or_path")
        raise EngineError(
            f"{path}: an adapter of {base!r:.200}; adapters are not added to weights here: merge it with peft"
            " (merge_and_unload, then save_pretrained), and name that folder"
        )
    if (folder / CONFIG_FILE).is_file():
        return
    inner = [found.parent for at in DEEPER for found in sorted(folder.glob(f"{at}/{CONFIG_FILE}"))]
    if inner:
        others = f", or one of {len(inner) - 1} others in it" if len(inner) > 1 else ""
        raise EngineError(f"{folder}: no {CONFIG_FILE}; the model lies deeper: name {inner[0]}{others}")
    if found := _names(folder, "*.gguf"):
        raise EngineError(f"{folder}: no {CONFIG_FILE}, only {_listed(found)}; {NAME_THE_FOLDER}")


def refused_weights(folder: Path) -> EngineError:
    """Of a folder that has neither model.safetensors nor an index."""
    no_weights = f"{folder}: no model.safetensors and no model.safetensors.index.json"
    if found := _names(folder, "*.safetensors"):
        remedy = "rename it to model.safetensors if it is the whole model" if len(found) == 1 else "fetch the index"
        return EngineError(f"{no_weights}, only {_listed(found)}; {remedy}")
    if found := _names(folder, "*.gguf"):
        return EngineError(f"{no_weights}, only {_listed(found)}; {NAME_THE_FOLDER}")
    if found := _names(folder, *PICKLE_PATTERNS):
        return EngineError(
            f"{folder}: only {_listed(found)}; pickle checkpoints are never loaded; convert to safetensors"
            " (transformers: from_pretrained, then save_pretrained to another folder)"
        )
    return EngineError(f"{no_weights}; fetch the weights")


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
