"""The command that counts a profile."""

from __future__ import annotations

import json
from functools import partial
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.elsewhere import stamp, written_somewhere
from harness.interrupts import raise_in_command
from harness.step_bar import StepBar
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NOT_WRITTEN,
    AsJson,
    check_out,
    console_of,
    end_interrupted,
    fail,
    fail_each,
    print_rows,
    quiet_libraries,
    rounded,
)
from results.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from engines.profile import Profile, ProfiledPredictions

Dtype = Literal["float32", "bfloat16", "float16"]


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as in model.source of a plan.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="WORKLOAD|PLAN.toml[,...]",
            help="Workloads, or a plan with workloads; their calibration prompts are counted. May be repeated.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the profile.")],
    prompts: Annotated[int, typer.Option(min=1, max=100_000, help="Prompts of each workload, if it has so many.")] = 32,
    dtype: Annotated[Dtype, typer.Option(help="How weights are stored in memory.")] = "float32",
    chunk: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of a prefill step.")] = 512,
    estimator: Annotated[
        bool,
        typer.Option("--estimator", help="Train a network that predicts the experts of the next layer, and keep it."),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the estimator's training; default: 0.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Steps of the estimator's training; default: 3000.")
    ] = None,
    width: Annotated[
        int | None, typer.Option(min=1, max=1 << 16, help="Width of the estimator; default: half the model's.")
    ] = None,
    expansion: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Inner over outer width of the estimator's feed-forward block; default: 2."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count which experts a model chooses, and write a profile for plans."""
    own = {"seed": seed, "n_steps": steps, "width": width, "expansion": expansion}
    given = {name: value for name, value in own.items() if value is not None}
    if given and not estimator:
        fail(
            f"--{next(iter(given)).removeprefix('n_')} belongs to an estimator, and none is trained; add --estimator",
            EXIT_BAD_PLAN,
        )
    quiet_libraries()
    raise_in_command()
    from engines.errors import EngineError
    from engines.estimator import EstimatorRecipe
    from engines.profile_files import check_is_free, write_profile
    from harness.calibration import CalibrationError
    from harness.calibration import calibrate as counted
    from harness.model_specs import ModelSpec

    console = console_of(stderr=True)
    # A name of a file may have commas.
    texts = [[text] if isfile(text) else text.split(",") for text in data]
    names = [name.strip() for own in texts for name in own if name.strip()]
    try:
        check_is_free(out)
        check_out(out)
        with _Progress(console) as progress:
            recipe = EstimatorRecipe.model_validate(given) if estimator else None
            profile = counted(ModelSpec(source=model, dtype=dtype), names, prompts, chunk, progress, recipe)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "no profile was written")
    except CalibrationError as error:
        fail_each(error.problems, EXIT_BAD_PLAN)
    except FileExistsError as error:
        fail(f"--out {error}", EXIT_BAD_PLAN)
    except (EngineError, OSError, ValueError) as error:
        fail(str(error), EXIT_BAD_PLAN)
    kept, trouble = written_somewhere(out, f"profile-{stamp()}", partial(write_profile, profile))
    if kept is None:
        fail(f"{trouble}; the profile is lost", EXIT_NOT_WRITTEN)
    if as_json:
        print_rows(_rows_with_predictions(profile), True, "")
    else:
        print_rows(_rows(profile), False, f"{model}: routing over {_counted(profile)}")
        if profile.predictions is not None:
            print_rows(_prediction_rows(profile.predictions), False, _predicted(profile.predictions))
        # Strings of TOML take what strings of JSON do.
        named = printable(json.dumps(str(kept), ensure_ascii=False))
        typer.echo(f"{printable(str(kept))}: written; a plan names it as profile = {named} in [[engine]]")
    if trouble:
        fail(f"{trouble}; the profile is in {kept}", EXIT_NOT_WRITTEN)


def _counted(profile: Profile) -> str:
    assert profile.origin is not None  # the command has just told it
    data = ", ".join(f"{_prompts(one.n_prompts)} of {one.workload} ({one.source})" for one in profile.origin.data)
    return f"{profile.n_tokens:,} tokens, top {profile.top_k}: {data}"


def _prompts(n: int) -> str:
    return f"{n} prompt{'s' if n != 1 else ''}"


def _rows(profile: Profile) -> list[dict[str, Any]]:
    return [
        {
            "layer": layer,
            "imbalance": rounded(profile.imbalance(layer)),
            "most chosen": ", ".join(map(str, profile.popularity(layer)[:4])),
            "experts": len(counts),
            "never chosen": counts.count(0),
        }
        for layer, counts in profile.tokens_per_expert.items()
    ]


def _rows_with_predictions(profile: Profile) -> list[dict[str, Any]]:
    told = () if profile.predictions is None else profile.predictions.accuracies
    return [
        row | {"predictions": [one.model_dump() for one in told if one.layer == row["layer"]]} for row in _rows(profile)
    ]


def _predicted(predictions: ProfiledPredictions) -> str:
    held = sum(data.n_prompts for data in predictions.held_out)
    shown = f"{_prompts(held)} held out" if held else "none held out, for the workloads keep no more; lower --prompts"
    found = f"experts of a layer, told by the layer before: calibration tokens, and {shown}"
    if predictions.estimator is not None:
        recipe, n_parameters = predictions.estimator.recipe, predictions.estimator.n_parameters
        found += f"; estimator of {n_parameters:,} parameters, {recipe.n_steps:,} steps, seed {recipe.seed}"
        asked = ", ".join(map(str, predictions.estimated_layers)) or "none"
        found += f"; by the tokens held back from it, a hybrid asks it after layers: {asked}"
    return found


def _prediction_rows(predictions: ProfiledPredictions) -> list[dict[str, Any]]:
    """Of each layer and predictor: on calibration tokens, on those held back from an estimator, on those held out."""
    both = {(one.layer, one.predictor, one.data): one for one in predictions.accuracies}
    rows = []
    for layer, predictor in sorted({(one.layer, one.predictor) for one in predictions.accuracies}):
        own, back, held = (both.get((layer, predictor, data)) for data in ("calibration", "held back", "held out"))
        assert own is not None  # every predictor was tried on the calibration tokens
        rows.append(
            {
                "layer": layer,
                "predictor": predictor,
                "recall": rounded(own.recall),
                **({} if back is None else {"held back": rounded(back.recall)}),
                "held out": None if held is None else rounded(held.recall),
                "cosine": rounded(own.cosine),
                "its held out": None if held is None else rounded(held.cosine),
                "right expert by rank": " ".join(f"{share:.2f}" for share in (held or back or own).rank_alignment),
            }
        )
    return rows


class _Progress(StepBar):
    """A bar on a terminal; elsewhere a line for each step and tenth of the prompts."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._of = ""

    def note(self, what: str) -> None:
        self._bar.update(self._task, description=printable(what))
        self._say(what)

    def begin(self, n: int, of: str) -> None:
        self._n, self._n_done, self._of = n, 0, of
        self._bar.reset(self._task, description=of, total=n)

    def advance(self) -> None:
        self._n_done += 1
        self._bar.update(self._task, advance=1)
        if self._n_done * 10 // self._n > (self._n_done - 1) * 10 // self._n:
            self._say(f"{self._n_done} of {self._n} {self._of}")
