"""What a coordinator and its workers say to each other: JSON, with traces as the Parquet file of a trial behind it.

    32 bytes  SHA-256 of all that follows: what carries it may have damaged it
    8 bytes   length of the JSON, big-endian
    JSON      a `Task` on the way to a worker, a `Description` or an `Answer` on the way back
    Parquet   of an answer with traces (`results.trace_files`)

Both sides parse it into records that refuse unknown fields. No pickle is in it; Dask, which carries it, has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from results.environments import Environment
from results.expert_heat import ExpertHeat
from results.records import PowerTrace, Record, Sample
from results.runs import Input
from results.self_tests import SelfTest
from results.trace_files import TraceFileError, parts_of, trace_file_of
from results.trials import Trial

DIGEST_BYTES = 32
HEAD_BYTES = DIGEST_BYTES + 8
MOST_BYTES = 1 << 30
"""Of one message. Hours of traces at 1 kHz are a tenth of it."""

Message = TypeVar("Message", bound=Record)


class MessageError(Exception):
    """What came is no message of ours, or a damaged one."""


class PlanSent(Record):
    """All that makes the same cells on another machine."""

    raw: dict[str, Any]
    plan_hash: str
    folder: str
    """Of the plan file: paths of hardware sheets start there."""
    data_root: str | None
    """Of the coordinator. It is part of every cell's identity; a worker reads from the folder that it has itself."""
    allow_code: bool = False
    max_cells: int


class Task(Record):
    kind: Literal["describe", "trial"]
    joulebench: str
    """The coordinator's version."""
    plan: PlanSent
    device: str
    run_id: str = ""
    """Empty before the run is begun. Another run of the same plan has its own trials."""
    lease_id: str = ""
    cell_id: str = ""
    repeat: int = 0
    attempt: int = 1
    wants_samples: bool = False
    """The coordinator does not know yet what the cell's workload asks, in words."""
    process_id: str = ""
    """Of the worker that was described: a trial runs nowhere else."""


class Description(Record):
    """A worker's machine and its device, before its first trial."""

    process_id: str
    host: str
    """The name of its machine, for people."""
    environments: dict[str, Environment] = Field(default_factory=dict)
    """By label, as the plan calls the device in its cells."""
    self_tests: dict[str, SelfTest] = Field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    refused: tuple[str, ...] = ()
    """Why it runs nothing: the plan's problems here, a device that does not open."""


class AskedSamples(Record):
    workload: str
    model: str
    samples: tuple[Sample, ...]


class Answer(Record):
    """A finished trial, or why there is none."""

    lease_id: str
    process_id: str
    trial: Trial | None = None
    heat: ExpertHeat | None = None
    samples: tuple[AskedSamples, ...] = ()
    device_lost: bool = False
    """The trial failed because the device went away: it may come back."""
    refused: tuple[str, ...] = ()


def packed(message: Record, traces: Mapping[str, Sequence[PowerTrace]] | None = None) -> bytes:
    """One message."""
    header = message.model_dump_json().encode()
    tail = bytes(trace_file_of(traces)) if traces and any(traces.values()) else b""
    return sealed(header, tail)


def sealed(header: bytes, tail: bytes = b"") -> bytes:
    """The bytes of a message. header: its JSON."""
    whole = len(header).to_bytes(HEAD_BYTES - DIGEST_BYTES, "big") + header + tail
    return hashlib.sha256(whole).digest() + whole


def unpacked(kind: type[Message], content: object) -> tuple[Message, dict[str, tuple[PowerTrace, ...]]]:
    """A message and the traces behind it. Raises `MessageError`."""
    if not isinstance(content, bytes):
        raise MessageError(f"a message is bytes, and this is {type(content).__name__}")
    if not HEAD_BYTES < len(content) <= MOST_BYTES:
        raise MessageError(f"a message has more than {HEAD_BYTES} and at most {MOST_BYTES} bytes: {len(content)}")
    if hashlib.sha256(memoryview(content)[DIGEST_BYTES:]).digest() != content[:DIGEST_BYTES]:
        raise MessageError("the message is not what was sent; the network damages it, or another joulebench sent it")
    end = HEAD_BYTES + int.from_bytes(content[DIGEST_BYTES:HEAD_BYTES], "big")
    if end > len(content):
        raise MessageError(f"the message ends after {len(content)} bytes, and says that it has {end}")
    try:
        message = kind.model_validate_json(content[HEAD_BYTES:end])
        return message, parts_of(content[end:], "the file of its traces") if end < len(content) else {}
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise MessageError(f"{where}: {first['msg']}") from error
    except TraceFileError as error:
        raise MessageError(str(error)) from error
