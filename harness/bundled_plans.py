"""Plans that come with joulebench, in a checkout and in a wheel alike."""

from __future__ import annotations

from pathlib import Path

PLANS = Path(__file__).parents[1] / "plans"
FIRST_PLAN = "first"


def bundled_plans() -> dict[str, Path]:
    """Name to file."""
    return {path.stem: path for path in sorted(PLANS.glob("*.toml"))}


def about_plan(path: Path) -> str:
    """Its first line, which says what the plan measures."""
    with path.open(encoding="utf-8") as lines:
        return next(lines, "").lstrip("# ").rstrip()


def write_bundled_plan(name: str, path: Path) -> None:
    """Raises `FileExistsError` where something is there already, and any other `OSError`."""
    from results.report.files import write_new_text

    text = bundled_plans()[name].read_text(encoding="utf-8")
    write_new_text(path, text)
