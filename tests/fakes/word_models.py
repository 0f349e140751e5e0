"""Checkpoints of random weights in which a token is a word: as small as a closed form is readable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from engines.model.checkpoints import Checkpoint, load_checkpoint, tensor_shapes
from engines.model.model_config import read_model_config


def word_model(folder: Path, config: Mapping[str, object]) -> Checkpoint:
    """In fp32, the same weights each time. config: as in config.json; its vocab_size is the number of words."""
    words = {f"w{i}": i for i in range(int(str(config["vocab_size"])))}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    shapes = tensor_shapes(read_model_config(folder))
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return load_checkpoint(str(folder), torch.float32)
