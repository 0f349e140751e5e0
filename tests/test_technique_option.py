"""`--technique` of commands: what is said of one that is wrong."""

from __future__ import annotations

import pytest
import typer

from harness.technique_option import technique_of
from harness.terminal import EXIT_BAD_PLAN


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("droples", "technique.name: unknown name 'droples'; did you mean dropless?;"),
        ("{ nam = 'dropless' }", "technique: has no name, found {'nam': 'dropless'}; add name = \"...\";"),
        (
            "{ name = 'blockwise', block_size = 'x' }",
            "technique.block_size: must be a whole number or \"intensity\", found 'x';",
        ),
        ("{ name = 'blockwise', block = 8 }", "technique.block: unknown key, found 8; did you mean block_size?;"),
        ("{ name = ", "no table in TOML ("),
    ],
)
def test_a_wrong_technique_is_told_in_a_line(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        technique_of(text)
    assert ended.value.exit_code == EXIT_BAD_PLAN
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --technique {text}: {told}")
