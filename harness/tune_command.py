"""`joulebench tune`: searches the settings with which this device spends least, and keeps what it found."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.interrupts import raise_in_command
from harness.run_folder import RESUMABLE, kept_in
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    EXIT_NONE_USABLE,
    EXIT_NOT_WRITTEN,
    console_of,
    end_interrupted,
    fail,
    fail_each,
    fail_store,
    print_rows,
    quiet_libraries,
)
from results.printable import printable

if TYPE_CHECKING:
    from harness.tuning.asked_plan import Asked

READ_BY_CHECK = ("check", "pairs", "out")
"""Options that `--check` reads."""
IN_PLANS = {
    "device": "with --set device.0.name=...",
    "engine": "take another plan",
    "model": "with --set model.source=...",
    "prompt": "in its [[workload]]",
    "decode": "in its [[workload]]",
    "requests": "in its [[workload]]",
}
"""Options that stand in for a plan, and how a plan's own value is changed."""
LEAST_CHECKED = 2
"""Pairs of a check."""
OBJECTIVES = ("energy", "latency", "pareto")
MODEL = "bundled:tiny-qwen3-moe"
PERCENT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*%|(0?\.\d{1,8}|0|1)")


def tune(
    context: typer.Context,
    plan_path: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A plan of one engine and one device, in place of options.")
    ] = None,
    device: Annotated[str, typer.Option(help="As a plan names it: host, model:SHEET, adb:SERIAL, ios:UDID.")] = "host",
    engine: Annotated[str, typer.Option(help="A technique, or another engine by its `runs`.")] = "dropless",
    model: Annotated[str, typer.Option(help="As a plan names its source.")] = MODEL,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a probe's prompt.")] = 64,
    decode: Annotated[int, typer.Option(min=1, help="Tokens that a probe decodes; source 002 takes 50.")] = 50,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a probe.")] = 4,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="engine.KEY=[...]",
            help="Tune this key in the place of cores. May be repeated: all combinations are candidates.",
        ),
    ] = None,
    objective: Annotated[str, typer.Option(metavar="|".join(OBJECTIVES), help="What is to be least.")] = "energy",
    slowdown: Annotated[str, typer.Option(help="Of energy: how much slower than the fastest, such as 8%.")] = "8%",
    search: Annotated[
        str | None,
        typer.Option(
            help="Of cores: tree (default), exhaustive, or probing once: aecs, aecs-code, aecs-measured, ios."
        ),
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of a search of cores, such as alpha=1: by the heuristic, no meter."),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Every candidate in every round to the end: the yardstick.")
    ] = False,
    accuracy_floor: Annotated[
        str | None, typer.Option(help="The most that accuracy may fall below the planned arm's, such as 1%.")
    ] = None,
    weights_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most that a candidate's weights may take: 2GB.")
    ] = None,
    temperature_limit: Annotated[
        float | None,
        typer.Option(
            metavar="DEGREES", min=0, max=200, help="A candidate in whose probe the device gets hotter leaves."
        ),
    ] = None,
    probes: Annotated[int, typer.Option(min=1, help="The most probes of each search.")] = 600,
    pairs: Annotated[int, typer.Option(min=0, help="Pairs that compare the chosen with the planned arm; 0: none.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of probes.")] = 0,
    name: Annotated[str | None, typer.Option(help="Of the tuned profile; default: device and model.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the session; default: runs/tune-NAME.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a value of the plan. May be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the session in the folder.")] = False,
    check: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure a tuned profile (name or path) again beside the planned arm."),
    ] = None,
) -> None:
    """Search the cores, or other keys of a plan, that cost least on a device; write a tuned profile."""
    quiet_libraries()
    raise_in_command(is_long=True)
    from harness.tuning.asked_plan import Asked

    problems: list[str] = []
    problems += _unread(context, plan_path is not None, check is not None, search)
    if check is not None and pairs < LEAST_CHECKED:
        problems.append(
            f"--pairs {pairs}: a check needs {LEAST_CHECKED} pairs or more, for fewer have no interval; name more, or"
            " leave it out and take 5"
        )
    shares = {"--slowdown": _share(slowdown, "--slowdown", problems)}
    if accuracy_floor is not None:
        shares["--accuracy-floor"] = _share(accuracy_floor, "--accuracy-floor", problems)
    if objective not in OBJECTIVES:
        problems.append(f"--objective {objective}: no such objective; take one of {', '.join(OBJECTIVES)}")
    limit_bytes = None if weights_limit is None else _size(weights_limit, problems)
    if check is not None and problems:
        fail_each(problems, EXIT_BAD_PLAN)
    asked = Asked(
        plan_path, device, engine, model, prompt, decode, requests, tuple(space or ()), objective,
        shares["--slowdown"], search, tuple(constant or ()), exhaustive, shares.get("--accuracy-floor"), limit_bytes,
        temperature_limit, probes, pairs, seed, name, out, tuple(settings or ()), resume,
    )  # fmt: skip
    folder: list[Path] = []
    try:
        if check is not None:
            _check(check, pairs, out)
        else:
            _tune(asked, problems, folder.append)
    except KeyboardInterrupt as interrupt:
        if check is not None:
            end_interrupted(interrupt, "the profile stays as it was, check it again")
        # Where it goes on, probes are kept from before.
        end_interrupted(interrupt, RESUMABLE.format("probe") if resume else kept_in(next(iter(folder), None), "probe"))


def _tune(asked: Asked, problems: list[str], begins_in: Callable[[Path], None]) -> None:
    from harness.opening import DeviceNotReadyError
    from harness.plan import PlanError
    from harness.tuning.asked import begin, conclude
    from harness.tuning.display import DOES, ProbeLines, candidate_rows, order_words, sentence, taken_words
    from harness.tuning.pages import write_session
    from harness.tuning.probing import SessionBrokenOffError
    from harness.tuning.profile import FILE_NAME, is_refuted, kept_path, write_profile
    from results.disk_errors import remedy_of
    from results.store import StoreError

    console = console_of()

    def say(line: str) -> None:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    try:
        with contextlib.ExitStack() as closing:
            lines = closing.enter_context(ProbeLines(console))
            session = closing.enter_context(begin(asked, problems, say))
            begins_in(session.folder)
            found = session.run(lines)
            profile = conclude(session, found, lines)
        for one in found.phases:
            title = f"{DOES[one.phase]}: candidates, {order_words(found.options)}"
            print_rows(candidate_rows(found, one), False, title)
            say(sentence(found, one))
        for line in found.disturbances:
            say(line)
        if profile.check is not None:
            say(profile.check.words)
        written = [
            write_profile(profile, session.folder / FILE_NAME),
            write_profile(profile, kept_path(profile.name)),
            *write_session(found, profile, session.folder),
        ]
    except PlanError as error:
        fail_each(error.problems, EXIT_BAD_PLAN)
    except StoreError as error:
        fail_store(error)
    except DeviceNotReadyError as error:
        fail(str(error), EXIT_DEVICE_NOT_READY)
    except SessionBrokenOffError as error:
        fail(f"{error}; every finished probe is kept", EXIT_NONE_USABLE)
    except OSError as error:
        fail(
            f"{error.filename}: cannot be written ({error.strerror}); {remedy_of(error)} and go on with --resume",
            EXIT_NOT_WRITTEN,
        )
    for path in written:
        say(str(path))
    if is_refuted(profile):
        fail(taken_words(profile), EXIT_NONE_USABLE)
    say(taken_words(profile))


def _check(named: str, pairs: int, out: Path | None) -> None:
    from harness.opening import DeviceNotReadyError
    from harness.plan import PlanError
    from harness.tuning.asked import check_again
    from harness.tuning.checking import CHECK_REPORT, VERDICT_WORDS
    from harness.tuning.display import ProbeLines
    from harness.tuning.probing import SessionBrokenOffError
    from harness.tuning.profile import TunedProfileError, kept_path
    from results.disk_errors import remedy_of
    from results.store import StoreError

    console = console_of()
    try:
        with ProbeLines(console) as lines:
            profile, paths, folder = check_again(named, pairs, out, lines)
    except PlanError as error:
        fail_each(error.problems, EXIT_BAD_PLAN)
    except (TunedProfileError, StoreError) as error:
        fail_store(error)
    except DeviceNotReadyError as error:
        fail(str(error), EXIT_DEVICE_NOT_READY)
    except SessionBrokenOffError as error:
        fail(f"{error}; the profile stays as it was, check it again then", EXIT_NONE_USABLE)
    except OSError as error:
        fail(
            f"{error.filename}: cannot be written ({error.strerror}); {remedy_of(error)}, and check it again",
            EXIT_NOT_WRITTEN,
        )
    assert profile.check is not None
    for line in (profile.check.words, f"figures of both arms: {folder / CHECK_REPORT}"):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    for path in paths:
        typer.echo(f"{printable(shlex.quote(str(path)))}: {'renewed' if profile.check.verdict == 'holds' else 'noted'}")
    if (kept := kept_path(profile.name)) not in paths:
        typer.echo(f"{printable(shlex.quote(str(kept)))}: left as it is, for it is of another search of this name")
    if profile.check.verdict != "holds":
        fail(
            f"the tuned profile {profile.name} {VERDICT_WORDS[profile.check.verdict]}; `joulebench tune` searches anew,"
            " and more --pairs make a check more certain",
            EXIT_NONE_USABLE,
        )


def _unread(context: typer.Context, has_plan: bool, is_check: bool, search: str | None) -> list[str]:
    """Options that were given and that nothing would read."""
    from harness.tuning.aecs import PRESETS

    given = {}
    for parameter in context.command.params:
        source = parameter.name and context.get_parameter_source(parameter.name)
        if source and source.name != "DEFAULT":
            given[parameter.name] = max(parameter.opts, key=len)
    if is_check:
        return [
            f"{'PLAN' if name == 'plan_path' else option}: has no part in --check, which runs the profile's own plan;"
            " leave it out"
            for name, option in given.items()
            if name not in READ_BY_CHECK
        ]
    of_races = [
        f"{given[name]}: --search {search} probes each candidate once, in its own order; leave it out"
        for name in ("probes", "seed")
        if name in given and search in PRESETS
    ]
    if not has_plan:
        return of_races
    of_plans = (
        f"{given[name]}: the plan says it; change it there, or {how}" for name, how in IN_PLANS.items() if name in given
    )
    return [*of_races, *of_plans]


def _share(text: str, option: str, problems: list[str]) -> float:
    match = PERCENT.fullmatch(text.strip())
    found = 1.0 if match is None else float(match[1]) / 100 if match[1] is not None else float(match[2])
    if match is None or not 0 <= found < 1:
        problems.append(f"{option} {text[:40]}: must be a share from 0 to below 1; write 8% or 0.08")
        return 0.0
    return found


def _size(text: str, problems: list[str]) -> int | None:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        problems.append(f"--weights-limit {text[:40]}: must be a size; write 2GB or 512MiB")
        return None
