"""The tuned profile: what a session chose, on which device, for which engine and model, and by what evidence.

    SESSION/tuned.json                     written by the session
    STATE/tuned/NAME.json                  the same, found by its name (`harness.state` says where STATE is)

It holds for the device, system, engine and model that it was made with. When one of them changes it has expired:
`why_expired` says what changed, and `joulebench tune --check` measures again and renews it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import Field, ValidationError

from harness.plan_values import MAX_NAME
from harness.state import state_folder
from harness.tuning.engine_marks import EngineMark
from results.environments import Environment
from results.file_state import sha256_of_file
from results.printable import printable
from results.records import MODEL_PREFIX, Method, Phase, Record
from results.report.files import replace_text

TUNED_FORMAT: Literal[2] = 2
UNSEALED = ""
MOST_BYTES = 1 << 22
DIGITS = 12
FILE_NAME = "tuned.json"
WORDS = {
    "model_sha256": "model files, SHA-256",
    "kernels_sha256": "kernels, SHA-256",
    "sheet_sha256": "sheet, SHA-256",
    "program_sha256": "program, its version and files, SHA-256",
}
"""What a digest is of, in a sentence that says that it changed."""


Triple = tuple[float, float | None, float | None]
"""(estimate, low, high) of 95 %; without an interval where there are too few probes."""


class TunedProfileError(Exception):
    """A profile that is absent, damaged, expired or of something else: what, and the remedy."""


class Fingerprint(Record):
    """What a choice holds for. None: not told by this device."""

    device: str
    machine: str | None
    cpu_model: str | None
    n_threads: int | None
    os: str | None
    joulebench: str
    torch: str | None
    kernels_sha256: str | None
    model: str
    """Its source, as the plan names it."""
    model_sha256: str | None
    """Of the digests of its files. None: they were not looked at."""
    engine: str
    """Our engine's technique, or another engine's name."""
    weights: str
    program_sha256: str | None
    """Of another engine's version, program, libraries and model file. None: ours, or it could not be read."""
    program_version: str | None = Field(None, exclude_if=lambda told: told is None)
    """As another engine says it itself; some programs say none. Left out of the file, as in profiles of before."""
    sheet_sha256: str | None = Field(None, exclude_if=lambda told: told is None)
    """Of the sheet that prices or meters, which decides what costs least. None: there is none, or it cannot be read."""


class CandidateEvidence(Record):
    """A candidate as the session saw it."""

    name: str
    state: str
    n_probes: int
    tokens_per_s: Triple | None = None
    energy_per_token: Triple | None = None
    reason: str | None = None


class PhaseEvidence(Record):
    """One search."""

    phase: Phase
    chosen: str
    fastest: str
    is_separated: bool
    n_probes: int
    floor_tokens_per_s: float | None = None
    energy_unit: str | None = None
    """"J/token", or the gauge's own; None: no meter."""
    energy_method: Method | None = None
    words: str
    """What was chosen and why."""
    candidates: tuple[CandidateEvidence, ...] = ()


class CheckedRatio(Record):
    """Chosen over planned, paired by repeats. None: not known, and why."""

    phase: Phase
    quantity: Literal["time", "energy"]
    ratio: float | None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    method: Method | None = Field(None, exclude_if=lambda told: told is None)
    """Of its joules, which a meter tells, whatever candidates were judged by. Left out of the file where there is none,
    as in profiles of before."""


class Check(Record):
    """The chosen arm measured beside the planned one, after the search and without its choice of luck."""

    at: str
    n_pairs: int
    ratios: tuple[CheckedRatio, ...]
    verdict: Literal["holds", "does not hold", "not certain"]
    words: str


class TunedProfile(Record):
    """A session's result, and what the latest check said of it."""

    tuned_format: Literal[2] = TUNED_FORMAT
    name: str = Field(min_length=1, max_length=MAX_NAME)
    created_at: str
    fingerprint: Fingerprint
    objective: str
    slowdown: float
    engine: dict[str, Any]
    """The chosen arm, as a plan writes it."""
    settings: dict[str, Any]
    """Of it what differs from the planned arm."""
    plan: dict[str, Any]
    """Of both arms, asked the same: what `--check` runs."""
    evidence: tuple[PhaseEvidence, ...]
    check: Check | None = None
    searched_on: Fingerprint | None = None
    """What the evidence is of, where a check has renewed the profile for another system or engine since."""
    sha256: str = UNSEALED


def write_profile(profile: TunedProfile, path: Path) -> Path:
    """Replaces the one before. Raises `OSError`."""
    sealed = profile.model_copy(update={"sha256": _seal(profile)})
    replace_text(path, sealed.model_dump_json(indent=1) + "\n")
    return path


def kept_path(name: str, folder: Path | None = None) -> Path:
    return (folder or state_folder()) / "tuned" / f"{quote(name, safe=' ')}.json"


def read_profile(path: Path) -> TunedProfile:
    """Raises `TunedProfileError`."""
    shown = printable(str(path), 200)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TunedProfileError(f"{shown}: no tuned profile there ({why}); `joulebench tune` writes one") from error
    if len(content) > MOST_BYTES:
        raise TunedProfileError(f"{shown}: more than {MOST_BYTES:,} bytes are no tuned profile; give its path")
    try:
        found = TunedProfile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:80] or "it"
        raise TunedProfileError(
            f"{shown}: no tuned profile that this joulebench reads ({where}: {first['msg'][:160]}); tune again"
        ) from error
    if found.sha256 != _seal(found):
        raise TunedProfileError(
            f"{shown}: was changed after it was written; tune again, or write its cores in the plan"
        )
    return found


def find_profile(named: str) -> tuple[TunedProfile, Path]:
    """By the path of it or of its session, or by its name among those that are kept: of a name of both, what is kept.

    Raises `TunedProfileError`.
    """
    is_path = "/" in named or named.endswith(".json")
    path = Path(named).expanduser() if is_path else kept_path(named)
    if not is_path and not path.exists():
        if (of_session := Path(named) / FILE_NAME).is_file():
            return read_profile(of_session), of_session
        names = sorted(profile.name for profile, _ in kept_profiles())
        told = f"there are {', '.join(names)}" if names else "there is none yet"
        raise TunedProfileError(
            f"no tuned profile is called {named[:80]!r}, {told}; `joulebench tune --name` makes one"
        )
    path = path / FILE_NAME if path.is_dir() else path
    return read_profile(path), path


def kept_profiles() -> Iterator[tuple[TunedProfile, Path]]:
    """Those of the state folder that can be read."""
    folder = state_folder() / "tuned"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            yield read_profile(path), path
        except TunedProfileError:
            continue  # it is told where it is asked for by its name


def doubts(profile: TunedProfile) -> list[str]:
    """Why it should not be relied on yet, in words; empty where a check says that it holds."""
    found = []
    if profile.check is None:
        found.append("its choice was not measured beside the planned arm")
    elif profile.check.verdict != "holds":
        found.append(f"its check {'does not hold' if is_refuted(profile) else 'is not certain'}")
    unsure = [one.phase for one in profile.evidence if not one.is_separated]
    if unsure:
        found.append(f"the search of {' and '.join(unsure)} did not tell all candidates apart")
    return found


def is_refuted(profile: TunedProfile) -> bool:
    """The latest check says that it costs more than the planned arm, or is too slow."""
    return profile.check is not None and profile.check.verdict == "does not hold"


def why_expired(then: Fingerprint, now: Fingerprint) -> list[str]:
    """What changed, in words. Only what both tell is compared, and of a model whose files are equal no more than these:
    it may lie elsewhere by now."""
    before, after = then.model_dump(exclude_none=True), now.model_dump(exclude_none=True)
    moved = {"model"} if then.model_sha256 is not None and then.model_sha256 == now.model_sha256 else set()
    return [
        f"{WORDS.get(key, key.replace('_', ' '))} {_short(key, value)} -> {_short(key, after[key])}"
        for key, value in before.items()
        if key not in moved and key in after and value != after[key]
    ]


def fingerprint(
    device: str,
    software: Environment,
    own: Environment | None,
    model: str,
    model_sha256: str | None,
    engine: EngineMark,
    sheet_sha256: str | None,
) -> Fingerprint:
    """software: where joulebench runs. own: of the device; None: it was not looked at."""
    return Fingerprint(
        device=device,
        machine=own and own.machine,
        cpu_model=own and own.cpu_model,
        n_threads=own and own.n_threads,
        os=own and own.os,
        joulebench=software.joulebench,
        torch=software.packages.get("torch") if engine.is_ours else None,
        kernels_sha256=own and own.build and own.build.sha256 if engine.is_ours else None,
        model=model,
        model_sha256=model_sha256,
        engine=engine.engine,
        weights=engine.weights,
        program_sha256=engine.program_sha256,
        program_version=engine.program_version,
        sheet_sha256=sheet_sha256,
    )


def digest_of_model(source: str, told: Callable[[str], None]) -> str | None:
    """Of the digests of its files; None where they are not here, or cannot be read."""
    from engines.errors import EngineError
    from engines.model.checkpoints import decisive_files
    from harness.file_digests import file_digests

    if not source.startswith("bundled:") and not Path(source).expanduser().is_dir():
        return None  # a hub's: its files may not be here, and a check fetches nothing
    try:
        digests = file_digests(decisive_files(source), state_folder(), told)
    except (EngineError, OSError):
        return None
    rows = sorted(f"{path.name} {digest}" for path, digest in digests.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def digest_of_sheet(device: dict[str, Any]) -> str | None:
    """Of the sheet of a plan's device, its own or that of its modelled meter; None where there is none to be read."""
    from devices.meters.modelled import watts_sheet_path
    from devices.models.sheet import sheet_path

    name, sheet = device.get("name"), device.get("sheet")
    try:
        if isinstance(sheet, str):
            return sha256_of_file(Path(sheet))
        if isinstance(name, str) and name.startswith(MODEL_PREFIX):
            return sha256_of_file(sheet_path(name.removeprefix(MODEL_PREFIX)))
        if isinstance(watts := device.get("watts_sheet"), str):
            return sha256_of_file(watts_sheet_path(watts))
    except OSError:
        return None
    return None


def _seal(profile: TunedProfile) -> str:
    rest = profile.model_dump(mode="json", exclude={"sha256"})
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _short(key: str, value: object) -> str:
    return str(value)[:DIGITS] if key.endswith("sha256") else str(value)
