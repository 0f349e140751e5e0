"""Where lm-eval's definitions lie: a task or group by its name, read from the YAML inside the installed package.

lm-eval's own index parses all of its fourteen thousand files, which takes a quarter of a minute; a name at the start of
a line is enough to find the one that is wanted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workloads.base import WorkloadError
from workloads.lm_eval_boundary import lm_eval_code

_NAME = re.compile(rb"""^["']?(?:task|group)["']?[ \t]*:[ \t]*["']?([^\s"'#\[\]{},|>]+)["']?[ \t]*(?:#.*)?\r?$""", re.M)


@dataclass(frozen=True)
class Group:
    """A group of lm-eval: its settings (how metrics are averaged) and its members, groups among them."""

    definition: Mapping[str, Any]
    members: tuple[Definition, ...]

    def tasks(self) -> Iterator[Mapping[str, Any]]:
        """The definitions of all tasks below it, in order."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.tasks()
            else:
                yield member


Definition = Mapping[str, Any] | Group
"""What a name stands for: a task's YAML as a dict, or a group."""


def lm_eval_tasks() -> Path:
    """The folder of lm-eval's task definitions."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


_REFUSED: tuple[tuple[Callable[[Mapping[str, Any]], Any], str], ...] = (
    (lambda task: task.get("unsafe_code"), "it runs generated code, as humaneval and mbpp_plus do in a sandbox"),
    (lambda task: task.get("doc_to_image") or task.get("doc_to_audio"), "it shows images or sounds, engines read text"),
    (lambda task: "class" in task, "it is a Python class with data and metrics of its own"),
    (lambda task: task.get("custom_dataset"), "it builds its own data; RULER's tasks are the workloads ruler_*"),
)


def read_definition(path: Path) -> dict[str, Any]:
    """The YAML with what it includes, its functions imported. Raises `WorkloadError` where they cannot be."""
    from lm_eval.tasks._yaml_loader import load_yaml

    # Its functions' modules are imported, which may import others, or fetch a metric from the hub.
    with lm_eval_code(f"{path.stem}: lm-eval's definition needs what is not here", "install it, or take another task"):
        return dict(load_yaml(path))


def _read_served(path: Path) -> dict[str, Any]:
    """As `read_definition`, of a task or group that can be asked here. Raises `WorkloadError` with the reason."""
    from lm_eval.tasks._yaml_loader import load_yaml

    # Importing a definition's functions may already fetch something: first it is read without.
    bare = load_yaml(path, resolve_func=False)
    for is_refused, reason in _REFUSED:
        if is_refused(bare):
            raise WorkloadError(f"{bare.get('task')}: this task of lm-eval is not served here: {reason}")
    return read_definition(path)


def find_definition(name: str) -> Definition:
    """A task or a group by lm-eval's name. Raises `WorkloadError`: unknown, or defined in a form that is not served."""
    paths = _paths()
    if name not in paths:
        tagged = [str(bare["task"]) for _, bare in _bearing(name, lm_eval_tasks())]
        near = difflib.get_close_matches(name, paths, n=4, cutoff=0.6)
        if tagged:
            remedy = f"it is a tag, without a score of its own; ask its tasks, such as {', '.join(sorted(tagged)[:8])}"
        else:
            remedy = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` prints the names it has"
        raise WorkloadError(f"lm-eval 0.4.13 has no task or group {name!r}; {remedy}")
    definition = _read_served(paths[name])
    return _group(definition, paths[name], paths) if "group" in definition else definition


def _group(definition: dict[str, Any], path: Path, paths: Mapping[str, Path]) -> Group:
    listed = definition.get("task")
    members: list[Definition] = []
    for member in [listed] if isinstance(listed, str) else listed or []:
        if not isinstance(member, str):
            raise WorkloadError(
                f"{definition['group']}: lm-eval defines members of this group in place ({member!r:.80}); "
                "name a task of its own"
            )
        members += [find_definition(member)] if member in paths else _tagged(member, path.parent)
    if not members:
        raise WorkloadError(f"{definition['group']}: a group without tasks ({path}); name a task")
    return Group(definition, tuple(members))


def _tagged(tag: str, folder: Path) -> list[Definition]:
    """The tasks of a group's folder that bear a tag, in the order of their names, as lm-eval asks them."""
    found = {definition["task"]: definition for path, _ in _bearing(tag, folder) for definition in [_read_served(path)]}
    if not found:
        raise WorkloadError(f"{tag}: named in a group of lm-eval, but no task in {folder} bears it; name a task")
    return [found[name] for name in sorted(found)]


def _bearing(tag: str, folder: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Files of tasks below a folder that bear a tag, and what they say without what their functions import."""
    from lm_eval.tasks._yaml_loader import load_yaml

    for path in folder.rglob("*.yaml"):
        if tag.encode() in path.read_bytes():
            bare = load_yaml(path, resolve_func=False)
            tags = bare.get("tag") or []
            if "task" in bare and tag in ([tags] if isinstance(tags, str) else tags):
                yield path, bare


@cache
def _paths() -> Mapping[str, Path]:
    """Names of tasks and groups -> their YAML files; of a name that stands twice the first, as in lm-eval."""
    paths: dict[str, Path] = {}
    for path in sorted(lm_eval_tasks().rglob("*.yaml")):
        for name in _NAME.findall(path.read_bytes()):
            paths.setdefault(name.decode(), path)
    return paths
