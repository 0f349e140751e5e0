"""Any task or group of lm-eval by its name, with the metrics and filters that it reports.

Rows come from files that the plan names, from the data folder (`<repository>/<config>/<split>.jsonl` or
`<task>/<split>.jsonl`, in the schema of the task's own data set), or from the hub and its cache. With a data folder
nothing is fetched unless the plan says `data = "hub"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from workloads.base import WorkloadError
from workloads.benchmark import GeneratingParameters, Part, ScoredOnce
from workloads.datasets import Dataset, DataSource, Row, SourceKind, find_file, read_rows
from workloads.lm_eval_index import Group, find_definition


class AnyTaskParameters(GeneratingParameters):
    task: str = Field(min_length=1)
    """lm-eval's name of a task, or of a group of tasks."""
    data_files: dict[str, str] = Field(default_factory=dict)
    """The task's name of a split -> a .jsonl, .jsonl.gz or .parquet file, also below the data folder."""


class AnyTask(ScoredOnce):
    def __init__(self, parameters: AnyTaskParameters, data_root: Path | None) -> None:
        found = find_definition(parameters.task)
        group, definitions = (found, list(found.tasks())) if isinstance(found, Group) else (None, [found])
        if parameters.data_files:
            if group or parameters.data is not None:
                what = f"the group {parameters.task}" if group else f"data = {parameters.data!r}"
                raise WorkloadError(f"data_files does not go with {what}; remove one of them, or name a single task")
            files = {
                split: find_file(f"data_files.{split}", name, data_root)
                for split, name in parameters.data_files.items()
            }
            parts = [_part_of_files(definitions[0], files)]
            source = ", ".join(dict.fromkeys(map(str, files.values())))
        else:
            kind = parameters.data or ("folder" if data_root else "hub")
            parts = [_part(definition, kind, data_root) for definition in definitions]
            source = str(data_root) if kind == "folder" else f"hub:{definitions[0].get('dataset_path')}"
        super().__init__(parameters.task, parts, parameters, source, group)


def _part(definition: Mapping[str, Any], kind: SourceKind, data_root: Path | None) -> Part:
    task, path, config = (definition.get(key) for key in ("task", "dataset_path", "dataset_name"))
    if kind not in ("folder", "hub"):
        raise WorkloadError(f'{task}: data = "{kind}" has nothing for this task; set data = "folder" or "hub"')
    if kind == "folder" and (data_root is None or not data_root.is_dir()):
        raise WorkloadError(f'{task}: data = "folder", but there is no data folder ({data_root}); set JOULEBENCH_DATA')
    name = str(path).rpartition("/")[2]
    if kind == "folder" and data_root is not None:
        # A repository's folder without its config's name may hold all of them (mmlu), which is not what is asked.
        whole = config in (None, "main", "default")
        places = list(dict.fromkeys([*([f"{name}/{config}"] if config else []), *([name] if whole else []), str(task)]))
        there = [place for place in places if _has_rows(data_root / place)]
        if not there:
            raise WorkloadError(
                f"{task}: its data is {path} on the hub, and with a data folder nothing is fetched; put its splits as "
                f'*.jsonl into one of {", ".join(places)} in {data_root}, name data_files, or set data = "hub"'
            )
        name = there[0]
    # What a repository's own loading script would be told, and where files of the hub would lie.
    options = {k: v for k, v in (definition.get("dataset_kwargs") or {}).items() if k != "trust_remote_code"}
    dataset = Dataset(
        name=name, hub_id=str(path), columns=(), problem=lambda _: None, hub_config=config, hub_options=options
    )
    source = DataSource(kind, data_root)
    return Part(str(task), definition, cache(lambda split: source.rows(dataset, split)))


def _part_of_files(definition: Mapping[str, Any], files: Mapping[str, Path]) -> Part:
    """Splits that no file is given for are not there: neither examples nor calibration prompts come from them."""

    @cache
    def rows(split: str) -> Sequence[Row]:
        if split not in files:
            raise WorkloadError(
                f"{definition['task']}: reads a {split} split, which data_files does not name (found: "
                f"{', '.join(files)}); name its file"
            )
        found = [row for _, row in read_rows(files[split])]
        if not found:
            raise WorkloadError(f"{files[split]}: empty; at least one item is needed")
        return found

    training = definition.get("training_split")
    return Part(
        str(definition["task"]), {**definition, "training_split": training if training in files else None}, rows
    )


def _has_rows(folder: Path) -> bool:
    return any(folder.glob("*.jsonl")) or any(folder.glob("*.jsonl.gz"))
