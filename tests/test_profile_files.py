"""A profile comes back as it was written, appears whole or not at all, and any damage is one clear error."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.estimator import Estimator, EstimatorRecipe, estimator_shapes
from engines.model.checkpoints import inspect_checkpoint
from engines.profile import (
    EstimatorOrigin,
    LayerAccuracy,
    Profile,
    ProfiledData,
    ProfiledPredictions,
    ProfileOrigin,
)
from engines.profile_files import digest_of_profile, mismatch, profile_files, read_profile, write_profile

MODEL, TOKENIZER, DATA = "ab" * 32, "cd" * 32, "ef" * 32
ORIGIN = ProfileOrigin(
    model="bundled:x",
    model_sha256=MODEL,
    tokenizer_sha256=TOKENIZER,
    data_sha256=DATA,
    data=(ProfiledData(workload="boolq", source="generated", n_prompts=3),),
    dtype="float32",
)


def made(vectors: bool = True) -> Profile:
    """Two layers, four experts, top 2, ten tokens; the last expert of the first layer was never chosen."""
    drawn_LEH = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    drawn_LEH[0, 3] = 0.0
    return Profile(
        {1: (10, 8, 2, 0), 3: (5, 5, 5, 5)},
        2,
        3,
        {1: (1.5, 0.1 + 0.2, 2.0, 0.0), 3: (1.0, 2.0, 3.0, 4.0)},
        {1: drawn_LEH[0], 3: drawn_LEH[1]} if vectors else None,
        ORIGIN,
    )


def accuracy(**changes: Any) -> LayerAccuracy:
    told = {"predictor": "estimator", "data": "calibration", "layer": 3, "n_tokens": 10, "recall": 0.75}
    return LayerAccuracy.model_validate(told | {"rank_alignment": (0.5, 0.25), "cosine": None} | changes)


def foreseeing() -> Profile:
    """With an estimator after layer 1, the only one that another follows."""
    recipe = EstimatorRecipe(width=3, expansion=2)
    drawn = {name: torch.full(shape, 0.5) for name, shape in estimator_shapes(1, 8, 4, 3, 2).items()}
    estimator = Estimator((1,), **drawn)
    predictions = ProfiledPredictions(
        every=1,
        held_out=(ProfiledData(workload="boolq", source="generated", n_prompts=1),),
        held_out_sha256=DATA,
        accuracies=(accuracy(), accuracy(predictor="router q", data="held out", cosine=0.5)),
        estimator=EstimatorOrigin(recipe=recipe, width=3, n_parameters=estimator.n_parameters, n_tokens=10),
        estimated_layers=(1,),
    )
    return replace(made(), predictions=predictions, estimator=estimator)


def test_predictions_and_their_estimator_come_back_bit_by_bit(tmp_path: Path) -> None:
    write_profile(foreseeing(), tmp_path / "p")
    found, wrote = read_profile(tmp_path / "p"), foreseeing()
    assert found.predictions == wrote.predictions
    assert found.estimator is not None
    assert wrote.estimator is not None
    assert found.estimator.layers == (1,)
    for name, tensor in wrote.estimator.tensors().items():
        assert torch.equal(found.estimator.tensors()[name], tensor)


PREDICTION_DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another width": lambda p: p["estimator"].update(width=4),
    "another inner width": lambda p: p["estimator"]["recipe"].update(expansion=3),
    "no estimator is told of": lambda p: p.update(estimator=None),
    "a layer that is not there": lambda p: p["accuracies"][0].update(layer=2),
    "the first layer": lambda p: p["accuracies"][0].update(layer=1),
    "a rank too many": lambda p: p["accuracies"][0].update(rank_alignment=[0.1, 0.1, 0.1]),
    "a recall above 1": lambda p: p["accuracies"][0].update(recall=1.5),
    "an estimator after the last layer": lambda p: p.update(estimated_layers=[3]),
    "a field of a later version": lambda p: p.update(more=1),
}


@pytest.mark.parametrize("damage", PREDICTION_DAMAGE)
def test_predictions_that_no_calibration_gives_are_one_error(damage: str, tmp_path: Path) -> None:
    write_profile(foreseeing(), tmp_path / "p")
    rewritten(tmp_path / "p", lambda description: PREDICTION_DAMAGE[damage](description["predictions"]))
    with pytest.raises(EngineError, match=r"damaged .*calibrate again"):
        read_profile(tmp_path / "p")


@pytest.mark.parametrize("damage", ["a tensor is missing", "NaN", "another shape"])
def test_an_estimator_that_was_not_written_so_is_one_error(damage: str, tmp_path: Path) -> None:
    write_profile(foreseeing(), tmp_path / "p")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if damage == "NaN":
            tensors["estimator.narrow_WV"][0, 0] = float("nan")
        elif damage == "another shape":
            tensors["estimator.norm_W"] = torch.ones(2)
        else:
            del tensors["estimator.norm_W"]

    with_tensors(tmp_path / "p", change)
    with pytest.raises(EngineError, match=r"damaged .*calibrate again"):
        read_profile(tmp_path / "p")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(made(), tmp_path / "p")
    return tmp_path / "p"


@pytest.mark.parametrize("vectors", [True, False])
def test_a_profile_comes_back_bit_by_bit(vectors: bool, tmp_path: Path) -> None:
    write_profile(made(vectors), tmp_path / "new" / "p")
    found, wrote = read_profile(tmp_path / "new" / "p"), made(vectors)
    for name in ("tokens_per_expert", "saliency_per_expert", "top_k", "n_prompts", "n_tokens", "origin"):
        assert getattr(found, name) == getattr(wrote, name)
    if wrote.default_vectors_EH is None:
        assert found.default_vectors_EH is None
    else:
        assert found.default_vectors_EH is not None
        assert all(torch.equal(found.default_vectors_EH[layer], v) for layer, v in wrote.default_vectors_EH.items())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p"]


def test_the_description_is_for_people_too(folder: Path) -> None:
    """Imbalance is the busiest over the mean: 10 of a mean of 5, then 5 of 5."""
    description = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    assert description["imbalance"] == [2.0, 1.0]
    assert (description["n_tokens"], description["n_prompts"], description["top_k"]) == (10, 3, 2)
    assert description["origin"]["data"] == [{"workload": "boolq", "source": "generated", "n_prompts": 3}]


@pytest.mark.parametrize("occupied_by", ["profile", "file", "folder", "broken link"])
def test_what_is_there_is_never_replaced(occupied_by: str, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "taken"
    if occupied_by == "profile":
        place = folder
    elif occupied_by == "file":
        place.write_text("mine")
    elif occupied_by == "folder":
        place.mkdir()
        (place / "mine").touch()
    else:
        place.symlink_to(tmp_path / "nowhere")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="left as it is"):
        write_profile(made(vectors=False), place)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_killed_writer_leaves_whole_profiles_alone(tmp_path: Path) -> None:
    """A process writes one after another and is killed in the middle of it."""
    program = (
        "from pathlib import Path\n"
        "from engines.profile_files import write_profile\n"
        "from tests.test_profile_files import made\n"
        f"for n in range(10**6): write_profile(made(), Path({str(tmp_path)!r}) / str(n))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        started_s = time.monotonic()
        while len(list(tmp_path.glob("[0-9]*"))) < 40:
            assert time.monotonic() - started_s < 120
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    found = list(tmp_path.glob("[0-9]*"))
    assert len(found) >= 40
    assert {read_profile(path).n_tokens for path in found} == {10}


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object], sealed_again: bool = True) -> None:
    path, _ = profile_files(folder)
    description = json.loads(path.read_text(encoding="utf-8"))
    change(description)
    if sealed_again:
        rest = json.dumps({k: v for k, v in description.items() if k != "sha256"}, sort_keys=True)
        description["sha256"] = hashlib.sha256(rest.encode()).hexdigest()
    path.write_text(json.dumps(description), encoding="utf-8")


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, and the description says that they are right."""
    _, path = profile_files(folder)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(folder, lambda description: description.update(tensors_sha256=digest))


TENSOR_DAMAGE: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "NaN in a vector": lambda t: t["default_vectors"][0, 0].fill_(float("nan")),
    "infinite saliency": lambda t: t["saliency_per_expert"][0, 0].fill_(float("inf")),
    "negative saliency": lambda t: t["saliency_per_expert"][1, 1].fill_(-1.0),
    "saliency of an expert never chosen": lambda t: t["saliency_per_expert"][0, 3].fill_(1.0),
    "vector of an expert never chosen": lambda t: t["default_vectors"][0, 3].fill_(1.0),
    "a choice more": lambda t: t["tokens_per_expert"][0, 0].add_(1),
    "a negative count": lambda t: t["tokens_per_expert"][1].copy_(torch.tensor([21, -1, 0, 0])),
    "an expert chosen twice by a token": lambda t: t["tokens_per_expert"][0].copy_(torch.tensor([11, 7, 2, 0])),
    "counts of another type": lambda t: t.update(tokens_per_expert=t["tokens_per_expert"].double()),
    "fewer experts": lambda t: t.update(tokens_per_expert=t["tokens_per_expert"][:, :3].contiguous()),
    "narrower vectors": lambda t: t.update(default_vectors=t["default_vectors"][:, :, :4].contiguous()),
    "no saliency": lambda t: t.pop("saliency_per_expert"),
    "a tensor more": lambda t: t.update(other=torch.ones(1)),
}
DESCRIPTION_DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no format": lambda d: d.update(profile_format=0),
    "a format that is no number": lambda d: d.update(profile_format=True),
    "an unknown key": lambda d: d.update(more=1),
    "a missing key": lambda d: d.pop("top_k"),
    "text for a number": lambda d: d.update(n_prompts="3"),
    "half a digest": lambda d: d["origin"].update(model_sha256="ab"),
    "no data": lambda d: d["origin"].update(data=[]),
    "layers in another order": lambda d: d.update(layers=[3, 1]),
    "a layer twice": lambda d: d.update(layers=[1, 1]),
    "no layers": lambda d: d.update(layers=[]),
    "more chosen than there are": lambda d: d.update(top_k=5, n_tokens=4),
    "other tokens": lambda d: d.update(n_tokens=11),
    "imbalance of something else": lambda d: d.update(imbalance=[2.0, 1.5]),
    "imbalance NaN": lambda d: d.update(imbalance=[2.0, float("nan")]),
    "no vectors said": lambda d: d.update(hidden=None),
    "the tensors of another profile": lambda d: d.update(tensors_sha256="00" * 32),
}


def refused(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        read_profile(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("what", TENSOR_DAMAGE)
def test_tensors_that_no_count_gives_are_refused(what: str, folder: Path) -> None:
    with_tensors(folder, TENSOR_DAMAGE[what])
    assert "calibrate again" in refused(folder)


@pytest.mark.parametrize("what", DESCRIPTION_DAMAGE)
def test_a_description_that_does_not_fit_is_refused(what: str, folder: Path) -> None:
    rewritten(folder, DESCRIPTION_DAMAGE[what])
    assert "calibrate again" in refused(folder)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (3, "made by a newer joulebench (format 3; this one reads format 2); update joulebench, or make it again with"),
        (1, "made by an older joulebench (format 1; this one reads format 2); make it again with `joulebench calibr"),
    ],
)
def test_a_profile_of_another_format_is_not_called_damaged(written: int, words: str, folder: Path) -> None:
    rewritten(folder, lambda d: d.update(profile_format=written))
    told = refused(folder)
    assert words in told
    assert "damaged" not in told


SEALED: dict[str, Callable[[dict[str, Any]], object]] = {
    "more prompts of a workload": lambda d: d["origin"]["data"][0].update(n_prompts=999),
    "another workload": lambda d: d["origin"]["data"][0].update(workload="<b>evil</b>"),
    "another source": lambda d: d["origin"]["data"][0].update(source="sample"),
    "another digest of the data": lambda d: d["origin"].update(data_sha256="12" * 32),
    "another name of the model": lambda d: d["origin"].update(model="other"),
    "another type of weights": lambda d: d["origin"].update(dtype="bfloat16"),
    "more prompts": lambda d: d.update(n_prompts=999),
}


@pytest.mark.parametrize("what", SEALED)
def test_whatever_a_description_says_is_sealed(what: str, folder: Path) -> None:
    read_profile(folder)
    rewritten(folder, SEALED[what], sealed_again=False)
    assert re.search(r"profile\.json was sealed as \w{12} and is \w{12} now", refused(folder))
    rewritten(folder, lambda _: None)
    read_profile(folder)


def test_every_changed_byte_of_the_tensors_is_seen(folder: Path) -> None:
    _, path = profile_files(folder)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "sha256" in refused(folder)


def test_what_is_no_profile_says_so(folder: Path, tmp_path: Path) -> None:
    description, tensors = profile_files(folder)
    for path in (tmp_path / "absent", tmp_path / "a\0b", tmp_path / ("x" * 300), description):
        assert "joulebench calibrate" in refused(path)
    whole = description.read_bytes()
    for content in (b"", whole[:-20], b"[" * 100_000, b"\xff\xfe", b"{}", b"null", whole + b" " * (1 << 20)):
        description.write_bytes(content)
        assert "damaged" in refused(folder)
    description.write_bytes(whole)
    tensors.unlink()
    assert "profile.safetensors" in refused(folder)


def test_the_digest_follows_what_was_counted(folder: Path, tmp_path: Path) -> None:
    write_profile(made(), tmp_path / "same")
    write_profile(made(vectors=False), tmp_path / "other")
    assert digest_of_profile(folder) == digest_of_profile(tmp_path / "same")
    assert digest_of_profile(folder) != digest_of_profile(tmp_path / "other")


def test_a_profile_of_another_model_names_both() -> None:
    config = inspect_checkpoint("bundled:tiny-qwen3-moe").config
    other_model = mismatch(made(), "12" * 32, TOKENIZER, config)
    assert other_model is not None
    assert "abababababab" in other_model
    assert "121212121212" in other_model
    other_tokenizer = mismatch(made(), MODEL, "34" * 32, config)
    assert other_tokenizer is not None
    assert "cdcdcdcdcdcd" in other_tokenizer
    assert "343434343434" in other_tokenizer


def test_a_profile_of_other_sizes_is_refused_without_a_look_at_the_weights() -> None:
    config = inspect_checkpoint("bundled:tiny-qwen3-moe").config
    moe = config.moe
    assert moe is not None
    sizes = mismatch(made(), None, TOKENIZER, config)
    assert sizes is not None
    assert f"4 experts of which a token chooses 2, and the model has {moe.n_experts}" in sizes
    own = [1] * moe.top_k + [0] * (moe.n_experts - moe.top_k)
    fewer = Profile({layer: tuple(own) for layer in moe.sparse_layers[:-1]}, moe.top_k, 1, origin=ORIGIN)
    layers = mismatch(fewer, None, TOKENIZER, config)
    assert layers is not None
    assert "layers" in layers
    whole = Profile({layer: tuple(own) for layer in moe.sparse_layers}, moe.top_k, 1, origin=ORIGIN)
    assert mismatch(whole, MODEL, TOKENIZER, config) is None
