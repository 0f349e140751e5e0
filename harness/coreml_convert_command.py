"""`joulebench coreml convert`: a MoE model as packages for the Apple Neural Engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from harness.coreml_command import print_first, told_ends
from harness.interrupts import raise_in_command
from harness.step_bar import StepBar
from harness.technique_option import technique_of
from harness.terminal import (
    EXIT_NOT_WRITTEN,
    AsJson,
    console_of,
    fail,
    print_rows,
    quiet_libraries,
)
from results.printable import printable
from results.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

    from engines.coreml.conversion import Conversion
    from engines.coreml.manifest import PackagePlan
    from engines.techniques.base import TechniqueParameters
    from harness.coreml_convert import Converted

Weights = Literal["float16", "int8", "int4"]
Attention = Literal["both", "stateful", "stateless"]
LONGEST_AXIS = 1 << 16
TECHNIQUE_HELP = "As in a plan: npumoe-tg, or '{ name = \"npumoe-tg\", group_size = 8 }'."


def convert_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as in model.source of a plan.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the packages; the same command goes on in it.")],
    profile: Annotated[
        str | None, typer.Option(metavar="DIR", help="What `joulebench calibrate` wrote, for techniques that learn.")
    ] = None,
    technique: Annotated[str, typer.Option(metavar="NAME|{...}", help=TECHNIQUE_HELP)] = "npumoe",
    chunk: Annotated[int, typer.Option(min=1, max=LONGEST_AXIS, help="Tokens of a prefill step.")] = 512,
    context: Annotated[int, typer.Option(min=1, max=LONGEST_AXIS, help="Positions that attention holds.")] = 2048,
    weights: Annotated[Weights, typer.Option(help="Form of the weights: fp16, or integers with scales.")] = "float16",
    attention: Annotated[
        Attention, typer.Option(help="Keeps keys and values in a Core ML state, takes them as inputs, or has both.")
    ] = "both",
    int4_known_to_crash: Annotated[
        bool, typer.Option("--int4-known-to-crash", help="Allow int4: reported to crash, or to be wrong, on Macs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a MoE model as Core ML packages for the Neural Engine: attention, and experts in groups of fixed shapes.

    Killed at any point, the same command goes on. Nothing is run: that takes a Mac.
    """
    quiet_libraries()
    raise_in_command()
    from harness.coreml_convert import NoSpaceError, convert_all

    console = console_of(stderr=True)
    parameters = technique_of(technique)
    options = {"chunk": chunk, "context": context, "weights": weights, "attention": attention}
    with told_ends(f"finished packages in {out} are kept; the same command goes on"):
        try:
            with console.status("reading the model"):
                conversion = _conversion(model, parameters, profile, options, int4_known_to_crash)
            with _Following(console) as following:
                converted = convert_all(conversion, out, following)
        except NoSpaceError as error:
            fail(f"--out {error}", EXIT_NOT_WRITTEN)
        except OSError as error:
            why = error.strerror or str(error)
            fail(f"--out {out}: cannot be written ({why}); finished packages are kept, the same command goes on",
                 EXIT_NOT_WRITTEN)  # fmt: skip
    rows = _package_rows(converted)
    if as_json:
        print_rows(rows, True, "")
        return
    _print_converted(rows, converted, out)


def _conversion(
    model: str, parameters: TechniqueParameters, profile: str | None, options: dict[str, Any], int4: bool
) -> Conversion:
    """Raises `ProblemsError` with all that is in the way, `OSError`."""
    from engines.coreml.conversion import Asked, Conversion, in_the_way
    from engines.coreml.toolkit import load_coremltools
    from engines.errors import EngineError, ProblemsError
    from engines.model.checkpoints import inspect_checkpoint
    from harness.profiles import model_digests, profile_for

    problems, learnt = [], None
    try:
        load_coremltools()
    except EngineError as error:
        problems.append(str(error))
    try:
        facts = inspect_checkpoint(model)
    except EngineError as error:
        raise ProblemsError([*problems, str(error)]) from error
    digest = model_digests(facts, lambda note: typer.echo(printable(note), err=True)).model
    if digest is None:
        problems.append(f"{model}: its weights are not here; fetch them into a folder first")
    if profile is not None and not parameters.learns:
        problems.append(f"--profile {profile}: {parameters.technique} learns nothing; leave it out")
    elif profile is not None:
        try:
            learnt = profile_for(profile, facts, parameters.learns)
        except EngineError as error:
            problems.append(str(error))
    asked = Asked(parameters, allow_int4_known_to_crash=int4, **options)
    problems += in_the_way(facts, asked, profile is not None)
    if problems or digest is None:
        raise ProblemsError(problems)
    conversion = Conversion(model, asked, learnt, digest)
    if not conversion.packages:
        raise EngineError(f"--technique {parameters.technique}: it places nothing on the npu, and so has no graph")
    return conversion


def _package_rows(converted: Converted) -> list[dict[str, Any]]:
    return [
        {
            "package": package.path,
            "layer": package.layer,
            "role": package.role,
            "experts": len(package.experts) or None,
            "functions": ", ".join(function.name for function in package.functions),
            "weight_bytes": package.weight_bytes,
        }
        for package in converted.manifest.packages
    ]


def _print_converted(rows: list[dict[str, Any]], converted: Converted, out: Path) -> None:
    shown = [{**row, "functions": _shortened(row["functions"])} for row in rows]
    print_first(shown, f"{converted.manifest.model} as packages", "manifest.json names all")
    peak = converted.peak.n_bytes
    told = f"{peak / GIB:.3g} GiB of memory at most" if peak is not None else str(converted.peak.remark)
    typer.echo(
        f"{len(rows)} packages ({converted.n_written} written, {converted.n_kept} were there),"
        f" {sum(len(package.functions) for package in converted.manifest.packages)} graphs,"
        f" {converted.n_bytes / 1e9:.3g} GB, {converted.took_s:.1f} s, {told}"
    )
    shown_out = shlex.quote(str(out))
    typer.echo(printable(f"{out}: converted, not run: that takes a Mac, and none has tried it. Next:"))
    typer.echo(printable(f"  joulebench coreml lint {shown_out}  # what would leave the Neural Engine"))


def _shortened(words: str, longest: int = 60) -> str:
    return words if len(words) <= longest else f"{words[: longest - 4]} ..."


class _Following(StepBar):
    """A bar of weights on a terminal; elsewhere a line a package."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, of_bytes=True)

    def checks(self, n_packages: int) -> None:
        if n_packages:
            self._bar.update(self._task, description=f"reading {n_packages} packages back")

    def begin(self, n_packages: int, n_bytes: int, n_done: int, done_bytes: int) -> None:
        self._n, self._n_done = n_packages, n_done
        self._bar.reset(self._task, total=n_bytes, completed=done_bytes)
        if n_done:
            self._console.print(f"{n_done} of {n_packages} packages are there already", highlight=False)

    def package(self, package: PackagePlan) -> None:
        self._bar.update(self._task, description=f"{self._n_done + 1} of {self._n}: {package.path}")

    def done(self, package: PackagePlan, took_s: float) -> None:
        self._n_done += 1
        self._bar.update(self._task, advance=package.weight_bytes)
        self._say(f"{self._n_done} of {self._n}: {package.path}, {package.weight_bytes / 1e6:.3g} MB, {took_s:.1f} s")
