"""Profiles that a plan names, held against the model that they are to serve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engines.errors import EngineError
from engines.model.checkpoints import CheckpointFacts, decisive_files_of
from engines.model.model_config import CONFIG_FILE
from engines.model.tokenizer import OWN_FILES
from engines.profile import Learnt, Profile
from engines.profile_files import mismatch, profile_folder, read_profile
from engines.techniques.base import TechniqueParameters
from engines.techniques.parameters import Composed
from engines.techniques.route import PredictedParameters
from harness.file_digests import file_digests
from harness.state import state_folder


class ModelDigests(NamedTuple):
    """model: None where its weights are not here."""

    model: str | None
    tokenizer: str


def model_digests(facts: CheckpointFacts, on_note: Callable[[str], None]) -> ModelDigests:
    """SHA-256 of config and weights, and of the tokenizer with its template, by what the files hold.

    A file that was read before is looked up (`harness.file_digests`); of a hub model nothing is fetched. Raises
    `OSError`, `EngineError`.
    """
    here = any(facts.folder.glob("*.safetensors"))
    files = decisive_files_of(facts.folder, weights=here)
    digests = file_digests(files, state_folder(), on_note)

    def whole(chosen: list[Path]) -> str:
        return sha256_of([[path.name, digests[path]] for path in chosen])

    computing = [path for path in files if path.name == CONFIG_FILE or path.suffix == ".safetensors"]
    return ModelDigests(whole(computing) if here else None, whole([path for path in files if path.name in OWN_FILES]))


def mismatch_with(profile: Profile, facts: CheckpointFacts, on_note: Callable[[str], None]) -> str | None:
    """Why a profile does not serve a model; None where it does. Raises `OSError`, `EngineError`."""
    digests = model_digests(facts, on_note)
    return mismatch(profile, digests.model, digests.tokenizer, facts.config)


def profile_for(name: str, facts: CheckpointFacts, learns: frozenset[Learnt]) -> Profile:
    """What `--profile` names, for a technique that learns. Raises `EngineError`, also of another model's."""
    found = read_profile(profile_folder(name))
    if reason := mismatch_with(found, facts, lambda note: None) or found.lacks(learns):
        raise EngineError(f"--profile {name}: {reason}")
    return found


def whose_guesses(profile: Profile, technique: TechniqueParameters) -> str | None:
    """Of a hybrid that a profile leaves one predictor: which. None of every other technique."""
    route = technique.choices.route if isinstance(technique, Composed) else None
    if not isinstance(route, PredictedParameters) or route.predictor != "hybrid" or profile.predictions is None:
        return None
    n_asked, n_guessing = len(profile.predictions.estimated_layers), len(profile.tokens_per_expert) - 1
    if 0 < n_asked < n_guessing:
        return None
    where, other, preset = ("every layer", "estimator", "est-pf") if n_asked else ("no layer", "router", "router-pf")
    like = preset if route.executes == "prediction" else f'predictor = "{other}"'
    return (
        f"the estimator recalls more experts than the router in {where}, so that a hybrid asks the {other} alone, as"
        f" {like} does"
    )


def sha256_of(content: Any) -> str:
    """Of anything that JSON writes."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
