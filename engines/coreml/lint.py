"""Reads saved packages back and tells what would leave the Neural Engine, be slow on it, or fail, by `eligibility`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engines.coreml.eligibility import COMPRESSED, INPUT, LISTED, RULES, Rule
from engines.coreml.manifest import MANIFEST, PLANNED, read_manifest
from engines.coreml.package_reading import SUFFIX, Function, Operation, Package, packages_below, read_package
from engines.coreml.sums import damage, sums_file
from engines.coreml.toolkit import load_coremltools
from engines.errors import EngineError, ProblemsError


class Finding(NamedTuple):
    """package, function, operation: empty where the rule is of more than one. found: what was there."""

    package: str
    function: str
    operation: str
    kind: str
    rule: Rule
    found: str

    @property
    def is_note(self) -> bool:
        return self.rule.effect == "unclear"


class Linted(NamedTuple):
    """unlisted: how many operations of a kind that no source speaks about."""

    findings: tuple[Finding, ...]
    unlisted: Mapping[str, int]
    n_packages: int
    n_graphs: int
    n_held: int
    """Of a process: of a package that holds graphs with states and without it takes one kind, here the more."""
    n_operations: int
    most_weight_bytes: int

    @property
    def passes(self) -> bool:
        return all(one.is_note for one in self.findings)


def lint_folder(folder: Path) -> Linted:
    """Every package below a folder, or the package that it is. Raises `ProblemsError`, with every problem."""
    problems = []
    try:
        load_coremltools()
    except EngineError as error:
        problems.append(str(error))
    paths = packages_below(folder) if folder.is_dir() else []
    if not folder.is_dir():
        problems.append(f"{folder}: is no folder; name one that `joulebench coreml convert` wrote")
    elif not paths:
        problems.append(f"{folder}: holds no {SUFFIX}; name one that `joulebench coreml convert` wrote")
    if problems:
        raise ProblemsError(problems)
    packages, problems = _read(folder, paths)
    if problems:
        raise ProblemsError(problems)
    return lint(packages, folder)


def _read(folder: Path, paths: Sequence[Path]) -> tuple[list[Package], list[str]]:
    """What can be read, and a line for each that cannot, is not as it was written, or is missing."""
    problems: dict[Path, str] = {}
    named: list[Path] = []
    if any((folder / name).exists() for name in (MANIFEST, PLANNED)):
        try:
            named = [folder / package.path for package in read_manifest(folder).packages]
        except EngineError as error:
            problems[folder] = str(error)
    elif any(path.parent.parent == folder and sums_file(path).is_file() for path in paths):
        problems[folder] = (
            f"{folder}: its {MANIFEST} is gone, which tells what may be missing; convert into another folder"
        )
    packages = []
    for path in paths:
        try:
            packages.append(read_package(path))
        except EngineError as error:
            problems[path] = str(error)
    # Packages of others have no sums.
    with_sums = [path for path in dict.fromkeys([*named, *paths]) if path in named or sums_file(path).is_file()]
    for path, reason in damage(path for path in with_sums if path not in problems).items():
        problems[path] = f"{path}: {reason}; convert it again"
    return packages, list(problems.values())


def lint(packages: Sequence[Package], folder: Path) -> Linted:
    """folder: names of packages are told from it."""
    findings: list[Finding] = []
    functions: list[Function] = []
    together: list[Function] = []
    unlisted: Counter[str] = Counter()
    n_operations = 0
    for path, held in packages:
        name = path.name if path == folder else str(path.relative_to(folder))
        kinds = [[f for f in held if bool(f.states) is stateful] for stateful in (True, False)]
        most = max(kinds, key=len)
        together += most
        for function in held:
            functions.append(function)
            computed = [o for o in function.operations if not o.kind.startswith(COMPRESSED)]
            n_operations += len(computed)
            unlisted.update(o.kind for o in computed if o.kind not in LISTED)
            findings.extend(_of_function(name, function))
    for rule in RULES:
        if rule.of_folder is not None and (found := rule.of_folder(together)) is not None:
            findings.append(Finding("", "", "", "", rule, found))
    most_bytes = max((function.weight_bytes for function in functions), default=0)
    return Linted(
        tuple(findings), dict(unlisted), len(packages), len(functions), len(together), n_operations, most_bytes
    )


def _of_function(package: str, function: Function) -> Iterator[Finding]:
    inputs = [Operation(INPUT, name, {}, {name: kind}) for name, kind in function.inputs.items()]
    for operation in (*inputs, *function.operations):
        for rule in RULES:
            if rule.of_operation is not None and (found := rule.of_operation(operation, function)) is not None:
                yield Finding(package, function.name, operation.name, operation.kind, rule, found)
    for rule in RULES:
        if rule.of_function is not None and (found := rule.of_function(function)) is not None:
            yield Finding(package, function.name, "", "", rule, found)
