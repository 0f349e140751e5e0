"""`joulebench serve`: the reference engine behind the protocol of OpenAI's servers, for programs of this machine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.interrupts import raise_in_command, words_and_code
from harness.technique_option import TECHNIQUE_HELP, technique_of
from harness.terminal import EXIT_BAD_PLAN, fail, quiet_libraries, warn_of_crowded
from harness.weights_option import Arithmetic, quantisation_of, table_of
from results.printable import printable

if TYPE_CHECKING:
    from engines.model.quantised import Quantisation
    from engines.reference import ReferenceEngine

DIGITS = 12
Dtype = Literal["float32", "bfloat16", "float16"]
LastLayer = Literal["asked"]


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as in model.source of a plan.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one, which is told.")] = 0,
    address: Annotated[str, typer.Option(help="A loopback address: 127.0.0.1 or ::1.")] = "127.0.0.1",
    technique: Annotated[
        str,
        typer.Option(metavar="NAME|{...}", help=TECHNIQUE_HELP),
    ] = "dropless",
    profile: Annotated[
        str | None, typer.Option(metavar="DIR", help="What `joulebench calibrate` wrote, for techniques that learn.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="How weights are stored in memory.")] = "float32",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORM|TOML",
            help="Narrower matrices: int8, ..., or '{ experts = \"int4-g32\" }', as quantise in a plan; default: as"
            " --dtype says.",
        ),
    ] = None,
    arithmetic: Annotated[
        Arithmetic | None,
        typer.Option(help="What inputs of products with such matrices are rounded to; default: fp32, nothing."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; default: torch's number.")] = None,
    chunk: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of a prefill step.")] = 512,
    reuse_prefix: Annotated[
        bool, typer.Option("--reuse-prefix", help="Start behind the tokens shared with the request before.")
    ] = False,
    last_layer: Annotated[
        LastLayer | None,
        typer.Option(help="asked: of a prompt it computes only tokens whose logits are wanted; default: all."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="By which clients ask for the model; default: MODEL.")] = None,
) -> None:
    """Answer OpenAI's protocol with the reference engine, on this machine only, until Ctrl-C."""
    import ipaddress

    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        fail(f"--address {address}: only a loopback address is served; use 127.0.0.1 or ::1", EXIT_BAD_PLAN)
    quiet_libraries()
    raise_in_command()
    warn_of_crowded(threads)
    from engines.errors import EngineError
    from engines.serving.computing import Computing
    from engines.serving.http import LocalServer

    try:
        quantise = _quantise(model, weights, arithmetic)
        engine = _engine(model, technique, profile, dtype, quantise, threads, chunk, reuse_prefix, last_layer)
        computing = Computing(engine)
        narrowed = quantise.asked | quantise.rounding
        settings = narrowed | where_it_computes(threads) | what_computes()
        settings |= {"chunk": chunk, "reuse-prefix": reuse_prefix, "last-layer": last_layer, "profile": profile}
        told = ", ".join(f"{key} {value}" for key, value in settings.items() if value not in (None, False))
        version = f"joulebench {_version()}, {served_digest(model, profile)}: {technique}, {dtype}, {told}"
        server = LocalServer(computing, name or model, address, port, version)
    except EngineError as error:
        fail(str(error), EXIT_BAD_PLAN)
    except (OSError, OverflowError) as error:
        fail(f"{address}, port {port}: cannot be listened on ({error}); leave --port out for a free one", EXIT_BAD_PLAN)
    except KeyboardInterrupt as interrupt:
        fail(words_and_code(interrupt)[0], words_and_code(interrupt)[1])
    forms = "".join(f", {key} {form}" for key, form in narrowed.items())
    told = f"{printable(server.model)} with {printable(technique)}{forms}, at most {engine.max_length} tokens"
    typer.echo(f"{server.url}: serves {told}; Ctrl-C ends it")
    listening = threading.Thread(target=server.serve_forever, name="listening", daemon=True)
    listening.start()
    try:
        # Here and not in a thread of its own: OpenMP keeps its threads with the one that it knows.
        computing.compute_forever()
    except KeyboardInterrupt as interrupt:
        words, code = words_and_code(interrupt)
        typer.echo(f"{words}; no longer served", err=True)
        raise typer.Exit(code) from None
    finally:
        server.shutdown()
        server.server_close()


def where_it_computes(threads: int | None) -> dict[str, int | str | None]:
    """As it is, and not as it was asked: a server that was started again on other cores is another one."""
    import torch

    from devices.cpu_seconds import usable_cpus
    from harness.inputs import ranges

    cpus = usable_cpus()
    return {"threads": threads or torch.get_num_threads(), "CPUs": None if cpus is None else ranges(cpus)}


def what_computes() -> dict[str, str]:
    """The kernels' build, or that there are none: other ones give other last bits, and other times."""
    from engines.road import build
    from results.environments import BUILD_DIGITS

    built = build()
    if built.sha256 is None:
        return {"torch alone": str(built.torch_instruction_set)}
    return {"kernels": f"{built.instruction_set} build {built.sha256[:BUILD_DIGITS]}"}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("joulebench")
    except PackageNotFoundError:
        return "not installed"


def served_digest(model: str, profile: str | None) -> str:
    """Of config, weights and tokenizer, and of a profile: a server that was started again with others is another one.

    Raises `EngineError`, `OSError`.
    """
    from engines.model.checkpoints import inspect_checkpoint
    from engines.profile_files import profile_folder
    from harness.file_digests import file_digests
    from harness.profiles import model_digests, sha256_of
    from harness.state import state_folder

    digests = model_digests(inspect_checkpoint(model), lambda note: typer.echo(note, err=True))
    told = f"model sha256 {sha256_of(digests)[:DIGITS]}"
    if profile is None:
        return told
    files = sorted(path for path in profile_folder(profile).rglob("*") if path.is_file())
    learnt = file_digests(files, state_folder(), lambda note: None)
    return f"{told}, profile sha256 {sha256_of([[path.name, learnt[path]] for path in files])[:DIGITS]}"


def _quantise(model: str, weights: str | None, arithmetic: Arithmetic | None) -> Quantisation:
    """Raises `EngineError`; ends the command on options that are wrong."""
    from engines.kernels.compile import lacks_for
    from engines.model.checkpoints import inspect_checkpoint
    from engines.model.wanted_tensors import check_quantisation, components_of

    config = inspect_checkpoint(model).config
    option = f"--weights {weights}" if weights is not None else f"--arithmetic {arithmetic}"
    try:
        table = {} if weights is None else table_of(weights, components_of(config))
        if arithmetic is not None and table.setdefault("arithmetic", arithmetic) != arithmetic:
            raise ValueError(f"its arithmetic is {table['arithmetic']}, and --arithmetic {arithmetic} is asked")
        found = quantisation_of(table)
    except ValueError as error:
        fail(f"{option}: {error}", EXIT_BAD_PLAN)
    if (lacking := lacks_for(found)) is not None:
        keys, reason = lacking
        fail(f"{option}: {reason}; leave {' and '.join(keys)} out", EXIT_BAD_PLAN)
    check_quantisation(config, found, f"{option}: ")
    return found


def _engine(
    model: str,
    technique: str,
    profile: str | None,
    dtype: str,
    quantise: Quantisation,
    threads: int | None,
    chunk: int,
    reuse_prefix: bool,
    last_layer: LastLayer | None,
) -> ReferenceEngine:
    """Raises `EngineError`; ends the command on options that are wrong."""
    parameters = technique_of(technique)
    import torch

    from engines.model.checkpoints import load_checkpoint
    from engines.reference import ReferenceEngine
    from harness.profiles import profile_for

    in_file = parameters.loads_from_file
    checkpoint = load_checkpoint(model, getattr(torch, dtype), quantise, experts_as_filed=in_file)
    engine = ReferenceEngine(
        checkpoint, parameters, chunk, threads=threads, reuse_prefix=reuse_prefix, last_layer=last_layer
    )
    if not engine.needs_calibration:
        if profile is not None:
            fail(f"--profile {profile}: {parameters.technique} learns nothing; leave it out", EXIT_BAD_PLAN)
        return engine
    if profile is None:
        fail(
            f"--technique {parameters.technique}: learns from prompts first; give --profile with what"
            " `joulebench calibrate` wrote",
            EXIT_BAD_PLAN,
        )
    engine.use_profile(profile_for(profile, checkpoint, parameters.learns))
    return engine
