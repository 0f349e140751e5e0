"""Commands for runs that are kept and given away: export, bundle, verify, open."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from harness.terminal import (
    EXIT_ALTERED,
    EXIT_BAD_PLAN,
    EXIT_NOT_WRITTEN,
    AsJson,
    fail,
    fail_store,
    fail_unwritten,
    quiet_libraries,
)
from results.printable import printable
from results.units import number_of

MOST_TOLD = 50
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def export(
    directory: RunFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; new or empty, or an earlier export.")],
    traces: Annotated[bool, typer.Option(help="Also every reading of every meter.")] = True,
) -> None:
    """Write a run as Parquet files with a card that says what they are."""
    quiet_libraries()
    from results.export import export as export_run
    from results.export import foreign_files
    from results.store import Store, StoreError

    try:
        strangers = foreign_files(out) if out.is_dir() else []
    except OSError as error:
        fail(f"--out {out}: cannot be read ({error.strerror or error}); name another folder", EXIT_NOT_WRITTEN)
    if strangers or (out.exists() and not out.is_dir()):
        told = f"holds other files ({', '.join(strangers[:3])})" if strangers else "is no folder"
        fail(f"--out {out}: {told}; name a new folder", EXIT_BAD_PLAN)
    try:
        with Store.view(directory) as store:
            paths = export_run(store.data(), out, traces)
    except StoreError as error:
        fail_store(error)
    except OSError as error:
        fail_unwritten(out, error)
    for path in paths:
        typer.echo(printable(str(path)))


def bundle(
    directory: RunFolder,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, such as run.zip.")],
    as_json: AsJson = False,
) -> None:
    """Pack a run into one file that shows when something in it is changed."""
    quiet_libraries()
    import json
    from importlib.metadata import version

    from results.bundle import write_bundle
    from results.store import StoreError

    if out.exists():
        fail(f"--out {out}: exists already and is left as it is; name another file", EXIT_BAD_PLAN)
    try:
        made = write_bundle(directory, out, version("joulebench"))
    except StoreError as error:
        fail_store(error)
    except OSError as error:
        fail(f"--out {out}: cannot be written ({error.strerror or error}); name another file", EXIT_NOT_WRITTEN)
    if as_json:
        typer.echo(json.dumps({"file": str(out), "root": made.root, "files": len(made.manifest.files)}))
        return
    typer.echo(f"{printable(str(out))}: {len(made.manifest.files)} files of run {printable(made.manifest.run_id)}")
    typer.echo(f"root hash {made.root}")
    typer.echo(
        "It shows tampering only against this hash: publish it, or keep it where the file does not lie. It holds"
        " prompts and answers, and paths as the run has them."
    )
    typer.echo(f"  joulebench verify {shlex.quote(str(out))} --root {made.root}")


def verify(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle, or the folder that it was unpacked into.")],
    root: Annotated[str | None, typer.Option(metavar="SHA256", help="The root hash that was kept elsewhere.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a bundle: which files were changed, removed or added."""
    import json

    from results.bundle import BundleError
    from results.bundle import verify as verify_bundle

    wanted = None if root is None else root.strip().lower()
    if wanted is not None and (len(wanted) != 64 or set(wanted) - set("0123456789abcdef")):
        fail(f"--root {root}: is no SHA-256, which has 64 digits of 0-9 and a-f", EXIT_BAD_PLAN)
    try:
        found = verify_bundle(path)
    except FileNotFoundError:
        fail(f"{path}: no such file", EXIT_BAD_PLAN)
    except OSError as error:
        fail(f"{path}: cannot be read ({error.strerror or error})", EXIT_BAD_PLAN)
    except BundleError as error:
        fail(str(error), EXIT_ALTERED)
    problems = list(found.problems)
    if wanted is not None and wanted != found.root:
        problems.insert(0, f"manifest.json: is another one: its root hash is {found.root}, not {wanted}")
    if as_json:
        typer.echo(json.dumps({"root": found.root, "run_id": found.manifest.run_id, "problems": problems}))
    else:
        for problem in problems[:MOST_TOLD]:
            typer.echo(printable(problem))
        if len(problems) > MOST_TOLD:
            typer.echo(f"and {len(problems) - MOST_TOLD} more")
    if problems:
        n = len(problems)
        told = "one of its files is not what it was" if n == 1 else f"{n} of its files are not what they were"
        fail(f"{path}: {told}", EXIT_ALTERED)
    if not as_json:
        manifest = found.manifest
        typer.echo(
            f"{printable(str(path))}: {len(manifest.files)} files of run {printable(manifest.run_id)}"
            f" ({number_of(manifest.n_trials, 'trial')}, written by joulebench {printable(manifest.joulebench)}) are"
            " what the manifest says"
        )
        typer.echo(f"root hash {found.root}")
        if wanted is None:
            typer.echo("Compare this hash with one that was kept elsewhere, or give it as --root: without that, whoever"
                       " changed the files may have made the manifest anew.")  # fmt: skip


def open_run(
    directory: RunFolder,
    show: Annotated[bool, typer.Option("--print", help="Only print the path.")] = False,
) -> None:
    """Open the report of a run in the browser. It is a file: nothing is served."""
    import webbrowser

    from results.database import StoreError
    from results.run_folders import check_holds_run

    page = directory / "report.html" if directory.is_dir() else directory
    if not page.is_file():
        if not directory.is_dir():
            told = "is no page; give the folder of a run" if page.exists() else "is not there; no such file"
            fail(f"{page}: {told}", EXIT_BAD_PLAN)
        try:
            check_holds_run(directory)
        except StoreError as error:
            fail(str(error), EXIT_BAD_PLAN)
        fail(f"{page}: is not there; `joulebench report {shlex.quote(str(directory))}` writes it", EXIT_BAD_PLAN)
    if page.suffix != ".html":
        fail(f"{page}: is no page; give the folder of a run", EXIT_BAD_PLAN)
    typer.echo(printable(str(page.absolute())))
    if not show and not webbrowser.open(page.absolute().as_uri()):
        fail("no browser was found here; open the file yourself, on any machine", EXIT_BAD_PLAN)
