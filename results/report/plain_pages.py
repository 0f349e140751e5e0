"""Pages beside the report of a run, in its style: their frame, and how they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.printable import on_page
from results.report.chart_library import chart_library
from results.report.charts import CONFIG
from results.report.files import replace_text
from results.report.html import DRAW_CHARTS, SORT_TABLES, json_in_script, script_hash

if TYPE_CHECKING:
    from jinja2 import Environment as Templates


def frame(title: str, charts: Sequence[tuple[str, dict[str, Any]]], own_style: str = "") -> dict[str, Any]:
    """What `plain_head.html.j2` and `plain_foot.html.j2` ask for. charts: the id of each on the page, and its spec."""
    specs = dict(charts)
    return {
        "title": title,
        "own_style": own_style,
        "charts_json": json_in_script({"config": CONFIG, "specs": specs}),
        "library": chart_library() if specs else "",
        "draw_charts": DRAW_CHARTS if specs else "",
        "sort_tables": SORT_TABLES,
        "script_hashes": [script_hash(script) for script in _scripts(bool(specs))],
    }


def _scripts(has_charts: bool) -> Iterator[str]:
    if has_charts:
        yield chart_library()
        yield DRAW_CHARTS
    yield SORT_TABLES


def write_plain_pages(package: str, pages: Mapping[str, tuple[str, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Each appears whole or not at all. package: has the templates. pages: by file name, the template and what it
    shows. Raises `OSError`."""
    templates = _templates(package)
    texts = {name: templates.get_template(template).render(shown) for name, (template, shown) in pages.items()}
    for name, text in texts.items():
        replace_text(folder / name, text)
    return [folder / name for name in texts]


@cache
def _templates(package: str) -> Templates:
    """Each is compiled once in a process, which takes longer than to fill it."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader("results", "report")]),
        autoescape=True,
        finalize=on_page,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
