"""Commands of a fleet: `fleet start`, `fleet join`, `fleet status`."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.interrupts import raise_in_command
from harness.outcome import tell_outcome
from harness.run_commands import (
    AllowCode,
    MaxCells,
    PlanPath,
    Settings,
    notes_on,
    prepared,
    show_run,
)
from harness.run_folder import folder_of, kept_in, refuse_folder, refuse_no_path
from harness.sweep import MAX_CELLS
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    AsJson,
    console_of,
    end_interrupted,
    fail,
    fail_store,
)
from results.printable import printable

if TYPE_CHECKING:
    from harness.fleet.security import Address, Tls
    from harness.plan import Plan

DEFAULT_ADDRESS = "127.0.0.1:8786"
HOUR_S = 3600.0

fleet_app = typer.Typer(no_args_is_help=True, help="Run one plan on many devices at once.")

TlsCa = Annotated[Path | None, typer.Option("--tls-ca", metavar="PEM", help="Certificate that signed all others.")]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", metavar="PEM", help="Certificate of this side.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", metavar="PEM", help="Its key.")]
WaitS = Annotated[float, typer.Option("--wait-s", min=0, metavar="S", help="How long to wait for the others.")]


@fleet_app.command()
def start(
    plan_path: PlanPath,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; default: runs/NAME.")] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where workers join. Port 0 takes a free one.")
    ] = DEFAULT_ADDRESS,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    allow_code: AllowCode = False,
    max_cells: MaxCells = MAX_CELLS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    trust_network: Annotated[
        bool,
        typer.Option("--trust-network", help="Listen beyond this machine without TLS: everybody there may run code."),
    ] = False,
    wait_s: WaitS = HOUR_S,
    most_losses: Annotated[
        int,
        typer.Option("--most-losses", min=1, help="A trial fails once it has lost so many workers or devices."),
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Hand out the trials of a plan to workers, keep what they measure, then write tables and report."""
    _need_dask()
    from harness.fleet.security import PICKLE_TOLD
    from harness.schema import EnduranceSpec

    address, tls = _address(listen, tls_ca, tls_cert, tls_key)
    if tls is None and not address.is_local and not trust_network:
        fail(
            f"--listen {listen}: other machines reach it, and nothing proves who they are. {PICKLE_TOLD}. Add --tls-ca,"
            " --tls-cert and --tls-key, or --trust-network where everybody on the network may do that",
            EXIT_BAD_PLAN,
        )
    refuse_no_path(out)
    raise_in_command(is_long=True)
    console = console_of(stderr=as_json)
    directory: Path | None = None
    try:
        begins = partial(refuse_folder, out, resume)
        with prepared(plan_path, settings, allow_code, max_cells, begins=begins) as (plan, _):
            if isinstance(plan.protocol.stop, EnduranceSpec):
                fail(
                    "protocol.stop.minutes: rounds of endurance follow each other, and a fleet deals out single"
                    " trials; `joulebench run` takes this plan",
                    EXIT_BAD_PLAN,
                )
            directory = folder_of(out, plan)
            for note in notes_on(plan):
                console.print(printable(note), markup=False, highlight=False)
            whom = "who has a certificate" if tls else "this machine only" if address.is_local else "EVERYBODY there"
            console.print(f"{address}: open to {whom}. {PICKLE_TOLD}.", markup=False, highlight=False, soft_wrap=True)
            _run(plan, plan_path, directory, address, tls, resume, allow_code, max_cells, wait_s, most_losses, as_json)
        show_run(directory, directory, console, as_json)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, kept_in(directory))
    from harness.runner import run_outcome
    from results.store import Store

    with Store.view(directory) as store:
        outcome = run_outcome(plan, store.trials())
    tell_outcome(outcome, plan.protocol.max_foreign_cpu_share)


def _run(
    plan: Plan,
    plan_path: Path,
    directory: Path,
    address: Address,
    tls: Tls | None,
    resume: bool,
    allow_code: bool,
    max_cells: int,
    wait_s: float,
    most_losses: int,
    as_json: bool,
) -> None:
    from harness.fleet.road import DaskRoad, FleetError
    from harness.fleet.start import FleetRun, sent_plan
    from harness.fleet.view import FleetView
    from harness.run_parts import data_root
    from results.store import StoreError

    sent = sent_plan(plan, plan_path, data_root(), allow_code, max_cells)
    try:
        with FleetView(console_of(stderr=as_json)) as view:
            FleetRun(plan, sent, directory, DaskRoad(address, tls), view, most_losses).run(resume, wait_s)
    except StoreError as error:
        fail_store(error)
    except FleetError as error:
        fail(str(error), EXIT_DEVICE_NOT_READY)


@fleet_app.command()
def join(
    to: Annotated[str, typer.Argument(metavar="ADDRESS", help="What `fleet start` printed.")] = DEFAULT_ADDRESS,
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="NAME", help="A device here, as the plan calls it. May be repeated."),
    ] = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    wait_s: WaitS = HOUR_S,
) -> None:
    """Offer devices of this machine to a fleet, until its run is over."""
    _need_dask()
    from harness.fleet.dask_worker import EXIT_NO_COORDINATOR, WorkerAsked
    from harness.fleet.joining import join as join_fleet
    from harness.fleet.security import PICKLE_TOLD

    address, tls = _address(to, tls_ca, tls_cert, tls_key)
    if not devices:
        fail("--device: missing; name a device of this machine as the plan does, such as host or adb:SERIAL", 2)
    twice = sorted({one for one in devices if devices.count(one) > 1})
    if twice:
        fail(f"--device {twice[0]}: named twice; two that drive one device ruin each other's figures", EXIT_BAD_PLAN)
    raise_in_command()
    if tls is None and not address.is_local:
        typer.echo(f"{address}: nothing proves who answers there. {PICKLE_TOLD}.", err=True)
    asked = [WorkerAsked(address=str(address), device=device, tls=tls, wait_s=wait_s) for device in devices]
    try:
        code = join_fleet(asked, lambda line: typer.echo(printable(line), err=True))
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "the fleet gives what was measured here to whoever offers the device next")
    if code == EXIT_NO_COORDINATOR:
        certificates = "" if tls else ", without certificates (--tls-ca)"
        fail(f"no fleet at {address} for {wait_s:.0f} s; is `joulebench fleet start` running there{certificates}?", 4)


@fleet_app.command()
def status(
    of: Annotated[
        str, typer.Argument(metavar="RUN|ADDRESS", help="Folder of the run, or the address of its fleet.")
    ] = DEFAULT_ADDRESS,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what the devices of a fleet are doing."""
    from harness.fleet.state import FleetState, read_state

    state: FleetState | None
    if Path(of).is_dir():
        try:
            state = read_state(Path(of))
        except (ValueError, OSError) as error:
            fail(str(error), EXIT_BAD_PLAN)
        if state is None:
            fail(f"{of} is no run of a fleet; `joulebench fleet start PLAN --out {of}` makes one", EXIT_BAD_PLAN)
    elif "/" in of and "://" not in of:
        fail(f"{of}: no such folder; give the folder of a fleet's run, or its address as HOST:PORT", EXIT_BAD_PLAN)
    else:
        _need_dask()
        from pydantic import ValidationError

        from harness.fleet.road import FleetError, published_state

        address, tls = _address(of, tls_ca, tls_cert, tls_key)
        try:
            text = published_state(address, tls)
            if text is None:
                fail(f"{address}: the fleet has not told anything yet; ask again in a few seconds", 4)
            state = FleetState.model_validate_json(text)
        except FleetError as error:
            fail(str(error), EXIT_DEVICE_NOT_READY)
        except ValidationError:
            fail(f"{address}: what is told there is of another joulebench; update one of them", EXIT_BAD_PLAN)
    if as_json:
        typer.echo(state.model_dump_json(indent=1))
        return
    from harness.fleet.view import age_told, fleet_table

    console = console_of()
    console.print(fleet_table(state, most_rows=None))
    console.print(printable(f"{state.address}, process {state.pid}, {age_told(state)}"), markup=False, highlight=False)


def _need_dask() -> None:
    if importlib.util.find_spec("distributed") is None:
        fail("fleets need Dask distributed, which is not installed: pip install 'joulebench[fleet]'", EXIT_BAD_PLAN)


def _address(text: str, ca: Path | None, certificate: Path | None, key: Path | None) -> tuple[Address, Tls | None]:
    from harness.fleet.security import AddressError, read_address, read_tls

    try:
        tls = read_tls(ca, certificate, key)
        return read_address(text, tls), tls
    except AddressError as error:
        fail(str(error), EXIT_BAD_PLAN)
