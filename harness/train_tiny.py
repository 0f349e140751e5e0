"""Trains the bundled model from a seed: the tokenizer, the lessons, the recipe, and the folder that comes out.

What the recipe reaches: docs/measurements/tiny-training.md.
"""

from __future__ import annotations

import csv
from itertools import chain
from pathlib import Path

from engines.errors import EngineError
from engines.model.accelerator import find_backend
from engines.model.tokenizer import Tokenizer
from engines.tiny.first_weights import set_copying_weights
from engines.tiny.model import CONFIG, VOCABULARY_SIZE, write_model, write_tokenizer
from engines.tiny.text import training_text
from engines.tiny.training import LOG_FILE, Batch, Recipe, Stage, train
from harness.training_text import batch, texts

RECIPE = Recipe(
    stages=(
        Stage(n_steps=100, n_rows=16, length=128, lessons="copying"),
        Stage(n_steps=1800, n_rows=8, length=256, lessons="all"),
        Stage(n_steps=600, n_rows=8, length=512, lessons="all"),
        Stage(n_steps=1000, n_rows=4, length=1024, lessons="all"),
    ),
    decay_share=0.4,
    warmup_steps=100,
)
N_TOKENIZER_TEXTS = 6000
STATE_FOLDER = "training"
"""Beside the model while it is trained: the state to go on from, and the whole log."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""What stands there alone where it was interrupted before the first step."""
LOG_STRIDE = 20
"""Of the log, the mean of so many steps is kept beside the model."""


def train_tiny(folder: Path, device: str = "cpu", recipe: Recipe = RECIPE) -> None:
    """Writes a Hugging Face model folder with the log of its training; goes on with what was begun there.

    EngineError: the folder holds a model or other files that were not begun here, or torch does not see the device.
    """
    find_backend(device, None)
    if (folder / "config.json").exists() and not (folder / STATE_FOLDER).is_dir():
        raise EngineError("a model that was not trained here; name another folder")
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in others if name not in TOKENIZER_FILES]
    if others and not (folder / STATE_FOLDER).is_dir():
        raise EngineError(f"holds files of something else ({others[0]}); name a new or an empty folder")
    if not (folder / "tokenizer_config.json").is_file():
        write_tokenizer(folder, chain(training_text(), texts(N_TOKENIZER_TEXTS, recipe.seed)))
    tokenizer = Tokenizer(folder, "tiny", (CONFIG["eos_token_id"],), VOCABULARY_SIZE)

    def draw(step: int, stage: Stage) -> Batch:
        return batch(step, stage, tokenizer, recipe.seed)

    # What names the file and its type is no setting of the arithmetic.
    settings = {
        key: CONFIG[key] for key in CONFIG if key not in ("architectures", "joulebench_note", "dtype", "torch_dtype")
    }
    tensors = train(settings, recipe, draw, folder / STATE_FOLDER, device=device, set_first_weights=set_copying_weights)
    write_model(folder, tensors)
    _thin_log(folder / STATE_FOLDER / LOG_FILE, folder / "training.csv")


def _thin_log(whole: Path, kept: Path) -> None:
    """Means over LOG_STRIDE steps, at the last step of each; tokens and seconds are sums from the beginning."""
    import pandas as pd

    log = pd.read_csv(whole)
    log[["tokens", "seconds"]] = log[["tokens", "seconds"]].cumsum()
    groups = log.groupby(log["step"] // LOG_STRIDE)
    thin = groups.agg(
        {
            "step": "last",
            "tokens": "last",
            "length": "last",
            "learning_rate": "mean",
            "answer_loss": "mean",
            "other_loss": "mean",
            "balance_loss": "mean",
            "seconds": "last",
        }
    )
    thin.round(5).to_csv(kept, index=False, quoting=csv.QUOTE_MINIMAL)
